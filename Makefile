# Python >= 3.10 and make are all it takes. Everything lands in this folder: .venv, results/ and caches.
#
#   make setup    the environment in .venv, with this package in it
#   make demo     sparse decoding of a real long document; results in results/demo
#   make test     every check: lint, types, tests
#
# PYTHON=/path/to/python chooses the interpreter of a new .venv. BUDGETS=16,256 chooses the demo's budgets.

PYTHON ?=
BUDGETS ?= 16,256

CANDIDATES := $(or $(PYTHON),python3.13 python3.12 python3.11 python3.10 python3)
VENV := .venv
RUN := $(VENV)/bin/python
STAMP := $(VENV)/.installed
PIP := $(RUN) -m pip --disable-pip-version-check --no-input

# A stranger's settings must not reach into the environment, nor the environment out of this folder.
unexport PYTHONPATH PYTHONHOME PIP_TARGET PIP_PREFIX PIP_USER

.DEFAULT_GOAL := help
.PHONY: help setup demo test lint types clean
.SUFFIXES:

help:
	@sed -n '3,7s/^# \{0,3\}//p' Makefile

setup: $(STAMP)

# What a change of rebuilds the C kernels of an editable install.
NATIVE := hatch_build.py $(wildcard src/saccade/kernels/_native/*.[ch])

$(STAMP): pyproject.toml constraints.txt $(NATIVE)
	@if ! $(RUN) -m pip --version >/dev/null 2>&1; then \
	  found=; \
	  for candidate in $(CANDIDATES); do \
	    if "$$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 10))' >/dev/null 2>&1; then \
	      found="$$candidate"; break; \
	    fi; \
	  done; \
	  if [ -z "$$found" ]; then \
	    echo "saccade needs Python 3.10 or newer; tried $(CANDIDATES); name one: make setup PYTHON=/path/to/python" >&2; \
	    exit 1; \
	  fi; \
	  echo "setup: creating $(VENV) with $$("$$found" --version)"; \
	  if ! "$$found" -m venv --clear $(VENV); then \
	    rm -rf $(VENV); \
	    echo "saccade: $$found cannot create environments; install its venv module (Debian: apt-get install python3-venv)" >&2; \
	    exit 1; \
	  fi; \
	fi
	@echo "setup: installing saccade and its tools into $(VENV); the first time takes minutes"
	@$(PIP) install -qq --constraint constraints.txt --editable '.[dev]'
	@touch $@

demo: setup
	@$(RUN) -m saccade compare --output-dir results/demo --budget $(BUDGETS)

test: setup
	@echo "test: ruff (lint, format), mypy --strict, pytest"
	@$(MAKE) --no-print-directory lint types
	@$(RUN) -m pytest --quiet

lint: setup
	@$(RUN) -m ruff check --quiet .
	@$(RUN) -m ruff format --quiet --check .

types: setup
	@$(RUN) -m mypy --no-error-summary

clean:
	rm -rf $(VENV) results build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +
