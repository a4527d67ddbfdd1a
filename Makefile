# make demo   trains softmax and sigmoid language models on real text and writes a report
# make test   runs every test
# make test-minimum   runs the operator's tests with the oldest PyTorch and Triton that are supported
# make test-integrations   runs a sample with the oldest transformers, timm and llvmlite that are supported, and with the newest
# make test-arm64   runs the tests of backend "llvm" on an emulated ARM processor: half an hour, and a download of 5 GB
# make sweep  every architecture of transformers and timm, every shape that PyTorch accepts: about an hour
# make mutation N=40   mutates the operator, and counts what the tests catch; the unmutated code alone takes minutes
# make mutation N=30 PART=src/sigattn/train/checkpoint.py   mutates another file or folder
# make train-all SPEECH=FSDD   sigmoid compared with softmax on every task, five seeds: about an hour
# make test-kernels   the long sweep over the GPU kernels, interpreted: an hour
# make experiments   lists the paper's experiments; make experiment NAME=k-summation runs one
# make benchmark NAME=cpu   runs a benchmark
# make docs   builds the documentation site into site/
# make figures   draws the figures and tables of the documentation from benchmarks/results
# Each makes .venv first (test-minimum .venv-minimum, test-integrations two layers over .venv), where it is missing.

PYTHON ?= python3
BIN := .venv/bin
# Bytecode is compiled at the first import: of 20,000 files, tests import a part
INSTALL := -m pip install --quiet --disable-pip-version-check --no-compile
# and must be kept then, also where the environment forbids it: the tests start a hundred processes
export PYTHONDONTWRITEBYTECODE :=

.PHONY: setup setup-minimum setup-integrations torchvision-apart demo test test-minimum test-integrations test-arm64 test-kernels sweep mutation train-all experiments experiment benchmark lint format docs figures clean

setup: .venv/installed

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else "Python 3.11 or later is needed; say make PYTHON=…")'
	$(PYTHON) -m venv .venv
	$(BIN)/python $(INSTALL) -c constraints.txt torch
	$(BIN)/python $(INSTALL) -c constraints.txt -e '.[dev]'
	$(BIN)/python -c 'import torchvision' 2>/dev/null || $(MAKE) --no-print-directory torchvision-apart
	touch $@

# The wheel of torchvision that pip finds is built for CUDA. Next to a PyTorch for CPUs it cannot be imported, and breaks
# transformers; so it is kept out of the environment, in a folder that benchmarks/compatibility/torchvision_apart.py adds.
torchvision-apart:
	$(BIN)/python -m pip uninstall --quiet --disable-pip-version-check --yes torchvision
	$(BIN)/python $(INSTALL) --no-deps --upgrade -c constraints.txt --target .venv/torchvision torchvision

setup-minimum: .venv-minimum/installed

.venv-minimum/installed: constraints-minimum.txt
	$(PYTHON) -m venv .venv-minimum
	.venv-minimum/bin/python $(INSTALL) -c constraints-minimum.txt \
	    torch triton numpy rich beartype jaxtyping pytest pytest-xdist
	touch $@

# Environments that see what is in .venv, but for other versions of these three packages and what they need. Without the
# dependencies of timm: torchvision would come along.
setup-integrations: .venv-integrations-minimum/installed .venv-integrations-newest/installed

.venv-integrations-minimum/installed: CONSTRAINTS := -c constraints-minimum-integrations.txt
.venv-integrations-%/installed: .venv/installed constraints-minimum-integrations.txt
	$(BIN)/python -m venv --without-pip $(@D)
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > $$(echo $(@D)/lib/python*/site-packages)/below.pth
	PIP_PYTHON=$(@D)/bin/python $(BIN)/python $(INSTALL) --no-warn-conflicts --upgrade $(CONSTRAINTS) transformers
	PIP_PYTHON=$(@D)/bin/python $(BIN)/python $(INSTALL) --upgrade --no-deps $(CONSTRAINTS) timm llvmlite
	touch $@

