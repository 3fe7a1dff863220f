"""Sampling as a GPU does it: the same tokens, and nothing that would make the host wait for the device."""

from collections.abc import Iterator
from unittest import mock

import numpy as np
import pytest
import torch
from support.sampling_oracle import Case, Logits, row_scratch, sampler_of, table_of
from torch import Tensor

from octavo.model import device, device_draw
from octavo.model.device_sampling import DeviceSampler
from octavo.model.draw import RowScratch
from octavo.model.slots import SlotTable
from octavo.model.step import Admission, Row, SamplingParams, Step

META = torch.device("meta")
KINDS = (
    SamplingParams(temperature=0),
    SamplingParams(),
    SamplingParams(min_p=0.05, seed=3),
    SamplingParams(top_k=40, top_p=0.9, seed=4, logprobs=3),
    SamplingParams(temperature=1.5, top_p=0.95, logprobs=0),
    SamplingParams(repetition_penalty=1.2, presence_penalty=0.5, frequency_penalty=0.3, min_tokens=9),
    SamplingParams(logit_bias=((5, 4.0), (6, -100.0)), logprobs=20),
)


def random_logits(rng: np.random.Generator, rows: int, vocabulary: int) -> Logits:
    """Of every scale, and with many equals in some rows."""
    logits = rng.standard_normal((rows, vocabulary)) * rng.choice([0.01, 1.0, 8.0], size=(rows, 1))
    return np.where(rng.random((rows, 1)) < 0.4, np.round(logits), logits).astype(np.float32)


def random_case(rng: np.random.Generator, vocabulary: int) -> Case:
    kept = [0, 1, 2, 40, 1023, 1024, 1025, vocabulary - 1]
    params = SamplingParams(
        temperature=float(rng.choice([0.0, 0.05, 0.7, 1.0, 30.0])),
        top_k=int(rng.choice(kept)),
        top_p=float(rng.choice([0.1, 0.9, 0.999, 1.0])),
        min_p=float(rng.choice([0.0, 0.0, 0.02])),
        repetition_penalty=float(rng.choice([1.0, 1.0, 1.3])),
        frequency_penalty=float(rng.choice([0.0, 0.0, 0.4])),
        logit_bias=((3, 2.5), (4, -100.0)) if rng.random() < 0.2 else (),
        seed=int(rng.integers(-(2**63), 2**63 - 1)),
        logprobs=(None, 0, 3, 20)[rng.integers(4)],
        prompt_logprobs=(None, 0, 5)[rng.integers(3)],
    )
    tokens = tuple(rng.integers(0, vocabulary, rng.integers(2, 30)).tolist())
    allowed = tuple(rng.integers(0, vocabulary, 200).tolist()) if rng.random() < 0.2 else None
    return Case(params, tokens, prompt_length=1, allowed=allowed)


@pytest.mark.parametrize("vocabulary", [50, 1023, 1025, 5000, 49_152])
@pytest.mark.parametrize("at_once", [1, 7, 64])
def test_a_device_yields_what_the_host_yields(vocabulary: int, at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.model.device_sampling.SAMPLER_LOGITS", at_once * vocabulary)
    rng, rows = np.random.default_rng(vocabulary), 100 if vocabulary < 10_000 else 20
    cases = [random_case(rng, vocabulary) for _ in range(rows)]
    logits, table = random_logits(rng, rows, vocabulary), table_of(cases, vocabulary)
    logits[3, 7], logits[5, 0] = np.nan, np.inf
    slots, positions = np.arange(rows), np.array([len(case.tokens) for case in cases])
    on_host, on_device = sampler_of(table), DeviceSampler(table, row_scratch(vocabulary))
    expected = on_host.sample(torch.from_numpy(logits.copy()), slots, positions).results()
    assert on_device.sample(torch.from_numpy(logits.copy()), slots, positions).results() == expected
    assert [row for row, result in enumerate(expected) if result.failed] == [3, 5]
    assert len({result.token for result in expected}) > 10
    scored = [sampler.score(torch.from_numpy(logits), slots, positions - 1) for sampler in (on_host, on_device)]
    assert scored[0].results() == scored[1].results()


@pytest.fixture
def unreadable_device() -> Iterator[None]:
    """Tensors without memory: whoever asks one what it holds, or for anything that follows from that, gets an error."""

    def to_meta(values: np.ndarray, target: torch.device) -> Tensor:
        assert target == META
        return torch.from_numpy(values).to(META)

    with (
        mock.patch.object(device, "to_device", to_meta),
        mock.patch.object(device_draw, "to_device", to_meta),
        mock.patch("octavo.model.slots.to_device", to_meta),
    ):
        yield


def test_laying_out_sampling_and_scoring_a_step_ask_the_device_nothing(unreadable_device: None) -> None:
    vocabulary, rows = 5000, len(KINDS)
    slots = SlotTable(rows, 64, 16, 4, vocabulary, META)
    admitted = tuple(
        Admission(slot, tuple(range(slot + 1, slot + 11)), 8, (slot,), params, ending_ids=(1, 2))
        for slot, params in enumerate(KINDS)
    )
    step = Step((), admitted, (), tuple(Row(slot, 0, 10, sample=True, score=True) for slot in range(rows)))
    slots.apply(step)
    areas = [torch.empty(10 * rows, dtype=torch.int32, device=META) for _ in range(2)]
    slots.inputs(step, *areas, torch.empty(10 * rows, dtype=torch.int32))
    scratch = row_scratch(vocabulary)
    sampler = DeviceSampler(slots, RowScratch(*(getattr(scratch, name).to(META) for name in scratch.__slots__)))
    which, positions = np.arange(rows), np.full(rows, 10)
    sampled = sampler.sample(torch.empty(rows, vocabulary, device=META), which, positions)
    slots.append(which, positions, sampled.tokens)
    sampler.score(torch.empty(rows, vocabulary, device=META), which, positions - 1)
    assert sampled.tokens.device == META
    with pytest.raises(RuntimeError):
        sampled.results()
