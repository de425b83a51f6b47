# `make demo` and `make test` are all the set-up there is: whichever comes first builds the virtual environment.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
# A second environment, with other versions within the range of pyproject.toml, for `make test-b`.
PYTHON_B ?= $(firstword $(shell for python in python3.12 \
    $(wildcard $(or $(PYENV_ROOT),$(HOME)/.pyenv)/versions/3.12*/bin/python3.12); do \
    $$python -c 'import sys; sys.exit(sys.version_info[:2] != (3, 12))' 2>/dev/null && command -v $$python; done))
VENV_B := .venv-b
SITE   := site
# What is pinned, and what is installed beside mmtrain; those of the second environment come from `make test-b`.
CONSTRAINTS := constraints.txt
BESIDE      :=

.PHONY: install demo test test-slow test-long test-all test-b quick-b check format schema docs notebooks surface clean

NOT_SUPPORTED := mmtrain needs Python 3.11, 3.12 or 3.13, and this is %d.%d: make PYTHON=python3.13 ...

# torch comes first and alone: what follows must build against the pinned version, and never replace it. What pip builds
# from sources finds the programs of the environment by PATH.
$(VENV)/.installed: export PATH := $(abspath $(BIN)):$(PATH)
$(VENV)/.installed: pyproject.toml $(CONSTRAINTS)
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(not (3, 11) <= v <= (3, 13) and "$(NOT_SUPPORTED)" % v)'
	$(PYTHON) -m venv --clear $(VENV)
	$(BIN)/pip install -q --upgrade pip
	$(BIN)/pip install -q -c $(CONSTRAINTS) torch $(BESIDE)
	$(BIN)/pip install -q -c $(CONSTRAINTS) -e '.[dev]'
	touch $@

install: $(VENV)/.installed   ## the environment of all other commands

demo: $(VENV)/.installed      ## demo data, plan, train on CPU, report what it learned
	$(BIN)/python scripts/demo.py

# Images of containers set it, and then every process that a test starts compiles all modules again.
export PYTHONDONTWRITEBYTECODE :=

# One worker per core; the tests of a file stay together, because they share what is expensive to start.
PARALLEL := -n auto --dist loadfile --no-loadscope-reorder

test: $(VENV)/.installed      ## the test suite
	$(BIN)/pytest $(PARALLEL) -m 'not slow and not long'

test-slow: $(VENV)/.installed ## its long runs
	$(BIN)/pytest $(PARALLEL) -m 'slow and not long' $(TEST_OPTIONS)

test-long: $(VENV)/.installed ## sweeps and property tests on many examples, which CI leaves out: before a release, or after a change they cover
	$(BIN)/pytest $(PARALLEL) -m 'long or hypothesis' --hypothesis-profile=thorough

test-all: test test-slow test-long ## all three

test-b:                       ## tests of what versions change, in the second environment
	@if [ -z "$(PYTHON_B)" ]; then \
	    echo "test-b: left out, for there is no Python 3.12 here; name one with make test-b PYTHON_B=..."; \
	else \
	    $(MAKE) quick-b PYTHON=$(PYTHON_B) VENV=$(VENV_B) CONSTRAINTS=constraints-b.txt BESIDE=torchvision; \
	fi

# The longest files of its folders: they wait for planners and servers, which versions hardly change.
LEFT_OUT_OF_B := tests/runtime/test_background_planning.py tests/data/test_remote_steps.py

# Also resolves what pip would install on Python 3.13, and runs the script for the first GPU dry, on this torch for CUDA.
quick-b: $(VENV)/.installed
	$(BIN)/pip install -q --dry-run --ignore-installed --python-version 3.13 --only-binary=:all: --target none '.[dev]'
	$(BIN)/pytest $(PARALLEL) -m 'not slow and not long' $(addprefix --ignore=,$(LEFT_OUT_OF_B)) \
	    tests/models tests/runtime tests/weights tests/data tests/program tests/flow/test_replicated.py
	$(BIN)/pytest $(PARALLEL) tests/flow/test_environments.py tests/flow/test_megatron_schedule.py
	$(BIN)/pytest $(PARALLEL) -m 'not long' tests/flow/test_pretrained.py -k test_a_step
	$(BIN)/python -m scripts.first_gpu --dry-run --out $(VENV)/first-gpu

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

docs: export NO_MKDOCS_2_WARNING := 1
docs: $(VENV)/.installed      ## the site of the documentation, in site/; a broken link is an error
	$(BIN)/mkdocs build --strict --site-dir $(SITE)

notebooks: $(VENV)/.installed ## after a change of what the notebooks of the documentation show
	$(BIN)/python -m scripts.run_notebooks

surface: $(VENV)/.installed   ## after a meant change of what a room exports
	$(BIN)/python -m tests.test_public_surface

clean:
	rm -rf $(VENV) $(VENV_B) $(SITE) runs demo-data build *.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
