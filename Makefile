# Everything runs in .venv at the repository's root, made on first use from pinned requirements.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
export TF_CPP_MIN_LOG_LEVEL ?= 2

.PHONY: test test-tensorflow test-jax lint format clean

test: lint test-tensorflow test-jax

# Small and full-size tests, on TensorFlow.
test-tensorflow: $(VENV)/test.stamp
	KERAS_BACKEND=tensorflow $(BIN)/python -m pytest --durations=10

# What runs models, again on JAX.
test-jax: $(VENV)/test.stamp
	KERAS_BACKEND=jax $(BIN)/python -m pytest -m backend

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
