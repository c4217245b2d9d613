# Everything runs in .venv, which is set up on first use and again when pyproject.toml or constraints.txt change.

.PHONY: demo test check clean
.DELETE_ON_ERROR:

PYTHON ?= $(shell python3.11 --version >/dev/null 2>&1 && echo python3.11 || echo python3)
BIN := .venv/bin
READY := .venv/ready

demo: $(READY)
	$(BIN)/python examples/train_trainer.py

test: $(READY)
	$(BIN)/python -m pytest

check: $(READY)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

clean:
	rm -rf .venv

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "Python 3.11 or newer is needed: install it, or name it with make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@echo "Setting up .venv: a few minutes, once"
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@
