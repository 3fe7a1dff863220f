import asyncio
import functools
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from support import scripted_engine
from support.live import engine_pid
from support.scripted_engine import CRASH, KILL, scripted_token

from octavo.model.step import SamplingParams
from octavo.scheduler.messages import EngineConfig, Submission, TokenEvent
from octavo.server.client import EngineClient
from octavo.server.generation import MOST_UNREAD, Generation
from octavo.server.metrics import Metrics
from octavo.server.revival import RestartPolicy
from octavo.server.spawning import EngineError

SCRIPT = scripted_engine.__file__


def command(step_seconds: float = 0.0) -> list[str]:
    return [sys.executable, SCRIPT, "--step-seconds", str(step_seconds)]


@asynccontextmanager
async def engine(
    step_seconds: float = 0.0, policy: RestartPolicy | None = None, **fields: object
) -> AsyncIterator[EngineClient]:
    config = EngineConfig(model="scripted", **fields)
    client = await EngineClient.start(config, command=command(step_seconds), policy=policy)
    try:
        yield client
    finally:
        await client.close()


def asked(prompt: list[int], max_tokens: int) -> Submission:
    return Submission(prompt=tuple(prompt), params=SamplingParams(temperature=0.0), max_tokens=max_tokens)


async def collect(generation: Generation) -> list[TokenEvent]:
    return [event async for events in generation for event in events]


def tokens(events: list[TokenEvent]) -> list[int]:
    return [event.token for event in events if event.token is not None]


def run(test: Callable[..., Coroutine[None, None, None]]) -> Callable[..., None]:
    @functools.wraps(test)
    def wrapped(**fixtures: object) -> None:
        asyncio.run(asyncio.wait_for(test(**fixtures), 60))

    return wrapped


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.001)


def gone(pid: int) -> bool:
    """Whether a process ends within a few seconds; a zombie that nobody has buried yet has ended."""
    for _ in range(500):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return True
        if state == "Z":
            return True
        time.sleep(0.01)
    return False


@run
async def test_a_submission_yields_its_tokens_in_order_and_then_ends() -> None:
    async with engine() as client:
        assert client.alive
        assert client.ready.vocabulary == scripted_engine.VOCABULARY
        events = await collect(client.submit(asked([5, 6, 7], 10)))
        assert tokens(events) == [scripted_token(3 + n) for n in range(10)]
        assert [event.finish for event in events] == [None] * 9 + ["length"]
        assert events[0].first
        assert client.live == 0
        assert client.metrics.stats.running == 0


@run
async def test_many_requests_at_a_time_get_their_own_tokens() -> None:
    async with engine() as client:
        lengths = range(1, 41)
        generations = [client.submit(asked([4] * length, 20)) for length in lengths]
        assert len({generation.request for generation in generations}) == 40
        results = await asyncio.gather(*map(collect, generations))
        assert [tokens(events) for events in results] == [
            [scripted_token(length + n) for n in range(20)] for length in lengths
        ]


@run
async def test_events_that_arrived_meanwhile_come_together() -> None:
    async with engine() as client:
        slow = client.submit(asked([4], 100))
        await collect(client.submit(asked([5], 100)))
        batches = [events async for events in slow]
        assert sum(map(len, batches)) == 100
        assert len(batches) < 10


@run
async def test_an_aborted_request_ends_with_the_given_reason_and_others_go_on() -> None:
    async with engine(step_seconds=0.002) as client:
        other = client.submit(asked([4], 60))
        generation = client.submit(asked([5], 2000))
        events = list(await anext(generation))
        generation.abort("stop")
        generation.abort("abort")
        events += await collect(generation)
        assert [event.finish for event in events if event.finish] == ["stop"]
        assert len(tokens(events)) < 2000
        assert len(tokens(await collect(other))) == 60
        generation.abort()
        assert client.metrics.stats.running == client.live == 0


@run
async def test_close_ends_the_process_and_the_live_requests() -> None:
    async with engine(step_seconds=0.002) as client:
        generation = client.submit(asked([5], 2000))
        await anext(generation)
        await client.close()
        await client.close()
        assert not client.alive
        assert client._process.returncode == 0
        with pytest.raises(EngineError, match="shut down"):
            await collect(generation)
        with pytest.raises(EngineError, match="shut down"):
            client.submit(asked([5], 1))


