# `make demo` is the place to start, `make help` lists the rest. Every target installs what it needs.

# Python 3.12 or 3.11; by default the first of those on PATH that has all that Trident needs.
PYTHON ?=
# The version that the tests run with. On a machine without a GPU, the CPU build is a tenth of the
# download: PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu make demo
TORCH ?= torch==2.13.0
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install
TORCH_ALONE := $(VENV)/.installed-torch
SERVER := $(VENV)/.installed
DEVELOPMENT := $(VENV)/.installed-development
PERF_ANALYZER := $(VENV)/perf-analyzer/bin/perf_analyzer
CPU_KERNELS := $(VENV)/.cpu-kernels
ADAPTERS := tests/server/gateway/adapters

.PHONY: demo serve install develop lint check test test-all with-server without-server \
  interpreted interpreted-kernels interpreted-engine compiled adapters bench clean help

demo: install  ## Start the server on the bundled model and watch several prompts being answered
	@$(BIN)/trident demo

serve: install  ## Start the server and keep it up; ARGS="MODEL --http-port 8080"
	@$(BIN)/trident serve $(ARGS)

install: $(SERVER) $(CPU_KERNELS)  ## Set up .venv to serve; PYTHON=/path/to/python3.12

develop: install $(DEVELOPMENT) $(PERF_ANALYZER)  ## Add what tests, linters and measurements need

lint: $(DEVELOPMENT)  ## Formatter, linter and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

check: develop lint  ## Formatter, linter, types and the fast tests
	$(BIN)/python -m pytest -m "not server and not slow and not large" --ignore=tests/aot
	TRITON_INTERPRET=1 $(BIN)/python -m pytest -m "not slow and not large" tests/kernels

test: develop  ## What CI runs: all but the large tests
	@$(LANES)

test-all: develop  ## All tests
	@$(LANES) SELECT='large or not large'

# Parts of the tests, one per core at a time. A large test repeats shorter ones at length.
LANES = $(MAKE) --no-print-directory --jobs=2 --keep-going --output-sync=line \
  with-server without-server interpreted-engine interpreted-kernels compiled
SELECT := not large
PYTEST = $(BIN)/python -m pytest --durations=30 --durations-min=0.5

with-server: develop  ## The tests that drive tritonserver
	$(PYTEST) -m 'server and ($(SELECT))' tests/server tests/client tests/docker

without-server: develop  ## All other tests but those of our kernels
	$(PYTEST) -m 'not server and ($(SELECT))' --ignore=tests/aot

interpreted: interpreted-kernels interpreted-engine  ## Our kernels under Triton's interpreter

interpreted-kernels: develop  ## Each of them alone
	TRITON_INTERPRET=1 $(PYTEST) -m '$(SELECT)' tests/kernels --ignore=tests/kernels/engine

interpreted-engine: develop  ## The engine on them
	TRITON_INTERPRET=1 $(PYTEST) -m '$(SELECT)' tests/kernels/engine

compiled: develop  ## Our kernels compiled for GPUs that need not be here
	$(PYTEST) -m '$(SELECT)' tests/aot

adapters: develop  ## Hold conversations through LangChain, LiteLLM and the AI SDK; needs npm
	$(BIN)/python -m venv $(VENV)/adapters
	$(VENV)/adapters/bin/python -m pip install --quiet --upgrade 'pip>=25.1,<27'
	$(VENV)/adapters/bin/python -m pip install --quiet --requirement $(ADAPTERS)/requirements.txt
	npm install --prefix $(ADAPTERS) --no-package-lock --no-audit --no-fund
	$(PYTEST) -m large $(ADAPTERS)

bench: develop  ## Test and measure engine and kernels on this machine's GPU; ARGS="--out FOLDER"
	$(BIN)/python -m engine.bench $(ARGS)

clean:  ## Remove the virtual environments and caches
	rm -rf $(VENV) $(ADAPTERS)/node_modules .mypy_cache .ruff_cache .pytest_cache .hypothesis

help:  ## List the targets
	@sed -n 's/^\([a-z-]*\):.*  ## /\1:/p' $(firstword $(MAKEFILE_LIST)) \
	  | while IFS=: read -r target text; do printf '  make %-20s %s\n' "$$target" "$$text"; done

# They are for the CPU and need a compiler; without them torch's operations serve. Without the
# stamp it is tried again: a compiler may have come meanwhile.
$(CPU_KERNELS): $(TORCH_ALONE) $(wildcard kernels/cpu/*.py kernels/cpu/csrc/*)
	@if $(BIN)/python -W 'ignore:Failed to initialize NumPy' -m kernels.cpu; then touch $@; fi

# A stamp is written last, so an interrupted set-up is done again.
$(SERVER): pyproject.toml | $(TORCH_ALONE)
	@$(PIP) '$(TORCH)' --editable '.[server]'
	@touch $@

# First and alone: all that compiling needs (NumPy comes later), so with --jobs the rest is installed
# meanwhile.
$(TORCH_ALONE): | $(BIN)/python
	@echo "Installing Trident and its dependencies into $(VENV) (a few minutes the first time)"
	@$(PIP) '$(TORCH)'
	@touch $@

# pip reads dependency groups since 25.1. With our own requirements again: else a tool may replace
# what they pin, as newer contourpy does with numpy.
$(DEVELOPMENT): pyproject.toml $(SERVER)
	@$(PIP) --upgrade 'pip>=25.1,<27'
	@$(PIP) --group dev --editable '.[server]'
	@touch $@

# The last wheel whose binary runs with glibc 2.36. In a folder of its own, as its tritonclient is
# older than ours; with the library of CUDA's that it is linked to.
$(PERF_ANALYZER): | $(BIN)/python
	@$(PIP) --quiet --no-deps --target $(VENV)/perf-analyzer tritonclient==2.51.0 \
	  nvidia-cuda-runtime-cu12==12.9.79
	@chmod +x $@ && touch $@

$(BIN)/python:
	@python=$$(engine/launch/choose-python $(PYTHON)) \
	  && { "$$python" -m venv $(VENV) || { rm -rf $(VENV); exit 1; }; }
