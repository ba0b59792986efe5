# `make demo` and `make test` set up everything they need; `make help` lists the rest.

# Another interpreter than the distribution's, with PyGObject from PyPI: make test PYTHON=python3.13
PYTHON =
# More arguments for the demo, pytest or the benchmarks: make test ARGS="-k layers"
ARGS =

# Two tests for each core: most of them wait for a process or a timer.
CORES := $(shell nproc)
JOBS := $(shell expr 2 \* $(CORES))
# Seconds for each random walk of test-long.
LONG_S = 600

# The tests start thousands of Python processes. Each would compile all modules again.
unexport PYTHONDONTWRITEBYTECODE

VENV = .venv
READY = $(VENV)/.stamp
# Without the tools for tests: the demo begins 10 seconds earlier.
DEMO_READY = $(VENV)/.demo-stamp
FUZZ_READY = $(VENV)/.fuzz-stamp
BIN = $(VENV)/bin
# By module, because a script's first line would name the place where the clone was set up.
RUN = $(BIN)/python -m
VM = PYTHONPATH=.:vm-tests $(RUN) vmlab.run

.DEFAULT_GOAL = help
.PHONY: help demo test test-fast test-changed test-long test-cluster test-mco test-hosted fuzz check format bench vm-test vm-smoke diagrams picture reports manuals rpm images clean

help:  ## this list
	@sed -n 's/^\([a-z-]*\):.*## /make \1	/p' Makefile

demo: $(DEMO_READY)  ## a pool of three nodes moves to a new OS image, live in this terminal
	@$(BIN)/treenail-lab demo $(ARGS)

test: check  ## check, all tests, and vm-smoke where it is possible: a quarter of an hour on two cores without KVM
	$(RUN) tools.run_tests $(ARGS)

test-fast: $(READY)  ## the unit tests, which start no process: 3 minutes at most
	$(RUN) pytest -n $(JOBS) --dist worksteal --without-processes $(ARGS)

# Its first run records what each test executes, and takes twice as long as test-fast.
test-changed: export TESTMON_DATAFILE = build/testmon
test-changed: $(READY)  ## of the unit tests those that execute changed code: seconds
	@mkdir -p build
	$(RUN) pytest --testmon --without-processes $(if $(wildcard build/testmon),,-n $(JOBS)) $(ARGS)

test-long: $(READY)  ## random walks, power cuts and fuzzing by the thousand: hours
	TREENAIL_WALK_SECONDS=$(LONG_S) $(RUN) pytest -m "walk or long" -n $(CORES) $(ARGS)

# ETCD, KUBE_APISERVER and KUBE_CONTROLLER_MANAGER name programs, or TREENAIL_TEST_KUBECONFIG a cluster.
test-cluster: $(READY)  ## contract and controllers on a real kube-apiserver: minutes; see CONTRIBUTING.md
	$(RUN) tools.test_cluster $(ARGS)

# ARGS="--target NAME --seconds 600"; --list prints the names.
fuzz: $(FUZZ_READY)  ## coverage-guided fuzzing of every reader: 10 minutes each; see CONTRIBUTING.md
	$(RUN) tests.fuzz.run $(ARGS)

# TREENAIL_TEST_MCC, TREENAIL_TEST_MCD and TREENAIL_TEST_MCS name programs; without a name its tests are skipped.
test-mco: $(READY)  ## the agent and controllers with those of the MCO: minutes; see CONTRIBUTING.md
	$(RUN) pytest -p no:cacheprovider -rs tests/mco $(ARGS)

# TREENAIL_TEST_HYPERSHIFT and TREENAIL_TEST_CAPI_MANAGER name programs; without a name its tests are skipped.
test-hosted: $(READY)  ## the programs of HyperShift and Cluster API on two API servers: minutes; see CONTRIBUTING.md
	$(RUN) pytest -p no:cacheprovider -rs tests/hosted $(ARGS)

check: $(READY)  ## format, lint (code and packaging), types and layers, changing nothing: seconds
	$(RUN) ruff format --check .
	$(RUN) ruff check .
	$(RUN) mypy
	$(RUN) tools.lint_packaging
	$(RUN) pytest -q tests/test_layers.py tests/test_style.py

format: $(READY)  ## format the sources
	$(RUN) ruff format .
	$(RUN) ruff check --fix .

bench: $(READY)  ## measure; a table here, and build/bench.json
	$(RUN) bench.run $(ARGS)

reports: $(READY)  ## write docs/what-it-survives.md and docs/what-it-costs.md from docs/records
	$(RUN) tools.reports

vm-test: $(READY)  ## the agent in virtual machines that reboot and lose power; see vm-tests
	$(VM) $(ARGS)

vm-smoke: $(READY)  ## of vm-test one update, whose power is cut: 2 minutes of CPU time once images are made
	$(VM) -m smoke $(ARGS)

diagrams: $(READY)  ## draw docs/*.svg again; needs dot, of the package graphviz
	$(RUN) tools.diagrams

picture: $(READY)  ## draw docs/picture.svg again, from a rollout in the lab: a minute
	$(RUN) tools.picture

manuals: $(READY)  ## write the man pages; read one with: man -l build/man/treenail.8
	$(RUN) tools.manuals build/man

rpm:  ## build the RPMs into build/rpm; on Fedora, with rpm-build and the spec's BuildRequires
	tools/rpm build/rpm

# BASE= an image: build only the image of a node on it, with TARGET=layer (packages) or layer-tree.
images:  ## build the RPMs, and the images of controllers and agent, with podman or buildah
	tools/build_images "$(BASE)" "$(TARGET)" $(ARGS)

clean:  ## remove what the targets wrote, except .venv
	rm -rf build .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find agent lab tests bench tools vm-tests -name __pycache__ -type d -prune -exec rm -rf {} +

$(DEMO_READY): pyproject.toml constraints.txt tools/setup
	@tools/setup $(VENV) controller,lab $(PYTHON)
	@echo "$(PYTHON)" > $@

$(READY): pyproject.toml constraints.txt tools/setup
	@tools/setup $(VENV) controller,lab,dev $(PYTHON)
	@echo "$(PYTHON)" | tee $(DEMO_READY) > $@

$(FUZZ_READY): $(READY)
	$(RUN) pip install --quiet --disable-pip-version-check --no-build-isolation \
	  --constraint constraints.txt --editable ".[fuzz]"
	@touch $@

# The environment was made with another interpreter than the one named now.
ifneq ($(strip $(PYTHON)),)
ifneq ($(strip $(PYTHON)),$(shell cat $(READY) 2>/dev/null))
.PHONY: $(READY)
endif
ifneq ($(strip $(PYTHON)),$(shell cat $(DEMO_READY) 2>/dev/null))
.PHONY: $(DEMO_READY)
endif
endif
