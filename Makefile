# `make demo`, `make test` and `make bench` do all their own set-up, with Python 3.11 or later and nothing else.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := -m pip install --quiet --disable-pip-version-check
INSTALL := $(BIN)/python $(PIP) -c constraints.txt

.PHONY: demo test bench lint house docs screenshots torture pin licences audit clean

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

# Entries, files, lines, import chains and cycles, beside their limits.
house: $(VENV)/.dev
	$(BIN)/python tools/house.py

docs: $(VENV)/.dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

# The pictures of the report in the documentation; needs Chromium.
screenshots: $(VENV)/.dev
	PYTHONPATH=. $(BIN)/python tools/screenshots.py docs/images

# The long campaigns, in as many seconds; plain `pytest` does not collect them.
torture: export DELTABARS_TORTURE_SECONDS ?= 600
torture: $(VENV)/.dev
	$(BIN)/python -m pytest tests/torture -s

# Pin what is installed now as the tested environment.
pin: $(VENV)/.dev
	(echo '# The tested versions. Install with: pip install -c constraints.txt …'; \
	$(BIN)/python -m pip freeze --exclude-editable) > constraints.txt

# Licences of the tested environment; fails at a licence that asks for our source.
licences: $(VENV)/.tools
	$(VENV)/tools/bin/pip-licenses --python $(BIN)/python --from=mixed --partial-match --fail-on 'GPL;GNU;UNKNOWN'

# Known weaknesses of the tested environment, where advisories can be had.
audit: $(VENV)/.tools
	$(VENV)/tools/bin/pip-audit --requirement constraints.txt --no-deps --disable-pip

$(VENV)/.demo: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) -e '.[demo]'
	touch $@

$(VENV)/.dev: $(VENV)/.demo peers.txt
	$(INSTALL) -e '.[dev]'
	$(INSTALL) --no-deps -r peers.txt
	touch $@

$(VENV)/.tools: $(VENV)/.dev
	$(PYTHON) -m venv $(VENV)/tools
	$(VENV)/tools/bin/python $(PIP) pip-audit pip-licenses
	touch $@

clean:
	rm -rf $(VENV) build dist site .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
