# Two commands: `make trial` and `make test`. Everything they need is set up first; environments are cached outside the checkout.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet

.PHONY: help setup trial check quick test lowest bench mutants controls lint compiled clean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z]+:.*## /{printf "  make %-8s %s\n", $$1, $$2}' Makefile

setup: $(VENV)/.core ## Make .venv with the light core (.venv/bin/seatrial) and the pytest plugins

$(VENV)/.core: pyproject.toml packages/pytest-seatrial/pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Seatrial needs Python 3.11 or newer; set PYTHON=/path/to/python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --editable . --editable packages/pytest-seatrial
	@touch $@

$(VENV)/.dev: $(VENV)/.core
	$(PIP) install --editable '.[dev]' --editable packages/pytest-seatrial
	@touch $@

trial: setup ## Run the default trial: real GRPO training to a verdict and a report
	$(BIN)/seatrial run

lint: $(VENV)/.dev ## Ruff and mypy (strict)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

# Where Python is told to write no bytecode, every process of the tests would compile us anew, and every worker of pytest all tests:
# thirteen seconds each.
check quick test: export PYTHONDONTWRITEBYTECODE :=
compiled: $(VENV)/.dev
	@$(BIN)/python -m compileall -q src packages/pytest-seatrial/src

check: lint compiled ## Lint and a smoke of every room (under a minute)
	$(BIN)/pytest @tests/smoke.txt -m "not real and not slow" -n 2 --dist loadfile -q -o tmp_path_retention_policy=failed

quick: lint compiled ## Lint and all quick tests (minutes)
	$(BIN)/pytest -m "not real and not slow" -n 3 --dist loadfile -q -o tmp_path_retention_policy=failed

test: lint compiled ## Every test, also those that drive a real loop
	@sh scripts/chromium.sh
	@sh scripts/slurm.sh
	@sh scripts/sandbox.sh
	$(BIN)/seatrial env build trl
	$(BIN)/seatrial env build verl-cpu
	$(BIN)/seatrial env build gym
	$(BIN)/seatrial env build vllm-cpu
	$(BIN)/seatrial env build megatron-cpu
	@$(BIN)/python -m tests.runtime.rays
	@$(BIN)/python -m tests.whole

lowest: ## The quick tests of the core with the lowest versions that pyproject.toml allows
	@PYTHON=$(PYTHON) sh scripts/lowest.sh

# What benchmarks run is made up: none of it belongs into the user's history.
bench: export SEATRIAL_HISTORY := off
bench: $(VENV)/.dev ## Benchmarks: ours and the peer's figure on the same work, and the ratio
	$(BIN)/seatrial env build trl
	$(BIN)/python bench/startup.py
	$(BIN)/python bench/event_reader.py --peer-python "$$($(BIN)/python bench/peer.py)"
	$(BIN)/python bench/overhead.py
	$(BIN)/python bench/step_record.py
	$(BIN)/python bench/router.py
	PYTHONPATH=src "$$($(BIN)/python bench/peer.py)" bench/refit_cpu.py
	@sh scripts/slurm.sh
	$(BIN)/python bench/slurm_status.py
	$(BIN)/seatrial env build gym
	$(BIN)/python bench/rollouts_collect.py --gym-python "$$($(BIN)/python bench/peer.py gym)"
	$(BIN)/python bench/rollouts_merge.py
	$(BIN)/python bench/bisect_git.py
	$(BIN)/python bench/bisect_noise.py
	$(BIN)/python bench/tracker.py
	$(BIN)/python bench/select_overhead.py
	$(BIN)/python bench/select_mutations.py
	$(BIN)/python bench/history_store.py
	$(BIN)/python bench/history_steps.py
	$(BIN)/python bench/rollouts_profile.py --gym-python "$$($(BIN)/python bench/peer.py gym)"

mutants: $(VENV)/.dev ## Mutate the lines of a training step, one at a time: how many bugs do the proving levels see?
	$(BIN)/seatrial env build trl
	$(BIN)/python -m bench.mutants.edits
	$(BIN)/python -m bench.mutants --table docs/mutants-table.md

controls: $(VENV)/.dev ## Clean runs under many settings: none may be called wrong
	$(BIN)/seatrial env build trl
	$(BIN)/python -m bench.mutants.controls --table docs/controls-table.md

clean: ## Remove .venv and caches of this checkout (not the environments)
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache build
