# Everything a person needs: `make demo` trains and evaluates a policy, `make test` runs every check.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check

.PHONY: setup demo test lint types tests clean parity site

setup: $(VENV)/.ready

# The virtual environment is rebuilt whenever the requirements change, and only then. Every file that is installed must
# have a hash of requirements.lock. Only torch is taken by its version: which build is right depends on the machine (a
# CPU, a version of CUDA), and indexes and mirrors have builds of their own.
$(VENV)/.ready: pyproject.toml constraints.txt requirements.lock
	@$(PYTHON) -c "import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))" || \
	  { echo "Flexor needs Python 3.11 to 3.13. Name one that you have: make $(MAKECMDGOALS) PYTHON=python3.12"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(PIP) --require-hashes --no-deps -r requirements.lock
	$(PIP) -c constraints.txt torch
	$(PIP) --no-deps --no-build-isolation -e .
	$(BIN)/python -m pip check
	touch $@

demo: setup
	$(BIN)/flexor demo

# mypy beside pytest: one process that takes minutes, if it has no cache, and tests that often wait.
test: setup lint
	$(MAKE) --no-print-directory -j2 types tests

tests: setup
	$(BIN)/python -m pytest -n 4 --dist loadgroup

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python scripts/check_licenses.py

types: setup
	$(BIN)/mypy

# Compare live with lerobot, installed into .venv-lerobot (needs Python 3.12, $PYTHON312 if it is not on
# the path), or in the environment of $LEROBOT_PYTHON. Name parts of it to run.py for less.
parity: setup
	$(BIN)/python tests/parity/run.py

# The docs as a site, in build/site. Warnings, such as links that lead nowhere, are errors. Its packages are not
# Flexor's: they have an environment of their own.
site: .venv-site/.ready
	NO_MKDOCS_2_WARNING=1 .venv-site/bin/mkdocs build --strict --quiet
	@echo "open build/site/index.html"

.venv-site/.ready: scripts/site.lock
	$(PYTHON) -m venv .venv-site
	.venv-site/bin/python -m pip install --quiet --disable-pip-version-check --require-hashes --no-deps -r scripts/site.lock
	.venv-site/bin/python scripts/check_licenses.py
	touch $@

clean:
	rm -rf $(VENV) .venv-site build runs
