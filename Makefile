# Two commands matter: `make demo` and `make test`. Both set everything up on a fresh machine.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip --disable-pip-version-check -q
# The CPU build: a bare `torch` would bring gigabytes of CUDA along.
TORCH := torch==2.13.0
SEEDS ?= 2000
PYTEST_WORKERS ?= 2
PYTEST := -m pytest -n $(PYTEST_WORKERS) --dist worksteal
# Tests of a tier that no machine has everything for may all be skipped or, with status 5, not exist.
OR_NONE := || [ $$? -eq 5 ]
FRAMEWORKS := .venv-frameworks
# Another one than that of the benchmarks, for test-ray-cluster: make test-ray-cluster RAY_VERSION=2.49.0
RAY_VERSION ?=
RAY := .venv-ray$(RAY_VERSION:%=-%)
# The tests start thousands of processes: none of them should compile the package anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo test lint types imports unit test-slow test-bench test-hosts test-frameworks test-ray test-ray-cluster test-ray-short test-as-user sim \
	bench-store bench-train bench-checkpoint bench-journal bench-frameworks bench-hub bench-stream bench-elastic bench-faults bench-ray bench-tune counts clean

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

# Environments on top of .venv: they see its packages (torch is large) and add their own, which `make test` does not have.
comma := ,
define overlay
	test -x $(1)/bin/python || $(PYTHON) -m venv $(1)
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
		>"$$($(1)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/base.pth"
	$(1)/bin/python -m pip --disable-pip-version-check -q install $(TORCH) $(2)
	@touch $@
endef

$(FRAMEWORKS)/.installed: $(VENV)/.dev
	$(call overlay,$(FRAMEWORKS),-e '.[frameworks$(comma)bench]')

$(RAY)/.installed: $(VENV)/.dev
	$(call overlay,$(RAY),$(if $(RAY_VERSION),-e '.[ray]' 'ray[default]==$(RAY_VERSION)',-e '.[bench$(comma)ray]'))

## demo          train on 2 workers, kill one, watch it recover
demo: $(VENV)/.base
	$(BIN)/python examples/demo.py

## test          lint, types, layers, and every test that an ordinary machine can run
test: lint types imports unit

## test-slow     long soaks: thousands of kills, hundreds of drivers
test-slow: $(VENV)/.dev
	$(BIN)/python $(PYTEST) -m slow

## test-bench    every benchmark once, in small
test-bench: $(VENV)/.dev
	$(BIN)/python -m pytest tests/e2e/test_bench_*.py

## test-hosts    what needs root: mounts, control groups, other users, network namespaces
test-hosts: $(VENV)/.dev
	$(BIN)/python $(PYTEST) -m "hosts and not slow"

## test-frameworks  real Lightning, Transformers, Accelerate, XGBoost, LightGBM, JAX, and their names in ray, in .venv-frameworks
test-frameworks: $(FRAMEWORKS)/.installed
	$(FRAMEWORKS)/bin/python $(PYTEST) tests/frameworks -m "frameworks and not slow" $(OR_NONE)

## test-ray      our public names against those of an installed ray, in .venv-ray
test-ray: $(RAY)/.installed
	$(RAY)/bin/python -m pytest tests/compat -m "ray and not slow" $(OR_NONE)

## test-ray-cluster  the Ray engine on Ray clusters of three nodes, in .venv-ray, or with RAY_VERSION=2.49.0 in .venv-ray-2.49.0
test-ray-cluster: $(RAY)/.installed
	$(RAY)/bin/python -m pytest tests/ray_cluster -m "ray and not slow" $(OR_NONE)

## test-ray-short  of test-ray-cluster, killed workers, trials and a lost node
test-ray-short: $(RAY)/.installed
	$(RAY)/bin/python -m pytest tests/ray_cluster -m "ray and not slow" -k "after_a_kill or trials_run_on or is_replaced" $(OR_NONE)

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
	$(BIN)/python $(PYTEST) -m "not slow and not hosts and not frameworks and not ray"

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

## bench-hub     one more run on a warm agent, and 10 to 10,000 agents on one controller: time, CPU, memory
bench-hub: $(VENV)/.dev
	$(BIN)/python -m bench.hub
	$(BIN)/python -m bench.agents

## bench-ray     start, killed workers and nodes, and trials on a Ray cluster, against Ray Train and Ray Tune, as ratios
bench-ray: $(RAY)/.installed
	$(RAY)/bin/python -m bench.ray_cluster

## bench-tune    trivial trials against Ray Tune and Optuna, what a trial costs in large experiments, and restoring them
bench-tune: $(VENV)/.bench
	$(BIN)/python -m bench.tune

## bench-stream  files that stream to the driver's machine against TLS streams and direct writes, as ratios
bench-stream: $(VENV)/.dev
	$(BIN)/python -m bench.stream

## bench-elastic  hosts that are killed, join and get a notice, against torchrun and Ray Train, as ratios
bench-elastic: $(RAY)/.installed
	$(RAY)/bin/python -m bench.elastic

## bench-faults  how long training stands still after each fault of hosts, on network namespaces (needs root)
bench-faults: $(VENV)/.dev
	$(BIN)/python -m bench.faults

## bench-journal  memory and restart of a driver after a million reports, against those of a young run
bench-journal: $(VENV)/.dev
	$(BIN)/python -m bench.journal

## bench-frameworks  start and recovery of examples/frameworks against Ray Train or torchrun, and a bare fork, as ratios
bench-frameworks: $(FRAMEWORKS)/.installed
	$(FRAMEWORKS)/bin/python -m bench.frameworks

## counts        fsyncs, messages, system calls and CPU time of a no-op run, a report, a commit and a restart
counts: $(VENV)/.dev
	$(BIN)/python -m bench.counts

clean:
	rm -rf $(VENV) $(FRAMEWORKS) .venv-ray .venv-ray-* .cache .mypy_cache .ruff_cache .hypothesis
