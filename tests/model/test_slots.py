from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.model.attention import AttentionBatch
from octavo.model.slots import SlotTable
from octavo.model.step import Admission, Growth, Row, SamplingParams, Step

BLOCK_SIZE, MAX_LENGTH, SLOTS, VOCABULARY = 4, 30, 5, 50
NONE = SamplingParams()


def new_table() -> SlotTable:
    return SlotTable(SLOTS, MAX_LENGTH, BLOCK_SIZE, 8, VOCABULARY, torch.device("cpu"))


def step(*parts: int | Admission | Growth | Row) -> Step:
    """Build a step: a bare number retires that slot."""
    return Step(
        retired=tuple(part for part in parts if isinstance(part, int)),
        admitted=tuple(part for part in parts if isinstance(part, Admission)),
        grown=tuple(part for part in parts if isinstance(part, Growth)),
        rows=tuple(part for part in parts if isinstance(part, Row)),
    )


def admission(slot: int, tokens: tuple[int, ...] = (1, 2, 3), blocks: tuple[int, ...] = (0,)) -> Admission:
    return Admission(slot, tokens, len(tokens), blocks, NONE)


@dataclass
class Layout:
    """What `inputs` filled and returned."""

    tokens: torch.Tensor = field(default_factory=lambda: torch.full((200,), -1, dtype=torch.int32))
    positions: torch.Tensor = field(default_factory=lambda: torch.full((200,), -1, dtype=torch.int32))
    slots: torch.Tensor = field(default_factory=lambda: torch.full((200,), -1, dtype=torch.int32))

    def of(self, table: SlotTable, current: Step) -> AttentionBatch:
        return table.inputs(current, self.tokens, self.positions, self.slots)


