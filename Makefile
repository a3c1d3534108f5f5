# Everything this project does starts here; `make help` lists it.
SHELL  := /bin/sh
PYTHON ?= python3
PIP    := .venv/bin/python -m pip --disable-pip-version-check
PYTEST := .venv/bin/python -m pytest

# The second official SDK that the tests drive; the first one comes with the dev extra.
OLD_SDK := .venv/sdk/0.125.0

.DEFAULT_GOAL := help
.PHONY: help install run test check fix soak coverage migrate

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-9s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

install: .venv/dev.stamp $(OLD_SDK)/done.stamp ## everything a developer needs, in .venv

run: .venv/runtime.stamp ## serve on HOST:PORT (127.0.0.1:8080) with the data in DATA_DIR (var)
	@exec .venv/bin/kvmeter up

test: install ## the whole suite; it starts the servers that it needs
	@$(PYTEST)

check: .venv/dev.stamp ## lint, format, types, import directions
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy
	.venv/bin/lint-imports

fix: .venv/dev.stamp ## repair what ruff can repair
	.venv/bin/ruff check --fix .
	.venv/bin/ruff format .

soak: install ## the long runs: ten kills of each process, 50 warm-equals-cold prompts, C sanitized
	@$(PYTEST) --soak -rA tests/system/test_kill.py tests/system/test_warm_equals_cold.py \
	  tests/engine/test_native_sanitizers.py

# Beside the suite, slower than it, and without a gate: a table is to be read.
coverage: install ## what the tests run, lines and branches, a table a package; ARGS=tests/billing for a part
	@mkdir -p var/coverage && rm -f var/coverage/data*
	-@.venv/bin/coverage run -m pytest $(ARGS)
	@.venv/bin/coverage combine --quiet
	@for package in gateway engine billing; do \
	  echo; .venv/bin/coverage report --include="$$package/*" || true; done

migrate: .venv/runtime.stamp ## bring the database in DATA_DIR to the newest schema
	@.venv/bin/kvmeter migrate

.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "kvmeter needs Python 3.11 or newer: make PYTHON=/path/to/python3 ..." >&2; exit 1; }
	$(PYTHON) -m venv .venv

# `pip -e .` with the pins in constraints.txt: the runtime needs no compiler and no GPU package.
.venv/runtime.stamp: pyproject.toml constraints.txt | .venv/bin/python
	$(PIP) install --quiet --constraint constraints.txt --editable .
	@touch $@

.venv/dev.stamp: .venv/runtime.stamp
	$(PIP) install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $@

$(OLD_SDK)/done.stamp: | .venv/bin/python
	$(PIP) install --quiet --no-deps --upgrade --target $(OLD_SDK) \
	  anthropic==$(notdir $(OLD_SDK)) distro==1.9.0
	@touch $@
