# `make demo` and `make test` are all the set-up there is: whichever comes first builds the virtual environment.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin

.PHONY: demo test test-slow test-long test-all check format schema surface clean

# torch comes first and alone: what follows must build against the pinned version, and never replace it.
$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "mmtrain needs Python 3.11: make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q --upgrade pip
	$(BIN)/pip install -q -c constraints.txt torch
	$(BIN)/pip install -q -c constraints.txt -e '.[dev]'
	touch $@

demo: $(VENV)/.installed      ## demo data, plan, train on CPU, report what it learned
	$(BIN)/python scripts/demo.py

# Images of containers set it, and then every process that a test starts compiles all modules again.
export PYTHONDONTWRITEBYTECODE :=

# One worker per core; the tests of a file stay together, because they share what is expensive to start.
PARALLEL := -n auto --dist loadfile --no-loadscope-reorder

test: $(VENV)/.installed      ## the test suite
	$(BIN)/pytest $(PARALLEL) -m 'not slow and not long'

test-slow: $(VENV)/.installed ## its long runs, and property tests on many examples
	$(BIN)/pytest $(PARALLEL) -m '(slow or hypothesis) and not long' --hypothesis-profile=thorough

test-long: $(VENV)/.installed ## the heaviest comparisons, which CI leaves out: before a release, or after a change they cover
	$(BIN)/pytest $(PARALLEL) -m long

test-all: test test-slow test-long ## all three

check: $(VENV)/.installed     ## format, lint, types, layers
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(VENV)/.installed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

schema: $(VENV)/.installed    ## after a change of the recipe's settings
	$(BIN)/mmtrain schema > docs/recipe.schema.json

surface: $(VENV)/.installed   ## after a meant change of what a room exports
	$(BIN)/python -m tests.test_public_surface

clean:
	rm -rf $(VENV) runs demo-data build *.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
