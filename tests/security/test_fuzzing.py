"""Bytes that nobody vouches for: any of them, and those that once were found to be too much. `make fuzz` finds more."""

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.fuzzing import FOUND, SEEDS, TARGETS, safetensors_index

searched = settings(max_examples=120, deadline=None, database=None, derandomize=True)


@pytest.mark.parametrize("target", TARGETS)
def test_what_was_found_is_refused_cve_2026_115912_cve_2026_93034_cve_2024_23605(target: str) -> None:
    for data in (*SEEDS[target], *FOUND.get(target, [])):
        TARGETS[target](data)


def damaged(seed: bytes, number: int) -> bytes:
    """With some of its bytes changed, doubled or gone."""
    rng = random.Random(number)
    data = bytearray(seed)
    for _ in range(rng.randrange(1, 6)):
        place = rng.randrange(len(data) + 1)
        data[place : place + rng.randrange(3)] = rng.choice([rng.randbytes(2), bytes(2), b"\xff" * 8, data[:place]])
        del data[4096:]
    return bytes(data)


@pytest.mark.parametrize("target", TARGETS)
def test_any_bytes_are_taken_or_refused_in_one_line(target: str) -> None:
    changed = st.builds(damaged, st.sampled_from(SEEDS[target]), st.integers(0, 2**32))

    @searched
    @given(st.binary(max_size=300) | changed)
    def taken_or_refused(data: bytes) -> None:
        TARGETS[target](data)

    taken_or_refused()


parts = st.sampled_from(
    ["..", "/", "\0", "a", "\\", "%2e", "~", "linked", "round", "folder", "\n", "\ud800", "C:", " "]
)
names = st.lists(parts, max_size=6).map("".join) | st.text(max_size=300)
values = names | names.map(lambda name: name + ".safetensors") | st.none() | st.integers() | st.lists(names, max_size=2)


@searched
@given(st.dictionaries(st.text(max_size=20), values, max_size=6))
def test_an_index_names_nothing_outside_its_directory_cve_2024_12055(weight_map: dict[str, object]) -> None:
    safetensors_index(json.dumps({"weight_map": weight_map}).encode())


def test_the_search_for_more_works(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "support.fuzz", "frames", "-runs=300", f"-artifact_prefix={tmp_path}/"]
    done = subprocess.run(command, cwd=Path(__file__).parent.parent, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "cov:" in done.stderr
