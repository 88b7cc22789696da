# make demo: from a clone to a table and a report. make test: the tests; make check: the slower ones, too (all cells, all
# planted faults, Slurm, hosts, trials, the browser). Each does all its set-up.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
CACHE = $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/samestep
# For pytest: two processes, each with whole files of tests. make test PYTEST='-k ddp' for less.
PYTEST = -n 2 --dist loadfile

# What `make demo` runs; benchmarks/starts.py and tests/test_make.py read it here.
DEMO = compare digits --launcher fork --rounds 3 --measured-steps 20 --warmup-steps 5

.PHONY: demo test check lint horovod mutations conformance overhead starts input jobs ports clean
