# Every target sets up what it needs: `make figures` and `make test` work on a fresh machine.
SHELL := /bin/bash
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3; do $$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null && echo $$p && break; done)
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
SCALE ?= reduced
NAME ?=
ARGS ?=
# Extra arguments of pip, such as: make setup PIP_EXTRA="--extra-index-url URL-OF-YOUR-TORCH-WHEELS"
PIP_EXTRA ?=
PIP := $(BIN)/python -m pip install --disable-pip-version-check --quiet

.PHONY: help setup test figures figure smoke sweep compare reference lab lint clean

help:
	@echo "make setup      virtual environment .venv with pinned packages (PYTHON=..., PIP_EXTRA=...)"
	@echo "make test       set up, then all tests"
	@echo "make figures    set up, then run experiments and notebooks (SCALE=smoke|reduced|paper)"
	@echo "make figure     one of them: make figure NAME=table4_ttft"
	@echo "make smoke      figures at SCALE=smoke: kick the tires, a few minutes"
	@echo "make sweep      WAN rate x threshold, a Hydra multirun (ARGS='more overrides')"
	@echo "make compare    hold paper_figures/out against paper_figures/reference"
	@echo "make reference  replace the reference by what is in out, and say what moved"
	@echo "make lab        JupyterLab on the index notebook"
	@echo "make lint       ruff and mypy"
	@echo "make clean      remove runs/, paper_figures/out/ and caches (make clean-venv: .venv too)"

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "make: no Python 3.11, 3.12 or 3.13 found; install one, or give PYTHON=/path/to/python" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' || { echo "make: $(PYTHON) is $$($(PYTHON) -V 2>&1); PDD needs Python 3.11, 3.12 or 3.13: give PYTHON=/path/to/python" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' || { echo "make: $(PYTHON) has no venv module; on Debian: apt-get install python3-venv" >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing pinned packages into $(VENV) (a few minutes the first time)"
	@$(PIP) $(PIP_EXTRA) -c constraints.txt -e '.[dev]'
	@touch $@

test: $(STAMP)
	$(BIN)/python -m pytest $(ARGS)

figures: $(STAMP)
	$(BIN)/python -m experiments.figures $(NAME) --scale $(SCALE) $(ARGS)

figure: $(STAMP)
	@test -n "$(NAME)" || { echo "make: say which figure: make figure NAME=table4_ttft" >&2; exit 2; }
	$(BIN)/python -m experiments.figures $(NAME) --scale $(SCALE) $(ARGS)

smoke:
	$(MAKE) figures SCALE=smoke

sweep: $(STAMP)
	$(BIN)/python -m experiments.run -m experiment=ttft scale=smoke wan.rate_mbps=50,100 router.threshold=0.8,0.95 $(ARGS)

compare: $(STAMP)
	$(BIN)/python -m experiments.compare $(ARGS)

reference: $(STAMP)
	$(BIN)/python -m experiments.compare --update

$(BIN)/jupyter-lab: $(STAMP)
	@$(PIP) $(PIP_EXTRA) -c constraints.txt -e '.[lab]'

lab: $(BIN)/jupyter-lab
	$(BIN)/jupyter-lab notebooks/00_index.ipynb

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python -m mypy

clean:
	rm -rf runs paper_figures/out .pytest_cache .ruff_cache .mypy_cache .hypothesis build *.egg-info
	find pdd experiments tests -name __pycache__ -type d -prune -exec rm -rf {} +

clean-venv: clean
	rm -rf $(VENV)
.PHONY: clean-venv
