# make demo: from a clone to a table and a report. make test: every test. Each does all its set-up.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin

.PHONY: demo test lint mutations overhead clean

demo: $(VENV)/.installed
	$(BIN)/samestep compare digits --launchers all

test: $(VENV)/.tested lint
	$(BIN)/python -m pytest

lint: $(VENV)/.tested
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Plants every fault of tests/mutations and prints the share that the proof catches and names.
mutations: $(VENV)/.tested
	$(BIN)/python tests/mutations/plant.py

# What the ddp engine costs over a hand-written script, and against the wrappers.
overhead: $(VENV)/.tested
	$(BIN)/pip install --quiet -c constraints.txt -e '.[wrappers]'
	$(BIN)/python benchmarks/overhead.py

# torch comes first and alone: no other package then chooses its version.
$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet -c constraints.txt torch
	$(BIN)/pip install --quiet -c constraints.txt -e .
	touch $@

$(VENV)/.tested: $(VENV)/.installed
	$(BIN)/pip install --quiet -c constraints.txt -e '.[test]'
	touch $@

clean:
	rm -rf $(VENV) runs
