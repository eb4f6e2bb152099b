# kvloom's commands; `make` alone lists them. Needs only make and Python 3.10 or newer.

PYTHON ?= python3
# Other Pythons that import kvloom, generate, and run kernels where they are at hand.
PYTHONS := 3.10 3.12 3.13
# Two processes: each imports torch and compiles kernels, so more cost more memory than they save.
WORKERS ?= 2

VENV := .venv
VENV_PYTHON := $(VENV)/bin/python
VENV_READY := $(VENV)/.ready
PIP_INSTALL := -m pip install -qq --disable-pip-version-check

# What `make pythons` installs: pinned as everywhere, but the lower bounds of pyproject.toml on 3.10.
GENERATOR_AND_KERNELS := numba numpy jinja2 pyyaml pydantic --constraint constraints.txt
GENERATOR_AND_KERNELS_3.10 := numba==0.61.0 numpy==1.24.0 jinja2==3.0.0 pyyaml==6.0 pydantic==2.6.0

# The releases of LMCache whose own code is run over kvloom: the first by most of tests/integration,
# the other, which has its operators elsewhere, by the tests of kvloom.lmcache.install.
LMCACHE := 0.5.6 0.4.7

# Neither an active environment nor a person's own search path may change what runs here.
unexport VIRTUAL_ENV PYTHONHOME PYTHONPATH PIP_USER PIP_TARGET PIP_PREFIX

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test bench lint generate goldens check format pythons lmcache clean

help: ## list these commands
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-9s %s\n", $$1, $$2 }' Makefile

demo: $(VENV_READY) ## offload, wipe and reload a paged cache in every layout
	@$(VENV_PYTHON) examples/demo.py $(ARGS)

# Two calls, since LMCache must not be importable where kvloom is tested without it. One that
# selects nothing (pytest says 5) is no failure if ARGS select tests of the other.
PYTEST := $(VENV_PYTHON) -m pytest -n $(WORKERS) --dist worksteal
LMCACHE_PATH := $(CURDIR)/build/lmcache/$(firstword $(LMCACHE)):$(CURDIR)/build/lmcache/packages
PYTEST_LMCACHE := PYTHONPATH="$(LMCACHE_PATH)" \
  $(PYTEST) --override-ini testpaths=tests/integration -m lmcache

test: lint check pythons lmcache ## lint, freshness of the generated files, then every test
	@$(PYTEST) $(ARGS); alone=$$?; beside=$$alone; \
	case $$alone in 0|5) \
	  if [ -e build/lmcache/.ready ]; then $(PYTEST_LMCACHE) $(ARGS); beside=$$?; fi;; \
	esac; \
	case $$alone$$beside in \
	  00) ;; \
	  05|50) exit $(if $(strip $(ARGS)),0,5);; \
	  *) exit 1;; \
	esac

lint: $(VENV_READY) ## ruff and mypy
	@$(VENV_PYTHON) -m ruff check
	@$(VENV_PYTHON) -m ruff format --check
	@$(VENV_PYTHON) -m mypy

bench: $(VENV_READY) ## measure transfers beside a torch copy, on a machine that does nothing else
	@$(VENV_PYTHON) benchmarks/transfers.py $(ARGS)

generate: $(VENV_READY) ## write everything that follows from specs/
	@$(VENV_PYTHON) -m kvloom_codegen
	@$(VENV_PYTHON) -m kvloom.lmcache docs/lmcache.md

goldens: $(VENV_READY) ## renew the goldens that differ, to be reviewed as a diff
	@$(VENV_PYTHON) -m kvloom_codegen --update-goldens
	@$(VENV_PYTHON) -m pytest -q --update-goldens tests/test_spec_errors.py

check: $(VENV_READY) ## say which generated files are missing, stale or orphaned
	@$(VENV_PYTHON) -m kvloom_codegen --check
	@$(VENV_PYTHON) -m kvloom.lmcache --check docs/lmcache.md

format: $(VENV_READY) ## format and mend what ruff can
	@$(VENV_PYTHON) -m ruff check --fix
	@$(VENV_PYTHON) -m ruff format

pythons: $(PYTHONS:%=build/pythons/%/.ready) ## environments of the other Pythons at hand, for the tests

lmcache: build/lmcache/.ready ## two releases of LMCache alone, for the tests that run its code

clean: ## remove environments, builds and caches
	rm -rf $(VENV) build dist .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -prune -exec rm -rf {} +

$(VENV_READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 10) else \
	  "Python %d.%d is too old: make PYTHON=python3.10, or newer" % sys.version_info[:2])'
	@echo "Installing into $(VENV) (torch is large; a minute or more)"
	@$(PYTHON) -m venv $(VENV)
	@$(VENV_PYTHON) $(PIP_INSTALL) --constraint constraints.txt --editable '.[dev]'
	@touch $@

# A Python that is not at hand leaves no .ready: the next run looks again, and its tests are skipped.
# Looked for under pyenv too, whose commands on the PATH may stand for versions that are not active.
build/pythons/%/.ready: pyproject.toml constraints.txt Makefile | $(VENV_READY)
	@is='import ensurepip, sys, venv; sys.exit("%d.%d" % sys.version_info[:2] != "$*")'; \
	if $(VENV_PYTHON) -c "$$is"; then exit 0; fi; \
	found=; \
	for candidate in python$* "$${PYENV_ROOT:-$$HOME/.pyenv}"/versions/$*.*/bin/python; do \
	  if "$$candidate" -c "$$is" 2>/dev/null; then found=$$candidate; break; fi; \
	done; \
	if [ -z "$$found" ]; then echo "Python $*: none at hand"; exit 0; fi; \
	echo "Installing into build/pythons/$*"; \
	rm -rf build/pythons/$* && "$$found" -m venv build/pythons/$* && \
	build/pythons/$*/bin/python $(PIP_INSTALL) --only-binary :all: \
	  $(or $(GENERATOR_AND_KERNELS_$*),$(GENERATOR_AND_KERNELS)) && \
	touch $@

# torch and the rest are the environment's. LMCache has wheels for some platforms and Pythons alone:
# where pip finds none, its tests are left out, and the next run looks again.
build/lmcache/.ready: tests/integration/requirements.txt Makefile $(VENV_READY)
	@echo "Installing into build/lmcache"; rm -rf build/lmcache; \
	into() { \
	  $(VENV_PYTHON) $(PIP_INSTALL) --no-deps --only-binary :all: --target build/lmcache/"$$@" 2>&1; \
	}; \
	if said=$$(true $(foreach version,$(LMCACHE),&& into $(version) lmcache==$(version)) && \
	  into packages --requirement tests/integration/requirements.txt); then touch $@; else \
	  case $$said in \
	    *"No matching distribution"*) echo "The tests of LMCache are left out: $${said##*ERROR: }";; \
	    *) echo "$$said"; exit 1;; \
	  esac; \
	fi
