# Everything runs from .venv, which is built from pyproject.toml and constraints.txt when it is missing or out of date.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := test

BIN := .venv/bin
# The first interpreter that is new enough; `make PYTHON=/path/to/python3.12` chooses another.
PYTHON ?= $(shell for candidate in python3.11 python3.12 python3.13 python3; do \
	if $$candidate -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then echo $$candidate; break; fi; done)
# One numerical thread per process: the tests run in two processes, and timings then do not depend on the machine.
# Bytecode is kept whatever the shell has set: the tests start more than a hundred processes, and each compiles it anew.
SINGLE_THREAD := RL_LOGGING_LEVEL=WARNING OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 NUMEXPR_NUM_THREADS=1
PIP := $(BIN)/python -m pip install -qq --disable-pip-version-check --constraint constraints.txt

.PHONY: demo environment test docs notebooks attack lint typecheck mypy public-types bench bench-torchrl experiments matrix release lock clean

# One environment has two stamps: the demo installs what it imports, and every other target the rest. A stamp is out of
# date if it is older than pyproject.toml or constraints.txt. pip compiles no bytecode: a first import compiles what it needs.
define install
	@if [ -z "$(PYTHON)" ]; then echo "Python 3.11 or newer is needed, none was found: make PYTHON=/path/to/python" >&2; exit 1; fi
	@if ! $(BIN)/python -c '' 2>/dev/null; then \
		echo "building .venv with $(PYTHON)"; rm -rf .venv; \
		$(PYTHON) -m venv .venv || { echo "the venv module of $(PYTHON) failed; on Debian: apt install python3-venv" >&2; exit 1; }; fi
	@echo "installing $(1) into .venv, with pinned versions"
	@$(PIP) hatchling editables
	@$(BIN)/python tests/install.py --constraint constraints.txt --no-build-isolation --no-compile --editable '$(2)'
endef

EVERYTHING := .[all,docs,dev]
DEMO := .[lightning,grids,plots]

.venv/.stamp: pyproject.toml constraints.txt
	$(call install,every extra and the tools of the tests (several minutes the first time),$(EVERYTHING))
	@touch .venv/.demo $@

.venv/.demo: pyproject.toml constraints.txt
	$(call install,what the demo needs (a minute the first time),$(DEMO))
	@touch $@

demo: .venv/.demo  ## three published effects in two minutes: tables and a picture
	PYTHONDONTWRITEBYTECODE= $(BIN)/python examples/demo.py

environment: .venv/.stamp  ## .venv with every extra

lint: .venv/.stamp  ## ruff: rules and layout
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

typecheck: mypy public-types  ## types of both packages

mypy: .venv/.stamp
	$(BIN)/mypy

public-types: .venv/.stamp  ## whether pyright finds a type for every public name
	$(BIN)/python -m tests.public_types

# A process that died is not replaced: --dist loadfile would give its successor finished files, and wait for ever.
test: .venv/.stamp  ## lint, types, then every test; two processes, each with all tests of a file
	@$(MAKE) --no-print-directory --jobs 2 --output-sync lint typecheck
	$(SINGLE_THREAD) PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -q -n 2 --max-worker-restart 0 --dist loadfile --no-loadscope-reorder --durations=15

docs: .venv/.stamp  ## the site, into build/docs; a warning is an error
	$(SINGLE_THREAD) $(BIN)/python -m sphinx --quiet --fail-on-warning --keep-going --conf-dir docs . build/docs

# `make notebooks NOTEBOOKS=docs/notebooks/levels.ipynb` executes one.
notebooks: .venv/.stamp  ## executes the notebooks of the site, and stores their outputs in them (four minutes)
	$(SINGLE_THREAD) $(BIN)/python docs/run_notebooks.py $(NOTEBOOKS)

attack: .venv/.stamp  ## searches for wrong rows, lost saves and growing memory for an hour on two cores: tests/attack in its long form
	$(SINGLE_THREAD) $(BIN)/python -m tests.attack

bench: .venv/.stamp  ## the targets in docs/benchmarks.md, peers beside ours in the same run
	@for script in tests/benchmarks/speed/bench_*.py; do \
		echo; echo "== $$script"; $(SINGLE_THREAD) $(BIN)/python $$script || exit 1; done

bench-torchrl: .venv/.stamp  ## T2 and T3 in an environment whose torch loads TorchRL's extension (several GB)
	$(SINGLE_THREAD) $(BIN)/python tests/benchmarks/speed/torchrl_environment.py

# `make experiments ONLY=locks` runs one, `ONLY=nmer` all of nmer-…, `ONLY="locks rooms nmer-short"` several; FLAGS are those of the command's --help.
experiments: .venv/.stamp  ## learning experiments over paired seeds into tests/benchmarks/results; goes on where an earlier one stopped
	$(SINGLE_THREAD) $(BIN)/python -m tests.benchmarks.learning --processes 2 $(if $(ONLY),--only $(ONLY)) $(FLAGS)

# `make matrix ONLY=lowest`; UV_* are the settings of uv, such as UV_FIND_LINKS.
matrix: .venv/.stamp  ## tests with the lowest and highest versions, other Pythons, each extra alone, and other libraries (three hours, 30 GB)
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m tests.matrix $(ONLY)

release: .venv/.stamp  ## the wheel and the source distribution in dist/, checked, installed by pip and uv, and run (twenty minutes)
	PATH="$(CURDIR)/$(BIN):$$PATH" $(SINGLE_THREAD) $(BIN)/python -m tests.release $(FLAGS)

# `make lock HOLD="torch==2.13.0"` keeps a version. torch's CUDA packages follow from its version, and are left out.
lock: .venv/.stamp  ## renews constraints.txt: the newest versions that pyproject.toml allows
	@mkdir -p build
	@$(BIN)/uv pip compile --quiet --no-annotate --no-header --extra all --extra docs --extra dev \
		--constraint <(printf '%s\n' $(HOLD)) pyproject.toml > build/lock.txt
	@(sed -n '/^#/p' constraints.txt; sed -E '/^(cuda-|nvidia-|triton)/d; s/\+[a-z0-9.]+$$//' build/lock.txt) > build/pins.txt
	@mv build/pins.txt constraints.txt

clean:  ## removes .venv, the peers' environments and every output
	rm -rf .venv .bench-* runs dist build lightning_logs *.egg-info MUJOCO_LOG.TXT .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
