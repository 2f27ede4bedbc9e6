# Every target sets up what it needs; a fresh clone with Python and make is enough.
WANTED := import sys; sys.exit(sys.version_info[:2] != (3, 11))
PYTHON ?= $(shell for p in python3.11 python3 python; do \
	$$p -c '$(WANTED)' 2>/dev/null && { echo $$p; break; }; done)
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
# Test files that run side by side. Live swarms keep two cores busy with one or two of them.
WORKERS ?= 2

.PHONY: demo test test-long lint format bench clean

$(STAMP): setup.cfg pyproject.toml constraints.txt
	@$(or $(PYTHON),false) -c '$(WANTED)' 2>/dev/null || { \
	  echo "error: blockswarm needs Python 3.11 (looked at: $(or $(PYTHON),PATH))" >&2; \
	  echo "  try: install Python 3.11, then make PYTHON=/path/to/python3.11 $(MAKECMDGOALS)" >&2; \
	  exit 2; }
	$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)
	$(INSTALL) -e ".[host,bench,test]"
	@$(INSTALL) -e ".[light]" || { \
	  echo "note: going on without py-libp2p, and without the tests of peers --light." >&2; \
	  echo "  A part of it is compiled: install gcc, Python's headers and libgmp's (Debian:" >&2; \
	  echo "  gcc python3-dev libgmp-dev), then rm $(STAMP)" >&2; }
	touch $(STAMP)

demo: $(STAMP)           ## a real swarm on this machine, to an assembled model and a text it wrote
	$(BIN)/blockswarm demo

test: $(STAMP)           ## everything that runs in minutes
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder --durations=10

test-long: $(STAMP)      ## the long suites: fuzzing, crash storms
	$(BIN)/python -m pytest -m long

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(STAMP)          ## every benchmark (hours); resumes what was cut off
	$(BIN)/python -m benchmarks

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache
