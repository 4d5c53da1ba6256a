# The index of habits. `make` alone lists them.
# The checkout's path must hold no spaces.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
DEEPSPEED := $(VENV)/deepspeed
STAMP := $(VENV)/.installed
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet -c constraints.txt

.DEFAULT_GOAL := help
.PHONY: help schema setup demo test lint format matrix slow distributed gpu bench bench-all bench-check bench-matrix bench-mismatch bench-tiny bench-growth evidence docs compat release-check clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(STAMP) ## create .venv and install into it; runs again only when pyproject.toml or constraints.txt change

# torch comes first and alone, so that nothing else can choose another build of it.
$(STAMP): pyproject.toml constraints.txt
	@if ! test -x $(BIN)/pip; then \
		$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
			echo 'setup: Python 3.11 or newer is needed, and "$(PYTHON)" is not; try: make setup PYTHON=python3.11' >&2; \
			exit 1; }; \
		echo 'setup: creating $(VENV)'; \
		$(PYTHON) -m venv $(VENV); \
	fi
	@echo 'setup: installing into $(VENV); the first time takes a few minutes'
	@$(PIP) torch==2.13.0
	@$(PIP) -e '.[all,dev]'
	@touch $@
	@echo 'setup: done'

demo: setup ## one recipe with stock TRL, which crashes, and with SafeGRPOTrainer, which learns
	@$(BIN)/safe-trainers demo

test: setup ## the tests that need neither a GPU nor much time, in two processes
	@$(BIN)/python -m pytest -n 2 --dist loadfile

lint: setup ## ruff (rules and format) and mypy; changes nothing
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

format: setup ## let ruff format the code and apply its safe fixes
	@$(BIN)/ruff check --fix-only .
	@$(BIN)/ruff format .

matrix: setup ## the full precision matrix
	@$(BIN)/python -m pytest -m matrix

slow: setup ## the tests that take minutes
	@$(BIN)/python -m pytest -m slow

distributed: setup ## two processes under every engine (2 minutes); DeepSpeed gets an environment of its own
	@test -e $(DEEPSPEED)/.installed || { \
		echo 'distributed: installing DeepSpeed into $(DEEPSPEED)'; \
		$(BIN)/python -m venv $(DEEPSPEED) \
		&& $(BIN)/python -c 'import os, sysconfig; print(sysconfig.get_path("purelib"), os.getcwd(), sep="\n")' \
			> "$$($(DEEPSPEED)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/beside.pth" \
		&& $(DEEPSPEED)/bin/python -m pip --disable-pip-version-check install --quiet wheel setuptools ninja \
		&& DS_BUILD_OPS=0 DS_ACCELERATOR=cpu $(DEEPSPEED)/bin/python -m pip --disable-pip-version-check install --quiet \
			--no-build-isolation deepspeed \
		&& touch $(DEEPSPEED)/.installed; \
	} || echo 'distributed: DeepSpeed cannot be installed here; its tests are skipped'
	@python=$(BIN)/python; test -e $(DEEPSPEED)/.installed && python=$(DEEPSPEED)/bin/python; \
		$$python -m pytest -m 'distributed or slow' tests/distributed

gpu: setup ## the tests that need a CUDA device
	@$(BIN)/python -m pytest -m gpu

bench: setup ## stock and safe side by side: time, memory, bytes of media, and how each grows (half an hour)
	@$(BIN)/python benchmarks/cost.py

bench-check: setup ## measure the cost again, and fail outside the spread of the committed ratios
	@$(BIN)/python benchmarks/cost.py --check

bench-matrix: setup ## stock and safe in each family, trainer, precision and kind: docs/evidence.md (5 to 20 minutes)
	@$(BIN)/python benchmarks/matrix.py
	@$(BIN)/python docs/build.py

bench-mismatch: setup ## sampler and trainer in bf16, in fp16 and mixed, by length: the table and the plot (10 minutes)
	@$(BIN)/python benchmarks/mismatch.py
	@$(BIN)/python docs/build.py

bench-tiny: setup ## run the embedded recipes and their controls again: docs/tiny_task.md (15 minutes)
	@$(BIN)/python benchmarks/tiny_task.py

bench-growth: setup ## time and memory as a model grows to 1e5 tensors and a batch to 1e3 images: docs/growth.md (7 minutes)
	@$(BIN)/python benchmarks/growth.py
	@$(BIN)/python docs/build.py

bench-all: bench-matrix bench bench-mismatch bench-tiny bench-growth evidence ## measure everything again, and make its page

evidence: setup ## make docs/evidence.md and its pictures from what was measured and committed
	@$(BIN)/python docs/build.py

docs: setup ## rewrite the pages that are made from the code, and build the site; any warning is an error
	@$(BIN)/python docs/build.py
	@$(BIN)/sphinx-build -W --keep-going -q docs docs/_build

schema: setup ## write down the keys of recipes of the installed TRL, which `validate` reads
	@$(BIN)/python -m safe_trainers.schema_make

compat: setup ## the core suite with each supported pair of TRL and transformers: docs/versions.md (PAIRS=trl-0.29)
	@$(BIN)/python tests/compat/run.py $(if $(PAIRS),--pairs $(PAIRS))
	@$(BIN)/python docs/build.py

release-check: setup ## build wheel and sdist, and try each in an empty environment (10 to 15 minutes, package index)
	@$(BIN)/python tests/release_check.py

clean: ## remove caches and build outputs; keeps .venv and runs/
	@rm -rf build dist docs/_build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	@find . -path ./$(VENV) -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +
