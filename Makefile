# Everything is installed into .venv, nothing into the system's Python.
# Overridable: PYTHON=python3.12  TEST_JOBS=4  PYTEST_ARGS="-k resume -x"  PIP_ARGS="--no-cache-dir"  N=50  SEED=2
PYTHON ?= python3
TEST_JOBS ?= 2
PYTEST_ARGS ?=
N ?= 200
SEED ?= 1
RESULTS_ARGS ?=
PIP_ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
# One thread per test process: stable bits, and two workers do not fight over two cores.
# Bytecode is kept even where the environment (many images of Python) forbids it: tests start hundreds of processes.
PYTEST := OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n $(TEST_JOBS) --dist worksteal

.DEFAULT_GOAL := help
.NOTPARALLEL:
.DELETE_ON_ERROR:
.PHONY: help demo test test-all lint docs mutants results audit clean

help: ## list these targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/make \1|\2/p' $(firstword $(MAKEFILE_LIST)) \
		| while IFS='|' read -r target text; do printf '  %-14s %s\n' "$$target" "$$text"; done

demo: $(VENV)/.core ## install, draw a small data set, train on it and evaluate (CPU is enough)
	$(BIN)/sightline prepare shapes --out demo/shapes
	$(BIN)/sightline train demo_classification --data demo/shapes/classification --out demo/run
	$(BIN)/sightline evaluate demo/run
	@printf '%s\n' "report: demo/run/report.html, to be opened in a browser" "next:" \
		"  $(BIN)/sightline predict demo/run demo/shapes/classification/val/star" \
		"  $(BIN)/sightline train classification --data DIR    # your images, a folder for each class"

test: $(VENV)/.dev ## run the tests, except those marked slow
	$(PYTEST) $(PYTEST_ARGS)

test-all: $(VENV)/.dev ## run every test, the slow ones too
	$(PYTEST) -m "slow or not slow" $(PYTEST_ARGS)

lint: $(VENV)/.dev ## style, formatting, types and import directions
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/unit/test_layout.py

docs: $(VENV)/.docs ## build the documents as a site with search: build/site/index.html
	$(BIN)/python docs/site.py

mutants: $(VENV)/.dev ## draw N small bugs at random and count how many the tests notice (N=200 SEED=1; half an hour)
	PYTHONDONTWRITEBYTECODE= $(BIN)/python tests/random_mutants.py --number $(N) --seed $(SEED) --jobs $(TEST_JOBS)

results: $(VENV)/.core ## repeat a row of the published scores: NAME=cifar10_94 DATA=DIR (benchmarks/notes/published.md)
	$(BIN)/python benchmarks/published/run.py $(NAME) --data $(DATA) $(RESULTS_ARGS)

audit: $(VENV)/.dev ## licences of all dependencies; known vulnerabilities where pip-audit and a network are there
	$(BIN)/python .ci/audit.py

clean: ## remove the demo, build products and caches; .venv and runs stay
	rm -rf demo build dist *.egg-info $(GUEST)/build $(GUEST)/*.egg-info .mypy_cache .pytest_cache .ruff_cache
	find sightline packages tests -type d -name __pycache__ -exec rm -rf {} +

# Installation: a stamp per set of packages, renewed when what decides the set changes. One call of pip installs
# Sightline and its guest, sightline-migrate, which nobody owns on the package index.

GUEST := packages/migrate
DECIDES := pyproject.toml $(GUEST)/pyproject.toml constraints.txt

$(VENV)/.core: $(BIN)/python $(DECIDES)
	@echo "Installing Sightline into $(VENV): about 5.5 GB with PyTorch, some minutes the first time."
	$(call install,.)
	@touch $@

$(VENV)/.dev: $(BIN)/python $(DECIDES)
	@echo "Installing Sightline and its test tools into $(VENV): about 5.5 GB with PyTorch, some minutes the first time."
	$(call install,.[dev])
	@touch $(VENV)/.core $@

# The generator alone: the site is built from text, so it needs none of the rest.
$(VENV)/.docs: $(BIN)/python pyproject.toml constraints.txt
	PIP_USER=0 $(BIN)/python -m pip install $(PIP_ARGS) -c constraints.txt zensical
	@touch $@

$(BIN)/python:
	@$(create_venv)

# A venv whose pip does not answer (interrupted, or its Python was upgraded) is made anew.
# pip unpacks in TMPDIR, and /tmp is often a small memory disk, so it gets a folder here.
# setuptools comes first, pinned, so that the build needs no second environment.
define install
@$(BIN)/python -m pip --version >/dev/null 2>&1 || { $(create_venv); }
@mkdir -p $(VENV)/tmp
TMPDIR="$(CURDIR)/$(VENV)/tmp" PIP_USER=0 $(BIN)/python -m pip install $(PIP_ARGS) -c constraints.txt pip setuptools
TMPDIR="$(CURDIR)/$(VENV)/tmp" PIP_USER=0 $(BIN)/python -m pip install $(PIP_ARGS) -c constraints.txt \
	--no-build-isolation -e '$(1)' -e $(GUEST)
@rm -rf $(VENV)/tmp
endef

# Debian ships venv without ensurepip unless python3-venv is there; then the system's pip fills the venv.
define create_venv
command -v $(PYTHON) >/dev/null || { \
	echo "$(PYTHON) was not found; install Python 3.11 or newer (Debian: apt install python3 python3-venv)" \
		"or name one: make PYTHON=/path/to/python3" >&2; exit 1; }; \
$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	echo "$(PYTHON) is $$($(PYTHON) -V 2>&1); Sightline needs Python 3.11 or newer." \
		"Name one: make PYTHON=python3.11" >&2; exit 1; }; \
echo "Creating $(VENV) with $$($(PYTHON) -V)"; \
if $(PYTHON) -c 'import ensurepip, venv' 2>/dev/null; then \
	$(PYTHON) -m venv --clear $(VENV); \
elif $(PYTHON) -c 'import venv' 2>/dev/null && $(PYTHON) -m pip --version >/dev/null 2>&1; then \
	$(PYTHON) -m venv --clear --without-pip $(VENV) && \
	PIP_USER=0 $(PYTHON) -m pip --python $(BIN)/python install $(PIP_ARGS) -c constraints.txt pip; \
else \
	echo "$(PYTHON) can neither create an environment with pip nor lend it one." \
		"Debian: apt install python3-venv (or python3-pip), then run make again." >&2; exit 1; \
fi
endef
