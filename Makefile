# Every target does its own set-up: a fresh machine needs Python 3.11 or newer and a C compiler, nothing else.
#
#   make demo    run a real Gemma 3 and a small hybrid on this machine and see what their prefix cache found
#   make test    run the tests (the quick ones; `make test-slow` runs the long sweeps)
#
# PYTHON is the interpreter that makes the environment, VENV is where the environment lies; PYTEST_WORKERS test files run
# at the same time, each in a process with models of its own (up to 2 GiB), 0: one after another in this one.

PYTHON ?= python3
VENV ?= .venv
PYTEST_WORKERS ?= 2

RUN := $(VENV)/bin/python
PYTEST := HF_HUB_OFFLINE=1 $(RUN) -m pytest -rs --numprocesses $(PYTEST_WORKERS) --dist loadfile
# Threads that wait by spinning starve each other when anything else runs: decoding was seen 18 times slower.
export OMP_WAIT_POLICY ?= PASSIVE

.PHONY: help setup demo test test-slow lint format types bench clean

help:
	@sed -n 's/^#   //p' $(MAKEFILE_LIST)
	@echo "also: setup  test-slow  lint  format  types  bench  clean"

setup: $(VENV)/.installed-dev

demo: $(VENV)/.installed-demo
	$(RUN) -m hybrid_engine.demo

test: $(VENV)/.installed-dev
	$(PYTEST) $(PYTEST_ARGS)

test-slow: $(VENV)/.installed-dev
	$(PYTEST) -m "slow and not gpu" $(PYTEST_ARGS)

lint: $(VENV)/.installed-dev
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .

format: $(VENV)/.installed-dev
	$(RUN) -m ruff check --fix .
	$(RUN) -m ruff format .

types: $(VENV)/.installed-dev
	$(RUN) -m mypy

bench: $(VENV)/.installed-dev
	HF_HUB_OFFLINE=1 $(RUN) -m hybrid_engine.bench all $(BENCH_ARGS)

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

# The stamps depend on pyproject.toml alone: the install is editable, so changed sources need no new one.

$(VENV)/.installed-dev: pyproject.toml | $(VENV)/bin/pip
	$(RUN) -m pip install --quiet --editable ".[dev]"
	@touch $@ $(VENV)/.installed-demo

$(VENV)/.installed-demo: pyproject.toml | $(VENV)/bin/pip
	$(RUN) -m pip install --quiet --editable ".[demo]"
	@touch $@

$(VENV)/bin/pip:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "$(PYTHON) is $$($(PYTHON) --version 2>&1), 3.11 or newer is needed: make PYTHON=python3.12 ..."; exit 1; }
	@command -v c++ >/dev/null || command -v g++ >/dev/null || \
		echo "no C++ compiler found: everything works, but slowly; install g++ for the fast kernels"
	$(PYTHON) -m venv $(VENV)
