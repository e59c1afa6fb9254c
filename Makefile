# Everything runs in .venv at the repository's root, made on first use from pinned requirements.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Python compiles a module when it is first imported: most never are. It must keep what it compiled,
# also in images that set this variable; every command would begin with 9 seconds of it.
unexport PYTHONDONTWRITEBYTECODE
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile
# TensorFlow's CUDA build where there is a GPU to use it.
CORE := $(if $(shell nvidia-smi --list-gpus 2> /dev/null),cuda,core)

.PHONY: demo serve check test test-first test-serving test-second test-parity test-full-size test-long
.PHONY: test-jax test-jax-parity bench-peers bench-gpu lint format clean

DEMO_PROMPTS := "a large red star on a dark blue background" \
    "a small yellow heart in the top left on a striped background" \
    "a small green ring left of a large white cross on a gray background" \
    "a small purple circle above a large orange square on a checkered background"

# One picture each: more and more of one adapter, the other one, and both.
DEMO_MIXTURES := outline@0 outline@0.5 outline@1 moon@1 outline@1,moon@1
DEMO_ADAPTED := "a large yellow moon above a small red star on a dark blue background"
# The embedded checkpoint, with the small decoder that makes a server's previews.
EXPORT_TINY := $(BIN)/sd-tf export --out exports/tiny --batch_size 4 --preview_decoder tiny:preview
# Places for both embedded adapters.
DEMO_PLACES := --adapter_slots 2 --adapter_rank 2 --adapter_layers all

# The embedded checkpoint: exported, verified, drawn, also with adapters, benchmarked with and without
# XLA.
demo: $(VENV)/$(CORE).stamp
	@echo "TensorFlow's $(if $(filter cuda,$(CORE)),CUDA build: nvidia-smi lists a GPU,build \
	for CPUs: nvidia-smi lists no GPU)."
	$(EXPORT_TINY) $(DEMO_PLACES) --overwrite
	$(BIN)/sd-tf export-adapters exports/tiny outline=tiny:outline moon=tiny:moon
	$(BIN)/sd-tf generate $(DEMO_PROMPTS) --export_dir exports/tiny \
	    --out out/pictures --num_steps 20 --seed 1 --count 2
	for mixture in $(DEMO_MIXTURES); do \
	    $(BIN)/sd-tf generate $(DEMO_ADAPTED) --export_dir exports/tiny --adapter $$mixture \
	        --out out/adapters/$$mixture --num_steps 20 --seed 1 \
	        --compile_cache out/compiled || exit 1; done
	$(BIN)/sd-tf benchmark --export_dir exports/tiny --all --num_steps 20 \
	    --prompt "a large red star on a dark blue background" --out out/report
	@echo "The pictures are in out/pictures and out/adapters, the report beside them in out. To make another:"
	@echo '    $(BIN)/sd-tf generate "a small green heart on a black background"'

# The embedded checkpoint behind a page and TensorFlow Serving's API, until Ctrl+C.
serve: $(VENV)/serve.stamp
	test -f exports/tiny/pipeline.json || $(EXPORT_TINY)
	$(BIN)/sd-tf serve ray --export_dir exports/tiny --num_steps 20 --examples docs/tiny_prompts.txt

# A random SD1.5, ours beside KerasCV, PyTorch, OpenVINO and JAX: an hour on 2 cores with AVX-512, 20 GB.
bench-peers: $(VENV)/bench.stamp
	$(BIN)/sd-tf bench peers --out out/peers/report
	$(BIN)/sd-tf bench starts --export_dir out/peers/exports/512-float32 --num_steps 1 \
	    --rounds 1 --calls 1 --json out/peers/report/starts-sd1.json
	test -f exports/tiny/pipeline.json || $(EXPORT_TINY)
	$(BIN)/sd-tf bench starts --export_dir exports/tiny \
	    --json out/peers/report/starts-tiny.json

# The original's job, 3 pictures of 512 px and 50 steps at once, on a GPU: a random SD1.5, ours beside
# KerasCV, PyTorch and JAX.
bench-gpu: $(VENV)/bench-gpu.stamp
	$(BIN)/sd-tf bench peers --device gpu --precision bfloat16 --sizes 512 --batch_size 3 --rounds 2 \
	    --full_steps 50 --peers kerascv_plain,kerascv,plain,torch,torch_compile,jax --work out/gpu \
	    --out out/gpu/report

PYTEST := $(BIN)/python -m pytest --durations=12

# For every change, in at most 5 minutes: lint, units, and a picture from the installed wheel.
UNITS := call config files imports retry sampler_tables sampling schedules serving_batching tokenizer world

check: lint
	$(PYTEST) $(UNITS:%=tests/test_%.py) tests/test_wheel.py

# Two groups at a time, the longest first, and the full-size models after the servers: both want the
# memory. A group is a process, so that what TensorFlow traced and keeps does not pile up. The system's
# programs come before, or the groups that need none of them would begin first. What tests export
# once (`once` in tests/exports.py), the groups share.
test:
	$(MAKE) --jobs=2 lint $(VENV)/tools.stamp
	made=$$(mktemp -d) && trap 'rm -rf "$$made"' EXIT && SHARED_EXPORTS="$$made" \
	    $(MAKE) --jobs=2 --output-sync=target test-first test-serving test-second test-full-size \
	    test-parity test-jax test-jax-parity

# Last what begins with an export that the first group's beginning makes, too.
SHARED := tests/test_serving_adapters.py
SERVING := $(filter-out $(SHARED),$(wildcard tests/test_serving*.py tests/test_tf_serving.py)) $(SHARED)

check test-%: export TF_CPP_MIN_LOG_LEVEL ?= 2
check test-first test-serving test-second test-parity test-full-size test-long: export KERAS_BACKEND = tensorflow
test-jax test-jax-parity: export KERAS_BACKEND = jax
# TensorFlow's passes over graphs allocate much: all of these groups' time is a sixth less so.
test-first test-serving test-second test-parity: export LD_PRELOAD = $(wildcard /usr/lib/*/libjemalloc.so.2)
# These compile much and run little: a third of the time goes into LLVM's optimizations.
test-jax test-jax-parity: export XLA_FLAGS = --xla_backend_optimization_level=0

test-first: $(VENV)/test.stamp $(VENV)/tools.stamp
	$(PYTEST) tests/test_[a-r]*.py -m "not full_size and not long"

test-serving: $(VENV)/test.stamp $(VENV)/tools.stamp
	$(PYTEST) $(SERVING) -m "not full_size and not long"

test-second: $(VENV)/test.stamp
	$(PYTEST) $(filter-out $(SERVING),$(wildcard tests/test_[s-z]*.py)) -m "not full_size and not long"

test-parity: $(VENV)/test.stamp
	$(PYTEST) tests/parity -m "not full_size and not long"

test-full-size: $(VENV)/test.stamp
	$(PYTEST) -m "full_size and not long"

# What repeats on a larger scale what other tests show; two hours more, before a release.
test-long: $(VENV)/test.stamp $(VENV)/tools.stamp
	$(PYTEST) -m "long and not jax"
	KERAS_BACKEND=jax $(PYTEST) -m "long and (jax or backend)"

# What runs models, again on JAX.
test-jax: $(VENV)/test.stamp
	$(PYTEST) tests/test_*.py -m "backend and not long"

test-jax-parity: $(VENV)/test.stamp
	$(PYTEST) tests/parity -m "backend and not long"

lint: $(VENV)/test.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(VENV)/test.stamp
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(VENV)/$(CORE).stamp: requirements/core.txt requirements/$(CORE).txt pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) -r requirements/$(CORE).txt
	$(PIP) --no-deps --no-build-isolation --editable .
	touch $@

$(VENV)/serve.stamp: requirements/serve.txt $(VENV)/$(CORE).stamp
	$(PIP) -r requirements/serve.txt
	touch $@

$(VENV)/bench.stamp: requirements/bench.txt $(VENV)/$(CORE).stamp
	$(PIP) -r requirements/bench.txt
	touch $@

$(VENV)/bench-gpu.stamp: requirements/bench-gpu.txt $(VENV)/bench.stamp
	$(PIP) -r requirements/bench-gpu.txt
	touch $@

# Programs that tests need: a browser for the page, curl for its command, openssl for TLS.
$(VENV)/tools.stamp: tests/tools.py
	$(PYTHON) -m tests.tools
	mkdir -p $(VENV)
	touch $@

$(VENV)/test.stamp: requirements/test.txt requirements/bench.txt requirements/serve.txt $(VENV)/$(CORE).stamp
	$(PIP) -r requirements/test.txt
	touch $@

clean:
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache
