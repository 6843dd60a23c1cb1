# make demo: the main job.  make test: the tests.  make check: lint and types.  make bench: the benchmarks.
PYTHON ?= python3
BIN := .venv/bin
export PYTHONSAFEPATH := 1

.PHONY: demo test check bench clean

demo: .venv/installed
	$(BIN)/python benchmarks/demo.py

# Two processes of one thread each; a process that is done takes over half of what the other has left.
test: .venv/installed
	OMP_NUM_THREADS=1 $(BIN)/pytest -q -n 2 --dist worksteal

bench: .venv/installed
	$(BIN)/python benchmarks/speed.py
	$(BIN)/python benchmarks/memory.py
	$(BIN)/python benchmarks/agents.py

# A tree of links gives the type checker the shape the package has when installed.
check: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	rm -rf build/types && mkdir -p build/types/worldmodels
	ln -s $(CURDIR)/worldmodels/* $(CURDIR)/envs $(CURDIR)/agents $(CURDIR)/configs build/types/worldmodels/
	ln -s $(CURDIR)/hydra_plugins build/types/
	cd build/types && $(CURDIR)/$(BIN)/mypy --cache-dir $(CURDIR)/.mypy_cache --explicit-package-bases worldmodels hydra_plugins

.venv/installed: setup.cfg pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; assert sys.version_info >= (3, 11), "Python 3.11 or newer is needed"'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

clean:
	rm -rf .venv build .mypy_cache .ruff_cache .pytest_cache
