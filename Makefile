# Every target first sets up .venv; only a Python >= 3.12 has to be there.

SHELL := bash
.DEFAULT_GOAL := help
.PHONY: help setup demo test figures notebooks docs docs-check docs-tools lock broken

PYTHON ?=
JOBS ?= 2
PYTEST_ARGS ?=
PY := .venv/bin/python

# Where .ci/run has installed the compile-only CUDA plugin, jax would look for a driver first.
ifeq ($(wildcard /dev/nvidia*),)
export JAX_PLATFORMS ?= cpu
endif

help:
	@echo 'make demo      set up, then measure how the recurrent state drifts under every scheme (minutes, CPU)'
	@echo 'make test      set up, then format, lint, types and tests'
	@echo 'make figures   set up, then draw every figure again from the committed rows'
	@echo 'make notebooks run the notebooks and export them with their outputs to build/notebooks'
	@echo 'make docs      build the documentation into build/site; a warning is an error'
	@echo 'make docs-check the same with the notebooks as they stand, into build/check: half a minute'
	@echo 'make setup     only create .venv and install requirements.lock'
	@echo 'make lock      resolve the dependencies anew and rewrite both locks (keeps the jax version)'
	@echo 'PYTHON=path    the interpreter for a new .venv        JOBS=n    test processes (default 2)'
	@echo 'PYTEST_ARGS=…  more arguments for pytest, such as -k ring'

demo: setup
	$(PY) -m experiments run drift --config demo

# Two processes share the tests; those of one file mostly stay together, and so do their compilations.
test: setup
	$(PY) -m ruff format --check
	$(PY) -m ruff check
	$(PY) -m mypy
	$(PY) -m pytest -n $(JOBS) --dist worksteal $(PYTEST_ARGS)

# Most of it is matplotlib, of one core: two processes share the figures.
figures: setup
	@mkdir -p build
	@printf '%s\n' $(patsubst experiments/results/%/rows.csv,%,$(wildcard experiments/results/*/rows.csv)) published \
	  | xargs -P 2 -n 10 $(PY) -m experiments figure
	@$(PY) -m experiments table published --markdown > build/published.md && mv build/published.md docs/published.md

# Of the py:percent notebooks; they open in Jupyter as they are.
notebooks: docs-tools
	@mkdir -p build/notebooks
	@set -e; for book in experiments/notebooks/*.py; do \
	  name=$$(basename "$$book" .py); echo "$$name"; \
	  $(DOCS)/jupytext --quiet --to ipynb --output "build/notebooks/$$name.ipynb" "$$book"; \
	  JAX_PLATFORMS=$${JAX_PLATFORMS:-cpu} PYTHONPATH=$(CURDIR) $(DOCS)/python -m nbconvert --log-level WARN \
	    --to notebook --execute --KernelManager.transport_encryption=auto --inplace "build/notebooks/$$name.ipynb"; \
	done

docs: notebooks
	NO_MKDOCS_2_WARNING=1 $(DOCS)/python -m mkdocs build --strict --quiet
	$(DOCS)/python docs/site/links.py build/site

# Needs the tools alone: docstrings are read and not imported, and tests run the notebooks.
SITE := build/site-venv/bin
docs-check: setup build/site-venv/requirements-docs.lock
	@mkdir -p build/unexecuted
	@set -e; for book in experiments/notebooks/*.py; do \
	  $(SITE)/jupytext --quiet --to ipynb --output "build/unexecuted/$$(basename "$$book" .py).ipynb" "$$book"; \
	done
	NOTEBOOKS=build/unexecuted NO_MKDOCS_2_WARNING=1 $(SITE)/python -m mkdocs build --strict --quiet --site-dir build/check
	$(SITE)/python docs/site/links.py build/check

build/site-venv/requirements-docs.lock: requirements-docs.lock
	$(PY) -m venv --clear build/site-venv
	$(SITE)/python -m pip install --quiet --disable-pip-version-check --requirement requirements-docs.lock
	@cp requirements-docs.lock $@

# The extra `docs` in an environment of its own: nothing else needs it.
DOCS := build/docs-venv/bin
docs-tools: setup build/docs-venv/requirements.lock

build/docs-venv/requirements.lock: requirements.lock requirements-docs.lock pyproject.toml
	$(PY) -m venv build/docs-venv
	$(DOCS)/python -m pip install --quiet --disable-pip-version-check --constraint requirements.lock \
	  --constraint requirements-docs.lock '.[experiments,tokenizer,test,docs]'
	@cp requirements.lock $@

lock: setup
	rm -rf build/lock && $(PY) -m venv build/lock
	build/lock/bin/python -m pip install --quiet --disable-pip-version-check \
	  --constraint <(grep -E '^jax(lib)?==' requirements.lock) '.[experiments,tokenizer,test]'
	build/lock/bin/python -m pip freeze --exclude deferred-commit > build/requirements.lock
	mv build/requirements.lock requirements.lock
	rm -rf build/lock && $(PY) -m venv build/lock
	$(PY) -c "import tomllib; print(*tomllib.load(open('pyproject.toml', 'rb'))['project']['optional-dependencies']['docs'], sep='\n')" > build/docs.in
	build/lock/bin/python -m pip install --quiet --disable-pip-version-check --constraint requirements.lock --requirement build/docs.in
	build/lock/bin/python -m pip freeze > build/requirements-docs.lock
	mv build/requirements-docs.lock requirements-docs.lock

setup: .venv/requirements.lock

# The copy of the lock inside .venv says what is installed there, unless its interpreter has gone.
.venv/requirements.lock: requirements.lock $(if $(realpath $(PY)),,broken)
	$(if $(shell $(usable)),,$(call new_venv,$(shell $(find_python))))
	@if ! cmp -s requirements.lock $@; then \
	  echo "installing $$(grep -c == requirements.lock) packages into .venv (a minute or two, once)"; \
	  $(PY) -m pip install --quiet --disable-pip-version-check --requirement requirements.lock || \
	    { echo 'set-up: pip could not install requirements.lock (see above); it needs a package index it can reach' >&2; exit 1; }; \
	fi
	@cp requirements.lock $@

# Prints "yes" where .venv can be kept.
usable = $(PY) -c 'import sys, pip; sys.version_info >= (3, 12) and print("yes")' 2>/dev/null

# An error here is one line of make's own, and nothing else.
new_venv = $(if $(filter ok:,$(firstword $(1))),@"$(subst ok: ,,$(1))" -m venv --clear .venv,$(error $(1)))

# Prints "ok: PATH" for the first interpreter that can make .venv, otherwise what is missing and how
# to get it. A pyenv shim answers for the version in .python-version and fails where that is not installed.
define find_python
set -- $(if $(PYTHON),"$(PYTHON)",python3.12 python3.13 python3.14 python3); \
old=; bare=; \
while IFS= read -r python; do \
  version=$$("$$python" -c 'import sys; print("%d.%d.%d" % sys.version_info[:3])' 2>/dev/null) || continue; \
  if ! "$$python" -c 'import sys; sys.exit(sys.version_info < (3, 12))' 2>/dev/null; then \
    old=$${old:-"$$python is Python $$version"}; \
  elif ! "$$python" -c 'import venv, ensurepip' 2>/dev/null; then \
    bare=$${bare:-"$$python (Python $$version)"}; minor=$${version%.*}; \
  else \
    echo "ok: $$python"; exit; \
  fi; \
done < <(type -ap "$$@" 2>/dev/null); \
if [ -n "$$bare" ]; then \
  echo "$$bare lacks the venv or ensurepip module: install it (on Debian and Ubuntu: apt install python$$minor-venv), or name another interpreter with make PYTHON=path"; \
else \
  echo "Python 3.12 or newer is needed, but $${old:-none was found$(if $(PYTHON), at $(PYTHON))}: install one (apt install python3.12 python3.12-venv, dnf install python3.12, or pyenv install 3.12), or name it with make PYTHON=path"; \
fi
endef
