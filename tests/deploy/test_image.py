"""The image: what can be checked of a Dockerfile and its locks without an engine that builds it."""

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from support.daemon import running

from octavo.model.weights.lookup import find_config
from octavo.server.settings import FOREIGN_VARIABLES, SETTINGS

ROOT = Path(__file__).parents[2]
PROGRAMS = Path(sys.executable).parent
DOCKERFILE = (ROOT / "Dockerfile").read_text()
HEALTHCHECK = ROOT / "deploy" / "healthcheck.py"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
LOCKS = sorted((ROOT / "deploy").glob("*.lock"))
VARIABLES = {setting.variable for setting in SETTINGS} | FOREIGN_VARIABLES


def instructions(stage: str) -> list[str]:
    """The instructions of one stage, each on one line."""
    joined = re.sub(r"\\\n\s*", "", re.sub(r"^#.*\n", "", DOCKERFILE, flags=re.MULTILINE))
    body = re.search(rf"^FROM \S+ AS {stage}\n(.*?)(?=^FROM |\Z)", joined, re.MULTILINE | re.DOTALL)[1]
    return [line for line in body.splitlines() if line.strip()]


def test_hadolint_finds_nothing() -> None:
    subprocess.run([PROGRAMS / "hadolint", ROOT / "Dockerfile"], check=True)


def test_every_file_that_the_image_copies_is_there() -> None:
    for sources in re.findall(r"^COPY (?!--from)(.*) \S+$", DOCKERFILE, re.MULTILINE):
        for source in sources.split():
            assert [(ROOT / source.replace("${DEVICE}", device)).exists() for device in ("cpu", "cuda")] == [True, True]


def test_the_build_sees_all_that_the_package_is_made_of_and_nothing_else() -> None:
    ignored = (ROOT / ".dockerignore").read_text().split()
    assert ignored[0] == "*"
    kept = {line.removeprefix("!") for line in ignored if line.startswith("!")}
    packages = {path.split("/")[0] for path in PROJECT["tool"]["setuptools"]["package-dir"].values()}
    metadata = {PROJECT["project"]["readme"], *PROJECT["project"]["license-files"], "pyproject.toml"}
    assert kept == packages | metadata | {"deploy/build_kernels.py", "deploy/healthcheck.py", "deploy/*.lock"}


def test_it_runs_as_nobody_in_particular_and_gets_signals() -> None:
    runtime = instructions("runtime")
    assert "USER 10001:0" in runtime
    [entry] = [line for line in runtime if line.startswith("ENTRYPOINT")]
    assert json.loads(entry.removeprefix("ENTRYPOINT ")) == ["tini", "--", "octavo", "serve"]
    [command] = [line for line in runtime if line.startswith("CMD")]
    assert json.loads(command.removeprefix("CMD "))
    assert DOCKERFILE.rstrip().endswith("FROM runtime")
    assert "g++" not in " ".join(instructions("base") + runtime)


def base_of(stage: str, device: str) -> str:
    """The image or stage that a stage begins with."""
    return re.search(rf"^FROM (\S+) AS {stage}$", DOCKERFILE, re.MULTILINE)[1].replace("${DEVICE}", device)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_final_stage_has_all_that_was_built_and_no_compiler(device: str) -> None:
    assert base_of("runtime", device) == "base"
    assert ("-devel-" in base_of(base_of("builder", device), device)) == (device == "cuda")
    final = base_of(base_of("base", device), device)
    assert re.fullmatch(r"ubuntu:24\.04" if device == "cpu" else r"nvidia/cuda:13\.\S+-runtime-ubuntu24\.04", final)
    copied = [line.split() for line in instructions("runtime") if line.startswith("COPY --from")]
    assert copied == [["COPY", "--from=kernels", "/opt/octavo", "/opt/octavo"]]
    assert base_of(base_of("kernels", device), device) == "builder"
    installed = next(line for line in instructions("builder") if "-m venv" in line)
    assert installed.endswith("python3 -m venv /opt/octavo"), (
        "FlashInfer's package, where its kernels are put, is in it"
    )


def test_kernels_for_both_sizes_of_heads_with_and_without_a_window_are_built_ahead() -> None:
    """What these arguments compile, and that a server loads just that, is in test_build_kernels.py."""
    lines = instructions("kernels-cuda")
    arguments = dict(re.fullmatch(r'ARG (\w+)="?([^"]*)"?', line).groups() for line in lines if line.startswith("ARG"))
    assert {find_config(model).head_dim for model in arguments["KERNELS"].split()} == {64, 128}
    [build] = [line for line in lines if line.startswith("RUN")]
    commands = re.sub(r"^RUN --mount=\S+ ", "", build).split("&&")
    for command, window in zip(commands, [False, True], strict=True):
        words = command.replace("${KERNELS}", arguments["KERNELS"]).replace("${KERNEL_OPTIONS}", "").split()
        assert words[:2] == ["python", "/source/deploy/build_kernels.py"]
        assert words[2:4] == arguments["KERNELS"].split()
        assert words[4:6] == ["--arch", '"${ARCH}"']
        assert ("--sliding-window" in words) == window
    assert "target=/root/.cache/flashinfer" in build, "FLASHINFER_WORKSPACE_BASE is the home of the builder's user"


