# Everything from a fresh clone, with nothing installed but Python 3.11 or newer and make.
#   make demo    trains DQN on CartPole
#   make test    lint, types, layers, tests, notebooks and the README's code
#   make lint    the first three
#   make bench   every benchmark
#   make clean   removes what these made, the environment too

PYTHON ?= $(if $(shell python3.11 -c 'print(1)' 2>/dev/null),python3.11,python3)
PYTEST_ARGS ?=
# More for pip, such as --extra-index-url https://download.pytorch.org/whl/cpu where torch would come with CUDA.
PIP_ARGS ?=

BIN := .venv/bin
INSTALL := $(BIN)/python -m pip --disable-pip-version-check --no-input install --quiet -c constraints.txt $(PIP_ARGS)

.PHONY: demo test lint bench clean
.DELETE_ON_ERROR:

demo: .venv/installed-demo
	$(BIN)/conduit demo dqn

test: lint
	$(BIN)/python -m pytest $(PYTEST_ARGS)

lint: .venv/installed-test
	@$(BIN)/python -c 'import platform; from importlib.metadata import version; print("python", platform.python_version(), \
	    *(f"{name} {version(name)}" for name in ("conduit-rl", "numpy", "optree", "torch", "jax", "gymnasium", "pytest")), sep="  ")'
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports

bench: .venv/installed-test
	@set -e; for file in $$(grep -l __main__ benchmarks/*.py); do echo "== $$file"; $(BIN)/python "$$file"; done

.venv/bin/python:
	$(PYTHON) -m venv .venv

# Stamps: installed again only when the pins or the project's metadata change.
.venv/installed-demo: pyproject.toml constraints.txt | .venv/bin/python
	$(INSTALL) -e '.[demo]'
	@touch $@

.venv/installed-test: pyproject.toml constraints.txt | .venv/bin/python
	$(INSTALL) -e '.[all,test]'
	@touch $@

clean:
	rm -rf .venv build dist *.egg-info .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