demo: setup
	$(BIN)/sigattn demo

test: setup
	$(BIN)/python -m pytest -n auto --dist worksteal --durations=10

# Without what does not depend on the version (messages, borders, simulated Hopper kernels, most interpreted kernels)
test-minimum: setup-minimum
	PYTHONPATH=$(CURDIR)/src .venv-minimum/bin/python -m pytest -n auto --dist worksteal --durations=10 \
	    -k "not (real_tiles or hopper or different_calls or masked_weights or wrong_calls or borders \
	    or statistics or broadcasting or small or dense_alignment or (triton and (kvcache or test_mask)) \
	    or (match_the_formula and (batched or few or tuned)))" \
	    tests/ops tests/test_flash.py tests/test_flash_kvcache.py

# Without a test that forks a process with threads, at which qemu 7.2 ends, and without other processors' symbols
test-arm64: setup
	tests/arm64.sh --durations=10 -k "not forked and not symbol" tests/ops/test_llvm.py

test-integrations: test-integrations-minimum test-integrations-newest

# In one thread each, so that make -j2 runs both side by side. A package that is not in the layer has the version of
# .venv, with which make test has tested it. Of the calls of test_llvm these are numbers 3 and 30 to 39.
OF_TRANSFORMERS := transformers transformers_saving transformers_model peft

test-integrations-%: .venv-integrations-%/installed
	files=$$(cd .venv-integrations-$*/lib/python*/site-packages && \
	    for name in timm:integrations/test_timm llvmlite:ops/test_llvm \
	        $(OF_TRANSFORMERS:%=transformers:integrations/test_%); do \
	        test ! -d $${name%%:*} || echo tests/$${name#*:}.py; \
	    done) && test -z "$$files" || \
	OMP_NUM_THREADS=1 PYTHONPATH=$(CURDIR)/src .venv-integrations-$*/bin/python -m pytest --durations=5 \
	    -k "not (trainer or compiled or whisper or t5 or the_example or (test_loaded_by_name and position) or \
	    weight_decay) and not (test_timm and not vision_transformers) and not (test_transformers_saving and not \
	    (TestLearnedBiases or kept or (TestCompositeModels and not own_implementation))) and \
	    not (test_llvm and not (match_the_formula and one-3 or logits_of_any_size))" $$files

test-kernels: setup
	SIGATTN_FUZZ_EXAMPLES=$(or $(EXAMPLES),500) $(BIN)/python -m pytest -n auto --dist worksteal -k "triton or kernels" \
	    tests/ops tests/test_flash.py
	SIGATTN_FUZZ_EXAMPLES=$(or $(EXAMPLES),500) TRITON_INTERPRET=0 $(BIN)/python -m pytest -n auto --dist worksteal tests/ops/compiled

sweep: setup
	SIGATTN_SWEEP=all $(BIN)/python -m pytest -n auto --dist worksteal tests/integrations tests/ops/test_broadcasting.py \
	    tests/distributed/test_context_parallel.py

mutation: setup
	$(BIN)/python $(INSTALL) -c constraints.txt 'cosmic-ray>=8.7'
	$(BIN)/python tests/mutation/run.py $(or $(N),40) $(if $(PART),--part $(PART))

train-all: setup
	$(BIN)/python -m experiments compare $(if $(SPEECH),--speech $(SPEECH))

experiments: setup
	$(BIN)/python -m experiments --list

experiment: setup
	$(BIN)/python -m experiments $(NAME)

benchmark: setup
	$(BIN)/python -m benchmarks $(NAME)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Broken links, and names that the reference does not have, are errors
docs: setup
	$(BIN)/python -m sphinx -W -b html docs site

figures: setup
	$(BIN)/python -m benchmarks.figures

clean:
	rm -rf .venv .venv-minimum .venv-integrations-* runs site docs/reference .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
