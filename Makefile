# make demo   runs Millrace on a generated Meetup stream and opens its dashboard   (ARGS="--help" lists the options)
# make test   runs the tests      make check   what CI checks      make bench   the benchmarks
# Each target sets up what it needs (a virtual environment from requirements.lock, jars from conf/jars.lock).

VENV   := .venv
PY     := $(VENV)/bin/python
PYTHON ?= $(shell command -v python3.11 || command -v python3.12 || command -v python3)
READY  := $(VENV)/.installed
ARGS   ?=

.PHONY: demo test check bench bench-log bench-lakehouse bench-s3 bench-fanout bench-lookup bench-sketches bench-collect bench-publishers bench-control bench-demand report soak \
  fuzz cluster crashes chaos setup java lock docs wheel clean
.DEFAULT_GOAL := help

help:
	@sed -n 's/^# \{0,1\}//p' Makefile | head -3

demo: setup
	@$(VENV)/bin/millrace demo $(ARGS)

# Four processes on two cores, because tests wait a good deal; in one: make test ARGS="-n 0 tests/serve -x"
test: setup
	@$(PY) -m pytest -n 4 --dist loadscope --no-loadscope-reorder $(ARGS)

check: $(READY)
	@$(VENV)/bin/ruff check .
	@$(VENV)/bin/ruff format --check .
	@$(VENV)/bin/mypy
	@$(VENV)/bin/lint-imports --no-cache

bench: setup
	@$(PY) -m tests.bench.bench_latency $(ARGS)

bench-log: setup
	@$(PY) -m tests.bench.bench_log_store $(ARGS)

bench-lakehouse: setup
	@$(PY) -m tests.bench.bench_lakehouse $(ARGS)

bench-s3: setup
	@$(PY) -m tests.bench.bench_s3 $(ARGS)

bench-fanout: setup
	@$(PY) -m tests.bench.bench_fanout $(ARGS)

bench-lookup: setup
	@$(PY) -m tests.bench.bench_lookup $(ARGS)

bench-sketches: $(READY)
	@$(PY) -m tests.bench.bench_sketches $(ARGS)

bench-collect: setup
	@$(PY) -m tests.bench.bench_collect $(ARGS)

bench-publishers: setup
	@$(PY) -m tests.bench.bench_publishers $(ARGS)

bench-control: $(READY)
	@$(PY) -m tests.bench.bench_control $(ARGS)

bench-demand: setup
	@$(PY) -m tests.bench.bench_demand $(ARGS)

# Every figure that the docs state, with its baseline: make report ARGS="latency fanout"
report: setup
	@$(PY) -m tests.bench.report $(ARGS)

# 14,000 merchants' feeds within the hour; then half an hour at 1,000 events/s, and whether every line stays flat.
# The tests marked soak: make test ARGS="-m soak"
soak: setup
	@$(PY) -m pytest -n 0 -m soak tests/lakehouse/load/test_many.py
	@$(PY) -m tests.bench.soak $(ARGS)

# A million made-up inputs for every parser at the border.
fuzz: $(READY)
	@$(PY) -m tests.fuzz $(ARGS)

# A Spark standalone cluster on this machine, a worker killed in the middle.
cluster: setup
	@$(PY) -m pytest -m soak tests/lakehouse/test_cluster.py $(ARGS)

# kill -9 at every point of the write path, at each of the first three times.
crashes: setup
	@$(PY) -m pytest -m soak tests/lakehouse/test_crashes.py tests/lakehouse/test_stream.py \
	  tests/lakehouse/stateful/test_live_join.py $(ARGS)

# The whole product under load while a seeded agent hurts it: make chaos SEED=7 MINUTES=3
chaos: setup
	@$(PY) -m tests.chaos $(if $(SEED),--seed $(SEED)) $(if $(MINUTES),--minutes $(MINUTES)) $(ARGS)

setup: java $(READY)
	@$(VENV)/bin/millrace prepare

java:
	@java=$${JAVA_HOME:+$$JAVA_HOME/bin/}java; \
	command -v $$java >/dev/null || { \
	  echo "Millrace needs Java 17 or later for Spark and the embedded broker, and there is none on PATH." >&2; \
	  echo "Install one (Debian: apt-get install openjdk-17-jre-headless) or set JAVA_HOME." >&2; exit 1; }; \
	version=$$($$java -version 2>&1 | sed -n 's/.* version "\([0-9]*\).*/\1/p' | head -n 1); \
	[ "$${version:-0}" -ge 17 ] || { \
	  echo "Millrace needs Java 17 or later; $$java is version $$version. Install one or set JAVA_HOME." >&2; exit 1; }

$(READY): requirements.lock pyproject.toml
	@[ -n "$(PYTHON)" ] || { echo "Millrace needs Python 3.11 or 3.12, and there is none on PATH." >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 13))' || { \
	  echo "Millrace needs Python 3.11 or 3.12; $(PYTHON) is $$($(PYTHON) -V). Set PYTHON=/path/to/python3.11." >&2; exit 1; }
	@echo "Setting up $(VENV) (once) …" >&2
	@[ -x $(PY) ] || $(PYTHON) -m venv $(VENV)
	@$(PY) -m pip install --disable-pip-version-check --require-hashes -r requirements.lock >&2
	@$(PY) -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $@

# The package, for pip: dist/*.whl and dist/*.tar.gz
wheel: $(READY)
	@$(PY) -m hatchling build -d dist

# The docs as a site: dist/site/index.html
docs: $(READY)
	@NO_MKDOCS_2_WARNING=1 PYTHONPATH=. $(PY) -m mkdocs build --strict -f docs/site/mkdocs.yml

# Needs uv; everything else does not.
lock:
	uv pip compile --python-version 3.11 --all-extras --generate-hashes --no-emit-index-url --no-annotate \
	  pyproject.toml -o requirements.lock

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache dist lake
