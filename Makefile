# Everything a person needs: `make demo` trains and evaluates a policy, `make test` runs every check.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: setup demo test lint types clean parity

setup: $(VENV)/.ready

# The virtual environment is rebuilt whenever the requirements change, and only then.
$(VENV)/.ready: pyproject.toml constraints.txt
	@$(PYTHON) -c "import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))" || \
	  { echo "Flexor needs Python 3.11 to 3.13. Name one that you have: make $(MAKECMDGOALS) PYTHON=python3.12"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

demo: setup
	$(BIN)/flexor demo

test: setup lint types
	$(BIN)/python -m pytest -n 4 --dist loadgroup

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup
	$(BIN)/mypy

# Compare live with lerobot, installed into .venv-lerobot (needs Python 3.12, $PYTHON312 if it is not on
# the path), or in the environment of $LEROBOT_PYTHON. Name parts of it to run.py for less.
parity: setup
	$(BIN)/python tests/parity/run.py

clean:
	rm -rf $(VENV) runs
