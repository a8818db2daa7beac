# Python 3.11 to 3.13 and make are all that has to be there; everything else goes into .venv.
PYTHON ?= $(shell for p in python3.12 python3.13 python3.11 python3; do \
	$$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null && { echo $$p; break; }; done)
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: setup demo check test test-slow chaos fuzz soak bench clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "Penstock needs Python 3.11, 3.12 or 3.13 on PATH (or make PYTHON=/path/to/python)."; exit 1; }
	@echo "Setting up $(VENV) with $(PYTHON) (about a minute, once) ..."
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[app,dev]'
	@touch $@

demo: setup
	@$(BIN)/penstock demo

check: setup
	@$(BIN)/ruff check --quiet . && $(BIN)/ruff format --check --quiet .
	@$(BIN)/lint-imports --no-cache > $(VENV)/lint-imports.log || { cat $(VENV)/lint-imports.log; exit 1; }
	@$(BIN)/basedpyright --level error
	@$(BIN)/pytest --quiet tests/test_house_rules.py

test: check
	@$(BIN)/pytest --ignore tests/test_house_rules.py --numprocesses 3 --dist loadfile -m 'not slow'

# Real all the same: short runs of the benchmarks, demos side by side, session servers killed at random.
test-slow: setup
	@$(BIN)/pytest --numprocesses 3 --dist loadfile -m slow

chaos: setup
	@$(BIN)/pytest tests/chaos --chaos-rounds 20

fuzz: setup
	@$(BIN)/pytest tests/penstock/test_response_fuzz.py --fuzz-rounds 1000 --timeout 900

soak: setup
	@$(BIN)/penstock bench soak --strict

bench: setup
	@for name in control recovery ingest filters lag boundary sessions rollout-worker renderers engine pool; do $(BIN)/penstock bench $$name || exit 1; done

clean:
	@rm -rf $(VENV) build *.egg-info
