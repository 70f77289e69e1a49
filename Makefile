# `make run` and `make test` do all the set-up on a fresh machine; see `make help`.
SHELL  := /bin/bash
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.co3-flower-installed
ARGS   ?=

.DEFAULT_GOAL := help
.PHONY: help setup run test test-deploy lint format bench clean

help:  ## this list
	@grep -hE '^[a-z-]+: .*## ' $(MAKEFILE_LIST) | sort | awk -F ': .*## ' '{printf "  make %-11s %s\n", $$1, $$2}'

$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "co3-flower needs Python 3.11 or newer; try: make PYTHON=python3.12 ...")'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing (a few GB, some minutes) ..."
	$(BIN)/python -m pip install --disable-pip-version-check --quiet --editable '.[sim,test]'
	@$(BIN)/python -m co3_flower.warmup
	@touch $@

setup: $(STAMP)  ## the .venv with everything in it (a few GB: torch)

run: $(STAMP)  ## train on the digits with CO3; options: make run ARGS="-c \"format='e5m2'\""
	@$(BIN)/co3 run $(ARGS)

test: $(STAMP)  ## every test; options: make test ARGS="-k settings"
	@$(BIN)/python -m pytest $(ARGS)

test-deploy: $(STAMP)  ## kill processes and cut links of a deployment on loopback (some 20 minutes)
	@$(BIN)/python -m pytest -m deploy tests/test_deploy.py tests/test_deploy_faults.py $(ARGS)

lint: $(STAMP)  ## ruff (lint and format) and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMP)  ## rewrite the sources as `make lint` wants them
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(STAMP)  ## every benchmark (minutes); options: make bench ARGS="--only roundtrip fit"
	@$(BIN)/python -m benchmarks $(ARGS)

clean:  ## remove the .venv and every cache (runs/ stays)
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
