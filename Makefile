# Everything runs in .venv; VENV=... uses another.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
WORKERS ?= 2
DEVICE ?= cpu
# bytecode is kept, whatever the shell says: else each worker and each process that a test starts compiles every file
TEST := OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest
PARALLEL := -n $(WORKERS) --dist worksteal

.PHONY: demo test quick fuzz reliability test-architectures test-browser test-thorough test-real test-clean evidence pages docs lint clean

demo: $(VENV)/.installed
	$(BIN)/hfpatch demo

test: $(VENV)/.installed-test
	$(TEST) $(PARALLEL) -m "not real and not architectures and not browser and not thorough and not clean"

# without ranks, notebooks, pictures, compiled models and processes; each patch and each kind of edit on one architecture
quick: $(VENV)/.installed-test
	$(TEST) $(PARALLEL) -m "not slow and not real and not architectures and not browser and not thorough and not clean"

test-architectures: $(VENV)/.installed-test
	$(TEST) $(PARALLEL) -m architectures tests

# packages that quantise or wrap a model are in a folder of their own: transformers and peft import what is installed
test-thorough: $(VENV)/.installed-wrapped
	PYTHONPATH=$(abspath $(VENV))/wrapped $(TEST) $(PARALLEL) -m thorough tests

test-browser: $(VENV)/.installed-test
	command -v chromium >/dev/null || { apt-get update && apt-get install -y chromium; }
	$(TEST) -m browser tests/browser

test-real: $(VENV)/.installed-real
	$(BIN)/python tests/real/weights.py
	$(TEST) $(PARALLEL) -m real tests/real

# 10,000 mutations of every kind of file that is read; half an hour on two cores
fuzz: $(VENV)/.installed-test
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.hostile.fuzz --count 10000 --processes $(WORKERS) --json benchmarks/results/fuzz-cpu.json --markdown benchmarks/results/fuzz-cpu.md

# the counts of the table of states and of `make fuzz`, and calls with absurd arguments; README's line on reliability
reliability: $(VENV)/.installed-test
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.reliability
	$(BIN)/python benchmarks/readme.py

# the lowest and the newest release of each dependency (releases.toml), in fresh environments: every verb, and the core
# of the tests. Downloads gigabytes
test-clean: $(VENV)/.installed-test
	$(TEST) $(PARALLEL) -m clean tests/clean

# what is made of the code, the proofs and the figures, and what the examples of a page print
pages: $(VENV)/.installed
	$(BIN)/python benchmarks/readme.py
	$(BIN)/python -m docs.patches
	$(BIN)/python -m docs.api
	$(BIN)/python -m docs.releases
	$(BIN)/python docs/atlas.py --render
	$(BIN)/python -m docs.running docs/start.md docs/symptoms.md

docs: $(VENV)/.installed-docs
	$(BIN)/sphinx-build --fail-on-warning --keep-going --quiet --builder html --conf-dir docs . build/html
	@echo build/html/docs/index.html

# the page of evidence: real weights in each way to run them; DEVICE=cuda on a GPU
evidence: $(VENV)/.installed-evidence
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/evidence.py --device $(DEVICE) --json benchmarks/results/evidence-$(DEVICE).json > benchmarks/results/evidence-$(DEVICE).md

lint: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports

$(VENV)/.installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e .
	touch $@

$(VENV)/.installed-test: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test]'
	touch $@

$(VENV)/.installed-docs: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	touch $@

$(VENV)/.installed-real: $(VENV)/.installed-test requirements-real.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -r requirements-real.txt
	touch $@

$(VENV)/.installed-wrapped: $(VENV)/.installed-test requirements-wrapped.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --upgrade --target $(VENV)/wrapped -r requirements-wrapped.txt
	touch $@

$(VENV)/.installed-evidence: $(VENV)/.installed-real requirements-evidence.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -r requirements-evidence.txt
	touch $@

clean:
	rm -rf $(VENV) dist build .pytest_cache .ruff_cache .hypothesis .import_linter_cache
