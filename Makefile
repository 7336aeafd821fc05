# make demo | test | test-all | test-stacks | test-oldest | lint | docs | test-gpu | clean. Each of them makes .venv first; PYTHON=... picks the interpreter for it.

VENV := .venv
READY := $(VENV)/.ready
RUN := $(VENV)/bin/python
OLDEST := $(VENV)/oldest
EXTRA := $(VENV)/extra
STACKS := $(VENV)/stacks
# The tests that need what is in EXTRA.
WITH_EXTRA := $(addprefix tests/test_,torchtitan.py results.py model_benchmarks.py)
# The tests start several processes each; without this every one of them takes all cores.
export OMP_NUM_THREADS ?= 1
# For the same reason Python keeps what it has compiled, also where the environment tells it not to.
unexport PYTHONDONTWRITEBYTECODE
# Python's objects lie in huge pages, of systems that give them to those who ask. In a virtual machine, looking up small
# ones took 0.8 of the 1.0 s of a loop over a dict, and 13 of 53 s, and 63 of 107 s, of two files of tests of passes.
export GLIBC_TUNABLES ?= glibc.malloc.hugetlb=1
export PYTHONMALLOC ?= malloc

.PHONY: help setup demo test test-all test-stacks test-oldest test-gpu lint docs clean
help:
	@echo "make demo      two ranks run a small Llama through Ditron and compare it with eager"
	@echo "make test      the tests that need no GPU, without the mutations"
	@echo "make test-all  every case of them, pictures and TorchTitan: about 45 minutes on two cores"
	@echo "make test-stacks  DeepSpeed, Fabric, Megatron, torchao and vLLM, which it installs (1.1 GB): about 7 minutes on two cores"
	@echo "make test-oldest  whether kernels compile with the oldest Triton that is supported, without a GPU"
	@echo "make test-gpu  the suite that needs two or more GPUs"
	@echo "make lint      ruff, mypy, file lengths"
	@echo "make docs      the documentation as a site, in build/site; broken links are errors"
	@echo "make clean     remove .venv and what the tools left"

setup: $(READY)

$(READY): pyproject.toml .ci/setup
	@.ci/setup $(VENV)
	@touch $@

demo: $(READY)
	@$(RUN) -m ditron_inductor demo

test: $(READY)
	$(RUN) -m pytest -q -m "not gpu" -n 4

test-all: $(READY) $(EXTRA)
	$(RUN) -m pytest -q -m "not gpu" -n 3 --all-cases $(addprefix --ignore=,$(WITH_EXTRA))
	PYTHONPATH=$(CURDIR)/$(EXTRA) $(RUN) -m pytest -q -m "not gpu" -n 2 --all-cases $(WITH_EXTRA)

$(EXTRA): $(READY) .ci/extra.txt
	rm -rf $@
	$(RUN) -m pip install --disable-pip-version-check --quiet --no-deps --target $@ --requirement .ci/extra.txt
	@touch $@

# Tests with ranks run one after the other, which needs no pytest-xdist; -rs says why a test was skipped.
test-stacks: $(READY) $(STACKS)
	PYTHONPATH=$(CURDIR)/$(STACKS) $(RUN) -m pytest -q -rs -n 0 tests/stacks tests/test_vllm.py

# DeepSpeed is built from its sources, beside the environment's torch, and without its kernels.
$(STACKS): $(READY) .ci/stacks.txt
	rm -rf $@
	DS_BUILD_OPS=0 $(RUN) -m pip install --disable-pip-version-check --quiet --no-deps --no-build-isolation --target $@ \
	    --requirement .ci/stacks.txt
	@touch $@

test-oldest: $(OLDEST)
	PYTHONPATH=$(CURDIR)/$(OLDEST) $(RUN) -m pytest -q -n 2 tests/lowering/test_*_compile.py

$(OLDEST): $(READY)
	$(RUN) -m pip install --disable-pip-version-check --quiet --no-deps --target $@ triton==3.6.0

test-gpu: $(READY)
	$(RUN) -m pytest -q -m gpu

lint: $(READY)
	$(RUN) -m ruff check .
	$(RUN) -m mypy
	$(RUN) .ci/layout.py

docs: $(VENV)/.docs
	@NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs build --strict
	@echo "docs: open build/site/index.html"

# The extra's own packages alone: building the site reads the sources and imports neither Ditron nor torch.
$(VENV)/.docs: $(READY)
	@$(RUN) -c 'import tomllib; \
	    print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"], sep="\n")' \
	    > $(VENV)/docs.txt
	$(RUN) -m pip install --disable-pip-version-check --quiet --requirement $(VENV)/docs.txt
	@touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache
