# make demo: from a clone to a table and a report. make test: the tests; make check: the slower ones (every engine, each
# kind of planted fault, Slurm, hosts, trials, the browser); make full: the rest. Each does all its set-up.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
CACHE = $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/samestep
# DeepSpeed compiles a C++ extension for one environment; two that share a folder would compile it in turn.
export TORCH_EXTENSIONS_DIR = $(abspath $(VENV))/torch_extensions
# For pytest: two processes, each with whole files of tests. make test PYTEST='-k ddp' for less.
PYTEST = -n 2 --dist loadfile
# Three for make check, whose tests wait more often, and the longest files first (tests/conftest.py).
PYTEST_CHECK = -n 3 --dist loadfile --no-loadscope-reorder
# More options for either: .ci/lanes.py has pytest write what became of each test.
PYTEST_MORE =

# What `make demo` runs; benchmarks/starts.py and tests/test_make.py read it here.
DEMO = compare digits --quick --launcher fork --rounds 3 --measured-steps 8 --warmup-steps 3

.PHONY: demo test check full golden lint horovod mutations conformance resume overhead checks safety starts lanes input jobs ports
.PHONY: proof-cost hangs watchdog kills checkpoint-faults museum museum-pins clean

demo: $(VENV)/.demo
	$(BIN)/samestep $(DEMO)

test: $(VENV)/.tested lint
	$(BIN)/python -m pytest -m 'not check and not full' $(PYTEST) $(PYTEST_MORE)

check: $(VENV)/.tested
	$(BIN)/python -m pytest -m 'check and not full' $(PYTEST_CHECK) $(PYTEST_MORE)

# What make check leaves out of its products: each engine with each job, each fault in each script, …
full: $(VENV)/.tested
	$(BIN)/python -m pytest -m full $(PYTEST_CHECK)

# Runs a drawn tenth of every corpus, and compares what samestep says with tests/golden/expected.jsonl. WHOLE=1: all of
# it. ONLY='WORDS': cases with one of these in their names. CHECKOUTS=FOLDER: public scripts, too. ACCEPT='NAMES': takes
# what the last run has found of these cases as what is expected.
golden: $(VENV)/.tested
	$(BIN)/python tests/golden/run.py $(if $(ACCEPT),--accept $(ACCEPT)) $(if $(WHOLE),--whole) \
	  $(if $(ONLY),--only $(ONLY)) $(if $(CHECKOUTS),--checkouts $(CHECKOUTS))

lint: $(VENV)/.tested
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --cache-dir $(CACHE)/mypy

# Plants every fault of tests/mutations and prints the share that the proof catches and names.
mutations: $(VENV)/.tested
	$(BIN)/python tests/mutations/record.py

# What the ddp engine costs over a hand-written script, and against the wrappers.
overhead: $(VENV)/.tested
	$(BIN)/python benchmarks/overhead.py

# What commands cost to start, and the demo, in units of importing torch. OUT=FOLDER: keeps its output and the figures.
starts: $(VENV)/.demo
	$(BIN)/python benchmarks/starts.py --demo $(if $(OUT),--out $(OUT))

# What the tests of make test, make check and make full take, in units of importing torch. OUT=FOLDER: keeps the figures.
lanes: $(VENV)/.tested
	$(BIN)/python benchmarks/lanes.py test $(if $(OUT),--out $(OUT))
	$(BIN)/python benchmarks/lanes.py check $(if $(OUT),--out $(OUT))
	$(BIN)/python benchmarks/lanes.py full $(if $(OUT),--out $(OUT))

# What the reference of a proof costs: its steps, memory and disk. OUT=FOLDER: keeps the figures.
proof-cost: $(VENV)/.tested
	$(BIN)/python benchmarks/proof_cost.py $(if $(OUT),--out $(OUT))

