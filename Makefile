# `make help` lists the targets. Everything is installed into .venv; nothing outside this folder is changed.
# NO_INSTALL=1 runs the tests with PYTHON as it is, which then has torch, the project and what the tests need.
# TORCH=2.11.0 is another version of torch than that of constraints.txt, for a VENV of its own.
PYTHON ?= python3
VENV   ?= .venv
PYTEST_WORKERS ?= 2
OLDEST_TORCH := 2.11.0

BIN     := $(abspath $(VENV))/bin
MADE    := $(VENV)/.installed
STAMP   := $(if $(NO_INSTALL),given,$(MADE))
PIP     := $(BIN)/python -m pip --disable-pip-version-check
PINS    := $(if $(TORCH),$(VENV)/constraints.txt,constraints.txt)
# Without -P the folder amp_compiler/, which lacks passes/ and rules/, would hide an installed package.
RUN     := $(if $(NO_INSTALL),$(PYTHON) -P,$(BIN)/python)
# What the tests compile is kept between runs in a folder of its own; no processes wait for kernels of a GPU.
CACHES  := TORCH_WARM_POOL=0 TORCHINDUCTOR_CACHE_DIR=$(CURDIR)/.cache/inductor AMP_COMPILER_CACHE=$(CURDIR)/.cache/loops
PYTEST  := OMP_NUM_THREADS=1 $(CACHES) $(RUN) -m pytest
# Each process takes half of the tests as they stand in the files, which share models, and then from the other's rest.
BOTH    := $(PYTEST) -n $(PYTEST_WORKERS) --dist worksteal
SOURCES := amp_compiler passes rules tests examples benchmarks docs tools

# Threads that wait for work sleep instead of spinning: on a busy machine that is many times faster, else no slower.
export OMP_WAIT_POLICY := PASSIVE
# The tests start many processes, and each would compile the bytecode of all that it imports.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.PHONY: help setup venv given demo test lint types format test-all-but-slow test-fast test-ranks test-slow test-gpu test-torch test-torch211 test-frameworks docs \
  scenarios browser search screens page-libraries bench bench-onnx examples zoo clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  make %-13s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(STAMP) ## make .venv with the tested versions (done by the other targets when needed)
venv: $(STAMP)

# torch goes first and alone: it is the largest, and whatever else needs it must find the pinned one there.
# Bytecode is compiled behind that, on all cores, but for the large packages of which little is imported.
RARELY := 'transformers/(models|integrations|quantizers)|torch/(testing|_inductor/kernel|distributed)|/tests/|scipy|sklearn|pip/'
# Another torch says itself which Triton and setuptools it takes.
TORCHS_OWN := '^(torch|triton|setuptools)=='
$(MADE): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "constraints.txt is for Python 3.11 or newer: make PYTHON=python3.11 $(MAKECMDGOALS)" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(if $(TORCH),(grep -vE $(TORCHS_OWN) constraints.txt; echo torch==$(TORCH)) > $(PINS))
	$(PIP) install --quiet --no-compile -c $(PINS) torch
	$(PIP) install --quiet --no-compile -c $(PINS) -e '.[dev]'
	-$(BIN)/python -m compileall -q -j 0 -x $(RARELY) $(VENV)/lib > /dev/null
	@touch $@

given:
	@$(RUN) -c 'import torch, pytest, amp_compiler.passes.pipeline' \
	  || { echo "NO_INSTALL=1: $(PYTHON) lacks what is named above; PYTHONPATH may show where it is" >&2; exit 1; }

demo: $(STAMP) ## train two small CNNs on handwritten digits in FP32, with torch.autocast and with amp.training_step
	$(BIN)/amp-compiler demo

test: $(STAMP) ## lint, types and all tests but the slow ones; installs Chromium on Debian as root
	+$(MAKE) --no-print-directory -j 2 lint types test-all-but-slow

test-all-but-slow: $(STAMP) browser
	$(BOTH) -m "not slow and not gpu and not ranks"

