# Every target sets up what it needs; `make demo` is the place to start.
PYTHON ?= python3
# The version that the tests run with. On a machine without a GPU, the CPU build is a tenth of the
# download: PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu make demo
TORCH ?= torch==2.13.0
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
CPU_KERNELS := $(VENV)/.cpu-kernels

.PHONY: demo serve test interpreted compiled check kernels bench install clean

demo: install  ## Start the server on the bundled model and watch several prompts being answered
	@$(BIN)/trident demo

serve: install  ## Start the server and keep it up; ARGS="--model PATH --http-port 9000"
	@$(BIN)/trident serve $(ARGS)

test: install  ## All tests, the real tritonserver included
	$(BIN)/python -m pytest --ignore=tests/aot
	@$(MAKE) --no-print-directory --jobs=2 --output-sync=target interpreted compiled

interpreted: install  ## Our kernels on the CPU: without a GPU, under Triton's interpreter
	TRITON_INTERPRET=1 $(BIN)/python -m pytest tests/kernels

compiled: install  ## Our kernels compiled for GPUs that need not be here
	$(BIN)/python -m pytest tests/aot

check: install  ## Format, lint, types and the fast tests
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -m "not server and not slow" --ignore=tests/aot
	TRITON_INTERPRET=1 $(BIN)/python -m pytest -m "not slow" tests/kernels

kernels: install  ## Test and measure all kernels on this machine's GPU; ARGS="--json results.json"
	$(BIN)/python -m kernels.bench $(ARGS)

bench: install  ## Test and measure the engine on this machine's GPU; ARGS="--json results.json"
	$(BIN)/python -m engine.bench $(ARGS)

install: $(INSTALLED) $(CPU_KERNELS)

# They need a compiler; where there is none, torch's operations serve in their place.
$(CPU_KERNELS): $(INSTALLED) $(wildcard kernels/cpu/*.py kernels/cpu/csrc/*)
	@$(BIN)/python -m kernels.cpu || true
	@touch $@

# The stamp is written last, so an interrupted set-up is done again.
$(INSTALLED): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "Trident needs Python 3.11 or newer; call make with PYTHON=/path/to/python3.11"; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) \
	  || { echo "cannot create $(VENV); on Debian or Ubuntu: apt-get install python3-venv"; rm -rf $(VENV); exit 1; }
	@echo "Installing Trident and its dependencies into $(VENV) (a few minutes the first time)"
	@$(BIN)/python -m pip install --disable-pip-version-check '$(TORCH)' -e '.[server,dev]'
	@touch $@

clean:  ## Remove the virtual environment and caches
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis
