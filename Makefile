# Two commands: `make serve` and `make test`. Both make what is missing and nothing else.
# `make docs` brings the generated parts of docs/ up to date and builds the site into build/docs.
#
#   PORT=8000                      port to serve on
#   CONFIG=configs/default.yaml    configuration file
#   ARGS="--log-level debug"       more flags for `slipstream serve`
#   PYTHON=python3.11              interpreter the virtual environment is made with

PORT ?= 8000
CONFIG ?= configs/default.yaml
ARGS ?=
PYTHON ?= $(shell command -v python3.11 || command -v python3)

VENV := .venv
BIN := $(VENV)/bin
NATIVE_SOURCES := $(shell find engine/kernels -name '*.cpp' -o -name '*.h')
INSTALL_INPUTS := pyproject.toml constraints.txt $(wildcard CMakeLists.txt) $(NATIVE_SOURCES)
# The environment variable also binds the isolated environment that builds the package.
INSTALL := PIP_CONSTRAINT=constraints.txt $(BIN)/python -m pip install \
	--disable-pip-version-check

.PHONY: serve test lint docs install clean
.DELETE_ON_ERROR:

serve: $(VENV)/.installed
	$(BIN)/slipstream serve --config $(CONFIG) --port $(PORT) $(ARGS)

test: lint
	$(BIN)/python -m pytest

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: install
	$(BIN)/python docs/generate.py
	$(BIN)/python -m mkdocs build --strict

install: $(VENV)/.installed-dev

clean:
	rm -rf $(VENV) build

$(VENV)/.made:
	$(PYTHON) -m venv --clear $(VENV)
	touch $@

$(VENV)/.installed: $(VENV)/.made $(INSTALL_INPUTS)
	$(INSTALL) --editable .
	touch $@

$(VENV)/.installed-dev: $(VENV)/.made $(INSTALL_INPUTS)
	$(INSTALL) --editable '.[dev]'
	touch $(VENV)/.installed $@
