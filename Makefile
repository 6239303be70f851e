# Octavo. `make serve` talks to a model; `make test` runs the tests. Both set up all that they need.

PYTHON ?= python3
VENV   ?= .venv
MODEL  ?= smollm2-135m
BIN    := $(VENV)/bin
CPP    := CMakeLists.txt $(wildcard csrc/*) $(wildcard csrc/tests/*)
TEST_MODELS := smollm2-135m qwen2.5-coder-0.5b

.PHONY: setup serve test test-slow check sanitize bench browser clean models format

setup: $(VENV)/.base  ## install the server alone (no torch)

serve: $(VENV)/.base  ## install, fetch the default model, serve it, open the page
	$(BIN)/octavo pull $(MODEL)
	$(BIN)/octavo serve $(MODEL) --open

test: check models browser  ## install, check, run the tests
	$(BIN)/python -m pytest -q

test-slow: $(VENV)/.dev models  ## the checks that take minutes
	$(BIN)/python -m pytest -q -m slow --timeout 3600

check: $(VENV)/.dev models  ## lint, types, import layers, examples in the docs
	$(BIN)/ruff check --quiet .
	$(BIN)/ruff format --check --quiet .
	$(BIN)/mypy --no-error-summary
	$(BIN)/python -m pytest -q tests/unit/test_layers.py tests/server/test_docs_examples.py

models: $(VENV)/.dev  ## fetch the models that the tests run on
	for m in $(TEST_MODELS); do $(BIN)/octavo pull $$m || exit 1; done

browser:  ## the browser that the page is tested in
	@command -v chromium >/dev/null || [ -n "$$OCTAVO_CHROMIUM" ] || { \
	  echo "installing chromium, which the tests of the page need"; \
	  SUDO=$$([ "$$(id -u)" = 0 ] || echo sudo); \
	  $$SUDO apt-get update -qq && $$SUDO apt-get install -y -qq --no-install-recommends chromium >/dev/null; \
	} || { echo "could not install chromium; install it, or set OCTAVO_CHROMIUM to a Chromium or Chrome"; exit 1; }

sanitize:  ## the C++ tests under AddressSanitizer and UndefinedBehaviorSanitizer
	cmake -S . -B build/sanitize -DCMAKE_BUILD_TYPE=RelWithDebInfo -DOCTAVO_SANITIZE=ON -DOCTAVO_TESTS=ON -DOCTAVO_PYTHON=OFF
	cmake --build build/sanitize -j 2
	ctest --test-dir build/sanitize --output-on-failure

bench: $(VENV)/.dev models  ## measure; peers are installed in environments of their own
	$(BIN)/pip install -q -e '.[test,bench]'
	$(BIN)/python -m benchmarks.run

format: $(VENV)/.dev
	$(BIN)/ruff check --fix --quiet .
	$(BIN)/ruff format --quiet .

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.base: $(BIN)/python pyproject.toml $(CPP)
	$(BIN)/pip install -q -e .
	touch $@

$(VENV)/.dev: $(BIN)/python pyproject.toml $(CPP)
	$(BIN)/pip install -q -e '.[test]'
	touch $@ $(VENV)/.base