# What --on-nan and --check-replicas cost a step. OUT=FOLDER: keeps the figures.
checks: $(VENV)/.tested
	$(BIN)/python benchmarks/checks.py $(if $(OUT),--out $(OUT))

# What the watchdog, the comparison of replicas and checkpoints cost together, at steps of usual length. OUT=FOLDER.
safety: $(VENV)/.tested
	$(BIN)/python benchmarks/checks.py --together $(if $(OUT),--out $(OUT))

# How fast a step is fed, against torch's DataLoader. IMAGES=FOLDER: from JPEGs in class folders, too.
input: $(VENV)/.tested
	$(BIN)/python benchmarks/input.py $(if $(IMAGES),--images $(IMAGES))

# Hangs a training in each of many ways, and looks whether the right rank and line are named. OUT=FOLDER: keeps it.
hangs: $(VENV)/.tested
	$(BIN)/python benchmarks/hangs.py $(if $(OUT),--out $(OUT))

# What the watchdog that names them costs a step. OUT=FOLDER: keeps the figures.
watchdog: $(VENV)/.tested
	$(BIN)/python benchmarks/heartbeat.py $(if $(OUT),--out $(OUT))

# Kills a training -9 fifty times, and continues it each time. OUT=FOLDER: keeps the record.
kills: $(VENV)/.tested
	$(BIN)/python benchmarks/kills.py --kills 50 $(if $(OUT),--out $(OUT))

# Damages checkpoints and disks in every way, and continues. OUT=FOLDER: keeps the record.
checkpoint-faults: $(VENV)/.tested
	$(BIN)/python benchmarks/checkpoint_faults.py $(if $(OUT),--out $(OUT))

# Trains each built-in job on 1, 2 and 3 ranks and verifies it under every engine. DATA=FOLDER: see the script.
jobs: $(VENV)/.tested
	$(BIN)/python benchmarks/jobs.py --data $(DATA)

# Verifies each port of examples/ on 2 and 3 ranks, and prints the coverage table of docs/porting.md.
ports: $(VENV)/.tested
	$(BIN)/python tests/examples/table.py

# Runs the wrong and the right version of each published bug of museum/, and compares with the record. ONLY=WORDS: of some.
museum: $(VENV)/.tested
	$(BIN)/python museum/run.py $(if $(ONLY),--only '$(ONLY)')

# Installs the old versions that some of them need, from the package index, into museum/.pins.
museum-pins: $(VENV)/.tested
	$(BIN)/python museum/install.py

# Measures the tables of docs/resume.md again: which engines continue which trainings, and the planted faults of a resume.
resume: $(VENV)/.tested
	$(BIN)/python tests/resume/table.py --out $(or $(OUT),runs/resume) --write
	$(BIN)/python tests/resume/plant.py --out $(or $(OUT),runs/resume)

# Measures the table of docs/conformance.md again.
conformance: $(VENV)/.tested
	$(BIN)/python tests/conformance/table.py --write

# torch comes first and alone: no other package then chooses its version.
$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet -c constraints.txt torch
	$(BIN)/pip install --quiet -c constraints.txt -e .
	touch $@

# Engines that fill the demo's table: those that install within a minute.
$(VENV)/.demo: $(VENV)/.installed
	$(BIN)/pip install --quiet -c constraints.txt -e '.[accelerate,lightning]'
	touch $@

$(VENV)/.tested: $(VENV)/.installed
	$(BIN)/pip install --quiet -c constraints.txt -e '.[test,all]'
	-$(BIN)/python -c 'from deepspeed.comm.torch import build_shm_op; build_shm_op()' >/dev/null 2>&1
	touch $@

# The one engine that pip alone does not install: minutes of compiling. Its tests skip without it, and say so.
horovod: $(VENV)/.horovod

$(VENV)/.horovod: $(VENV)/.tested scripts/install-horovod
	scripts/install-horovod $(BIN)/python
	touch $@

clean:
	rm -rf $(VENV) runs
