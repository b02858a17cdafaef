# Every target makes what it needs. PIP_* variables of the machine reach pip untouched.

SHELL := /bin/bash
PYTHON ?= python3
BIN := .venv/bin
DEV := .venv/.installed-dev
TORCH := .venv/.installed-torch
PEERS := .peers/.installed
FRAMEWORKS := .frameworks/.installed
DOCS := .docs/.installed
SOURCES := pyproject.toml constraints.txt

COUNT ?= 1000
NODES ?= 64
SEED ?= 0
WORKERS ?= 6
UNIT ?= $(addprefix tests/unit/,core shared cli checkpoint/test_export.py checkpoint/test_export_zero.py checkpoint/test_verify.py parity/test_code.py parity/test_table.py) tests/property
CLUSTER ?= long
FORM ?= long
SHARE ?=

# Some machines forbid Python to keep what it compiled. Tests start thousands of interpreters: each would compile
# ckptd anew, which is a third of its start.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help venv demo unit test simulate simulate-slow scale charts mutants test-matrix frameworks-test golden golden-wire bench bench-records nodes bench-large bench-journal bench-peers gpu test-gpu bench-gpu check lint types architecture wheel man release-check longest faults guards histories kills polite mistakes cluster-test docs clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-15s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

venv: $(DEV) ## .venv with everything that development needs

demo: $(TORCH) ## train, kill, restore, and compare with an undisturbed run
	$(BIN)/ckptd demo

unit: $(DEV) ## the tests that start no process and open no connection: less than a minute, while you write
	$(BIN)/python -m pytest -q -n 4 -p tests.unit.alone -m "not process and not seconds" $(UNIT)

test: $(DEV) ## every test of the short form, once; what each costs is in build/durations.tsv: WORKERS=6
	DURATIONS=build/durations.tsv $(BIN)/python -m pytest -q -n $(WORKERS) --max-worker-restart=0 --dist loadgroup --no-loadscope-reorder -p tests.durations tests

longest: ## the files of build/durations.tsv that make test begins with: after make test, when tests were added
	$(BIN)/python -m tests.longest build/durations.tsv

simulate: $(DEV) ## seeds of the simulator: COUNT=1000 NODES=64 SEED=0
	PYTHONPATH=.:client $(BIN)/python -m tests.simulation.campaign $(COUNT) $(NODES) $(SEED)

simulate-slow: $(DEV) ## hours of saving to a store that is ten times too slow: COUNT=1 NODES="1 4 8"
	PYTHONPATH=.:client $(BIN)/python -m tests.simulation.slow_store --seeds $(if $(filter file,$(origin COUNT)),1,$(COUNT)) --nodes $(if $(filter file,$(origin NODES)),1 4 8,$(NODES))

scale: $(DEV) ## jobs of many simulated nodes whose daemons take time, against bars: NODES="64 256 1000" ONLY="connect load"
	PYTHONPATH=.:client $(BIN)/python -m tests.simulation.scale $(ONLY) --nodes $(if $(filter file,$(origin NODES)),64 256 1000,$(NODES))

charts: $(DEV) ## docs/charts.md: a save and a restore of 4 to 1,000 simulated nodes; constants are measured first: CHARTS="4 16 64"
	PYTHONPATH=.:client $(BIN)/python -m bench.charts $(if $(CHARTS),--nodes $(CHARTS))

mutants: $(DEV) ## mutants of every kind of file through every reader: COUNT=1000 SEED=0 KIND=; one again: ONE=0-17
	PYTHONPATH=.:client $(BIN)/python -W ignore -m tests.hostile.mutants $(if $(ONE),--one $(ONE),$(COUNT) $(SEED)) $(if $(KIND),"$(KIND)")

test-matrix: $(BIN)/python ## client, stock readers and golden files against two releases of torch
	$(BIN)/python scripts/torch_matrix.py $(MATRIX)

frameworks-test: $(FRAMEWORKS) ## under DeepSpeed, Lightning, Hugging Face and Megatron, in an environment of its own; FORM=short
	FRAMEWORKS=$(FORM) .frameworks/bin/python -m pytest -q tests/frameworks

golden: $(DEV) ## the golden checkpoints anew: only for a change of the format that is meant
	PYTHONPATH=.:client $(BIN)/python -W ignore -m tests.golden.make tests/golden/files

golden-wire: $(DEV) ## the golden bytes of messages anew: only for a change of a protocol that is meant
	PYTHONPATH=.:client $(BIN)/python -m tests.golden.wire

bench: $(DEV) ## the speed budget, beside its yardsticks and other ways of saving
	$(BIN)/python -m bench $(BENCH)

bench-records: $(DEV) ## votes, manifest, commit and one rank's load of 8,192 ranks; a quarter of an hour; RECORDS="--ranks 512"
	$(BIN)/python -m bench.records --keep bench/records.json $(RECORDS)

nodes: $(DEV) ## real daemons on this machine: saves, one node of each set lost, a load from memory; 2 minutes: NODES=64
	$(BIN)/python -m bench.nodes $(NODES)

bench-large: $(DEV) ## jobs of 100 to 1,000 nodes, played over real links: what they cost their coordinator; LARGE="4000"
	$(BIN)/python -m bench.large $(LARGE)

bench-journal: $(DEV) ## what the journal of a job adds to a save, to the daemon's memory and to an idle daemon: JOURNAL="--against DIR"
	$(BIN)/python -m bench.journal $(JOURNAL)

bench-peers: $(PEERS) ## the same, DLRover and DeepSpeed too, in an environment of its own; BENCH="--docs docs"
	.peers/bin/python -m bench $(BENCH)

gpu: test-gpu bench-gpu ## both, on a machine with a CUDA device; figures in bench/out, with its name

test-gpu: $(DEV) ## tests that need a CUDA device; skipped without one
	$(BIN)/python -m pytest -q -m gpu tests/gpu

bench-gpu: $(DEV) ## saves and loads on a GPU, beside its pinned copies and DCP's pinned staging
	$(BIN)/python -m bench.gpu

check: lint types architecture wheel ## lint, types, import rule, wheel

lint: $(DEV)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(DEV)
	$(BIN)/mypy

architecture: $(DEV)
	$(BIN)/python -m pytest -q tests/unit/test_architecture.py

wheel: $(DEV)
	scripts/wheel_check.sh $(BIN)/python

man: $(DEV) ## man pages and completions of bash, zsh and fish, into build/share: cp -r build/share /usr/local/
	PYTHONPATH=. $(BIN)/python -m scripts.manual build/share

release-check: $(DEV) docs wheel man ## whether a release can be made: versions, notes, sdist and wheel, site; DRAFT=1 before it has a date
	PYTHONPATH=. $(BIN)/python -m scripts.release_check $(if $(DRAFT),--draft)

faults: $(DEV) ## the long form of all tests that have one: every crash point, all layouts; SHARE=0/100 for one part of 100
	FAULTS=long MUTANTS=40 SHARE=$(SHARE) $(BIN)/python -m pytest -q -n $(WORKERS) --max-worker-restart=0 --dist loadgroup --no-loadscope-reorder --timeout 600 tests

guards: $(DEV) ## each guard of the product removed in a copy, and its tests seen to fail: ONLY="NAME ..." SHARE=0/100 COUNT=10 SEED=0
	PYTHONPATH=.:client $(BIN)/python -m tests.guards.run $(ONLY) $(if $(SHARE),--share $(SHARE)) $(if $(filter file,$(origin COUNT)),,--count $(COUNT) --seed $(SEED))

histories: $(DEV) ## one job started over, remounted, lost and returned on real daemons: COUNT=200 SEED=0
	PYTHONPATH=.:client $(BIN)/python -m tests.faults.histories $(if $(filter file,$(origin COUNT)),200,$(COUNT)) $(SEED)

kills: $(DEV) ## a job that saves without a pause, disturbed: COUNT=500 SEED=0
	PYTHONPATH=.:client $(BIN)/python -m tests.faults.kill_campaign $(if $(filter file,$(origin COUNT)),500,$(COUNT)) $(SEED)

polite: $(DEV) ## lock-step ranks (DDP, FSDP2) told to end at random moments: COUNT=1000 SEED=0
	PYTHONPATH=.:client $(BIN)/python -m tests.faults.polite_campaign $(if $(filter file,$(origin COUNT)),1000,$(COUNT)) $(SEED)

mistakes: $(DEV) ## mistakes of a new user, and what they are told, to be read by people: ONLY=ranks
	PYTHONPATH=.:client $(BIN)/python -m tests.mistakes.run $(ONLY)

cluster-test: $(DEV) ## four machines booted with systemd, GlusterFS between them; needs root; CLUSTER=short
	MACHINES=$(CLUSTER) $(BIN)/python -m pytest -q --durations=20 tests/machines

docs: $(DOCS) ## the site of the documents, into .docs/site; fails on a warning
	PYTHONPATH=. NO_MKDOCS_2_WARNING=1 .docs/bin/python -m mkdocs build --quiet --strict

clean: ## remove the environment and everything that was built
	rm -rf .venv .matrix .peers .frameworks .docs build dist bench/out .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	$(PYTHON) -m venv .venv

$(DEV): $(BIN)/python $(SOURCES)
	$(BIN)/python -m pip install -c constraints.txt -e '.[dev]'
	@touch $(DEV) $(TORCH)

# The demo alone needs no test tools; an environment made for development will do.
$(TORCH): $(BIN)/python $(SOURCES)
	$(BIN)/python -m pip install -c constraints.txt -e '.[torch]'
	@touch $@

# DeepSpeed compiles what it writes with when that is first used: now, and if it cannot, its row says why.
$(PEERS): $(SOURCES)
	$(PYTHON) -m venv .peers
	DS_BUILD_OPS=0 .peers/bin/python -m pip install -c constraints.txt -e '.[bench,peers]'
	-.peers/bin/python -W ignore -m bench.peers.deepspeed
	@touch $@

# DeepSpeed compiles nothing at its installation: what is tested here needs none of its operators.
$(FRAMEWORKS): $(SOURCES)
	$(PYTHON) -m venv .frameworks
	DS_BUILD_OPS=0 .frameworks/bin/python -m pip install -c constraints.txt -e '.[test,bench,frameworks]'
	@touch $@

# No torch: mkdocstrings reads the sources and imports nothing of them.
$(DOCS): $(SOURCES)
	$(PYTHON) -m venv .docs
	.docs/bin/python -m pip install -c constraints.txt -e '.[docs]'
	@touch $@
