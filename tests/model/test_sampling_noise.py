import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.sampling_oracle import Case, sampler_of, table_of, uniform

from octavo.model.philox import choice_seed, philox4x32, uniforms, unsigned_seed
from octavo.model.step import SamplingParams

INT64 = st.integers(-(2**63), 2**63 - 1)


def chi_square(counts: np.ndarray, shares: np.ndarray) -> float:
    expected = shares * counts.sum()
    return float(((counts - expected) ** 2 / expected).sum())


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
)
def test_philox_gives_its_published_answers(counter: list[int], key: list[int], words: list[int]) -> None:
    # The vectors of the Random123 library, beside others so that columns cannot mix.
    counters = np.array([[1, 2, 3, 4], counter, [9, 9, 9, 9]], dtype=np.uint64).T
    keys = np.array([[5, 6], key, [7, 7]], dtype=np.uint64).T
    assert philox4x32(counters, keys)[:, 1].tolist() == words


@given(st.lists(st.tuples(INT64, st.integers(0, 2**32 - 1)), min_size=1, max_size=20))
def test_noise_is_a_function_of_seed_and_position_alone(pairs: list[tuple[int, int]]) -> None:
    seeds = np.array([unsigned_seed(seed) for seed, _ in pairs], dtype=np.uint64)
    positions = np.array([position for _, position in pairs], dtype=np.int64)
    assert uniforms(seeds, positions).tolist() == [uniform(*pair) for pair in pairs]


def test_signed_seeds_map_to_64_bits_by_twos_complement() -> None:
    assert [unsigned_seed(seed) for seed in (0, 1, 2**63 - 1, -1, -(2**63))] == [0, 1, 2**63 - 1, 2**64 - 1, 2**63]


def test_noise_is_uniform_over_positions_and_over_seeds_and_free_of_echoes() -> None:
    count = 200_000
    numbers = np.arange(count)
    fixed = np.full(count, 7)
    over_positions, over_seeds = (
        uniforms(seeds.astype(np.uint64), positions) for seeds, positions in ((fixed, numbers), (numbers, fixed))
    )
    for noise in (over_positions, over_seeds):
        assert noise.min() > 0
        assert noise.max() < 1
        # 99.9th percentile of chi-square with 99 degrees of freedom: 148.2.
        assert chi_square(np.bincount((noise * 100).astype(np.int64), minlength=100), np.full(100, 0.01)) < 148.2
        # A correlation of independent numbers has a deviation of 1 / sqrt(count) = 0.0022.
        assert abs(np.corrcoef(noise[1:], noise[:-1])[0, 1]) < 0.008


@given(INT64, st.integers(1, 127))
def test_choices_of_one_request_have_seeds_of_their_own(seed: int, choice: int) -> None:
    assert choice_seed(seed, 0) == seed
    mixed = choice_seed(seed, choice)
    assert 0 <= mixed < 2**53, "a client whose JSON numbers are doubles could not send it back"
    assert mixed not in {seed, choice_seed(seed, choice + 1), choice_seed(seed ^ 1, choice)}


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(seed=11),
        SamplingParams(seed=12, temperature=0.5),
        SamplingParams(seed=13, temperature=2.0, top_k=10),
        SamplingParams(seed=14, top_p=0.8),
        SamplingParams(seed=15, min_p=0.2),
    ],
)
def test_draws_follow_the_distribution(params: SamplingParams) -> None:
    # 8,192 positions of one slot: nothing but the noise differs between them.
    logits = np.random.default_rng(1).standard_normal(16).astype(np.float32)
    table = table_of([Case(params)], 16)
    sampler = sampler_of(table)
    slots = np.zeros(1 << 11, dtype=np.int64)
    counts = np.zeros(16, dtype=np.int64)
    for start in range(0, 1 << 13, 1 << 11):
        batch = torch.from_numpy(np.tile(logits, (len(slots), 1)))
        drawn = sampler.sample(batch, slots, start + np.arange(len(slots))).tokens
        counts += np.bincount(drawn.numpy(), minlength=16)
    shares = np.exp(logits.astype(np.float64) / params.temperature)
    ranking = np.argsort(-shares)
    shares[ranking[params.top_k or 16 :]] = 0
    kept = np.searchsorted(np.cumsum(shares[ranking]) / shares.sum(), params.top_p) + 1
    shares[ranking[kept:]] = 0
    shares[shares < params.min_p * shares.max()] = 0
    assert (counts[shares == 0] == 0).all()
    kept_tokens = shares > 0
    # 99.9th percentile of chi-square with 15 degrees of freedom, 37.7, bounds that of fewer.
    assert chi_square(counts[kept_tokens], shares[kept_tokens] / shares.sum()) < 37.7
