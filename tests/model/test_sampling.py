import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from support.sampling_oracle import Case, Logits, expected, processed, row_scratch, run, run_in, sampler_of, table_of

from octavo.model import draw
from octavo.model.device import CPU, Lander
from octavo.model.sampling import Sampled
from octavo.model.step import RowResult, SamplingParams, Step

GREEDY = SamplingParams(temperature=0)


def normal_logits(rows: int, vocabulary: int, scale: float = 3.0, seed: int = 0) -> Logits:
    return (np.random.default_rng(seed).standard_normal((rows, vocabulary)) * scale).astype(np.float32)


def mixed_cases(count: int, vocabulary: int) -> list[Case]:
    """Requests that differ in everything, so that every path of the sampler is taken beside every other."""
    kinds = [
        GREEDY,
        SamplingParams(),
        SamplingParams(temperature=0.3, min_p=0.05),
        SamplingParams(top_k=40, top_p=0.9),
        SamplingParams(temperature=1.5, top_p=0.95, min_p=0.01),
        SamplingParams(top_k=300),
        SamplingParams(repetition_penalty=1.2, presence_penalty=0.5, frequency_penalty=0.3),
        SamplingParams(temperature=0, logit_bias=((5, 4.0), (6, -100.0)), min_tokens=9),
    ]
    return [
        Case(
            replace(kinds[row % len(kinds)], seed=row - 5, logprobs=(None, 0, 5, 20)[row % 4]),
            tokens=tuple((row * 7 + index * index) % vocabulary for index in range(3 + row % 11)),
            prompt_length=2,
            ending_ids=(1, 2),
            allowed=tuple(range(row % 7, vocabulary, 3)) if row % 5 == 0 else None,
        )
        for row in range(count)
    ]


def score(logits: Logits, params: SamplingParams, targets: list[int]) -> Sampled:
    """Score the tokens of one prompt, each by its own row of logits."""
    case = Case(params, tokens=(0, *targets), prompt_length=1 + len(targets))
    slots = np.zeros(len(targets), dtype=np.int64)
    return sampler_of(table_of([case], logits.shape[1])).score(
        torch.from_numpy(logits), slots, 1 + np.arange(len(targets))
    )


# Batches


@pytest.mark.parametrize("vocabulary", [997, 49_152])
def test_a_row_has_the_same_bits_in_every_batch(vocabulary: int) -> None:
    count = 64
    cases, rng = mixed_cases(count, vocabulary), np.random.default_rng(3)
    logits = normal_logits(count, vocabulary)
    table = table_of(cases, vocabulary)
    alone = [run_in(table, logits, cases, [row]).results()[0] for row in range(count)]
    assert sum(result.logprobs is not None for result in alone) == 48
    for size in [*range(1, 65)] if vocabulary < 1000 else [2, 3, 7, 20, 33, 64]:
        rows = rng.permutation(count)[:size].tolist()
        assert run_in(table, logits, cases, rows).results() == [alone[row] for row in rows]


@pytest.mark.parametrize("vocabulary", [997, 49_152, 128_256])
def test_probabilities_have_the_same_bits_in_every_batch(vocabulary: int) -> None:
    cases = [Case(SamplingParams(temperature=temperature)) for temperature in np.linspace(0.1, 3, 16)]
    records, logits = table_of(cases, vocabulary).sampling, torch.from_numpy(normal_logits(16, vocabulary))
    scaled = (logits.double() - logits.amax(dim=1, keepdim=True)) / torch.tensor(records["temperature"])[:, None]
    together, scratch = scaled.softmax(dim=1), row_scratch(vocabulary)
    sums, logprobs = together.cumsum(dim=1), logits.log_softmax(dim=1)
    for row in range(16):
        one = draw.probabilities(logits[row], records[row], scratch)
        assert torch.equal(one, together[row])
        assert torch.equal(one.cumsum_(dim=0), sums[row])
        assert torch.equal(torch.log_softmax(logits[row], 0, out=scratch.logprobs), logprobs[row])