# The pages that the project writes are tried in Debian's Chromium. Without it those tests are skipped and say so, but
# with AMP_BROWSER=require, as continuous integration sets it, they fail.
browser: ## install Chromium and its driver where they are missing, on Debian and as root
	@if command -v chromedriver > /dev/null && command -v chromium > /dev/null; then :; \
	elif command -v apt-get > /dev/null && [ "$$(id -u)" = 0 ]; then \
	  { apt-get install -qq -y --no-install-recommends chromium chromium-driver \
	    || { apt-get update -qq && apt-get install -qq -y --no-install-recommends chromium chromium-driver; }; } \
	    > /dev/null 2>&1 || echo "Chromium could not be installed: the tests marked 'browser' are left out" >&2; \
	else echo "there is no Chromium with its driver: the tests marked 'browser' are left out" >&2; fi

screens: $(STAMP) browser ## the screenshots of the docs, by Chromium
	$(BIN)/python docs/tools/screens.py

page-libraries: ## bundle the libraries of the page of a plan anew, by npm, and check their hashes
	$(PYTHON) tools/page_libraries/bundle.py

lint: $(STAMP) ## ruff: rules and format
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)

format: $(STAMP) ## let ruff rewrite what it can
	$(BIN)/ruff check --fix $(SOURCES)
	$(BIN)/ruff format $(SOURCES)

# passes/ and rules/ become amp_compiler.passes and amp_compiler.rules only when installed, so types are checked there.
MYPY := --config-file ../pyproject.toml --cache-dir ../.mypy_cache
types: $(STAMP) ## mypy --strict on an installed copy, and on what a user writes
	@rm -rf .types build
	$(PIP) install --quiet --no-deps --no-build-isolation --target .types .
	cd .types && $(BIN)/python -m mypy $(MYPY) -p amp_compiler
	cd .types && $(BIN)/python -P ../tests/types_of_a_user.py $(MYPY)

test-fast: $(STAMP) ## the tests that compile nothing and take no seconds
	$(BOTH) -m "not slow and not gpu and not ranks and not compiles and not long and not browser"

# Two and four processes, each number of them started once: the tests stand in one process, and the ranks beside it.
test-ranks: $(STAMP) ## the tests in which several processes train one model
	$(PYTEST) -m "ranks and not slow" tests/ranks

test-slow: $(STAMP) ## the tests marked slow, which with those of `make test` and `make test-ranks` are all that need no GPU
	$(BOTH) -m "slow and not gpu and not ranks"
	$(PYTEST) -m "slow and ranks" tests/ranks

test-gpu: $(STAMP) ## the tests that need a CUDA device, with a table of them
	@mkdir -p .cache
	$(PYTEST) -m gpu --junitxml=.cache/gpu.xml; failed=$$?; $(RUN) tools/test_table.py .cache/gpu.xml; exit $$failed

# Other frameworks live in an environment of their own, which borrows the project's; none of them brings another torch.
FRAMEWORKS := $(VENV)/frameworks
$(FRAMEWORKS)/.installed: $(STAMP)
	$(PYTHON) -m venv $(FRAMEWORKS)
	$(BIN)/python -c 'import site; print("import site; site.addsitedir(%r)" % site.getsitepackages()[0])' \
	  > $$($(FRAMEWORKS)/bin/python -c 'import site; print(site.getsitepackages()[0])')/project.pth
	$(FRAMEWORKS)/bin/python -m pip --disable-pip-version-check install --quiet --no-deps \
	  lightning==2.6.6 pytorch-lightning==2.6.6 lightning-utilities torchmetrics accelerate==1.15.0 peft==0.21.2 trl==1.16.0 \
	  diffusers==0.42.1 sentence-transformers==6.2.0 torch-geometric==2.8.1 monai==1.6.1 skorch==1.4.0 pytorch-ignite==0.5.5 \
	  torchao==0.18.0 importlib_metadata zipp datasets multiprocess dill xxhash pyarrow pandas python-dateutil six aiohttp httpx tabulate
	@touch $@

test-frameworks: $(FRAMEWORKS)/.installed ## the integrations and docs/frameworks.md beside Lightning, diffusers and others, which are installed
	$(CACHES) OMP_NUM_THREADS=1 $(FRAMEWORKS)/bin/python -P -m pytest -q tests/integrations

