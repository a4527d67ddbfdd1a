# make demo   trains softmax and sigmoid language models on real text and writes a report
# make test   runs every test
# make sweep  every architecture of transformers and timm, every shape that PyTorch accepts: about an hour
# make mutation N=40   mutates the operator and the checkpoints, and counts what the tests catch: minutes each
# make train-all SPEECH=FSDD   sigmoid beside softmax over every task, three seeds: under an hour
# make test-kernels   the long sweep over the GPU kernels, interpreted: an hour
# Both make .venv first, where it is missing.

PYTHON ?= python3
BIN := .venv/bin

.PHONY: setup torchvision-apart demo test test-kernels sweep mutation train-all lint format docs clean

setup: .venv/installed

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else "Python 3.11 or later is needed; say make PYTHON=…")'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	$(BIN)/python -c 'import torchvision' 2>/dev/null || $(MAKE) --no-print-directory torchvision-apart
	touch $@

# The wheel of torchvision that pip finds is built for CUDA. Next to a PyTorch for CPUs it cannot be imported, and breaks
# transformers; so it is kept out of the environment, in a folder that only a second run of pytest sees.
torchvision-apart:
	$(BIN)/python -m pip uninstall --quiet --disable-pip-version-check --yes torchvision
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --upgrade -c constraints.txt \
	    --target .venv/torchvision torchvision

demo: setup
	$(BIN)/sigattn demo

test: setup
	$(BIN)/python -m pytest -n auto --durations=10
	test ! -d .venv/torchvision || PYTHONPATH=.venv/torchvision:tests/plugins \
	    $(BIN)/python -m pytest -n auto -p torchvision_operators -m torchvision tests/data tests/integrations

test-kernels: setup
	SIGATTN_FUZZ_EXAMPLES=$(or $(EXAMPLES),500) $(BIN)/python -m pytest -n auto -k "triton or static or kernels" \
	    tests/ops tests/test_flash.py tests/bench
	SIGATTN_FUZZ_EXAMPLES=$(or $(EXAMPLES),500) TRITON_INTERPRET=0 $(BIN)/python -m pytest -n auto tests/ops/compiled

sweep: setup
	SIGATTN_SWEEP=all $(BIN)/python -m pytest -n auto tests/integrations tests/ops/test_broadcasting.py
	test ! -d .venv/torchvision || SIGATTN_SWEEP=all PYTHONPATH=.venv/torchvision:tests/plugins \
	    $(BIN)/python -m pytest -n auto -p torchvision_operators -m torchvision tests/integrations

mutation: setup
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt 'cosmic-ray>=8.7'
	$(BIN)/python tests/mutation/run.py $(or $(N),40)

train-all: setup
	$(BIN)/sigattn compare $(if $(SPEECH),--speech $(SPEECH))

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: setup
	$(BIN)/python -m pytest -q tests/test_docs.py

clean:
	rm -rf .venv runs .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
