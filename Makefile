# The four commands one needs. PYTHON is what makes the environment.
PYTHON ?= python3
BIN = .venv/bin

.PHONY: setup test check ci

setup: # the environment, with pinned versions and all extras
	$(PYTHON) -m venv .venv
	$(BIN)/pip install -q -c constraints.txt -e '.[engine,gguf,serve,tune,cluster,dev]'

test: # the quick tests
	$(BIN)/pytest -n auto

check: # linter, formatter, types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

ci: # what must be green before a change lands
	.ci/run
