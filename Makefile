# Verbs; each does the set-up it needs. A second run reinstalls only if a file below has changed.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.PHONY: install demo test lint bench gpu clean

install: $(INSTALLED)

$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(None if v >= (3, 11) else f"Python 3.11 or newer is needed, {sys.executable} is {v[0]}.{v[1]}; try: make PYTHON=python3.12 $(MAKECMDGOALS)")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

demo: $(INSTALLED)
	$(BIN)/stability run configs/quickstart.yaml

test: $(INSTALLED)
	$(BIN)/python -m pytest -q -n 2 --dist worksteal

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/lint-imports
	$(BIN)/codespell

bench: $(INSTALLED)
	$(BIN)/python kernels/benchmarks/run.py
	$(BIN)/python benchmarks/metrics.py

# Needs an NVIDIA GPU and a python3 with torch, Triton and pytest; nothing is installed.
gpu:
	PYTHONPATH=kernels:. $(PYTHON) -m pytest -q -m gpu tests/kernels
	PYTHONPATH=kernels $(PYTHON) kernels/benchmarks/run.py --device cuda
	PYTHONPATH=kernels:. $(PYTHON) -m stability.cli.main run configs/quickstart.yaml --out runs-gpu --wandb disabled

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .hypothesis .import_linter_cache
