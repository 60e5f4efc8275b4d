# The two commands: `make demo` does the main job for real, `make test` proves the rest.
# Everything is installed into .venv; VENV=DIR puts it elsewhere.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# A machine with an NVIDIA GPU gets the CUDA build of vLLM, any other the CPU build.
ENGINE ?= $(shell nvidia-smi -L >/dev/null 2>&1 && echo cuda || echo cpu)
UV_CPU := $(if $(filter cpu,$(ENGINE)),--torch-backend cpu)
# A torch wheel that the machine keeps on its disk saves the download.
UV_LINKS := $(if $(PIP_FIND_LINKS),--find-links "$(PIP_FIND_LINKS)")

.PHONY: demo test check clean
.DELETE_ON_ERROR:

demo: $(VENV)/installed  ## environment, models, prompts, a run and its table
	$(BIN)/specbench convert humaneval
	$(BIN)/specbench convert mt_bench
	$(BIN)/specbench run --config demo.yaml
	$(BIN)/specbench report

test: $(VENV)/installed check  ## the fast tests first, then those that start real engines
	$(BIN)/python -m pytest -q -m "not engine"
	$(BIN)/python -m pytest -q -m engine

check: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check -q .
	$(BIN)/mypy

$(VENV)/installed: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	    { echo "specbench needs Python 3.11 or newer; name one: make PYTHON=python3.12"; exit 2; }
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null || \
	    { echo "This Python has no ensurepip: apt-get install python3-venv"; exit 2; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q uv
	$(BIN)/uv pip install -q --python $(BIN)/python $(UV_CPU) $(UV_LINKS) \
	    -e ".[$(ENGINE),demo]" --group dev
	@# A fresh environment has no byte code; compiled on both cores it saves every start 10 s.
	-$(BIN)/python -m compileall -q -j 0 $(VENV)/lib >/dev/null 2>&1
	touch $@

clean:
	rm -rf $(VENV)
