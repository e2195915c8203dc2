# make demo    the main job on real video: dense, then sparse, with a report      make check   lint, types, import order
# make test    everything that runs without a GPU, minutes on 2 cores             make gpu-test  the suite for a card
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
# With an NVIDIA driver pip picks the CUDA build of torch; without one the pinned CPU build.
PINS = $(if $(shell command -v nvidia-smi),,-c constraints.txt)

.PHONY: demo test check gpu-test clean

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit("foveate needs Python 3.11 or newer, this is " + sys.version.split()[0] + "; try make PYTHON=python3.12" if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)

# torch first and by itself: the pinned version must come from the pin, not from what another package asks for.
$(VENV)/.base: pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/pip install -q --disable-pip-version-check $(if $(PINS),torch==2.13.0,torch)
	$(BIN)/pip install -q --disable-pip-version-check $(PINS) -e '.[demo]'
	touch $@

$(VENV)/.dev: $(VENV)/.base
	$(BIN)/pip install -q --disable-pip-version-check $(PINS) -e '.[dev]'
	touch $@

demo: $(VENV)/.base
	$(BIN)/foveate demo --out runs/demo

test: $(VENV)/.dev
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist worksteal

check: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/pytest tests/test_imports.py

gpu-test: $(VENV)/.dev
	$(BIN)/pytest tests/gpu

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .ruff_cache