def test_no_rows_give_no_results() -> None:
    sampler, none = sampler_of(table_of([Case(GREEDY)], 9)), np.zeros(0, dtype=np.int64)
    assert sampler.sample(torch.empty(0, 9), none, none).results() == []
    assert sampler.score(torch.empty(0, 9), none, none).results() == []


# Greedy


@pytest.mark.parametrize("rows", [1, 5])
def test_greedy_takes_the_lowest_id_among_equals(rows: int) -> None:
    vocabulary, rng = 128_256, np.random.default_rng(0)
    sampler = sampler_of(table_of([Case(GREEDY)], vocabulary))
    slots, positions = np.zeros(rows, dtype=np.int64), np.ones(rows, dtype=np.int64)
    for _ in range(60):
        logits = torch.from_numpy(normal_logits(rows, vocabulary, seed=int(rng.integers(99))))
        best = np.sort(rng.choice(vocabulary, size=(rows, 3), replace=False), axis=1)
        logits.scatter_(1, torch.from_numpy(best), 50.0)
        assert sampler.sample(logits, slots, positions).tokens.tolist() == best[:, 0].tolist()


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(top_k=1), SamplingParams(top_p=0.0)])
def test_equal_logits_everywhere_yield_token_zero(params: SamplingParams) -> None:
    assert run(np.zeros((1, 49_152), dtype=np.float32), [Case(params)]).tokens.tolist() == [0]


def test_greedy_takes_zeros_of_both_signs_as_equal() -> None:
    logits = np.array([[-1.0, -0.0, 0.0], [-1.0, 0.0, -0.0]], dtype=np.float32)
    assert run(logits, [Case(GREEDY)] * 2).tokens.tolist() == [1, 1]


@pytest.mark.parametrize("temperature", [1e-4, 1e-5])
def test_a_tiny_temperature_is_greedy_and_stays_finite(temperature: float) -> None:
    logits = normal_logits(20, 1000, scale=1e4)
    results = run(logits.copy(), [Case(SamplingParams(temperature=temperature, seed=seed)) for seed in range(20)])
    assert results.tokens.tolist() == logits.argmax(axis=1).tolist()
    assert not results.failed.any()


def test_min_p_of_one_draws_only_among_equal_maxima() -> None:
    logits = normal_logits(1, 500).repeat(200, axis=0)
    logits[:, [17, 300]] = 40
    cases = [Case(SamplingParams(min_p=1.0, temperature=2.0, seed=seed)) for seed in range(200)]
    assert set(run(logits, cases).tokens.tolist()) == {17, 300}


def test_top_p_keeps_the_smallest_set_that_reaches_it_exactly() -> None:
    logits = np.zeros((300, 4), dtype=np.float32)
    cases = [Case(SamplingParams(top_p=0.5, seed=seed)) for seed in range(300)]
    assert set(run(logits, cases).tokens.tolist()) == {0, 1}


@pytest.mark.parametrize("top_k", [2, 1023, 1024, 1025, 4999])
def test_top_k_keeps_the_lowest_ids_of_equal_logits(top_k: int) -> None:
    logits = np.zeros((400, 5000), dtype=np.float32)
    cases = [Case(SamplingParams(top_k=top_k, seed=seed)) for seed in range(400)]
    # The largest of 400 draws lies within the last 2 % of the range, but for one time in 3,000.
    assert 0.98 * top_k - 1 < max(run(logits, cases).tokens.tolist()) < top_k


def test_a_draw_on_the_edge_between_two_tokens_takes_the_later_and_none_takes_a_token_of_weight_zero() -> None:
    logits = torch.tensor([-torch.inf, 0, -torch.inf, 0, -torch.inf])
    record, scratch = table_of([Case(SamplingParams())], 5).sampling[0], row_scratch(5)
    drawn = [draw.draw(logits, record, noise, scratch).item() for noise in (1e-10, 0.5, 1 - 1e-10)]
    assert drawn == [1, 3, 3]


