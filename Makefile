# The commands of a developer. PYTHON is what makes the environment.
PYTHON ?= python3
BIN = .venv/bin

.PHONY: setup test check docs ci

setup: # the environment, with pinned versions and all extras
	$(PYTHON) -m venv .venv
	$(BIN)/pip install -q -c constraints.txt -e '.[engine,gguf,serve,tune,cluster,dev]'

test: # the quick tests
	$(BIN)/pytest -n auto

check: # linter, formatter, types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: # the site, in build/site; warnings are errors
	$(BIN)/pip install -q -c constraints.txt -e '.[docs]'
	$(BIN)/mkdocs build --strict --quiet

ci: # what must be green before a change lands
	.ci/run
