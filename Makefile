# Everything runs in .venv, which `make setup` builds from requirements/lock.txt; every target that needs it
# builds it by itself. Variables: PYTHON (3.11 or newer), SPARK (a version in requirements/spark.txt), BACKEND and
# STATE_DIR for demo, ARGS for demo, s3, hdfs, kafka, postgres, pytest and bench.

# Versions of PySpark: the oldest and the newest release of each minor version. The last one is the lock's.
SPARKS := 4.0.0 4.0.5 4.1.0 4.1.4 4.2.0 4.2.1 4.3.0
PYTHONS := python3.12 python3.13

# SPARK takes the place of the locked PySpark, in an environment of its own, and of its own for each PYTHON.
VENV := .venv$(if $(SPARK),-spark-$(SPARK)$(if $(PYTHON),-$(notdir $(PYTHON))))
BIN := $(VENV)/bin
STAMP := $(VENV)/.ready
# The folders that pyproject.toml maps into the package holdfast.
FOLDERS := backends benches examples mvcc snapshotter spark_integration
SOURCES := holdfast $(FOLDERS) found_by_spark tests setup.py
COMPILE := $(BIN)/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-emit-index-url \
           --no-emit-find-links --custom-compile-command 'make lock' $(if $(UPGRADE),--upgrade)

# As many processes as tests/conftest.py says; which tests stay together and which begin, tests/parts.py says.
SIDE_BY_SIDE := --numprocesses auto --dist loadfile --no-loadscope-reorder -p no:benchmark

# What `make check` runs.
HOUSE_RULES := $(addprefix tests/,test_pages.py test_source_tree.py test_tidy.py)

# Neither Spark nor a server nor anything slow, no injected faults, no histories by chance, and nothing of `make check`;
# what is left out whole is not imported.
FAST := -m 'not slow and not spark and not cluster and not s3 and not hdfs and not kafka and not postgres' \
        $(addprefix --ignore=,$(addprefix tests/,cluster faults fuzz model packaging sinks soak spark storages) $(HOUSE_RULES))

# From nothing (-E), and strict: what is read from an earlier run's pages would not be checked.
SITE := $(BIN)/sphinx-build --quiet --fresh-env --fail-on-warning -c docs/site -d build/docs-read

# Without compiled files each of a run's many Python processes would compile pandas and PySpark anew: two seconds each.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup prepare demo s3 hdfs kafka postgres test test-fast test-all test-long record smoke matrix check types bench bench-micro docs links results dist \
        lock clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(STAMP) ## build .venv from the lock file (done by every other target when needed)

$(STAMP): requirements/lock.txt requirements/uv.txt pyproject.toml requirements/setup.sh $(if $(SPARK),requirements/spark.txt)
	@PYTHON='$(PYTHON)' SPARK='$(SPARK)' requirements/setup.sh $(VENV)
	@touch $@

# Both use a minute of processor time and more, so they begin together. What fails here, the tests that need it tell.
prepare: $(STAMP) ## fetch and build the servers of tests, once a machine, and archive Spark's classes (done by make test)
	@$(BIN)/python -m tests.spark_classes & $(BIN)/python -m tests.servers.downloads; wait

demo: $(STAMP) ## a year of flights through a stateful query that is killed half-way [BACKEND= STATE_DIR= SPARK= ARGS=]
	$(BIN)/holdfast demo $(if $(BACKEND),--backend '$(BACKEND)') $(if $(STATE_DIR),--state-dir '$(STATE_DIR)') $(ARGS)

s3: $(STAMP) ## a local S3 to try the demo on, until Ctrl-C [ARGS=]
	@$(BIN)/python -m tests.servers s3 $(ARGS)

hdfs: $(STAMP) ## a local HDFS to try the demo on, until Ctrl-C [ARGS=]
	@$(BIN)/python -m tests.servers hdfs $(ARGS)

kafka: $(STAMP) ## a local Kafka to try the sink on, until Ctrl-C [ARGS=]
	@$(BIN)/python -m tests.servers kafka $(ARGS)

postgres: $(STAMP) ## a local PostgreSQL to try the sink on, until Ctrl-C [ARGS=]
	@$(BIN)/python -m tests.servers postgres $(ARGS)

test: $(if $(ARGS),,prepare) $(STAMP) ## every promise once, in ten minutes; only the Spark tests with SPARK=4.0.5 [SPARK= PYTHON= ARGS=]
	$(BIN)/pytest $(SIDE_BY_SIDE) $(if $(SPARK),-m 'spark or cluster or smoke') $(or $(ARGS),$(addprefix --ignore=,$(HOUSE_RULES)))

test-fast: $(STAMP) ## of these what needs neither Spark nor servers, in one minute [ARGS=]
	$(BIN)/pytest $(SIDE_BY_SIDE) $(FAST) $(ARGS)

test-all: $(STAMP) ## every case once, in hours [PART=7/20: a part of them] [ARGS=]
	HOLDFAST_TEST_TIER=all HOLDFAST_TEST_PART=$(PART) $(BIN)/pytest $(SIDE_BY_SIDE) --timeout 1800 $(ARGS)

