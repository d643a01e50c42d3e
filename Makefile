# make demo and make test are the two commands a newcomer needs; both create .venv when it is missing.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
WORKERS ?= 2
# Three parts that share no test and together are all of them; tests/contract says what the matrix is.
QUICK := not slow and not data and not gpu and not matrix
SLOW := (slow or data or gpu) and not matrix
MATRIX := matrix
# Bytecode is kept also where the environment says not to: without it each worker takes 10 s longer
# to read the tests. A worker gets one half of the tests in order, then what the other has left: what
# the tests of a file share is made once, and not by each worker.
TESTING := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python
SHARED := -q -n $(WORKERS) --dist worksteal
CODE := src tests $(wildcard benchmarks examples)

.PHONY: venv demo test test-slow test-matrix test-all lint format bench clean

venv: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[all,dev]'
	touch $@

# One thread, here and in the tests: networks this small are slower on several.
demo: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/doxa demo --out demo

test: $(STAMP)
	$(TESTING) -m pytest $(SHARED) -m "$(QUICK)"

# The data suite needs DOXA_DATA and is skipped without it.
test-slow: $(STAMP)
	$(TESTING) -m pytest $(SHARED) -m "$(SLOW)"

# Every variant of every contract that .ci/run leaves to a representative: for a release, or after a
# change of the parts that all methods share.
test-matrix: $(STAMP)
	$(TESTING) -m pytest $(SHARED) -m "$(MATRIX)"

# Everything, in this order, so that what is quick to fail fails first.
test-all:
	$(MAKE) test
	$(MAKE) test-slow
	$(MAKE) test-matrix

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
