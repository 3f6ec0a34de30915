# Verbs; each does the set-up it needs. A second run reinstalls only if a file below has changed.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.PHONY: install demo test test-slow test-clusters install-clusters mutants lint bench gpu experiments docs screenshots release-check clean

install: $(INSTALLED)

$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(None if v >= (3, 11) else f"Python 3.11 or newer is needed, {sys.executable} is {v[0]}.{v[1]}; try: make PYTHON=python3.12 $(MAKECMDGOALS)")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

demo: $(INSTALLED)
	$(BIN)/stability run configs/quickstart.yaml

# one thread a worker: two workers of two threads each would fight over two cores
PYTEST = OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist worksteal --no-showlocals
test: $(INSTALLED)
	$(PYTEST) -m "not slow and not long and not clusters"

# slow: kill and resume at many points, trainings of every kind; long: every dial of the kernels, the
# whole zoo of attentions, simulations with 100,000 repetitions
SLOW = slow or long
test-slow: $(INSTALLED)
	$(PYTEST) -m "($(SLOW)) and not clusters"

# On a Slurm and a Ray that are started here for it. Slurm comes from Debian's packages, and needs
# root: `apt-get install slurm-wlm munge`; where there is none its tests are skipped, which says why.
# EXTRAS is for a machine that can install one of them alone.
CLUSTERS := $(VENV)/.clusters
EXTRAS = slurm,ray
test-clusters: $(CLUSTERS)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -rs --no-showlocals -m clusters tests/clusters

install-clusters: $(CLUSTERS)

$(CLUSTERS): $(INSTALLED)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[$(EXTRAS)]'
	@touch $@

# plants each mistake of tests/mutants/kernels.toml in a copy of the kernels: tests have to find it
mutants: $(INSTALLED)
	PYTHONPATH=. $(BIN)/python tests/mutants/run.py

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports
	$(BIN)/codespell

bench: $(INSTALLED)
	$(BIN)/python kernels/benchmarks/run.py --json kernels/benchmarks/results/cpu.json
	PYTHONPATH=kernels $(BIN)/python kernels/benchmarks/static.py --json kernels/benchmarks/results/static.json
	$(BIN)/python benchmarks/metrics.py
	$(BIN)/python benchmarks/compare.py
	$(BIN)/python benchmarks/probe.py
	$(BIN)/python benchmarks/witness.py
	$(BIN)/python benchmarks/recorder.py
	$(BIN)/python benchmarks/records.py
	$(BIN)/python benchmarks/report.py
	$(BIN)/python benchmarks/report.py --dashboard

# every published claim at its CPU size: records, figures and the table of experiments/README.md
experiments: $(INSTALLED)
	$(BIN)/stability experiment all

# Needs an NVIDIA GPU. With GPU_PYTHON=python3, a python that has torch, Triton and pytest already,
# nothing is installed, and trainings are left out if that python lacks the other dependencies. Most
# of the tests' time is that of compilers: they run side by side where pytest-xdist is there. What
# fails lets the rest go on, and `make gpu` fails at its end.
GPU_PYTHON ?= $(BIN)/python
GPU_JOBS ?= 8
GPU_TESTS = $(shell grep -rl "mark.gpu" --include="*.py" $(1))
# pytest-benchmark, where it is there too, warns of pytest-xdist, and a warning is an error here
BESIDE = $(shell $(GPU_PYTHON) -c 'import xdist' 2>/dev/null && echo -p no:benchmark -n $(GPU_JOBS))
GPU_PYTEST = PYTHONPATH=kernels:. $(GPU_PYTHON) -m pytest -q -m gpu $(BESIDE)
gpu: $(if $(filter $(BIN)/python,$(GPU_PYTHON)),$(INSTALLED))
	@set -x; failed=; \
	$(GPU_PYTEST) --confcutdir=tests/kernels $(call GPU_TESTS,tests/kernels) || failed=1; \
	PYTHONPATH=kernels $(GPU_PYTHON) kernels/benchmarks/run.py --device cuda \
		--json kernels/benchmarks/results/cuda.json || failed=1; \
	PYTHONPATH=kernels $(GPU_PYTHON) kernels/benchmarks/static.py \
		--json kernels/benchmarks/results/static.json || failed=1; \
	PYTHONPATH=kernels $(GPU_PYTHON) kernels/benchmarks/fill_readme.py || failed=1; \
	if $(GPU_PYTHON) -c 'import lightning, wandb, datasets, jsonargparse' 2>/dev/null; then \
		$(GPU_PYTEST) $(call GPU_TESTS,tests/stability) || failed=1; \
		PYTHONPATH=kernels:. $(GPU_PYTHON) -m stability.cli.main run configs/quickstart.yaml \
			--out runs/gpu || failed=1; \
	else echo 'trainings skipped: $(GPU_PYTHON) lacks one of lightning, wandb, datasets, jsonargparse'; fi; \
	test -z "$$failed"

# the pictures of the documentation, which are committed, and the site in build/site/html
docs: $(INSTALLED)
	$(BIN)/python docs/scripts/draw_rooms.py
	$(BIN)/python docs/scripts/draw_verdict.py
	$(BIN)/python docs/scripts/draw_chaos.py
	PATH="$(BIN):$$PATH" $(BIN)/python docs/scripts/build_site.py

# the pictures of docs/ that show the program, of a demo that has been run, and many more to look at in
# build/screenshots; needs chromium and chromium-driver
STUDY ?= $(wildcard runs/quickstart)
screenshots: $(INSTALLED)
	PYTHONPATH=. $(BIN)/python docs/scripts/take_screenshots.py $(STUDY)

# what has to be true before a release, one line a check; publishes nothing
release-check: $(INSTALLED)
	$(BIN)/python .ci/release_check.py

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .hypothesis .import_linter_cache
