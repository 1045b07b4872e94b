# On a fresh machine with python3 (3.10 or later), pip and make: `make demo` or `make test`; each makes .venv first.
# Another interpreter: make PYTHON=python3.12. Another torch: make TORCH="torch==2.9.* torchvision==0.24.*".

PYTHON ?= python3
TORCH  ?= torch torchvision
VENV   ?= .venv
PYTEST ?= -q

bin   := $(VENV)/bin
stamp := $(VENV)/installed
# Tests run one process beside another; more threads than cores make small matrices slower, not faster.
export OMP_NUM_THREADS ?= 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: help venv demo test test-all check format clean
.DEFAULT_GOAL := help

help:  ## show this list
	@sed -n 's/^\([a-z-]*\):.*## /  make \1	/p' $(MAKEFILE_LIST) | expand -t 18

venv: $(stamp)  ## make the environment: .venv with this package (editable), its dependencies and the tools

$(stamp): pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "autoprec needs Python 3.10 or later")'
	test -x $(bin)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing into $(VENV); the first time this takes minutes, PyTorch is large."
	$(bin)/python -m pip install --quiet "pip>=25.1"
	$(bin)/python -m pip install --quiet $(TORCH) --editable . --group dev
	@touch $@

demo: $(stamp)  ## see a run fail in fp16, be diagnosed, be repaired and train (under a minute)
	@$(bin)/autoprec demo

test: $(stamp)  ## the tests that are fast (minutes)
	$(bin)/python -m pytest $(PYTEST) -m "not long"

test-all: $(stamp)  ## every test
	$(bin)/python -m pytest $(PYTEST)

check: $(stamp)  ## lint, format and types
	$(bin)/ruff check
	$(bin)/ruff format --check
	$(bin)/mypy

format: $(stamp)  ## put the format right
	$(bin)/ruff check --fix
	$(bin)/ruff format

clean:  ## remove the environment and everything generated
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
