# Two commands matter: `make demo` and `make test`. Both set everything up on a fresh machine.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip --disable-pip-version-check -q
# The CPU build: a bare `torch` would bring gigabytes of CUDA along.
TORCH := torch==2.13.0
SEEDS ?= 2000

.PHONY: help demo test lint types imports unit sim bench-store bench-train bench-checkpoint bench-journal counts test-as-user clean

help:
	@grep -E '^## ' Makefile | sed 's/^## //'

$(VENV)/.base: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install $(TORCH) numpy
	$(PIP) install -e .
	@touch $@

$(VENV)/.dev: $(VENV)/.base tools/install-servers.sh
	$(PIP) install -e '.[dev]'
	bash tools/install-servers.sh
	@touch $@

$(VENV)/.bench: $(VENV)/.dev
	$(PIP) install -e '.[bench]'
	@touch $@

## demo          train on 2 workers, kill one, watch it recover
demo: $(VENV)/.base
	$(BIN)/python examples/demo.py

## test          lint, types, layers, and the whole suite
test: lint types imports unit

## test-as-user  the same in a fresh clone, as an ordinary user with a home directory of 60 characters (needs root)
test-as-user:
	tools/test-as-user.sh

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.dev
	$(BIN)/mypy

imports: $(VENV)/.dev
	$(BIN)/lint-imports

unit: $(VENV)/.dev
	$(BIN)/python -m pytest -n 2 --dist loadfile -m "not slow"

## sim           many seeds of the simulated cluster: make sim SEEDS=20000
sim: $(VENV)/.dev
	$(BIN)/python -m tests.sim --seeds $(SEEDS)

## bench-store   checkpoints against cp, rclone and pyarrow, as ratios
bench-store: $(VENV)/.dev
	$(BIN)/python -m bench.store

## bench-train   start, reports and recovery against Ray Train and torchrun, as ratios
bench-train: $(VENV)/.bench
	$(BIN)/python -m bench.train

## bench-checkpoint  stall and time to durable against torch, Ray Train and the machine, as ratios
bench-checkpoint: $(VENV)/.bench
	$(BIN)/python -m bench.checkpoint

## bench-journal  memory and restart of a driver after a million reports, against those of a young run
bench-journal: $(VENV)/.dev
	$(BIN)/python -m bench.journal

## counts        fsyncs, messages, system calls and CPU time of a no-op run, a report, a commit and a restart
counts: $(VENV)/.dev
	$(BIN)/python -m bench.counts

clean:
	rm -rf $(VENV) .cache .mypy_cache .ruff_cache .hypothesis
