# make demo   build the bundled demo checkpoint's SM121 engine and generate text from it on the CPU
# make test   lint, type check and the CPU test suite
# make test-simulated   the runtime's tests again, on engines over a simulator of TensorRT's runtime
# make gpu    the tests that need CUDA
PYTHON ?= python3
VENV ?= .venv
# The newest torch that is tested. Its default Linux build brings CUDA; a CPU build of the same version does as well.
TORCH ?= torch==2.13.0

BIN := $(VENV)/bin
READY := $(VENV)/.ready
# The suite runs two processes side by side; each keeps to one core, and a file to one process: its tests share what is
# built for them. The files that take longest come first.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

# The tests that run on engines as well, over the simulator; of these the first few in every run.
SIMULATED_FEW := tests/runtime/test_llm.py tests/runtime/test_preemption.py tests/runtime/drafts/test_engine_drafts.py
SIMULATED := tests/runtime tests/serve tests/e2e/test_demo_drafts.py tests/e2e/test_long_runs.py

.PHONY: setup demo test test-all test-simulated gpu lint golden bench bench-gpu clean

setup: $(READY)

$(READY): pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or later is needed; set PYTHON=")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet "$(TORCH)"
	$(BIN)/python -m pip install --quiet --editable ".[test]"
	touch $(READY)

demo: setup
	$(BIN)/qwen4exp-build demo/checkpoint -o build/demo
	$(BIN)/qwen4exp-generate build/demo "$(shell cat demo/prompt.txt)" --max-tokens 120 --temperature 0

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/basedpyright --pythonpath $(BIN)/python

test: lint
	$(PYTEST) -m "not slow and not gpu"
	$(PYTEST) -m "not slow and not gpu" --engine simulated $(SIMULATED_FEW)

test-all: lint test-simulated
	$(PYTEST) -m "not gpu"

test-simulated: setup
	$(PYTEST) -m "not gpu" --engine simulated $(SIMULATED)

gpu: setup
	$(BIN)/python -m pytest -m gpu

golden: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/passes/test_golden.py --update-golden

bench: setup
	$(BIN)/python benchmarks/build_full_size.py tests/fixtures/released_config.json
	$(BIN)/python benchmarks/build_full_size.py tests/fixtures/released_config.json --precision nvfp4
	$(BIN)/python benchmarks/build_full_size.py tests/fixtures/released_config.json --precision nvfp4-w4a4
	$(BIN)/python benchmarks/evaluate_demo.py
	$(BIN)/python benchmarks/load_weights.py
	$(BIN)/python benchmarks/drafts_demo.py
	$(BIN)/python benchmarks/scheduler.py
	$(BIN)/python benchmarks/ngram_disk.py

bench-gpu: setup
	$(BIN)/python benchmarks/run_kernels.py
	$(BIN)/python benchmarks/decode_full_size.py tests/fixtures/released_config.json --precision nvfp4
	$(BIN)/python benchmarks/decode_full_size.py tests/fixtures/released_config.json --precision checkpoint
	$(BIN)/python benchmarks/prefill_full_size.py tests/fixtures/released_config.json
	$(BIN)/python benchmarks/drafts_full_size.py tests/fixtures/released_config.json
	$(BIN)/python benchmarks/qsa_prefill.py

clean:
	rm -rf build dist .pytest_cache .ruff_cache .hypothesis *.egg-info src/*.egg-info
