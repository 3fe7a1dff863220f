import random
import struct
import subprocess
import sys
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.checkpoints import tiny_model, write_gguf

from octavo.model.weights.checkpoint import open_checkpoint
from octavo.model.weights.errors import CheckpointError
from octavo.model.weights.gguf_file import CHUNK, GGUFFile

F32, Q8_0, STRING, ARRAY, UINT32, BOOL = 0, 8, 8, 9, 4, 7


def string(text):
    return [("Q", len(text.encode())), ("raw", text.encode())]


def entry(key, kind, *value):
    return [*string(key), ("I", kind), *value]


def tensor(name, shape, kind=F32, offset=0):
    dimensions = [("Q", size) for size in reversed(shape)]
    return [*string(name), ("I", len(shape)), *dimensions, ("I", kind), ("Q", offset)]


def header(entries, tensors, *, magic=b"GGUF", version=3):
    """The fields of a header in order, as (letter of struct, number) or ("raw", bytes)."""
    fields = [("raw", magic), ("I", version), ("Q", len(tensors)), ("Q", len(entries))]
    return fields + [field for part in entries + tensors for field in part]


def packed(fields, data=b"", alignment=32):
    head = b"".join(value if letter == "raw" else struct.pack("<" + letter, value) for letter, value in fields)
    return head + b"\0" * (-len(head) % alignment) + data


ENTRIES = [
    entry("general.architecture", STRING, *string("llama")),
    entry("general.alignment", UINT32, ("I", 32)),
    entry("tokenizer.ggml.tokens", ARRAY, ("I", STRING), ("Q", 2), *string("a"), *string("b")),
    entry("tokenizer.ggml.token_type", ARRAY, ("I", 5), ("Q", 2), ("i", 1), ("i", -3)),
    entry("tokenizer.ggml.add_bos_token", BOOL, ("B", 1)),
    entry("llama.rope.freq_base", 6, ("f", 1e4)),
]
TENSORS = [tensor("matrix", (2, 64), Q8_0), tensor("vector", (3,), F32, 160)]
DATA = bytes(range(136)) + b"\0" * 24 + np.array([1, 2, 3], "<f4").tobytes()
FIELDS = header(ENTRIES, TENSORS)


def opened(path, content):
    path.write_bytes(content)
    return GGUFFile(path)


def test_a_well_formed_file_reads_as_written(tmp_path):
    file = opened(tmp_path / "x.gguf", packed(FIELDS, DATA))
    assert file.metadata == {
        "general.architecture": "llama",
        "general.alignment": 32,
        "tokenizer.ggml.tokens": ["a", "b"],
        "tokenizer.ggml.token_type": [1, -3],
        "tokenizer.ggml.add_bos_token": True,
        "llama.rope.freq_base": 10000.0,
    }
    assert {name: (found.shape, found.type, found.nbytes) for name, found in file.tensors.items()} == {
        "matrix": ((2, 64), "Q8_0", 136),
        "vector": ((3,), "F32", 12),
    }
    assert file.rows("matrix").tobytes() == DATA[:136]
    assert file.rows("matrix").shape == (2, 68)
    assert file.rows("vector").view(np.float32).tolist() == [[1.0, 2.0, 3.0]]


def test_an_array_of_strings_is_read_whole_however_they_lie_in_the_chunks(tmp_path):
    chosen = random.Random(0)
    sizes = [chosen.randrange(2000) for _ in range(1000)] + [0, CHUNK - 8, CHUNK - 7, 3 * CHUNK, 1, CHUNK - 17, 1, 2]
    words = [chosen.choice("aé€") * size for size in sizes]
    fields = [field for word in words for field in string(word)]
    words_entry = entry("words", ARRAY, ("I", STRING), ("Q", len(words)), *fields)
    file = opened(tmp_path / "x.gguf", packed(header([words_entry, *ENTRIES], TENSORS), DATA))
    assert file.metadata["words"] == words
    assert file.metadata["llama.rope.freq_base"] == 10000.0


def test_a_string_late_in_an_array_that_is_wrong_is_named_by_its_place(tmp_path):
    words = [field for number in range(1000) for field in string(str(number))]
    for wrong, message in (
        ((("Q", 1), ("raw", b"\xff")), "is not UTF-8"),
        ((("Q", 1 << 30),), "1,073,741,824 bytes in a"),
    ):
        array = entry("words", ARRAY, ("I", STRING), ("Q", 1001), *words, *wrong)
        with pytest.raises(CheckpointError, match=message):
            opened(tmp_path / "x.gguf", packed(header([array], TENSORS), DATA))


