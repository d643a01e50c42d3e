# make demo and make test are the two commands a newcomer needs; both create .venv when it is missing.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
WORKERS ?= 2
QUICK := not slow and not data and not gpu
CODE := src tests $(wildcard benchmarks examples)

.PHONY: venv demo test test-slow test-all lint format bench clean

venv: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[all,dev]'
	touch $@

# One thread, here and in the tests: networks this small are slower on several.
demo: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/doxa demo --out demo

test: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(WORKERS) -m "$(QUICK)"

test-slow: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(WORKERS) -m "not ($(QUICK))"

# Everything; the data suite needs DOXA_DATA and is skipped without it. In this order, so that
# what is quick to fail fails first.
test-all:
	$(MAKE) test
	$(MAKE) test-slow

lint: $(STAMP)
	$(BIN)/ruff check $(CODE)
	$(BIN)/ruff format --check $(CODE)
	$(BIN)/mypy

format: $(STAMP)
	$(BIN)/ruff check --fix $(CODE)
	$(BIN)/ruff format $(CODE)

bench: $(STAMP)
	$(BIN)/python -m benchmarks

clean:
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache
