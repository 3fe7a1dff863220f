from collections import Counter

import pytest
from support.fake_device import CorruptionError
from support.simulation import simulate

from octavo.scheduler.messages import FinishReason

SEEDS = 160
LOOKAHEADS = (0, 1, 2)


@pytest.mark.parametrize("lookahead", LOOKAHEADS)
def test_every_request_yields_what_it_would_alone(lookahead: int) -> None:
    preempted = cached = chunks = scored = failed = kept = put_back = 0
    finishes: Counter[FinishReason | None] = Counter()
    for seed in range(SEEDS):
        try:
            outcome = simulate(seed, lookahead)
        except (CorruptionError, AssertionError) as error:
            error.add_note(f"seed {seed}, lookahead {lookahead}")
            raise
        kept += outcome.paused[0]
        put_back += outcome.paused[1]
        failed += outcome.stats.failed_steps_total
        preempted += outcome.stats.preemptions_total
        cached += outcome.stats.prefix_hits_total
        chunks += sum(row.count > 1 and not row.sample for step in outcome.steps for row in step.rows)
        scored += sum(row.score for step in outcome.steps for row in step.rows)
        finishes.update(transcript.finish for transcript in outcome.transcripts.values())
    # The workload has something of everything, or the checks above had nothing to find.
    assert preempted > 100
    assert failed > 100
    assert min(kept, put_back) > 100
    assert cached > 2_000
    assert chunks > 1_000
    assert scored > 1_000
    assert min(finishes[reason] for reason in ("stop", "length", "abort", "error")) > 50


def test_a_seed_takes_the_same_steps_every_time() -> None:
    first, second = simulate(11, 1), simulate(11, 1)
    assert first.steps == second.steps
