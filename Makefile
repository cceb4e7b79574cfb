# Everything runs in .venv; VENV=... uses another.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
WORKERS ?= 2
# bytecode is kept, whatever the shell says: else each worker and each process that a test starts compiles every file
TEST := OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest
PARALLEL := -n $(WORKERS) --dist worksteal

.PHONY: demo test quick test-architectures test-browser test-thorough test-real lint clean

demo: $(VENV)/.installed
	$(BIN)/hfpatch demo

test: $(VENV)/.installed-test
	$(TEST) $(PARALLEL) -m "not real and not architectures and not browser and not thorough"

# without ranks, notebooks, pictures, compiled models and processes; each patch and each kind of edit on one architecture
quick: $(VENV)/.installed-test
	$(TEST) $(PARALLEL) -m "not slow and not real and not architectures and not browser and not thorough"

test-architectures: $(VENV)/.installed-test
	$(TEST) $(PARALLEL) -m architectures tests

test-thorough: $(VENV)/.installed-test
	$(TEST) $(PARALLEL) -m thorough tests

test-browser: $(VENV)/.installed-test
	command -v chromium >/dev/null || { apt-get update && apt-get install -y chromium; }
	$(TEST) -m browser tests/browser

test-real: $(VENV)/.installed-real
	$(BIN)/python tests/real/weights.py
	$(TEST) $(PARALLEL) -m real tests/real

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

$(VENV)/.installed-real: $(VENV)/.installed-test requirements-real.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -r requirements-real.txt
	touch $@

clean:
	rm -rf $(VENV) dist build .pytest_cache .ruff_cache .hypothesis .import_linter_cache