@pytest.mark.parametrize("count", [1, 7, 499, 500])
def test_ranking_is_a_stable_sort_on_every_device(count: int) -> None:
    values = torch.from_numpy(np.round(normal_logits(9, 500, scale=2.0)))
    values[0, 3], values[1, 5], values[2] = -torch.inf, torch.inf, -0.0
    values[2, ::3] = 0.0
    values[3] = torch.from_numpy(normal_logits(1, 500, scale=1e-42)[0])
    scratch = row_scratch(500)
    for row, exact in zip(values, values.sort(dim=1, descending=True, stable=True).indices[:, :count], strict=True):
        assert torch.equal(draw.most_likely(row, count, scratch), exact)
        # What a device other than the CPU does with the same keys.
        keys = draw.ranking_keys(row, scratch)
        assert torch.equal(keys.topk(count, largest=False).values & 0xFFFFFFFF, exact)


# Edits


def test_c18_penalties_follow_the_hand_formula() -> None:
    # The prompt repeats token 3; the output is 5, 6, 6. Logits so far apart that the bare order shows the numbers.
    tokens, prompt_length = (3, 3, 3, 5, 6, 6), 3
    logits = np.array([[0.0, 1.0, -1.0, 8.0, 2.0, 4.0, 6.0, -3.0]], dtype=np.float32)

    def edited(**penalties: float) -> list[float]:
        case = Case(SamplingParams(temperature=0, **penalties), tokens, prompt_length)  # type: ignore[arg-type]
        table, row = table_of([case], 8), torch.from_numpy(logits.copy())
        sampler_of(table).sample(row, np.array([0]), np.array([len(tokens)]))
        return row[0].tolist()

    assert edited(presence_penalty=1.5) == [0.0, 1.0, -1.0, 8.0, 2.0, 2.5, 4.5, -3.0]
    assert edited(frequency_penalty=1.5) == [0.0, 1.0, -1.0, 8.0, 2.0, 2.5, 3.0, -3.0]
    assert edited(repetition_penalty=2.0) == [0.0, 1.0, -1.0, 4.0, 2.0, 2.0, 3.0, -3.0]
    assert edited(repetition_penalty=2.0, presence_penalty=0.5, frequency_penalty=0.25) == [
        *[0.0, 1.0, -1.0, 4.0, 2.0],
        4.0 / 2 - 0.25 - 0.5,
        6.0 / 2 - 2 * 0.25 - 0.5,
        -3.0,
    ]


def test_a_negative_logit_is_multiplied_by_the_repetition_penalty() -> None:
    case = Case(SamplingParams(temperature=0, repetition_penalty=1.5), tokens=(1,))
    assert run(np.array([[-1.2, -1.0]], dtype=np.float32), [case]).tokens.tolist() == [0]
    assert run(np.array([[-1.6, -1.0]], dtype=np.float32), [case]).tokens.tolist() == [1]


def test_a_prompt_alone_is_neither_present_nor_frequent() -> None:
    logits = np.array([[1.0, 1.1]], dtype=np.float32)
    params = SamplingParams(temperature=0, presence_penalty=2.0, frequency_penalty=2.0)
    assert run(logits.copy(), [Case(params, tokens=(1, 1, 1), prompt_length=3)]).tokens.tolist() == [1]
    assert run(logits.copy(), [Case(params, tokens=(1, 1, 1), prompt_length=2)]).tokens.tolist() == [0]


def test_occurrences_of_one_request_leave_no_trace_in_the_next() -> None:
    cases, logits = mixed_cases(64, 300), normal_logits(64, 300)
    heavy = [Case(replace(case.params, frequency_penalty=2.0), (*case.tokens, 9, 9, 9), 1) for case in cases]
    tokens = run(logits.copy(), heavy).tokens.tolist()
    assert tokens == [run(logits[row : row + 1].copy(), [heavy[row]]).tokens.item() for row in range(64)]


@pytest.mark.parametrize("penalty", [1e-300, 1e300])
def test_an_extreme_repetition_penalty_fails_no_row(penalty: float) -> None:
    case = Case(SamplingParams(repetition_penalty=penalty, logprobs=1), tokens=(0, 1, 2))
    result = run(np.array([[0.0, 3.0, -3.0, 1.0]], dtype=np.float32), [case])
    assert not result.failed.any()


