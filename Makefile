# `make demo` and `make test` need nothing but Python 3.11 or newer; uv is used where it is installed.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
UV := $(shell command -v uv 2>/dev/null)

.PHONY: help install demo train train-quick train-sweep evaluate tensorboard show-config version
.PHONY: test lint types unit parity campaign tiny docs clean
.DELETE_ON_ERROR:

help:
	@echo "make install                            an environment of its own in $(VENV), which every target makes for itself"
	@echo "make demo                               reinforcement learning on a CPU, in about a minute (also: train-quick)"
	@echo "make train ARGS='model=gemma3_1b'       trains a model; without ARGS Gemma 3 270M on GSM8K"
	@echo "make train-sweep RATES=1e-6,1e-5        one run for each learning rate; ARGS as for train"
	@echo "make evaluate RUN=runs/<folder>         a run on its test split; ARGS='inference_config=standard num_passes=8'"
	@echo "make tensorboard RUN=runs               curves of all runs below a folder; it needs tensorboard"
	@echo "make show-config ARGS='model=gemma3_1b' the whole configuration, without training"
	@echo "make version"
	@echo "make test                               lint, types and the whole test suite"
	@echo "make docs                               the documentation, as a site: docs/_build/html/index.html"

demo: $(VENV)/installed
	$(BIN)/python run_training.py +experiment=quick_test

install: $(VENV)/installed

train: $(VENV)/installed
	$(BIN)/python run_training.py $(ARGS)

train-quick: demo

RATES ?= 1e-7,1e-6,1e-5,1e-4
train-sweep: $(VENV)/installed
	$(BIN)/python run_training.py --multirun $(or $(ARGS),+experiment=quick_test) optimizer.learning_rate=$(RATES)

evaluate: $(VENV)/installed
	$(BIN)/python evaluate.py $(if $(RUN),run=$(RUN)) $(ARGS)

tensorboard: $(VENV)/installed
	@$(BIN)/python -c 'import tensorboard' 2>/dev/null || \
	  { echo "tensorboard is not installed: $(BIN)/python -m pip install tensorboard. Without it: agent-tunix watch runs"; exit 2; }
	$(BIN)/python -m tensorboard.main --logdir $(or $(RUN),runs)

show-config: $(VENV)/installed
	@$(BIN)/python run_training.py --cfg job $(ARGS)

version: $(VENV)/installed
	@$(BIN)/agent-tunix --version

test: lint types unit

lint: $(VENV)/installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/installed-test
	$(BIN)/mypy

# Three processes for two cores, as tests that start others wait for them.
unit: $(VENV)/installed-test
	$(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder

# Fresh goldens by torch, transformers and TRL, our numbers against them, and the live tests that need those libraries.
# For torch without CUDA: PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu make parity
parity: $(VENV)/installed-parity
	$(BIN)/python scripts/make_goldens.py --seed 7 --folder $(VENV)/goldens
	AGENT_TUNIX_GOLDENS=$(abspath $(VENV)/goldens) $(BIN)/python -m pytest -m 'golden or parity'

# Kills, damages and bad inputs, more than a thousand of them, in about 40 minutes on 2 cores: see scripts/trust_campaign.py.
campaign: $(VENV)/installed-test
	$(BIN)/python scripts/trust_campaign.py

tiny: $(VENV)/installed
	$(BIN)/python scripts/make_tiny.py

# The page of keys, the curves of the schedules, and the site: docs/_build/html/index.html. It needs no network.
docs: $(VENV)/installed-docs
	$(BIN)/python scripts/make_docs.py
	$(BIN)/python -m sphinx -q -W --keep-going -n -c docs -d docs/_build/doctrees . docs/_build/html

clean:
	rm -rf $(VENV)

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Python 3.11 or newer is needed; set PYTHON, as in: make demo PYTHON=python3.12"; exit 2; }
	$(if $(UV),uv venv -q --python $(PYTHON) $(VENV),$(PYTHON) -m venv $(VENV))

$(VENV)/installed: pyproject.toml constraints.txt | $(BIN)/python
	$(if $(UV),uv pip install -q --python $(BIN)/python,$(BIN)/python -m pip install -q) -c constraints.txt -e .
	@touch $@

$(VENV)/installed-test: pyproject.toml constraints.txt | $(BIN)/python
	$(if $(UV),uv pip install -q --python $(BIN)/python,$(BIN)/python -m pip install -q) -c constraints.txt -e '.[test]'
	@$(if $(UV),uv pip install -q --python $(BIN)/python,$(BIN)/python -m pip install -q) -c constraints.txt -e '.[reasoning-gym]' \
	  || echo "reasoning-gym could not be installed (it needs a C compiler); its tests will be skipped"
	@touch $@ $(VENV)/installed

$(VENV)/installed-docs: pyproject.toml constraints.txt | $(BIN)/python
	$(if $(UV),uv pip install -q --python $(BIN)/python,$(BIN)/python -m pip install -q) -c constraints.txt -e '.[docs]'
	@touch $@ $(VENV)/installed

$(VENV)/installed-parity: pyproject.toml constraints.txt | $(BIN)/python
	$(if $(UV),uv pip install -q --python $(BIN)/python,$(BIN)/python -m pip install -q) -c constraints.txt -e '.[test,parity]'
	@touch $@ $(VENV)/installed $(VENV)/installed-test