@run
async def test_an_engine_that_does_not_answer_is_killed() -> None:
    async with engine() as client:
        os.kill(engine_pid(client), signal.SIGSTOP)
        await client.close()
        assert client._process.returncode == -signal.SIGKILL
        assert gone(engine_pid(client))


@run
async def test_an_engine_that_is_not_to_be_replaced_fails_every_live_request_and_all_later_ones() -> None:
    async with engine(0.002, RestartPolicy(deaths=1)) as client:
        generations = [client.submit(asked([5], 2000)) for _ in range(20)]
        await anext(generations[0])
        os.kill(engine_pid(client), signal.SIGKILL)
        for generation in generations:
            with pytest.raises(EngineError, match="killed by SIGKILL"):
                await collect(generation)
        await client.lost.wait()
        assert not client.alive
        assert client.live == 0
        with pytest.raises(EngineError) as raised:
            client.submit(asked([5], 1))
        assert raised.value.exit_code == 70


@run
async def test_events_that_arrived_before_the_end_are_not_lost() -> None:
    async with engine() as client:
        generation = client.submit(asked([5], 3))
        await collect(client.submit(asked([5], 3)))
        await client.close()
        assert len(await collect(generation)) == 3


@run
async def test_a_fault_of_the_device_ends_the_request_to_blame_and_no_other() -> None:
    async with engine() as client:
        others = [client.submit(asked([4] * length, 20)) for length in range(1, 8)]
        [event] = await collect(client.submit(asked([CRASH], 1)))
        assert (event.finish, event.error) == ("error", "the model cannot compute this request: RuntimeError")
        results = await asyncio.gather(*map(collect, others))
        assert [tokens(events) for events in results] == [
            [scripted_token(length + n) for n in range(20)] for length in range(1, 8)
        ]
        assert client.alive


@run
async def test_f1_a_killed_engine_is_replaced_and_every_request_goes_on_where_it_was() -> None:
    async with engine(0.002) as client:
        generations = [client.submit(asked([4] * length, 200)) for length in range(1, 21)]
        first = list(await anext(generations[0]))
        os.kill(engine_pid(client), signal.SIGKILL)
        await until(lambda: client.restarting)
        assert client.alive
        meanwhile = client.submit(asked([4] * 30, 5))
        results = await asyncio.gather(*map(collect, [*generations, meanwhile]))
        results[0] = first + results[0]
        expected = [(length, 200) for length in range(1, 21)] + [(30, 5)]
        for (length, count), events in zip(expected, results, strict=True):
            assert tokens(events) == [scripted_token(length + n) for n in range(count)]
            assert [event.finish for event in events if event.finish] == ["length"]
            assert sum(event.first for event in events) == 1
        assert (client.metrics.engine_restarts, client.metrics.requests_resumed) == (1, 21)
        assert client.metrics.stats.running == client.live == 0


@run
async def test_an_abort_while_there_is_no_engine_ends_the_request() -> None:
    async with engine(0.002) as client:
        known, other = client.submit(asked([4], 2000)), client.submit(asked([5], 50))
        await anext(known)
        os.kill(engine_pid(client), signal.SIGKILL)
        await until(lambda: client.restarting)
        known.abort("stop")
        unknown = client.submit(asked([4], 2000))
        unknown.abort()
        assert [event.finish for event in await collect(known)][-1] == "stop"
        assert [event.finish for event in await collect(unknown)] == ["abort"]
        assert client.restarting
        assert tokens(await collect(other)) == [scripted_token(1 + n) for n in range(50)]


@run
async def test_f2_a_request_that_kills_the_engine_ends_with_an_error_and_no_other_does() -> None:
    async with engine(0.002, RestartPolicy(delays=(0.0,))) as client:
        others = [client.submit(asked([4] * length, 100)) for length in range(1, 7)]
        await anext(others[0])
        killers = [client.submit(asked([KILL, 4], 3)), client.submit(asked([KILL], 3))]
        late = [client.submit(asked([4] * length, 20)) for length in range(7, 20)]
        for killer in killers:
            [event] = await collect(killer)
            assert (event.finish, event.error) == ("error", "the engine dies whenever it computes this request")
        for length, generation in enumerate(others + late, 1):
            count = 100 if length < 7 else 20
            expected = [scripted_token(length + n) for n in range(count)]
            found = tokens(await collect(generation))
            assert found == expected or (length == 1 and found == expected[-len(found) :])
        assert client.alive
        assert client.metrics.engine_restarts == 6


@run
async def test_f4_an_engine_that_stalls_is_killed_and_replaced() -> None:
    async with engine(0.002, RestartPolicy(stall_seconds=0.5), fault=("step-hangs:step=5:life=0",)) as client:
        hung = engine_pid(client)
        generation = client.submit(asked([4], 30))
        assert tokens(await collect(generation)) == [scripted_token(1 + n) for n in range(30)]
        assert gone(hung)
        assert client.metrics.engine_restarts == 1


@run
async def test_f5_an_engine_that_is_stopped_for_less_than_the_timeout_is_not_replaced() -> None:
    async with engine(0.002, RestartPolicy(stall_seconds=5.0)) as client:
        generation = client.submit(asked([4], 30))
        os.kill(engine_pid(client), signal.SIGSTOP)
        await asyncio.sleep(0.7)
        os.kill(engine_pid(client), signal.SIGCONT)
        assert tokens(await collect(generation)) == [scripted_token(1 + n) for n in range(30)]
        assert client.metrics.engine_restarts == 0


@run
async def test_f7_a_paused_request_is_neither_a_stall_nor_to_blame_for_what_kills_the_engine() -> None:
    async with engine(policy=RestartPolicy(deaths=9, delays=(0.0,), stall_seconds=0.3)) as client:
        unread = client.submit(asked([4], 1500))
        await until(lambda: unread.paused)
        tokens_before = tokens(await collect(client.submit(asked([5], 5))))
        await asyncio.sleep(1)
        assert client.metrics.engine_restarts == 0
        emitted = len(unread.submission.emitted)
        assert MOST_UNREAD <= emitted < 1500
        for death in range(1, 5):
            os.kill(engine_pid(client), signal.SIGKILL)
            await until(lambda: client.metrics.engine_restarts == death)  # noqa: B023 - it is awaited at once
            assert tokens(await collect(client.submit(asked([5], 5)))) == tokens_before
        assert len(unread.submission.emitted) == emitted
        assert tokens(await collect(unread)) == [scripted_token(1 + n) for n in range(1500)]


@run
async def test_a_paused_request_can_be_aborted_and_frees_its_blocks() -> None:
    async with engine() as client:
        unread = client.submit(asked([4], 1500))
        await until(lambda: unread.paused)
        unread.abort()
        assert [event.finish for event in await collect(unread)][-1] == "abort"
        assert (client.metrics.stats.running, client.metrics.stats.blocks_referenced, client.metrics.paused) == (
            0,
            0,
            0,
        )


@run
async def test_f18_a_server_that_stands_still_does_not_blame_its_engine() -> None:
    async with engine(0.002, RestartPolicy(stall_seconds=0.3)) as client:
        generation = client.submit(asked([4], 500))
        await anext(generation)
        time.sleep(1)
        await asyncio.sleep(0.1)
        await collect(generation)
        assert client.metrics.engine_restarts == 0


@run
@pytest.mark.parametrize("name", ["report-corrupted", "report-doubled", "report-swapped", "engine-exits"])
async def test_f19_reports_that_suffer_on_their_way_cost_an_engine_but_no_token(name: str) -> None:
    async with engine(0.002, fault=(f"{name}:step=7:life=0",)) as client:
        generations = [client.submit(asked([4] * length, 30)) for length in range(1, 5)]
        for length, events in enumerate(await asyncio.gather(*map(collect, generations)), 1):
            assert tokens(events) == [scripted_token(length + n) for n in range(30)]
        assert client.metrics.engine_restarts == 1


@run
async def test_an_engine_that_dies_again_and_again_is_given_up() -> None:
    async with engine(0.002, RestartPolicy(deaths=3, delays=(0.0,)), fault=("engine-killed:step=3",)) as client:
        with pytest.raises(EngineError, match="again and again") as raised:
            await collect(client.submit(asked([4], 500)))
        assert raised.value.exit_code == 70
        assert client.metrics.engine_restarts == 2


@run
async def test_an_engine_that_does_not_start_again_is_given_up(tmp_path: Path) -> None:
    once = f"""
import pathlib, runpy, sys
mark = pathlib.Path({str(tmp_path / "mark")!r})
if mark.exists():
    raise SystemExit(1)
mark.touch()
sys.argv = [{SCRIPT!r}, *sys.argv[1:]]
runpy.run_path({SCRIPT!r}, run_name="__main__")
"""
    policy = RestartPolicy(deaths=3, delays=(0.0,))
    command = [sys.executable, "-c", once]
    client = await EngineClient.start(EngineConfig(model="scripted"), command=command, policy=policy)
    try:
        generation = client.submit(asked([4], 2000))
        os.kill(engine_pid(client), signal.SIGKILL)
        with pytest.raises(EngineError, match="exit code 1, again and again"):
            await collect(generation)
    finally:
        await client.close()


@run
async def test_a_client_that_is_closed_while_its_engine_restarts_leaves_no_process_behind() -> None:
    async with engine(0.002, RestartPolicy(delays=(60.0,))) as client:
        generation = client.submit(asked([4], 2000))
        os.kill(engine_pid(client), signal.SIGKILL)
        await until(lambda: client.restarting)
    with pytest.raises(EngineError, match="shut down"):
        await collect(generation)


@run
async def test_a_model_that_cannot_be_loaded_fails_the_start_with_its_own_exit_code() -> None:
    with pytest.raises(EngineError, match="there is no model called missing") as raised:
        await EngineClient.start(EngineConfig(model="missing"), command=command())
    assert raised.value.exit_code == 65


@run
async def test_a_command_that_is_no_engine_fails_the_start() -> None:
    with pytest.raises(EngineError, match="exit code 3"):
        await EngineClient.start(EngineConfig(model="m"), command=[sys.executable, "-c", "raise SystemExit(3)"])
    with pytest.raises(EngineError, match="cannot start"):
        await EngineClient.start(EngineConfig(model="m"), command=["/no/such/program"])


@run
async def test_an_engine_that_breaks_the_protocol_is_ended() -> None:
    script = "import os, sys, time; os.write(int(sys.argv[1]), b'\\x01\\0\\0\\0?????'); time.sleep(60)"
    with pytest.raises(EngineError, match="broke the protocol"):
        await EngineClient.start(EngineConfig(model="m"), command=[sys.executable, "-c", script])


@run
async def test_a_start_that_is_cancelled_leaves_no_process_behind(tmp_path: Path) -> None:
    script = f"import os, time; open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    start = asyncio.create_task(EngineClient.start(EngineConfig(model="m"), command=[sys.executable, "-c", script]))
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
        await asyncio.sleep(0.01)
    start.cancel()
    with pytest.raises(asyncio.CancelledError):
        await start
    assert gone(int((tmp_path / "pid").read_text()))


@run
async def test_at_rest_every_request_is_accounted_for() -> None:
    metrics = Metrics()
    client = await EngineClient.start(EngineConfig(model="scripted"), command=command(0.001), metrics=metrics)
    await asyncio.gather(*(collect(client.submit(asked([4] * 20, 5))) for _ in range(12)))
    aborted = client.submit(asked([4], 1000))
    await anext(aborted)
    assert (metrics.running, metrics.waiting) == (1, 0)
    aborted.abort()
    await collect(aborted)
    lost = client.submit(asked([4], 1000))
    await anext(lost)
    await client.close()
    assert metrics.finished == {"stop": 0, "length": 12, "abort": 1, "error": 1, "timeout": 0}
    assert metrics.started == 14
    assert metrics.running == metrics.waiting == 0
    assert metrics.prompt_tokens == 12 * 20 + 2


def test_the_engine_dies_with_a_server_that_is_killed() -> None:
    program = f"""
import asyncio, sys
from octavo.scheduler.messages import EngineConfig
from octavo.server.client import EngineClient
async def main():
    client = await EngineClient.start(EngineConfig(model="scripted"), command=[sys.executable, {SCRIPT!r}])
    print(client._process._process.pid, flush=True)
    await asyncio.sleep(60)
asyncio.run(main())
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as server:
        pid = int(server.stdout.readline())
        os.kill(pid, 0)
        server.kill()
    assert gone(pid)