def test_a_bias_of_minus_100_forbids_and_one_of_100_forces() -> None:
    logits = normal_logits(100, 50)
    logits[:, 7] = 500
    forbidden = [Case(SamplingParams(temperature=2.0, seed=seed, logit_bias=((7, -100.0),))) for seed in range(100)]
    assert 7 not in run(logits.copy(), forbidden).tokens.tolist()
    logits[:, 7] = 0
    forced = [Case(SamplingParams(seed=seed, logit_bias=((7, 100.0),))) for seed in range(100)]
    assert set(run(logits.copy(), forced).tokens.tolist()) == {7}


def test_a_row_without_any_allowed_token_fails_alone() -> None:
    banned = SamplingParams(logit_bias=tuple((token, -100.0) for token in range(5)))
    cases = [Case(banned), Case(replace(banned, temperature=0)), Case(replace(banned, top_k=2)), Case(GREEDY)]
    result = run(normal_logits(4, 5), cases)
    assert result.failed.tolist() == [True, True, True, False]


def test_ending_ids_are_forbidden_until_min_tokens_are_generated() -> None:
    logits = np.array([[1.0, 5.0, 9.0]], dtype=np.float32)
    params = SamplingParams(temperature=0, min_tokens=2)

    def chosen(output: tuple[int, ...]) -> int:
        # The end-of-sequence id 77 lies beyond this vocabulary, as some checkpoints' does.
        return int(run(logits.copy(), [Case(params, (0, 0, *output), 2, ending_ids=(1, 2, 77))]).tokens.item())

    assert [chosen(()), chosen((0,)), chosen((0, 0))] == [0, 0, 2]


def test_a_bias_does_not_lift_the_min_tokens_mask() -> None:
    params = SamplingParams(temperature=0, min_tokens=1, logit_bias=((2, 100.0),))
    assert run(np.zeros((1, 3), dtype=np.float32), [Case(params, ending_ids=(2,))]).tokens.tolist() == [0]


# Seeds


@pytest.mark.parametrize("vocabulary", [31, 32, 33, 997])
def test_a_mask_leaves_exactly_its_tokens(vocabulary: int) -> None:
    rng = np.random.default_rng(vocabulary)
    everyone = [tuple(rng.permutation(vocabulary)[: rng.integers(1, vocabulary + 1)].tolist()) for _ in range(20)]
    cases = [Case(SamplingParams(temperature=0, logit_bias=((0, 100.0),)), allowed=allowed) for allowed in everyone]
    for case, token in zip(cases, run(normal_logits(20, vocabulary), cases).tokens.tolist(), strict=True):
        assert case.allowed is not None
        assert token in case.allowed
    forbidding = [Case(GREEDY, allowed=()), Case(GREEDY)]
    assert run(normal_logits(2, vocabulary), forbidding).failed.tolist() == [True, False]


def test_a_mask_lasts_for_one_step() -> None:
    cases = [Case(GREEDY, allowed=(3,))]
    logits = np.zeros((1, 9), dtype=np.float32)
    table = table_of(cases, 9)
    assert run_in(table, logits, cases, [0]).tokens.tolist() == [3]
    table.apply(Step(retired=(), admitted=(), grown=(), rows=()))
    assert run_in(table, logits, cases, [0]).tokens.tolist() == [0]


def test_a_mask_decides_alone_which_tokens_may_end_a_request() -> None:
    params = SamplingParams(temperature=0, min_tokens=5)
    case = Case(params, ending_ids=(1,), allowed=(1,))
    assert run(np.zeros((1, 9), dtype=np.float32), [case]).tokens.tolist() == [1]


def test_a_mask_of_another_vocabulary_is_refused() -> None:
    table = table_of([Case(GREEDY)], 33)
    with pytest.raises(ValueError, match="a mask of 4 bytes instead of 8"):
        table.masks.restrict(0, bytes(4))


def test_the_extreme_seeds_draw_as_defined_and_differ() -> None:
    logits = np.zeros((1, 1000), dtype=np.float32)
    drawn = []
    for seed in (0, 1, 2**63 - 1, -1, -(2**63)):
        case = Case(SamplingParams(seed=seed))
        drawn.append(run(logits.copy(), [case]).tokens.item())
        assert drawn[-1] == expected(logits[0], case)[0]
    assert len(set(drawn)) == 5


def test_a_request_admitted_again_with_its_output_goes_on_as_before() -> None:
    logits = normal_logits(1, 200, scale=1.0).repeat(12, axis=0)
    params = SamplingParams(seed=5, frequency_penalty=1.0, repetition_penalty=1.1, top_p=0.95, min_tokens=6)
    tokens = [3, 4]
    for row in logits:
        case = Case(params, tuple(tokens), prompt_length=2, ending_ids=(9,))
        tokens.append(int(run(row[None].copy(), [case]).tokens.item()))
    table = table_of([Case(params, (3, 4, *[0] * 12), prompt_length=2, ending_ids=(9,))], 200)
    sampler, slot = sampler_of(table), np.array([0])
    for index, row in enumerate(logits):
        position = np.array([2 + index])
        table.append(slot, position, sampler.sample(torch.from_numpy(row[None].copy()), slot, position).tokens)
    assert table.tokens[0, :14].tolist() == tokens


# Log-probabilities


def test_logprobs_are_the_raw_log_softmax_whatever_the_parameters_do() -> None:
    cases = [Case(replace(case.params, logprobs=20), *(case.tokens, 2)) for case in mixed_cases(64, 1000)]
    logits = normal_logits(64, 1000)
    exact = torch.from_numpy(logits).double().log_softmax(dim=1).numpy()
    for row, result in enumerate(run(logits.copy(), cases).results()):
        logprobs = result.logprobs
        assert logprobs is not None
        assert logprobs.token == result.token
        ids = [token for token, _ in logprobs.top]
        assert ids == sorted(range(1000), key=lambda token, row=row: (-exact[row, token], token))[:20]
        # float32: a logit below 16, a sum of 1,000 terms and a difference below 32 each round to 2e-6 or better.
        values = np.array([logprobs.logprob, *(value for _, value in logprobs.top)])
        assert np.abs(values - exact[row, [logprobs.token, *ids]]).max() < 6e-6


def test_alternatives_with_equal_logprobs_come_by_id() -> None:
    logits = np.zeros((3, 3000), dtype=np.float32)
    logits[1, [2500, 40, 41]] = [2, 1, 1]
    logits[2, 5:100] = 1
    cases = [Case(replace(GREEDY, logprobs=count)) for count in (20, 4, 7)]
    tops = [result.logprobs.top for result in run(logits, cases).results() if result.logprobs]
    ids = [[token for token, _ in top] for top in tops]
    assert ids == [[*range(20)], [2500, 40, 41, 0], [*range(5, 12)]]
    assert all(value == pytest.approx(-math.log(3000), abs=1e-6) for _, value in tops[0])


@pytest.mark.parametrize("alternatives", [0, 3, 20])
def test_the_rank_of_a_token_is_exact_whether_or_not_it_is_reported(alternatives: int) -> None:
    logits = normal_logits(60, 700)
    logits[1::2] = logits[1::2].round()
    targets = [*logits[:10].argmax(axis=1).tolist(), *range(100, 600, 10)]
    exact = torch.from_numpy(logits).double().log_softmax(dim=1).tolist()

    def rank(row: int, token: int) -> int:
        return 1 + sum((value, -rival) > (exact[row][token], -token) for rival, value in enumerate(exact[row]))

    expected = [rank(row, target) for row, target in enumerate(targets)]
    results = score(logits, SamplingParams(prompt_logprobs=alternatives), targets).results()
    assert [result.logprobs and result.logprobs.rank for result in results] == expected
    assert expected[:10] == [1] * 10
    assert max(expected) > 600
    cases = [Case(SamplingParams(seed=row, temperature=3.0, logprobs=alternatives)) for row in range(60)]
    for row, result in enumerate(run(logits.copy(), cases).results()):
        assert result.logprobs is not None
        assert result.logprobs.rank == rank(row, result.logprobs.token)


