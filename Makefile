# The environment is made on first use and made again when what it installs changes.
PYTHON ?= python3
VENV ?= .venv
JOBS ?= 2
ARGS ?=
PY := $(VENV)/bin/python
STAMP := $(VENV)/.installed

.PHONY: help install train test lint format notebooks pictures site operators rules clean

help:
	@echo "make train [ARGS=\"--steps 100 --placements fsdp\"]   train the demo"
	@echo "make test                                           lint, types and tests"
	@echo "make lint                                           ruff and pyright"
	@echo "make format                                         let ruff rewrite the files"
	@echo "make notebooks                                      run them and store their outputs"
	@echo "make site                                           build the documentation in build/site"
	@echo "make install                                        only make $(VENV)"
	@echo "PYTHON=python3.12 VENV=.venv-312 choose another interpreter and folder"

install: $(STAMP)

# A venv whose interpreter has gone is made anew rather than repaired.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "$(PYTHON) is not Python 3.11 or newer: make PYTHON=python3.11 ..." >&2; exit 1; }
	@echo "making $(VENV) with $$($(PYTHON) --version) ..."
	@$(PY) -c '' 2>/dev/null || $(PYTHON) -m venv --clear $(VENV)
	$(PY) -m pip install --quiet --disable-pip-version-check --no-input -c constraints.txt -e '.[dev]'
	@touch $@

train: $(STAMP)
	$(VENV)/bin/dtorchjax train $(ARGS)

lint: $(STAMP)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m pyright --pythonpath $(PY)

test: lint
	$(PY) -m pytest -n $(JOBS) $(ARGS)

notebooks: $(STAMP)
	$(PY) tests/test_notebooks.py

pictures: $(STAMP)
	$(PY) tests/pictures.py

site: $(STAMP)
	$(PY) -m mkdocs build --strict

operators: $(STAMP)
	$(PY) tests/operators_page.py

rules: $(STAMP)
	$(PY) tests/rules_page.py

format: $(STAMP)
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

clean:
	rm -rf .venv .venv-next build dist dtorchjax.egg-info .pytest_cache .ruff_cache .hypothesis
