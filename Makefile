# `make demo` and `make test` set everything up by themselves; both can be repeated.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
JOBS ?= 2
EXTRAS ?= test

.PHONY: demo test test-all test-tpu test-gpu lint notebooks clean

# XLA's first optimisation level compiles a quarter faster than its default on a CPU and runs as fast.
demo: export XLA_FLAGS := --xla_backend_optimization_level=1 $(XLA_FLAGS)
demo: $(VENV)/data.stamp
	$(BIN)/kda-jax train --config configs/demo.py --run-dir runs/demo
	$(BIN)/kda-jax generate runs/demo --prompt "The Congress of the United States" --max-new-tokens 300 --temperature 0.8

test: $(VENV)/install.stamp
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder -q

test-all: $(VENV)/install.stamp
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder -q -m ""

# Budgets of the TPU kernels: libtpu compiles them without a TPU, in an environment of its own.
test-tpu:
	$(MAKE) VENV=.venv-tpu EXTRAS=test,tpu .venv-tpu/install.stamp
	.venv-tpu/bin/python -m pytest -q -m "" tests/kernels/test_tpu_budget.py

# The adversarial grid on the GPU of this machine, for which jax[cuda13] must be installed beside this.
test-gpu: export JAX_PLATFORMS := cuda,cpu
test-gpu: export XLA_FLAGS := --xla_backend_optimization_level=3
test-gpu: export XLA_PYTHON_CLIENT_PREALLOCATE := false
test-gpu:
	python -m pytest -q -m slow tests/ops/test_grid.py -k pallas_gpu -n 8

lint: $(VENV)/install.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

notebooks: $(VENV)/install.stamp
	$(BIN)/jupytext --to ipynb notebooks/*.py

clean:
	rm -rf $(VENV) .cache data runs

$(VENV)/install.stamp: pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed, found " + sys.version.split()[0] + "; choose one with make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable '.[$(EXTRAS)]'
	touch $@

$(VENV)/data.stamp: $(VENV)/install.stamp
	$(BIN)/kda-jax data
	touch $@
