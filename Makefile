# Development commands; `make` without a target lists them.
# The path of the checkout must not contain spaces.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
DEEPSPEED := $(VENV)/deepspeed
VLLM := $(VENV)/vllm
STAMP := $(VENV)/.installed
GPU_PYTHON ?= 3.12
GPU_SITE := $(VENV)/gpu-site
GPU_RUN = $(if $(WHEELS),PYTHONPATH="$(GPU_SITE):$$PWD" $(PYTHON),$(BIN)/python)
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet -c constraints.txt

.DEFAULT_GOAL := help
.PHONY: help schema setup demo test lint format matrix slow distributed gpu vllm vllm-slow bench bench-all bench-check bench-matrix bench-mismatch bench-metrics bench-tiny bench-growth bench-trainers bench-not-finite bench-diff bench-tune bench-experts bench-sampler every-family evidence docs gpu-wheels gpu-evidence upstream compat house release-check clean bench-checks bench-curves bench-half-rl

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(STAMP) ## create .venv and install into it; runs again only when pyproject.toml or constraints.txt change

# torch is installed first and alone, so that no other package can select a different build.
$(STAMP): pyproject.toml constraints.txt
	@if ! test -x $(BIN)/pip; then \
		$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
			echo 'setup: Python 3.11 or newer is required, and "$(PYTHON)" is older; try: make setup PYTHON=python3.11' >&2; \
			exit 1; }; \
		echo 'setup: creating $(VENV)'; \
		$(PYTHON) -m venv $(VENV); \
	fi
	@echo 'setup: installing into $(VENV); the first time takes a few minutes'
	@$(PIP) torch==2.13.0
	@$(PIP) -e '.[all,dev]'
	@touch $@
	@echo 'setup: done'

demo: setup ## train one recipe with stock TRL, which crashes, and with SafeGRPOTrainer, which learns
	@$(BIN)/safe-trainers demo

test: setup ## run the fast tests that need no GPU, in two processes
	@$(BIN)/python -m pytest -n 2 --dist loadfile

lint: setup ## run ruff (rules and format), mypy and import-linter; changes nothing
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-logo

format: setup ## format the code with ruff and apply its safe fixes
	@$(BIN)/ruff check --fix-only .
	@$(BIN)/ruff format .

matrix: setup ## run the tests of the full precision matrix
	@$(BIN)/python -m pytest -m matrix

slow: setup ## run the tests that take minutes
	@$(BIN)/python -m pytest -m 'slow and not vllm'

distributed: setup ## run the tests with two processes under every engine (2 minutes); DeepSpeed gets its own environment
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

vllm: $(VLLM)/.installed ## train with vLLM's CPU build in its own environment (3 minutes, 4 GB)
	@$(VLLM)/bin/python -m pytest -n 2 --dist loadfile -m 'vllm and not slow' tests/real_vllm

vllm-slow: $(VLLM)/.installed ## run the tests with vLLM that are not in `make vllm` (2 minutes)
	@$(VLLM)/bin/python -m pytest -m 'vllm and slow' tests/real_vllm

$(VLLM)/.installed: tests/real_vllm/install.sh tests/real_vllm/requirements.txt
	@echo 'vllm: installing vLLM into $(VLLM)'
	@PYTHON='$(PYTHON)' tests/real_vllm/install.sh $(VLLM)

gpu: setup ## run the tests that need a CUDA device
	@$(BIN)/python -m pytest -m gpu

bench: setup ## compare time, memory and bytes of media with stock TRL, by size (two hours)
	@$(BIN)/python benchmarks/cost.py

bench-check: setup ## measure the cost again; fails if a ratio is outside the committed range
	@$(BIN)/python benchmarks/cost.py --check

bench-matrix: setup ## compare with stock TRL by family, trainer, precision and kind: docs/evidence.md and docs/matrix.md (5 to 20 minutes)
	@$(BIN)/python benchmarks/matrix.py
	@$(BIN)/python tools/build_docs.py

bench-mismatch: setup ## measure the mismatch of sampler and trainer by dtype and length: docs/mismatch.md (10 minutes)
	@$(BIN)/python benchmarks/mismatch.py
	@$(BIN)/python tools/build_docs.py

bench-metrics: setup ## train healthily and with planted faults, and record every metric: docs/metric_runs.md (6 minutes)
	@$(BIN)/python benchmarks/metric_runs.py
	@$(BIN)/python tools/build_docs.py

bench-tiny: setup ## run the embedded recipes and their controls: docs/tiny_task.md (15 minutes)
	@$(BIN)/python benchmarks/tiny_task.py

bench-tune: setup ## search modules in float32 for each tiny family, against fixed rules: docs/tune.md (two to three hours)
	@$(BIN)/python benchmarks/tune.py
	@$(BIN)/python tools/build_docs.py

bench-growth: setup ## measure time and memory up to 1e5 tensors and 1e3 images: docs/growth.md (7 minutes)
	@$(BIN)/python benchmarks/growth.py
	@$(BIN)/python tools/build_docs.py

bench-not-finite: setup ## put NaN and infinity into runs of stock and safe trainers: docs/matrix.md (10 minutes)
	@$(BIN)/python benchmarks/not_finite.py
	@$(BIN)/python tools/build_docs.py

bench-diff: setup ## plant 50 faults into runs and find them with `safe-trainers diff`: docs/diff.md (5 minutes)
	@$(BIN)/python benchmarks/diff_faults.py
	@$(BIN)/python tools/build_docs.py

bench-trainers: setup ## train each trainer of TRL, stock and safe: docs/trainers.md (2 minutes)
	@$(BIN)/python benchmarks/trainers.py
	@$(BIN)/python tools/build_docs.py

bench-checks: setup ## run `safe-trainers bench` on TRL's trainers, stock and safe: docs/bench.md (20 minutes)
	@$(BIN)/python benchmarks/bench_trainers.py
	@$(BIN)/python tools/build_docs.py

bench-experts: setup ## measure which experts sampler and trainer choose, by family, and replay them: docs/experts.md (an hour)
	@$(BIN)/python benchmarks/experts.py
	@$(BIN)/python tools/build_docs.py

bench-sampler: $(VLLM)/.installed ## measure the mismatch with the real vLLM by family, kind and precision (40 minutes)
	@$(VLLM)/bin/python benchmarks/sampler.py
	@$(VLLM)/bin/python benchmarks/adapter_sync.py

bench-curves: $(VLLM)/.installed setup ## train under faults of precision with stock and safe trainers: docs/curves.md (40 minutes)
	@$(VLLM)/bin/python benchmarks/curves.py --again
	@$(BIN)/python tools/build_docs.py

bench-half-rl: $(VLLM)/.installed setup ## train with vLLM in bf16, fp16 and fp32 at several degrees of mismatch: docs/fp16_rl.md (an hour)
	@$(VLLM)/bin/python benchmarks/fp16_rl.py --again
	@$(BIN)/python tools/build_docs.py

# It can be interrupted: the next time, it runs those whose results are not of the present package. `make --jobs 2` runs two.
bench-all: setup ## run the benchmarks that need no vLLM and are not of the present package, and write their pages (6 hours)
	@left=$$($(BIN)/python benchmarks/provenance.py --left) && { test -z "$$left" || $(MAKE) --no-print-directory $$left; }
	@$(BIN)/python tools/build_docs.py
	@$(BIN)/python benchmarks/provenance.py

every-family: setup ## train every multimodal family of transformers, stock and safe: docs/families.md (two hours)
	@$(BIN)/python benchmarks/every_family.py --again
	@$(BIN)/python tools/build_docs.py

evidence: setup ## write the pages of results and their figures from the committed results
	@$(BIN)/python tools/build_docs.py

docs: setup ## write the generated pages and build the site; any warning is an error
	@$(BIN)/python tools/build_docs.py
	@$(BIN)/sphinx-build -W --keep-going -q docs docs/_build

schema: setup ## write the schema of recipes for the installed TRL, which `validate` reads
	@$(BIN)/python -m safe_trainers.recipes.schema_from_trl

house: setup ## compare the structure of the package with its targets: imports, counts, the paths of four values
	@$(BIN)/python tools/house.py

# With WHEELS, packages are installed into GPU_SITE, and not into the machine's own Python.
gpu-wheels: setup ## collect in WHEELS=folder the packages that an offline GPU machine lacks, for its GPU_PYTHON=3.12 (46 MB)
	@for package in trl datasets bitsandbytes peft rich 'dill<0.4.2' 'multiprocess<0.70.20'; do \
		pinned=$$(grep "^$$package==" constraints.txt || echo "$$package"); \
		$(BIN)/python -m pip --disable-pip-version-check download --quiet --no-deps --only-binary=:all: \
			--python-version $(GPU_PYTHON) --implementation cp --platform manylinux_2_28_x86_64 \
			--platform manylinux_2_24_x86_64 --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 \
			--dest $(WHEELS) "$$pinned" || exit 1; \
	done

gpu-evidence: $(if $(WHEELS),,setup) ## measure on a CUDA device, in at most nine minutes: docs/gpu.md; offline with WHEELS=folder
	@if test -n '$(WHEELS)'; then \
		$(PYTHON) -m pip --disable-pip-version-check install --quiet --no-index --no-deps --no-compile --upgrade \
			--target $(GPU_SITE) $(WHEELS)/*.whl; \
	fi
	@$(GPU_RUN) benchmarks/gpu_evidence.py $(ARGS)
	@$(GPU_RUN) tools/gpu_page.py

upstream: setup ## run the scripts that show faults of the libraries below: docs/upstream.md (4 minutes)
	@$(BIN)/python upstream/run.py

compat: setup ## run the core tests with each supported pair of TRL and transformers: docs/versions.md (PAIRS=trl-0.29)
	@$(BIN)/python tests/compat/run.py $(if $(PAIRS),--pairs $(PAIRS))
	@$(BIN)/python tools/build_docs.py

release-check: setup ## build wheel and sdist, and test each in an empty environment (10 to 15 minutes, package index)
	@$(BIN)/python tests/release_check.py

clean: ## remove caches and build outputs; keeps .venv and runs/
	@rm -rf build dist docs/_build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	@find . -path ./$(VENV) -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +
