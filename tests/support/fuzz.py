"""Search for bytes that a reader cannot take: `python -m support.fuzz TARGET [options of libFuzzer]`, in tests/.

Needs atheris. Ends with an error, and writes down the bytes, when it has found some.
"""

import sys
import tempfile
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["octavo"]):
    from support.fuzzing import FOUND, SEEDS, TARGETS


def main() -> None:
    name, *options = sys.argv[1:]
    corpus = tempfile.mkdtemp(prefix=f"fuzz-{name}-")
    for number, seed in enumerate((*SEEDS[name], *FOUND.get(name, []))):
        Path(corpus, str(number)).write_bytes(seed)
    atheris.Setup([sys.argv[0], f"-artifact_prefix={corpus}-", *options, corpus], TARGETS[name])
    atheris.Fuzz()


if __name__ == "__main__":
    main()
