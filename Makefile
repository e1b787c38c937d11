# Every target does its own set-up: a fresh machine needs Python 3.11 or newer and a C compiler, nothing else.
#
#   make demo    run a real Gemma 3 and a small hybrid on this machine and see what their prefix cache found
#   make test    run the tests (the quick ones; `make test-slow` runs the long sweeps)
#
# PYTHON is the interpreter that makes the environment, VENV is where the environment lies.

PYTHON ?= python3
VENV ?= .venv

RUN := $(VENV)/bin/python
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
	HF_HUB_OFFLINE=1 $(RUN) -m pytest -rs $(PYTEST_ARGS)

test-slow: $(VENV)/.installed-dev
	HF_HUB_OFFLINE=1 $(RUN) -m pytest -m "slow and not gpu" -rs $(PYTEST_ARGS)

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