DAMAGED = {
    "this is not a GGUF file": header(ENTRIES, TENSORS, magic=b"GGML"),
    "unknown version 1": header(ENTRIES, TENSORS, version=1),
    "unknown version 4": header(ENTRIES, TENSORS, version=4),
    "big-endian": header(ENTRIES, TENSORS, version=3 << 24),
    "65,537 metadata entries": [*FIELDS[:3], ("Q", 65_537), *FIELDS[4:]],
    "65,537 tensors": [*FIELDS[:2], ("Q", 65_537), *FIELDS[3:]],
    "metadata key 'twin' appears twice": header([entry("twin", BOOL, ("B", 0))] * 2, TENSORS),
    "metadata key 'x' has unknown type 13": header([entry("x", 13, ("I", 0))], TENSORS),
    "is an array of type 9": header([entry("x", ARRAY, ("I", ARRAY), ("Q", 0))], TENSORS),
    "4,194,305 elements in 'x'": header([entry("x", ARRAY, ("I", 0), ("Q", (1 << 22) + 1))], TENSORS),
    "16,777,217 bytes in a string": header([[("Q", (16 << 20) + 1)]], TENSORS),
    "is not UTF-8": header([[("Q", 1), ("raw", b"\xff")]], TENSORS),
    "alignment is not a power of two": header([entry("general.alignment", UINT32, ("I", 48))], TENSORS),
    "general.alignment is not": header([entry("general.alignment", STRING, *string("32"))], TENSORS),
    "tensor 'matrix' appears twice": header(ENTRIES, [TENSORS[0], TENSORS[0]]),
    "has 0 dimensions": header(ENTRIES, [tensor("x", ())]),
    "has 5 dimensions": header(ENTRIES, [tensor("x", (1, 1, 1, 1, 1))]),
    "has type Q5_K; supported: F32": header(ENTRIES, [tensor("x", (256,), 13)]),
    "has type number 99": header(ENTRIES, [tensor("x", (256,), 99)]),
    "shape [2, 33] cannot hold blocks of 32 (Q8_0)": header(ENTRIES, [tensor("x", (2, 33), Q8_0)]),
    "shape [0, 32] cannot": header(ENTRIES, [tensor("x", (0, 32), Q8_0)]),
    "tensor 'x' is not aligned to 32 bytes": header(ENTRIES, [tensor("x", (1,), F32, 4)]),
    "tensor 'x' ends at byte": header(ENTRIES, [tensor("x", (1 << 40, 1 << 40))]),
    "tensors 'x' and 'y' overlap": header(ENTRIES, [tensor("y", (8,), F32, 32), tensor("x", (9,))]),
}


@pytest.mark.parametrize("message", DAMAGED)
def test_a_damaged_header_is_refused_in_one_line_that_says_why(tmp_path, message):
    with pytest.raises(CheckpointError) as caught:
        opened(tmp_path / "x.gguf", packed(DAMAGED[message], DATA))
    assert message in str(caught.value)
    assert str(tmp_path / "x.gguf") in str(caught.value)
    assert "\n" not in str(caught.value)


def refused_or_read(path, content):
    """Whether opening fails; anything but CheckpointError gets through to the test."""
    path.write_bytes(content)
    try:
        open_checkpoint(path)
    except CheckpointError:
        return True
    return False


def test_no_length_or_count_in_a_header_is_believed(tmp_path):
    """Any number replaced by any extreme: a CheckpointError or a harmless change, never memory of that size."""
    integers = [place for place, (letter, _) in enumerate(FIELDS) if letter in "IQ"]
    assert len(integers) > 30
    for wrong in (0, 2**31 - 1, 2**63, 2**64 - 1):
        for place in integers:
            letter = FIELDS[place][0]
            changed = [*FIELDS[:place], (letter, wrong % (1 << 8 * struct.calcsize(letter))), *FIELDS[place + 1 :]]
            content = packed(changed, DATA)
            tracemalloc.start()
            refused_or_read(tmp_path / "x.gguf", content)
            _, peak = tracemalloc.get_traced_memory()
            tracemalloc.stop()
            assert peak < 1 << 20


@pytest.fixture(scope="module")
def whole_file(tmp_path_factory):
    """A complete tiny model as GGUF, and the end of its header."""
    directory = tmp_path_factory.mktemp("gguf")
    write_gguf(directory / "model.gguf", tiny_model(directory, "llama", layers=1), "Q4_0")
    content = (directory / "model.gguf").read_bytes()
    tensors = GGUFFile(directory / "model.gguf").tensors.values()
    return content, min(found.offset for found in tensors), max(found.offset + found.nbytes for found in tensors)


def test_a_file_cut_anywhere_is_refused(tmp_path, whole_file):
    content, header_end, data_end = whole_file
    assert not refused_or_read(tmp_path / "x.gguf", content[:data_end])
    chosen = random.Random(0)
    cuts = [chosen.randrange(header_end) for _ in range(60)] + [chosen.randrange(data_end) for _ in range(40)]
    for cut in [0, 3, 4, 23, 24, header_end, data_end - 1, *cuts]:
        assert refused_or_read(tmp_path / "x.gguf", content[:cut]), cut


@settings(max_examples=300, deadline=None)
@given(changes=st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255)), min_size=1, max_size=8))
def test_bytes_flipped_in_the_header_never_raise_anything_else(tmp_path_factory, whole_file, changes):
    content, header_end, _ = whole_file
    damaged = bytearray(content)
    for place, byte in changes:
        damaged[int(place * header_end)] = byte
    refused_or_read(tmp_path_factory.getbasetemp() / "flipped.gguf", bytes(damaged))


def test_what_is_no_file_is_refused(tmp_path):
    for path in (tmp_path, tmp_path / "absent.gguf"):
        with pytest.raises(CheckpointError, match=str(path)):
            GGUFFile(path)


def test_reading_a_header_imports_no_torch():
    script = (
        "import sys, octavo.model.weights.configuration, octavo.model.weights.locate; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