@dataclass
class Mirror:
    """The same state in plain lists."""

    tokens: dict[int, list[int]] = field(default_factory=dict)
    blocks: dict[int, list[int]] = field(default_factory=dict)

    def apply(self, current: Step) -> None:
        for slot in current.retired:
            del self.tokens[slot], self.blocks[slot]
        for admitted in current.admitted:
            self.tokens[admitted.slot], self.blocks[admitted.slot] = list(admitted.tokens), list(admitted.blocks)
        for grown in current.grown:
            self.blocks[grown.slot] += grown.blocks

    def check(self, current: Step, layout: Layout, batch: AttentionBatch) -> None:
        tokens, positions, slots = [], [], []
        query_indptr, lengths, block_indptr, blocks, last = [0], [], [0], [], []
        for row in current.rows:
            end, table = row.start + row.count, self.blocks[row.slot]
            for position in range(row.start, end):
                tokens.append(self.tokens[row.slot][position])
                positions.append(position)
                slots.append(table[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE)
            used = (end + BLOCK_SIZE - 1) // BLOCK_SIZE
            query_indptr.append(query_indptr[-1] + row.count)
            lengths.append(end)
            blocks += table[:used]
            block_indptr.append(block_indptr[-1] + used)
            last.append(end - (used - 1) * BLOCK_SIZE)
        fields = (batch.query_indptr, batch.kv_lengths, batch.block_indptr, batch.block_indices, batch.last_block_len)
        expected = [query_indptr, lengths, block_indptr, blocks, last]
        assert [values.tolist() for values in fields] == expected
        assert batch.slots.tolist() == slots
        assert {values.dtype for values in (*fields, batch.slots)} == {torch.int32}
        for filled, values in ((layout.tokens, tokens), (layout.positions, positions), (layout.slots, slots)):
            assert filled[: len(values)].tolist() == values
            assert (filled[len(values) :] == -1).all()


def random_step(rng: np.random.Generator, mirror: Mirror) -> Step:
    """Retire, admit, grow and compute at random, within what the table allows."""
    retired = [slot for slot in mirror.tokens if rng.random() < 0.3]
    free = [slot for slot in range(SLOTS) if slot not in mirror.tokens or slot in retired]
    admitted = []
    for slot in free:
        if rng.random() < 0.6:
            length = int(rng.integers(1, MAX_LENGTH - 2))
            blocks = rng.choice(1000, size=-(-length // BLOCK_SIZE), replace=False)
            tokens = rng.integers(VOCABULARY, size=length)
            admitted.append(Admission(slot, tuple(tokens.tolist()), length, tuple(blocks.tolist()), NONE))
    lengths = {slot: len(tokens) for slot, tokens in mirror.tokens.items() if slot not in retired}
    owned = {slot: len(mirror.blocks[slot]) for slot in lengths}
    lengths |= {item.slot: len(item.tokens) for item in admitted}
    owned |= {item.slot: len(item.blocks) for item in admitted}
    grown, rows = [], []
    for slot, length in lengths.items():
        needed = -(-length // BLOCK_SIZE) - owned[slot]
        if needed > 0 or (rng.random() < 0.2 and owned[slot] < 8):
            grown.append(Growth(slot, tuple(rng.integers(1000, size=max(needed, 1)).tolist())))
        if rng.random() < 0.8:
            start = int(rng.integers(length))
            count = int(rng.integers(1, length - start + 1))
            rows.append(Row(slot, start, count, sample=start + count == length))
    return step(*retired, *admitted, *grown, *rows)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_a_table_lays_out_every_step_as_plain_lists_do(seed: int) -> None:
    rng, table, mirror = np.random.default_rng(seed), new_table(), Mirror()
    for _ in range(25):
        current, layout = random_step(rng, mirror), Layout()
        table.apply(current)
        mirror.apply(current)
        mirror.check(current, layout, layout.of(table, current))
        sampling = [row for row in current.rows if row.sample and row.start + row.count < MAX_LENGTH]
        slots = np.array([row.slot for row in sampling], dtype=np.int64)
        positions = np.array([row.start + row.count for row in sampling], dtype=np.int64)
        sampled = rng.integers(VOCABULARY, size=len(sampling))
        table.append(slots, positions, torch.from_numpy(sampled))
        assert table.read(slots, positions).tolist() == sampled.tolist()
        for row, token in zip(sampling, sampled.tolist(), strict=True):
            mirror.tokens[row.slot].append(token)


def test_a_slot_is_retired_and_given_away_within_one_step() -> None:
    table, layout = new_table(), Layout()
    table.apply(step(admission(2, (1,) * 12, blocks=(5, 6, 7))))
    current = step(2, admission(2, (9, 8), blocks=(3,)), Growth(2, (4,)), Row(2, 0, 2, sample=True))
    table.apply(current)
    batch = layout.of(table, current)
    assert layout.tokens[:2].tolist() == [9, 8]
    assert batch.slots.tolist() == [12, 13]
    assert batch.block_indices.tolist() == [3]
    with pytest.raises(ValueError, match="more blocks than its slot has"):
        layout.of(table, step(Row(2, 8, 1, sample=True)))


def test_the_last_sampled_token_of_a_full_slot_has_a_place() -> None:
    table = new_table()
    table.apply(step(admission(0, (1,) * MAX_LENGTH, blocks=tuple(range(8))), admission(1, (2, 2))))
    table.append(np.array([0]), np.array([MAX_LENGTH]), torch.tensor([7]))
    assert table.read(np.array([0, 1]), np.array([MAX_LENGTH, 0])).tolist() == [7, 2]


def test_a_step_without_rows_lays_out_nothing() -> None:
    layout = Layout()
    batch = layout.of(new_table(), step())
    assert (batch.rows, batch.tokens, batch.query_indptr.tolist(), batch.block_indptr.tolist()) == (0, 0, [0], [0])


def test_a_batch_keeps_its_values_when_the_table_changes() -> None:
    table, layout = new_table(), Layout()
    current = step(admission(0, blocks=(6,)), Row(0, 0, 3, sample=True))
    table.apply(current)
    batch = layout.of(table, current)
    table.apply(step(0, admission(0, blocks=(9,))))
    assert batch.block_indices.tolist() == [6]


def test_sampling_parameters_are_replaced_at_admission() -> None:
    table, slot = new_table(), 3
    params = SamplingParams(seed=-1, top_k=7, logprobs=2, logit_bias=((4, -100.0), (5, 1.5)), min_tokens=3)
    table.apply(step(replace(admission(slot), params=params, ending_ids=(6, VOCABULARY))))
    record, lists = table.sampling[slot], table.lists[slot]
    assert (record["seed"], record["top_k"], record["logprobs"], record["prompt_logprobs"]) == (2**64 - 1, 7, 2, -1)
    assert (record["prompt_length"], record["min_tokens"], record["biased"]) == (3, 3, True)
    assert lists is not None
    assert lists.bias_ids.tolist() == [4, 5]
    assert lists.bias_values.tolist() == [-np.inf, 1.5]
    assert lists.ending_ids.tolist() == [6]
    table.apply(step(slot, admission(slot)))
    record = table.sampling[slot]
    assert (record["seed"], record["top_k"], record["logprobs"], record["biased"]) == (0, VOCABULARY, -1, False)


@pytest.mark.parametrize(
    ("current", "message"),
    [
        (step(1), "slot 1 is retired but free"),
        (step(admission(0)), "slot 0 is admitted but occupied"),
        (step(Growth(1, (2,))), "slot 1 is given blocks but free"),
        (step(Growth(0, (2,) * 8)), "slot 0 would have 9 blocks; a slot holds at most 8"),
        (step(admission(1, tokens=())), "slot 1 is given 0 tokens"),
        (step(admission(1, tokens=(1,) * 31)), "slot 1 is given 31 tokens; max_model_len is 30"),
        (step(admission(1, tokens=(1, VOCABULARY))), "below 50"),
        (step(admission(1, tokens=(-1,))), "at least 0"),
        (step(replace(admission(1), params=SamplingParams(logit_bias=((VOCABULARY, 1.0),)))), "below 50"),
    ],
)
def test_a_step_that_contradicts_the_table_is_refused(current: Step, message: str) -> None:
    table = new_table()
    table.apply(step(admission(0)))
    with pytest.raises(ValueError, match=message):
        table.apply(current)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (Row(1, 0, 1, sample=True), "its slot is free"),
        (Row(0, 3, 2, sample=True), "more blocks than its slot has"),
        (Row(2, 30, 1, sample=True), "beyond max_model_len"),
        (Row(0, 1, 0, sample=True), "at least one token"),
    ],
)
def test_a_row_that_its_slot_cannot_hold_is_refused(row: Row, message: str) -> None:
    table = new_table()
    table.apply(step(admission(0), admission(2, (1,) * 30, blocks=tuple(range(8)))))
    with pytest.raises(ValueError, match=message):
        Layout().of(table, step(row))
