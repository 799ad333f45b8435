# `make demo` and `make test` do everything, the set-up of .venv included. Needs Python 3.10 or newer and a C++ compiler.
PYTHON ?= python3
WORKERS ?= auto
PYTEST_ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PEERS := .venv-peers

.DEFAULT_GOAL := help
.PHONY: help setup demo test lint bench peers readme clean

help:
	@echo "make demo    quantize all-MiniLM-L6-v2 to int8, compile it, compare with eager"
	@echo "make test    the tests (make test PYTEST_ARGS='-k cli' for some of them)"
	@echo "make lint    ruff and mypy"
	@echo "make bench   measure this machine and rewrite the README's tables"
	@echo "make peers   install other int8 runtimes into .venv-peers, for 'qinductor bench --peers'"
	@echo "make clean   remove caches; .venv and .venv-peers stay"

setup: $(STAMP)

# One stamp: pip runs again only when what is to be installed has changed.
$(STAMP): pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "qinductor needs Python 3.10 or newer: make PYTHON=python3.x")'
	@test -x $(BIN)/python || { echo "creating $(VENV) and installing (once, some minutes)"; $(PYTHON) -m venv $(VENV); }
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[hf,bench,test]'
	@touch $@

demo: $(STAMP)
	$(BIN)/python -m qinductor.bench.demo

# One thread a worker: the workers share the cores, and an OpenMP team in each would thrash them.
test: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m "not slow" $(PYTEST_ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/mypy -p qinductor

bench: $(STAMP)
	$(BIN)/python -m qinductor.bench.models
	$(BIN)/python -m qinductor.bench.readme

peers: $(PEERS)/.installed

# Apart from .venv: what other runtimes depend on is none of this package's business. The pins make
# its torch the one of .venv, so pip takes it from its cache, and both load the same weights.
$(PEERS)/.installed: pyproject.toml constraints.txt
	@test -x $(PEERS)/bin/python || { echo "creating $(PEERS) and installing (once, some minutes)"; $(PYTHON) -m venv $(PEERS); }
	$(PEERS)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[hf,peers]'
	@touch $@

readme: $(STAMP)
	$(BIN)/python -m qinductor.bench.readme

clean:
	rm -rf .cache .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist *.egg-info
