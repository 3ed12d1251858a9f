# Two commands matter: `make demo` (watch a language model learn) and `make test` (see it proven).
PYTHON ?= python3
VENV   ?= .venv
BIN     = $(VENV)/bin
RUN_DIR ?= runs/demo
SEEDS  ?= 200

.PHONY: setup demo tiny test lint soak clean

setup:
	@$(PYTHON) launch/setup_env.py --venv $(VENV)

models/smollm2-135m/config.json:
	@$(BIN)/python -m actors.models prepare --out models/smollm2-135m

data/sort3.jsonl:
	@$(BIN)/python -m actors.prompts_data sort3 --out data/sort3.jsonl

demo: setup
	@$(MAKE) --no-print-directory models/smollm2-135m/config.json data/sort3.jsonl
	@$(BIN)/headrace run launch/topologies/demo_cpu.yaml --run-dir $(RUN_DIR)

lint: setup
	@$(BIN)/ruff check . && $(BIN)/ruff format --check .
	@$(BIN)/mypy

test: lint
	@$(BIN)/pytest

soak: setup
	@$(BIN)/pytest -m soak --timeout 3600
	@$(BIN)/headrace soak queue --seeds $(SEEDS)

clean:
	rm -rf $(VENV) models data runs build *.egg-info