def test_more_alternatives_than_tokens_report_every_token() -> None:
    result = run(np.array([[0.0, 2.0, 1.0]], dtype=np.float32), [Case(replace(GREEDY, logprobs=9))]).results()[0]
    assert result.logprobs is not None
    assert [token for token, _ in result.logprobs.top] == [1, 2, 0]


def test_only_rows_that_ask_get_logprobs_and_as_many_as_they_ask() -> None:
    cases = [Case(replace(GREEDY, logprobs=count)) for count in (None, 0, 3)]
    results = run(normal_logits(3, 10), cases).results()
    assert [None if result.logprobs is None else len(result.logprobs.top) for result in results] == [None, 0, 3]


def test_prompt_tokens_are_scored_as_sampled_ones_are() -> None:
    logits, targets = normal_logits(30, 700), [*range(0, 300, 10)]
    results = score(logits, SamplingParams(prompt_logprobs=5, logprobs=None, temperature=0.1), targets).results()
    sampled = run(logits.copy(), [Case(replace(GREEDY, logprobs=5))] * 30).results()
    exact = torch.from_numpy(logits).double().log_softmax(dim=1)
    for row, (result, other) in enumerate(zip(results, sampled, strict=True)):
        assert result.logprobs is not None
        assert other.logprobs is not None
        assert result.token == result.logprobs.token == targets[row]
        assert result.logprobs.top == other.logprobs.top
        assert abs(result.logprobs.logprob - exact[row, targets[row]].item()) < 6e-6


def test_scoring_leaves_the_logits_alone_and_reports_a_row_that_is_not_finite() -> None:
    logits = normal_logits(3, 50)
    logits[1, 4] = np.nan
    before = logits.copy()
    results = score(logits, SamplingParams(prompt_logprobs=1, repetition_penalty=2.0), [4, 5, 6]).results()
    assert [result.failed for result in results] == [False, True, False]
    assert results[1] == RowResult(failed=True)
    np.testing.assert_array_equal(logits, before)


# Rows that are not finite


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_row_that_is_not_finite_fails_alone(value: float) -> None:
    for cases in (mixed_cases(48, 600), [Case(GREEDY)] * 48):
        logits = normal_logits(48, 600)
        clean = run(logits.copy(), cases).results()
        bad = [*range(0, 48, 5)]
        logits[bad, [(row * 37 + 599) % 600 for row in bad]] = value
        sampled = run(logits, cases)
        assert np.flatnonzero(sampled.failed).tolist() == bad
        assert (sampled.tokens[bad] == 0).all()
        results = sampled.results()
        assert [results[row] for row in bad] == [RowResult(failed=True)] * len(bad)
        assert [results[row] for row in range(48) if row % 5] == [clean[row] for row in range(48) if row % 5]


def test_large_finite_logits_do_not_fail() -> None:
    logits = np.full((2, 100), np.finfo(np.float32).max, dtype=np.float32)
    logits[:, 50:] = -np.finfo(np.float32).max
    result = run(logits, [Case(GREEDY), Case(SamplingParams(seed=4))])
    assert not result.failed.any()
    assert (result.tokens < 50).all()


def test_results_on_the_host_equal_those_on_the_device() -> None:
    sampled = run(normal_logits(16, 90), mixed_cases(16, 90))
    landed, fence = sampled.to_host(Lander(CPU))
    fence.wait()
    assert landed.results() == sampled.results()


def test_the_oracle_edits_as_the_sampler_does() -> None:
    cases, logits = mixed_cases(64, 300), normal_logits(64, 300)
    table, edited = table_of(cases, 300), torch.from_numpy(logits.copy())
    sampler_of(table).sample(edited, np.arange(64), np.array([len(case.tokens) for case in cases]))
    for row, case in enumerate(cases):
        np.testing.assert_array_equal(edited[row].numpy(), processed(logits[row], case))
