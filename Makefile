# Two commands matter: `make demo` (watch a language model learn) and `make test` (see it proven).
PYTHON ?= python3
VENV   ?= .venv
BIN     = $(VENV)/bin
SEEDS  ?= 200

.PHONY: setup demo tiny test lint soak clean

setup:
	@$(PYTHON) launch/setup_env.py --venv $(VENV)

demo: setup
	@$(BIN)/python -m actors.models prepare --out models/smollm2-135m
	@$(BIN)/python -m actors.prompts_data sort3 --out data/sort3.jsonl
	@$(BIN)/headrace run launch/topologies/demo_cpu.yaml

tiny: setup
	@$(BIN)/python -m actors.models tiny --out models/tiny-llama
	@$(BIN)/python -m actors.prompts_data letters --out data/letters.jsonl
	@$(BIN)/headrace run launch/topologies/tiny_cpu.yaml

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
