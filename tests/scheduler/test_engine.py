from collections.abc import Mapping, Sequence

import pytest
from support.fake_device import PendingStep, ScriptedRunner
from support.list_channel import ListChannel
from support.scheduling import BLOCK_SIZE, VOCABULARY, make_scheduler, next_token, submission

from octavo.model.step import SamplingParams, Step, StepResult
from octavo.scheduler.engine import Engine
from octavo.scheduler.messages import Abort, EngineConfig, FinishReason, Shutdown

PLAIN = SamplingParams(temperature=0.0, ignore_eos=True)


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


class FailingRunner(LoggingRunner):
    """Fails to compute a certain token: when the step is queued (then only of prompts), or late."""

    def __init__(self, poison: int, *, late: bool) -> None:
        super().__init__()
        self.poison = poison
        self.late = late
        self.prompts: dict[int, Sequence[int]] = {}

    def submit(self, step: Step) -> PendingStep:
        pending = super().submit(step)
        self.prompts |= {admission.slot: admission.tokens[: admission.prompt_length] for admission in step.admitted}
        if not self.late:
            self._fail(step, self.prompts)
        return pending

    def compute(self, step: Step) -> StepResult:
        if self.late:
            admitted = {admission.slot: admission.tokens for admission in step.admitted}
            self._fail(step, {number: slot.tokens for number, slot in self.slots.items()} | admitted)
        return super().compute(step)

    def _fail(self, step: Step, tokens: Mapping[int, Sequence[int]]) -> None:
        if any(self.poison in tokens[row.slot][row.start : row.start + row.count] for row in step.rows):
            self.broken = True
            raise RuntimeError("the device is on fire")


def answers(channel: ListChannel) -> dict[int, tuple[list[int], FinishReason | None]]:
    """Tokens and end of every request."""
    found: dict[int, tuple[list[int], FinishReason | None]] = {}
    for event in (event for report in channel.reports for event in report.events):
        tokens, finish = found.get(event.request, ([], None))
        assert finish is None
        found[event.request] = ([*tokens, *([] if event.token is None else [event.token])], event.finish)
    return found


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("lookahead", [0, 1, 2])
@pytest.mark.parametrize("poisoned", [0, 2, 5])
def test_a_request_that_breaks_the_runner_ends_alone(poisoned: int, lookahead: int, late: bool) -> None:
    submissions = [submission(number, [1, 2, 3, 12 + number], max_tokens=6, params=PLAIN) for number in range(6)]
    undisturbed = ListChannel(submissions)
    Engine(make_scheduler(), LoggingRunner(), undisturbed, lookahead).run()
    assert all(12 + poisoned not in tokens for tokens, _ in answers(undisturbed).values())
    channel = ListChannel(submissions)
    runner = FailingRunner(12 + poisoned, late=late)
    Engine(make_scheduler(), runner, channel, lookahead).run()
    expected = answers(undisturbed) | {poisoned: ([], "error")}
    assert answers(channel) == expected
    assert all("fire" not in (event.error or "") for report in channel.reports for event in report.events)
    assert 2 <= channel.reports[-1].stats.failed_steps_total <= 4


@pytest.mark.parametrize("lookahead", [0, 1, 2])
def test_a_request_that_breaks_the_runner_late_keeps_the_tokens_it_had(lookahead: int) -> None:
    submissions = [submission(number, [1, 2, 3, 4 + number], max_tokens=6, params=PLAIN) for number in range(3)]
    undisturbed = ListChannel(submissions)
    Engine(make_scheduler(), LoggingRunner(), undisturbed, lookahead).run()
    tokens = answers(undisturbed)[1][0]
    poison = next(token for token in tokens[2:] if all(token not in answers(undisturbed)[other][0] for other in (0, 2)))
    channel = ListChannel(submissions)
    Engine(make_scheduler(), FailingRunner(poison, late=True), channel, lookahead).run()
    kept = tokens[: tokens.index(poison) + 1]
    assert answers(channel) == answers(undisturbed) | {1: (kept, "error")}


@pytest.mark.parametrize("lookahead", [0, 1])
def test_a_fault_that_does_not_come_again_ends_nobody(lookahead: int) -> None:
    class BreaksOnce(LoggingRunner):
        def submit(self, step: Step) -> PendingStep:
            pending = super().submit(step)
            if len(self.steps) == 4:
                self.broken = True
                raise MemoryError
            return pending

    submissions = [submission(number, [1, 2, 3, 4 + number], max_tokens=6, params=PLAIN) for number in range(6)]
    undisturbed = ListChannel(submissions)
    Engine(make_scheduler(), LoggingRunner(), undisturbed, lookahead).run()
    channel = ListChannel(submissions)
    Engine(make_scheduler(), BreaksOnce(), channel, lookahead).run()
    assert answers(channel) == answers(undisturbed)
    assert channel.reports[-1].stats.failed_steps_total == 1


def test_requests_that_arrive_or_leave_while_suspects_are_tried_are_served() -> None:
    first = [submission(number, [1, 2, 3, 4 + number], max_tokens=6, params=PLAIN) for number in range(4)]
    newcomer = submission(9, [1, 2, 3], max_tokens=2, params=PLAIN)
    undisturbed = ListChannel([*first, newcomer])
    Engine(make_scheduler(), LoggingRunner(), undisturbed).run()
    channel = ListChannel(first, [newcomer, Abort(request=0)], [], [])
    Engine(make_scheduler(), FailingRunner(4 + 2, late=False), channel).run()
    assert answers(channel) == answers(undisturbed) | {0: ([], "abort"), 2: ([], "error")}


def test_a_runner_that_cannot_be_reset_ends_the_engine() -> None:
    class Gone(FailingRunner):
        def reset(self) -> None:
            raise RuntimeError("the device is gone")

    channel = ListChannel([submission(0, [1, 2, 3])])
    with pytest.raises(RuntimeError, match="the device is gone"):
        Engine(make_scheduler(), Gone(3, late=False), channel).run()
    assert channel.reports == []
