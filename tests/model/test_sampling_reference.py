import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from support.sampling_oracle import ROUNDING, Case, Logits, expected, run

from octavo.model.step import SamplingParams

SEEDS = st.sampled_from([0, 1, 2**63 - 1, -1, -(2**63)]) | st.integers(-(2**63), 2**63 - 1)


@st.composite
def cases(draw: st.DrawFn, vocabulary: int) -> Case:
    tokens = st.integers(0, vocabulary - 1)
    prompt, output = draw(st.lists(tokens, min_size=1, max_size=8)), draw(st.lists(tokens, max_size=8))
    params = SamplingParams(
        temperature=draw(st.sampled_from([0.0, 1e-4, 0.01, 0.7, 1.0, 2.0, 50.0])),
        top_p=draw(st.sampled_from([0.0, 0.1, 0.5, 0.9, 0.99, 1.0])),
        top_k=draw(st.sampled_from([0, 1, 2, 5, vocabulary - 1, vocabulary, vocabulary + 1])),
        min_p=draw(st.sampled_from([0.0, 0.0, 0.01, 0.3, 1.0])),
        seed=draw(SEEDS),
        repetition_penalty=draw(st.sampled_from([1.0, 1.0, 0.5, 1.3])),
        presence_penalty=draw(st.sampled_from([0.0, 0.0, -2.0, 0.7])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.0, -0.3, 2.0])),
        logit_bias=tuple(draw(st.dictionaries(tokens, st.sampled_from([-100.0, -1.5, 3.25]), max_size=3)).items()),
        min_tokens=draw(st.sampled_from([0, 0, 4])),
    )
    allowed = draw(st.none() | st.lists(tokens, max_size=vocabulary).map(tuple))
    forbidden = {token for token, bias in params.logit_bias if bias == -100}
    assume(len(forbidden) + 1 < vocabulary and (allowed is None or set(allowed) - forbidden))
    return Case(params, tuple(prompt + output), len(prompt), ending_ids=(draw(tokens),), allowed=allowed)


def random_logits(rng: np.random.Generator, rows: int, vocabulary: int) -> Logits:
    scale = rng.choice([0.01, 1, 3, 30], size=(rows, 1))
    logits = rng.standard_normal((rows, vocabulary)) * scale
    tied = rng.random((rows, 1)) < 0.3
    return np.where(tied, np.round(logits), logits).astype(np.float32)


def check(logits: Logits, batch: list[Case]) -> int:
    """Compare every row whose outcome rounding cannot turn, and count them."""
    tokens = run(logits.copy(), batch).tokens.tolist()
    compared = 0
    for row, case in enumerate(batch):
        token, margin = expected(logits[row], case)
        if margin > ROUNDING:
            assert tokens[row] == token, case
            compared += 1
    return compared


@settings(max_examples=150, deadline=None)
@given(st.data(), st.integers(5, 40), st.integers(0, 2**32 - 1))
def test_every_parameter_agrees_with_the_definition(data: st.DataObject, vocabulary: int, seed: int) -> None:
    batch = data.draw(st.lists(cases(vocabulary), min_size=1, max_size=6))
    check(random_logits(np.random.default_rng(seed), len(batch), vocabulary), batch)


@pytest.mark.parametrize("vocabulary", [100, 1023, 1025, 5000])
def test_truncation_agrees_with_the_definition_however_many_tokens_it_keeps(vocabulary: int) -> None:
    rng = np.random.default_rng(vocabulary)
    batch = [
        Case(
            SamplingParams(
                temperature=float(rng.choice([1e-4, 0.5, 1.0, 3.0])),
                top_p=float(rng.choice([0.05, 0.55, 0.93, 0.999, 1.0])),
                top_k=int(rng.choice([0, 0, 2, 50, 1023, 1024, 1025, 4096, vocabulary - 1])) % vocabulary,
                min_p=float(rng.choice([0.0, 0.0, 1e-4, 0.1])),
                seed=int(rng.integers(2**63)),
            )
        )
        for _ in range(150)
    ]
    compared = check(random_logits(rng, len(batch), vocabulary), batch)
    assert compared >= 0.98 * len(batch)


def test_truncation_agrees_with_the_definition_where_hundreds_of_logits_are_equal() -> None:
    rng = np.random.default_rng(0)
    logits = rng.integers(0, 3, size=(120, 2000)).astype(np.float32)
    batch = [
        Case(SamplingParams(top_k=int(rng.choice([0, 3, 100, 1023, 1024, 1500])), top_p=float(top_p), seed=int(seed)))
        for top_p, seed in zip(rng.uniform(0.01, 1, 120), rng.integers(2**63, size=120), strict=True)
    ]
    assert check(logits, batch) >= 118
