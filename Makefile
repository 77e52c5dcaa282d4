# The commands of a developer. PYTHON is what makes the environment.
PYTHON ?= python3
BIN = .venv/bin

.PHONY: setup test check staged types docs ci

setup: # the environment, with pinned versions and all extras
	$(PYTHON) -m venv .venv
	$(BIN)/pip install -q -c constraints.txt -e '.[engine,gguf,serve,tune,cluster,dev]'

test: # the quick tests
	$(BIN)/pytest -n auto

check: types # linter, formatter, types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

staged: # the package for tools that read sources: its folders where an installation has them
	rm -rf .mypy_cache/staged && mkdir -p .mypy_cache/staged/pagedsim
	ln -s $(addprefix $(CURDIR)/,$(wildcard pagedsim/*) policies kernels conf experiments) .mypy_cache/staged/pagedsim

types: staged # mypy
	$(BIN)/mypy

docs: staged # the site, in build/site; warnings are errors
	$(BIN)/pip install -q -c constraints.txt -e '.[docs]'
	$(BIN)/mkdocs build --strict --quiet

ci: # what must be green before a change lands
	.ci/run
