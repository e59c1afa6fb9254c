# Everything runs in .venv at the repository's root, made on first use from pinned requirements.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
export TF_CPP_MIN_LOG_LEVEL ?= 2

.PHONY: demo test test-tensorflow test-jax lint format clean

DEMO_PROMPTS := "a large red star on a dark blue background" \
    "a small yellow heart in the top left on a striped background" \
    "a small green ring left of a large white cross on a gray background" \
    "a small purple circle above a large orange square on a checkered background"

# The embedded checkpoint: exported, verified, drawn, benchmarked with and without XLA.
demo: $(VENV)/core.stamp
	$(BIN)/python serialize_savedmodels.py --output_dir=exports/tiny --batch_size=4 --overwrite
	$(BIN)/python -m sd_tf.generate $(DEMO_PROMPTS) --export_dir exports/tiny \
	    --out out/pictures --num_steps 20 --guidance_scale 4 --seed 1 --count 2
	$(BIN)/python benchmark.py --export_dir=exports/tiny --all --num_steps=20 \
	    --prompt="a large red star on a dark blue background" --guidance_scale=4 \
	    --output=out/report
	@echo "The pictures are in out/pictures, the report beside them in out."

test: lint test-tensorflow test-jax

# In three processes: TensorFlow keeps what it traced, and full-size models want the memory.
test-tensorflow: export KERAS_BACKEND = tensorflow
test-tensorflow: $(VENV)/test.stamp
	$(BIN)/python -m pytest --durations=5 --ignore=tests/parity
	$(BIN)/python -m pytest --durations=5 tests/parity -m "not full_size"
	$(BIN)/python -m pytest --durations=5 tests/parity -m full_size

# What runs models, again on JAX.
test-jax: export KERAS_BACKEND = jax
test-jax: $(VENV)/test.stamp
	$(BIN)/python -m pytest -m backend

lint: $(VENV)/test.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(VENV)/test.stamp
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(VENV)/core.stamp: requirements/core.txt pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements/core.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	touch $@

$(VENV)/test.stamp: requirements/test.txt $(VENV)/core.stamp
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements/test.txt
	touch $@

clean:
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache
