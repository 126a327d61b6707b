# `make` lists what there is to do. Every target sets up what it needs; a second run only checks a stamp.
#
# ENV=off runs with the Python that PYTHON names and installs nothing: for machines without a package index, where torch and
# triton are there already.

PYTHON ?= python3
VENV ?= .venv
ENV ?= on
ARGS ?=
WORKERS ?= auto
GPU_RECORD ?= evidence/gpu-tests
GPU_WORKERS ?= 6

# Tests start many processes: each would compile every module anew, and each worker rewrite every test.
unexport PYTHONDONTWRITEBYTECODE

ifeq ($(ENV),off)
RUN := PYTHONPATH=src$(if $(PYTHONPATH),:$(PYTHONPATH)) $(PYTHON)
else
RUN := $(VENV)/bin/python
endif
TEST := $(RUN) -m pytest
SANITIZER := $(filter PYTHONPATH=%,$(RUN)) compute-sanitizer
CPU_TESTS := --numprocesses $(WORKERS) --maxprocesses 8 --dist worksteal --timeout 600 --hypothesis-profile ci

.DEFAULT_GOAL := help
.PHONY: help prove test test-all test-triton test-gpu sanitize lint types format format-check readme docs release-check clean env-proof env-dev env-docs

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | awk -F '\t' '{ printf "make %-13s %s\n", $$1, $$2 }'

prove: env-proof ## run the whole chain of proof on this machine (ARGS="my_kernel.toml --suite seed" for your own)
	@$(RUN) -m flashmoe_science prove $(ARGS)

test: env-dev ## run the tests that need no GPU, without exhaustive tables (ARGS="tests/proof -k stale" for some)
	$(TEST) $(CPU_TESTS) -m "not gpu and not exhaustive" $(ARGS)

test-all: env-dev ## run every test that needs no GPU: each row of each table, too; a release runs it
	$(TEST) $(CPU_TESTS) -m "not gpu" $(ARGS)

# `make test` asks the newest Triton. Another one compiles each kernel for each architecture, and interprets usual cases.
test-triton: env-dev ## compile each kernel and interpret some with another Triton: set PYTHONPATH
	$(TEST) $(CPU_TESTS) -m "triton and not exhaustive and not one_triton and not gpu" $(ARGS)

test-gpu: env-dev ## run the tests that need a GPU and leave two records in evidence/gpu-tests/: in parallel, then those that time
	$(TEST) -m "gpu and not timing" --numprocesses $(GPU_WORKERS) --gpu-record=$(GPU_RECORD) $(ARGS)
	$(TEST) -m "gpu and timing" --gpu-record=$(GPU_RECORD) $(ARGS)

# racecheck takes barriers that Triton keeps in shared memory for data (lab/README.md): no warp-specialised kernel.
sanitize: env-proof ## watch every access of small calls with compute-sanitizer; needs a GPU and the CUDA toolkit
	$(SANITIZER) --tool memcheck --error-exitcode 9 $(lastword $(RUN)) tools/small_calls.py
	$(SANITIZER) --tool racecheck --error-exitcode 9 $(lastword $(RUN)) tools/small_calls.py --kernels forward_short_gluon,forward_triton

lint: env-dev ## check the code with ruff
	$(RUN) -m ruff check .

types: env-dev ## check the types with mypy
	$(RUN) -m mypy

format: env-dev ## format the code and mend what ruff can mend
	$(RUN) -m ruff check --fix-only .
	$(RUN) -m ruff format .

format-check: env-dev
	$(RUN) -m ruff format --check .

readme: env-proof ## render README's table and pictures, and what became of older claims, from claims/ and evidence/
	$(RUN) -m flashmoe_science readme
	$(RUN) tools/claims_since.py --write
	$(RUN) tools/readme_pictures.py

docs: env-proof env-docs ## build the documentation into site/, with the pages of speeds from claims/ and evidence/
	$(RUN) -m mkdocs build --strict

release-check: env-dev ## build the package into dist/, try its wheel in a fresh environment, and list and audit what it needs
	rm -rf dist
	$(RUN) -m build --outdir dist .
	$(RUN) tools/check_wheel.py
	$(RUN) tools/sbom.py
	$(RUN) tools/audit.py

clean: ## remove the environment, caches and build output
	rm -rf $(VENV) .cache .hypothesis .mypy_cache .pytest_cache .ruff_cache build dist site
	find src tests tools -name __pycache__ -type d -prune -exec rm -rf {} +

env-proof env-dev env-docs: env-%:
ifneq ($(ENV),off)
	@$(PYTHON) tools/setup_env.py --folder $(VENV) $(if $(filter dev docs,$*),proof) $*
endif
