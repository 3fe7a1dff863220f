from collections.abc import Sequence

import pytest
from support.fake_device import PendingStep, ScriptedRunner
from support.scheduling import BLOCK_SIZE, VOCABULARY, make_scheduler, next_token, submission

from octavo.model.step import SamplingParams, Step, StepResult
from octavo.scheduler.engine import Engine
from octavo.scheduler.messages import Abort, EngineConfig, Shutdown, StepReport, ToEngine

PLAIN = SamplingParams(temperature=0.0, ignore_eos=True)


class ListChannel:
    """Hands out one batch of messages a turn, and a Shutdown once there are no more and the engine would wait."""

    def __init__(self, *batches: Sequence[ToEngine]) -> None:
        self.batches = list(batches)
        self.blocked: list[bool] = []
        self.reports: list[StepReport] = []

    def receive(self, block: bool) -> Sequence[ToEngine]:
        self.blocked.append(block)
        if self.batches:
            return self.batches.pop(0)
        return [Shutdown()] if block else []

    def send(self, message: StepReport) -> None:
        self.reports.append(message)


class LoggingRunner(ScriptedRunner):
    """Notes when steps are queued and when they are awaited."""

    def __init__(self) -> None:
        super().__init__(next_token, VOCABULARY, BLOCK_SIZE)
        self.log: list[str] = []
        self.steps: list[Step] = []

    def submit(self, step: Step) -> PendingStep:
        self.steps.append(step)
        self.log.append(f"submit {len(self.steps)}")
        return super().submit(step)

    def execute(self, step: Step) -> StepResult:
        self.log.append(f"wait {self.steps.index(step) + 1}")
        return super().execute(step)


def make_engine(channel: ListChannel, lookahead: int = 0) -> tuple[Engine, LoggingRunner]:
    runner = LoggingRunner()
    return Engine(make_scheduler(), runner, channel, lookahead), runner


def test_without_lookahead_each_step_lands_before_the_next_is_decided() -> None:
    channel = ListChannel([submission(0, [1, 2, 3], max_tokens=3, params=PLAIN)])
    engine, runner = make_engine(channel)
    engine.run()
    assert runner.log == ["submit 1", "wait 1", "submit 2", "wait 2", "submit 3", "wait 3"]


@pytest.mark.parametrize("lookahead", [1, 2])
def test_with_lookahead_that_many_steps_are_queued_behind_the_one_awaited(lookahead: int) -> None:
    channel = ListChannel([submission(0, [1, 2, 3], max_tokens=5, params=PLAIN)])
    engine, runner = make_engine(channel, lookahead)
    engine.run()
    for number in range(1, 6):
        ahead = min(number + lookahead, 5)
        assert runner.log.index(f"submit {ahead}") < runner.log.index(f"wait {number}")
    assert runner.log.index(f"wait {1}") < runner.log.index(f"submit {2 + lookahead}")
    assert runner.log[-lookahead:] == [f"wait {number}" for number in range(6 - lookahead, 6)]


def test_it_waits_for_messages_only_when_there_is_nothing_to_do() -> None:
    channel = ListChannel([], [submission(0, [1, 2, 3], max_tokens=2, params=PLAIN)])
    engine, _ = make_engine(channel, lookahead=1)
    engine.run()
    assert channel.blocked == [True, True, False, False, True]


def test_one_report_is_sent_for_each_committed_step() -> None:
    channel = ListChannel([submission(number, [1, 2, 3], max_tokens=3, params=PLAIN) for number in range(2)])
    engine, runner = make_engine(channel)
    engine.run()
    assert [[event.request for event in report.events] for report in channel.reports] == [[0, 1]] * 3
    assert [report.stats.steps_total for report in channel.reports] == [1, 2, 3]
    assert [report.stats.step_rows for report in channel.reports] == [2, 2, 2]
    assert [report.stats.step_tokens for report in channel.reports] == [6, 2, 2]
    assert [report.stats.step_decode_tokens for report in channel.reports] == [0, 2, 2]
    assert [report.stats.step_tokens for report in channel.reports] == [step.tokens for step in runner.steps]


def test_a_step_without_events_is_reported_too_as_a_sign_of_life() -> None:
    channel = ListChannel([submission(0, range(1, 41), max_tokens=1, params=PLAIN)])
    engine, _ = make_engine(channel)
    engine.run()
    assert [len(report.events) for report in channel.reports] == [0, 0, 1]


def test_statistics_describe_the_state_after_the_step() -> None:
    channel = ListChannel([submission(number, range(1, 10), max_tokens=2, params=PLAIN) for number in range(5)])
    engine, _ = make_engine(channel)
    engine.run()
    first, last = channel.reports[0].stats, channel.reports[-1].stats
    assert (first.running, first.waiting) == (4, 1)
    assert (last.running, last.waiting, last.blocks_referenced) == (0, 0, 0)
    assert first.blocks_free + first.blocks_cached + first.blocks_referenced == 32
    assert (last.prefix_queries_total, last.prefix_hits_total) == (45, 32)
    for report in channel.reports:
        assert min(report.stats.schedule_seconds, report.stats.device_seconds, report.stats.commit_seconds) > 0


def test_refusals_and_aborts_are_reported_at_once_and_together() -> None:
    channel = ListChannel(
        [submission(0, [1, 2, 3], params=PLAIN)],
        [submission(1, []), Abort(request=0, reason="stop"), Abort(request=9), submission(2, [1] * 65)],
    )
    engine, _ = make_engine(channel)
    engine.run()
    report = channel.reports[-1]
    assert [(event.request, event.finish) for event in report.events] == [(1, "error"), (0, "stop"), (2, "error")]
    assert (report.stats.step_rows, report.stats.step_tokens, report.stats.device_seconds) == (0, 0, 0.0)
    assert (report.stats.running, report.stats.steps_total) == (0, 1)


def test_a_submission_and_its_abort_may_arrive_together() -> None:
    channel = ListChannel([submission(0, [1, 2, 3]), Abort(request=0)])
    engine, runner = make_engine(channel)
    engine.run()
    assert [(event.request, event.finish) for event in channel.reports[0].events] == [(0, "abort")]
    assert runner.steps == []


def test_a_step_in_flight_for_nobody_lands_before_the_engine_waits() -> None:
    channel = ListChannel([submission(0, [1, 2, 3], params=PLAIN)], [Abort(request=0)])
    engine, runner = make_engine(channel, lookahead=2)
    engine.run()
    assert runner.log == ["submit 1", "wait 1"]
    assert channel.blocked == [True, False, True]


def test_shutdown_drops_what_is_alive() -> None:
    channel = ListChannel([submission(0, [1, 2, 3], params=PLAIN)], [Shutdown(), Abort(request=0)])
    engine, _ = make_engine(channel)
    engine.run()
    assert [event.finish for report in channel.reports for event in report.events] == [None]


def test_a_second_configuration_is_an_error() -> None:
    engine, _ = make_engine(ListChannel([EngineConfig(model="m")]))
    with pytest.raises(ValueError, match="configured once"):
        engine.run()


def test_an_error_of_the_runner_ends_the_engine() -> None:
    def fail(tokens: Sequence[int]) -> int:
        raise RuntimeError("the device is gone")

    channel = ListChannel([submission(0, [1, 2, 3])])
    engine = Engine(make_scheduler(), ScriptedRunner(fail, VOCABULARY, BLOCK_SIZE), channel)
    with pytest.raises(RuntimeError, match="the device is gone"):
        engine.run()
    assert channel.reports == []


def test_a_negative_lookahead_is_refused() -> None:
    with pytest.raises(ValueError, match="it cannot be -1"):
        make_engine(ListChannel(), lookahead=-1)