test-torch: ## the tests of `make test` with another torch (TORCH=2.14.1), in an environment of its own, .venv-TORCH
	@test -n "$(TORCH)" || { echo "say which: make test-torch TORCH=2.14.1" >&2; exit 1; }
	+$(MAKE) --no-print-directory VENV=.venv-$(TORCH) TORCH=$(TORCH) test-all-but-slow

# With SCENARIOS="python3.12 python3.13" other Pythons than PYTHON; each gets torch from the index.
scenarios: ## what a new user does, from a built wheel in an empty folder, with the time to each first result
	$(PYTHON) tools/scenarios.py $(or $(SCENARIOS),$(PYTHON))

test-torch211: ## the same with the oldest torch that is supported
	+$(MAKE) --no-print-directory TORCH=$(OLDEST_TORCH) test-torch

# NO_MKDOCS_2_WARNING: a notice of the theme's about its successor.
docs: $(STAMP) ## what is made from the code (pictures, passes/README.md), and all docs as a site in site/, offline
	$(BIN)/python docs/tools/generate.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build

search: docs browser ## look whether the search of the site finds a page, opened as a file and from a server
	$(BIN)/python docs/tools/try_search.py

# The short runs do not replace the full ones, which the tables of the docs are made of: those are each script by itself.
SHORT := --json benchmarks/results/short_
bench: $(STAMP) ## seven benchmarks on the CPU, shortened to a model or two and 10 steps: under 10 minutes; writes results/short_*.json
	$(BIN)/python benchmarks/train_step.py --models mlp gpt2 --bounds gemm --steps 10 --seconds 10 $(SHORT)train_step_cpu.json
	$(BIN)/python benchmarks/inference.py --models gpt2 --bounds gemm --steps 10 --seconds 10 $(SHORT)inference_cpu.json
	$(BIN)/python benchmarks/update.py --steps 10 --seconds 10 $(SHORT)update_cpu.json
	$(BIN)/python benchmarks/host_cost.py --models blocks-2 $(SHORT)host_cost_cpu.json
	$(BIN)/python benchmarks/range_profile.py --models mlp --steps 10 $(SHORT)range_profile_cpu.json
	$(BIN)/python benchmarks/plan.py --sizes 1000,3000,10000 --models gpt2 mlp --repeats 1 $(SHORT)plan.json
	$(BIN)/python benchmarks/autocast_parity.py --models bert lstm --seeds 1 $(SHORT)autocast_parity.json

# The other converters pin packages in their own way, so they live apart. ModelOpt imports torch, the largest of what it
# needs: the project's own serves, found behind the peers' packages.
PEERS := $(VENV)/peers
$(PEERS)/.installed: $(STAMP)
	$(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/python -m pip --disable-pip-version-check install --quiet \
	  onnx onnxruntime onnxconverter-common sympy onnx-graphsurgeon onnxslim lief polygraphy nvidia-ml-py
	$(PEERS)/bin/python -m pip --disable-pip-version-check install --quiet --no-deps nvidia-modelopt
	$(BIN)/python -c 'import pathlib, torch; print(pathlib.Path(torch.__file__).parents[1])' \
	  > $$($(PEERS)/bin/python -c 'import site; print(site.getsitepackages()[0])')/project.pth
	@touch $@

bench-onnx: $(PEERS)/.installed ## ONNX conversion and amp.tune beside other converters, installed in an environment of their own
	$(BIN)/python -m benchmarks.onnx_convert --peers $(PEERS)/bin/python
	$(BIN)/python -m benchmarks.tune --peers $(PEERS)/bin/python

RECIPES := $(filter-out common pictures seeds text trials zoo,$(basename $(notdir $(wildcard examples/recipes/*.py))))
examples: $(STAMP) ## the recipes in full, one after the other, half an hour to an hour on one core: their tables, and examples/recipes/results/
	$(foreach recipe,$(RECIPES),OMP_NUM_THREADS=1 $(BIN)/python examples/recipes/$(recipe).py &&) true

zoo: $(STAMP) ## the pictures and tables of docs/zoo.md from the results of the recipes
	$(BIN)/python examples/recipes/zoo.py

clean: ## remove .venv and everything generated
	rm -rf $(VENV) .venv-* .wheels .cache .types build dist site *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find $(SOURCES) -name __pycache__ -type d -prune -exec rm -rf {} +
