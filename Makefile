# `make demo`, `make test` and `make bench` do all their own set-up, with Python 3.11 or later and nothing else.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: demo test bench lint docs screenshots torture lock verify-lock licences audit clean

demo: $(VENV)/.demo
	$(BIN)/deltabars demo --report deltabars-demo.html

test: lint
	$(BIN)/python -m pytest -n 2 --dist loadfile

bench: $(VENV)/.dev
	$(BIN)/python -m benchmarks

lint: $(VENV)/.dev
	$(BIN)/ruff format --check src tests tools benchmarks
	$(BIN)/ruff check src tests tools benchmarks
	$(BIN)/mypy
	$(BIN)/lint-imports

docs: $(VENV)/.dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

# The pictures of the report in the documentation; needs Chromium.
screenshots: $(VENV)/.dev
	$(BIN)/python -m tests.screenshots docs/images

# The long campaigns, in as many seconds; plain `pytest` does not collect them.
torture: export DELTABARS_TORTURE_SECONDS ?= 600
torture: $(VENV)/.dev
	$(BIN)/python -m pytest tests/torture -s

# The lock file of the test environment, anew, and compared with what is installed.
lock: $(VENV)/.dev
	$(BIN)/python tools/lock.py

verify-lock: $(VENV)/.dev
	$(BIN)/python tools/lock.py --check

licences: $(VENV)/.dev
	$(BIN)/python tools/licences.py

# Known weaknesses of what is installed, where advisories can be had.
audit: $(VENV)/.dev
	$(BIN)/python tools/audit.py

$(VENV)/.demo: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) -e '.[demo]'
	touch $@

$(VENV)/.dev: $(VENV)/.demo peers.txt
	$(INSTALL) -e '.[dev]'
	$(INSTALL) --no-deps -r peers.txt
	touch $@

clean:
	rm -rf $(VENV) build dist site .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
