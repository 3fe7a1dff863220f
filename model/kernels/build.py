"""Compile the C++ files beside this one into a shared library, once per compiler and source, and keep it in a cache.

The library fits every CPU of the architecture: a file that names instruction sets in a line "// variants: plain avx2"
is compiled once for each, and which copy runs is decided when the kernels are loaded.
"""

import fcntl
import hashlib
import logging
import os
import platform
import re
import shlex
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

logger = logging.getLogger(__name__)

SOURCES = Path(__file__).parent
FLAGS = (
    "-std=c++20",
    "-O3",
    "-fPIC",
    "-fvisibility=hidden",
    "-ffp-contract=fast",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fno-exceptions",
    "-Wall",
)
AVX512 = ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma", "-mprefer-vector-width=512")
VARIANTS = {
    "plain": (),
    "avx2": ("-mavx2", "-mfma", "-mf16c"),
    "avx512": AVX512,
    "avx512_bf16": (*AVX512, "-mavx512bf16"),
    "amx_bf16": (*AVX512, "-mavx512bf16", "-mamx-tile", "-mamx-bf16"),
}
CHECKSUM_BYTES = hashlib.sha256().digest_size
COMPILER_SECONDS = 300


class BuildError(RuntimeError):
    """No library: there is no compiler, or it failed. The message is one line."""


def build_library(sources: Path = SOURCES) -> Path:
    """Return the path of the compiled library of all *.cpp in `sources`, building it if the cache has none.

    Several processes may call this at once: one builds, the others wait for it.

    Raises:
        BuildError: no compiler, or it failed.
        PermissionError: the cache directory could be written by other users, or was chosen and cannot be written.
    """
    stem = f"kernels-{_source_key(sources)}"
    try:
        compiler = _find_compiler()
        name = f"{stem}-{_compiler_key(compiler)}.so"
    except BuildError:
        # An image may be built with a compiler and run without one.
        for earlier in sorted(cache_directory().glob(f"{stem}-*.so")):
            if _is_intact(earlier):
                _check_owner(earlier.parent)
                return earlier
        raise
    if _is_intact(cache_directory() / name):  # perhaps where this user may not write
        _check_owner(cache_directory())
        return cache_directory() / name
    cache = _open_cache()
    library = cache / name
    with (cache / "kernels.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not _is_intact(library):
            _compile(compiler, sources, library)
    return library


def can_build_library(sources: Path = SOURCES) -> bool:
    """Whether `build_library` has what it needs, found out without compiling."""
    try:
        _find_compiler()
    except BuildError:
        return any(map(_is_intact, cache_directory().glob(f"kernels-{_source_key(sources)}-*.so")))
    return True


def cache_directory() -> Path:
    """Where compiled kernels are kept: $OCTAVO_CACHE_DIR, $XDG_CACHE_HOME/octavo or ~/.cache/octavo."""
    if chosen := os.environ.get("OCTAVO_CACHE_DIR"):
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "octavo"


def _open_cache() -> Path:
    """Return the cache directory, or a temporary one of our own where that cannot be written.

    The temporary one is not removed: the library in it is about to be loaded.
    """
    directory = cache_directory()
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        writable = os.access(directory, os.W_OK | os.X_OK)
    except OSError:
        writable = False
    if not writable and os.environ.get("OCTAVO_CACHE_DIR"):
        raise PermissionError(f"OCTAVO_CACHE_DIR: {directory} cannot be written to; choose a directory of your own")
    if not writable:
        directory = Path(tempfile.mkdtemp(prefix="octavo-"))
        logger.warning("the cache directory %s is not writable; compiling into %s", cache_directory(), directory)
    _check_owner(directory)
    return directory


def _check_owner(directory: Path) -> None:
    status = directory.stat()
    if status.st_mode & 0o002 or status.st_uid not in {os.getuid(), 0}:
        raise PermissionError(
            f"cache directory {directory}: other users could replace the library in it; "
            "remove their write permission, or set OCTAVO_CACHE_DIR to a directory of your own"
        )


def _find_compiler() -> list[str]:
    command = shlex.split(os.environ.get("CXX", "")) or ["g++"]
    if shutil.which(command[0]) is None:
        raise BuildError(f"no C++ compiler: {command[0]} was not found; install g++ or set CXX")
    return command


def _run(command: list[str]) -> str:
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=COMPILER_SECONDS, check=False)  # noqa: S603
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{command[0]} did not run: {error}") from None
    if result.returncode != 0:
        errors = [line for line in result.stderr.splitlines() if "error: " in line] or result.stderr.splitlines()
        raise BuildError(f"{command[0]} failed: {errors[0] if errors else f'status {result.returncode}'}")
    return result.stdout


def _compiler_key(compiler: list[str]) -> str:
    return hashlib.sha256(repr((compiler, _run([*compiler, "--version"]))).encode()).hexdigest()[:16]


def _source_key(sources: Path) -> str:
    digest = hashlib.sha256(repr((FLAGS, VARIANTS, platform.machine())).encode())
    for path in sorted([*sources.glob("*.cpp"), *sources.glob("*.h")]):
        digest.update(path.name.encode() + b"\0" + hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:32]


def _variants(source: Path) -> list[str]:
    """Read which instruction sets a file is to be compiled for; only the plain one where the CPU is no x86-64."""
    line = re.search(r"^// variants: (.+)$", source.read_text(), re.MULTILINE)
    names = line.group(1).split() if line else ["plain"]
    if unknown := set(names) - VARIANTS.keys():
        raise BuildError(f"{source.name}: unknown variants {sorted(unknown)}; known are {sorted(VARIANTS)}")
    return names if platform.machine() == "x86_64" else [name for name in names if name == "plain"]


def _is_intact(library: Path) -> bool:
    """Whether the file is there and whole: the loader would crash on a damaged one. Its last bytes are its SHA-256."""
    try:
        content = library.read_bytes()
    except OSError:
        return False
    return hashlib.sha256(content[:-CHECKSUM_BYTES]).digest() == content[-CHECKSUM_BYTES:]


def _compile(compiler: list[str], sources: Path, library: Path) -> None:
    logger.info("compiling the CPU kernels with %s, once (some seconds)", compiler[0])
    with tempfile.TemporaryDirectory(prefix="build-", dir=library.parent) as directory:
        work = Path(directory)

        def compile_one(source: Path, variant: str) -> str:
            target = str(work / f"{source.stem}-{variant}.o")
            variant_flags = [*VARIANTS[variant], f"-DOCTAVO_VARIANT={variant}"]
            _run([*compiler, *FLAGS, *variant_flags, "-c", str(source), "-o", target])
            return target

        units = [(source, variant) for source in sorted(sources.glob("*.cpp")) for variant in _variants(source)]
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            objects = list(pool.map(compile_one, *zip(*units, strict=True)))
        linked = work / library.name
        _run([*compiler, "-shared", "-pthread", "-Wl,--as-needed", *objects, "-o", str(linked)])
        with linked.open("rb+") as file:
            checksum = hashlib.sha256(file.read()).digest()
            file.write(checksum)
        linked.replace(library)
    logger.info("compiled the CPU kernels: %s", library)