test-long: $(STAMP) ## every case, many times; stops at the first failure [PART= ARGS=]
	HOLDFAST_TEST_TIER=long HOLDFAST_TEST_PART=$(PART) $(BIN)/pytest $(SIDE_BY_SIDE) --timeout 1800 --exitfirst $(ARGS)

record: $(STAMP) ## ask Spark's own operators again what tests/recorded says that they answer [SPARK= ARGS=tests/spark/parity]
	HOLDFAST_TEST_TIER=all HOLDFAST_TEST_RECORD=1 $(BIN)/pytest -p no:benchmark --timeout 1800 \
	    $(or $(ARGS),$(addprefix tests/spark/,operators/test_equal_to_spark.py operators/test_joins.py parity processors))

smoke: $(STAMP) ## the few tests that tell whether a version of Spark or Python works: demo, kill, drop-in [SPARK= PYTHON= ARGS=]
	$(BIN)/pytest $(SIDE_BY_SIDE) -m smoke $(ARGS)

matrix: ## make test on each version of Spark, make smoke on each further Python: takes hours [SPARKS= PYTHONS= ARGS=]
	@for spark in $(SPARKS); do $(MAKE) test SPARK=$$spark || exit 1; done
	@for python in $(PYTHONS); do $(MAKE) smoke SPARK=$(lastword $(SPARKS)) PYTHON=$$python || exit 1; done

check: $(STAMP) types links ## format, lint, types, links, house rules
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/ruff check $(SOURCES)
	MYPYPATH=build/types $(BIN)/mypy -p holdfast -p holdfast_parquet $(addprefix -p ,$(notdir $(wildcard found_by_spark/*)))
	$(BIN)/pytest --quiet $(HOUSE_RULES)

# Packages as links, as an installation would make them: type checkers do not follow package-dir mappings.
types:
	@rm -rf build/types && mkdir -p build/types/holdfast
	@ln -s $(foreach entry,$(filter-out %__pycache__,$(wildcard holdfast/*)) $(FOLDERS),../../../$(entry)) build/types/holdfast/
	@ln -s ../../examples/parquet_backend/src/holdfast_parquet $(addprefix ../../,$(wildcard found_by_spark/*)) build/types/

bench: $(STAMP) ## which backend suits your load, in ten minutes: build/bench.html [ARGS='--keys 5000000 --value-bytes 200 …']
	$(BIN)/holdfast bench run --quick --out build/bench $(ARGS)
	$(BIN)/holdfast bench report build/bench -o build/bench.html

bench-micro: $(STAMP) ## single functions, with pytest-benchmark [ARGS=]
	$(BIN)/pytest benches/micro --benchmark-only -o python_files='*.py' -o timeout=0 $(ARGS)

docs: $(STAMP) ## the documentation as a site, with an API reference: build/docs/README.html
	$(SITE) -b html . build/docs

# The same without pages: fails on a broken link, anchor or docstring. Links to other sites are not fetched.
links: $(STAMP)
	$(SITE) -b dummy . build/docs-check

results: $(STAMP) ## RESULTS.md, the report and README's figures from benches/results, with the suites of a new full run [RUN=]
	$(BIN)/python -m holdfast.benches.report.published $(RUN)

lock: $(STAMP) ## rewrite requirements/*.txt from pyproject.toml [UPGRADE=1: newest versions]
	$(COMPILE) --all-extras pyproject.toml --output-file requirements/lock.txt
	$(COMPILE) requirements/uv.in --output-file requirements/uv.txt
	@for wanted in benches/peers/requirements/*.in; do $(COMPILE) $$wanted --output-file $${wanted%.in}.txt || exit 1; done
	@{ echo '# Written by make lock: the versions of PySpark that SPARK= may name, and what the older ones need with it.'; \
	    for spark in $(SPARKS); do \
	    case $$spark in 4.0.[0-4]|4.1.[0-3]) arrow='pyarrow<26' ;; *) arrow= ;; esac; \
	    case $$spark in 4.0.*) protobuf='protobuf<7' ;; *) protobuf= ;; esac; echo "# Spark $$spark"; \
	    printf '%s\n' "pyspark==$$spark" $$arrow $$protobuf | $(COMPILE) --no-deps --no-header --no-annotate - || exit 1; \
	    done; } >requirements/spark.txt
	@if grep -nE '://|--(extra-)?index-url|--find-links' requirements/*.txt benches/peers/requirements/*.txt; then \
	    echo 'the lock must name no host: see the lines above' >&2; exit 1; fi

dist: $(STAMP) ## sdist and wheel in dist/, checked as PyPI will check them
	rm -rf dist
	$(BIN)/uv build --quiet --no-build-isolation --python $(BIN)/python
	$(BIN)/twine check --strict dist/*
	@grep -q '^Source = ' pyproject.toml || echo 'project.urls has no Source: the links of README are plain text on PyPI' >&2

clean: ## remove the environments and everything that was built
	rm -rf .venv .venv-* build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis .benchmarks
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