def test_the_image_compiles_nothing_and_writes_only_to_its_cache() -> None:
    variables = dict(re.findall(r"\b(\w+)=(\S+)", next(x for x in instructions("runtime") if x.startswith("ENV"))))
    assert variables["FLASHINFER_DISABLE_JIT"] == "1"
    assert variables["FLASHINFER_CUDA_ARCH_LIST"] == "${ARCH}"
    assert "ARG ARCH=9.0a" in instructions("runtime")
    assert "ARG ARCH=9.0a" in instructions("kernels-cuda")
    assert variables["FLASHINFER_WORKSPACE_BASE"] == variables["HOME"] == "/cache"
    assert "VOLUME /cache" in instructions("runtime")


def test_its_variables_are_settings() -> None:
    names = re.findall(r"\b(OCTAVO_\w+)=", " ".join(instructions("runtime")))
    assert {"OCTAVO_HOST", "OCTAVO_CACHE_DIR"} <= set(names) <= VARIABLES


@pytest.mark.parametrize("path", LOCKS, ids=lambda path: path.name)
def test_a_lock_pins_every_package_with_hashes_and_names_no_index(path: Path) -> None:
    text = path.read_text()
    entries = re.split(r"\n(?=\S)", text.replace("\\\n", " ").strip())
    for entry in entries:
        assert re.fullmatch(r"[a-z0-9-]+==\S+\s+(--hash=sha256:[0-9a-f]{64}\s*)+", entry), entry[:80]
    assert "://" not in text


@pytest.mark.parametrize(("device", "extras"), [("cpu", ()), ("cuda", ("gpu",))])
def test_the_locks_hold_what_the_project_asks_for(device: str, extras: tuple[str, ...]) -> None:
    text = (ROOT / "deploy" / f"requirements-{device}.lock").read_text()
    pinned = dict(re.findall(r"^([a-z0-9-]+)==(\S+)", text, re.MULTILINE))
    wanted = PROJECT["project"]["dependencies"] + PROJECT["build-system"]["requires"]
    for extra in extras:
        wanted = wanted + PROJECT["project"]["optional-dependencies"][extra]
    for requirement in map(Requirement, wanted):
        assert requirement.specifier.contains(pinned[requirement.name]), f"{requirement}: run deploy/lock.sh"


def health(url: str) -> int:
    environment = {**os.environ, "OCTAVO_PORT": url.rpartition(":")[2]}
    return subprocess.run([sys.executable, HEALTHCHECK], env=environment, check=False).returncode


def test_the_health_check_tells_a_ready_server_from_one_that_loads_or_is_gone(tmp_path: Path) -> None:
    with running("--load-until", str(tmp_path / "loaded"), until="listening on") as daemon:
        assert health(daemon.url) == 1
        (tmp_path / "loaded").touch()
        while not any("serving on" in line for line in daemon.log):
            assert daemon.process.poll() is None
        assert health(daemon.url) == 0
    assert health(daemon.url) == 1


@pytest.mark.skipif("IMAGE_STEPS" not in os.environ, reason="downloads gigabytes: set IMAGE_STEPS=cpu or cuda")
@pytest.mark.timeout(3600)
def test_the_steps_of_the_build_make_an_environment_that_serves(tmp_path: Path) -> None:
    """Runs the RUN lines of the builder in a fresh virtual environment with Python 3.12, without a container."""
    home = tmp_path / "octavo"
    subprocess.run([shutil.which("python3.12") or "python3.12", "-m", "venv", home], check=True)
    source = tmp_path / "source"
    shutil.copytree(ROOT, source, ignore=shutil.ignore_patterns(".*", "tests"))
    environment = {"PATH": f"{home}/bin:{os.environ['PATH']}", "HOME": str(tmp_path), "TMPDIR": str(tmp_path)}
    environment["PIP_CONFIG_FILE"] = os.devnull  # as in a container
    for name in ("PIP_CERT", "PIP_INDEX_URL", "PIP_CACHE_DIR"):
        environment |= {name: os.environ[name]} if name in os.environ else {}
    for line in instructions("builder"):
        if line.startswith("RUN") and "pip install" in line:
            script = re.sub(r"^RUN (--mount=\S+ )?", "", line).replace("${DEVICE}", os.environ["IMAGE_STEPS"])
            script = script.replace("/source", str(source)).replace("/opt/octavo", str(home))
            script = re.sub(r"\S+/(?=requirements-)", f"{source}/deploy/", script)
            subprocess.run(["/bin/bash", "-euc", script], env=environment, check=True)
    assert list((home / "kernels").glob("kernels-*.so"))
    runtime = environment | {"OCTAVO_CACHE_DIR": str(home / "kernels"), "CXX": "no-compiler", "PYTHONWARNINGS": "error"}
    plan = subprocess.run([home / "bin/octavo", "plan", "smollm2"], env=runtime, check=True, capture_output=True)
    assert b"It fits" in plan.stdout
    serve = [home / "bin/octavo", "serve", "--port", "0"]
    with subprocess.Popen(serve, env=runtime, stderr=subprocess.PIPE, text=True) as process:
        lines = []
        for line in process.stderr:
            lines.append(line)
            if "serving on" in line:
                break
        process.terminate()
        assert process.wait(60) == 0, lines
    assert not any("kernels torch" in line for line in lines), lines
