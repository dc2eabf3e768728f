# Two commands: `make serve` and `make test`. Both make what is missing and nothing else.
# `make sanitize` runs the native code's tests under AddressSanitizer and UBSan; needs GCC.
# `make test-all` also runs what takes long, and measures the coverage of the short tests.
# `make clients` installs the client libraries that tests/conformance drives, into build/clients.
# `make docs` brings the generated parts of docs/ up to date and builds the site into build/docs.
#
#   PORT=8000                      port to serve on
#   CONFIG=configs/default.yaml    configuration file
#   ARGS="--log-level debug"       more flags for `slipstream serve`
#   PYTHON=python3.11              interpreter the virtual environment is made with
#   FUZZ_INPUTS=1000               inputs of each long fuzz test in `make test-all`

PORT ?= 8000
CONFIG ?= configs/default.yaml
ARGS ?=
FUZZ_INPUTS ?= 1000
PYTHON ?= $(shell command -v python3.11 || command -v python3)

VENV := .venv
BIN := $(VENV)/bin
NATIVE_SOURCES := $(shell find engine/kernels -name '*.cpp' -o -name '*.h')
INSTALL_INPUTS := pyproject.toml constraints.txt $(wildcard CMakeLists.txt) $(NATIVE_SOURCES)
# The environment variable also binds the isolated environment that builds the package.
INSTALL := PIP_CONSTRAINT=constraints.txt $(BIN)/python -m pip install \
	--disable-pip-version-check

LONG := slow or real or conformance
PYTEST := $(BIN)/python -m pytest --numprocesses=logical --maxprocesses=8 --dist=loadgroup \
	--durations=20

.PHONY: serve test test-all coverage long lint sanitize clients site docs install clean
.DELETE_ON_ERROR:

serve: $(VENV)/.installed
	$(BIN)/slipstream serve --config $(CONFIG) --port $(PORT) $(ARGS)

test: lint
	$(PYTEST) -m "not ($(LONG))"

test-all: lint coverage long sanitize site

# Of the short tests, in the processes that they start too. The long ones wait for faults to be
# mended in time, which the tracer would hold up.
coverage: install
	$(PYTEST) -m "not ($(LONG))" --cov --cov-report=term --cov-report=html

long: install
	FUZZ_INPUTS=$(FUZZ_INPUTS) $(PYTEST) -m "$(LONG)"

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clients: install
	$(BIN)/python -m tests.conformance.environments

# `make sanitize SANITIZE=thread` looks for data races. The program that a test compiles gets its
# flags from CXXFLAGS. A sanitizer's runtime has to be loaded before the interpreter, and libstdc++
# with it, to see exceptions. The interpreter and torch leak at exit what this project can't free.
SANITIZE := address,undefined
SANITIZED := build/sanitize/$(SANITIZE)
SANITIZED_TESTS := tests/kernels tests/models/test_cpu_runner.py tests/models/test_decoder_inputs.py \
	tests/models/test_not_finite.py tests/models/test_stale_kv.py
runtime = $(shell $(or $(CXX),c++) -print-file-name=$(1))
PRELOAD_address,undefined = $(call runtime,libasan.so):$(call runtime,libubsan.so)
PRELOAD_thread = $(call runtime,libtsan.so)

sanitize: $(SANITIZED)/.built
	LD_PRELOAD=$(PRELOAD_$(SANITIZE)):$(call runtime,libstdc++.so) \
	ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 \
	TSAN_OPTIONS=ignore_noninstrumented_modules=1 \
	CXXFLAGS="-g -fsanitize=$(SANITIZE) -fno-sanitize-recover=all" \
	SLIPSTREAM_NATIVE=$(SANITIZED) \
	$(BIN)/python -m pytest -p tests.kernels.other_native $(SANITIZED_TESTS)

$(SANITIZED)/.built: $(VENV)/.installed-dev
	rm -rf $(SANITIZED)
	$(INSTALL) --no-deps --target $(SANITIZED) \
		--config-settings build-dir=build/sanitize/cmake-$(SANITIZE) \
		--config-settings cmake.define.SLIPSTREAM_SANITIZE=$(SANITIZE) .
	touch $@

site: install
	$(BIN)/python -m mkdocs build --strict

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
