# Needs Python 3.11 or newer and make; everything else goes into $(VENV).
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PYTEST := $(BIN)/python -m pytest -n 2 --dist loadfile -q

.PHONY: demo test test-all lint types docs bench clean

$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; assert sys.version_info >= (3, 11), "jfleet needs Python 3.11 or newer, this is " + sys.version'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -e ".[dev]"
	@touch $@

demo: $(STAMP)        ## train, save, resume on another mesh: the main job
	$(BIN)/python examples/train_lm.py --demo

test: $(STAMP)        ## the tests that run in CI
	$(PYTEST)

test-all: $(STAMP)    ## everything, slow tests included
	$(PYTEST) -m ""

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/codespell

types: $(STAMP)
	$(BIN)/pyrefly check --python-interpreter-path $(BIN)/python

docs: $(STAMP)        ## the pages as a site; a warning is an error
	$(BIN)/python -m sphinx -n -W --keep-going -q docs build/docs

bench: $(STAMP)       ## ratios against hand-written JAX
	$(BIN)/python benchmarks/levels.py

clean:
	rm -rf $(VENV) demo_out build dist
