"""Every silent fault of a training step fails its level, and the step proof names its stage.

Drivers and shadows are forked from one process that has imported everything, which the benchmark of mutants does, too.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from bench.mutants.harness import Server, judged, phases_of, run

from seatrial.checks.step import limitations, step_checks
from seatrial.core.verdict import Verdict
from seatrial.instruments.shadow.interface import STAGES
from seatrial.instruments.trl.fault_names import AT_LEVEL_1, FAULTS, STEP
from seatrial.runtime.environments import Environment

pytestmark = pytest.mark.real

NAMED = {name: fault for name, fault in FAULTS.items() if fault.stage and fault.levels != (5,)}
"""Those of pictures are in test_faults.py."""
STEPS = 4
"""Warm-up, and an update whose weights the same generation is used with again."""
LONGER = {"other-sync-alpha": 6, "never-synced": 6}
"""The reference is synced after step 3, and the generation before step 5 is the first to see it."""
WITH_TENSOR = ("weights", "clip")
WITH_ROW = ("length", "reward", "advantage", "reference", "logprob", "ratio", "mask")
"""Stages whose every message has the row that is wrong."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the model is made once."""
    return tmp_path_factory.mktemp("models")


def test_every_stage_has_three_faults() -> None:
    count = Counter(fault.stage for fault in NAMED.values())
    stages = set(STAGES) - {"value"}  # of a critic, which GRPO has none of
    assert {stage: count[stage] for stage in stages if count[stage] < 3} == {}
    assert set(STEP) == stages
    assert set(AT_LEVEL_1) <= set(NAMED)


@pytest.mark.parametrize("level", [0, 1])
def test_without_a_fault_the_same_run_passes(level: int, server: Server, environment: Environment, tmp_path: Path) -> None:
    assert run(server, level, tmp_path / str(level), environment.python, short=True, words=("--max_steps", str(STEPS))) is None


def _rows() -> list[Any]:
    """All faults; of each stage two are run, unless all are asked for."""
    rows, seen = [], Counter[str]()
    for name, fault in NAMED.items():
        seen[fault.stage] += 1
        more = seen[fault.stage] > 2 and not os.environ.get("SEATRIAL_ALL_LEVELS")
        rows.append(pytest.param(name, marks=pytest.mark.skipif(more, reason="two of each stage are run: SEATRIAL_ALL_LEVELS=1 runs it")))
    return rows


@pytest.mark.parametrize("name", _rows())
def test_fault_is_named_at_its_stage(name: str, server: Server, environment: Environment, tmp_path: Path, models: Path) -> None:
    fault, steps = NAMED[name], LONGER.get(name, STEPS)
    level, words = fault.levels[0], ("--max_steps", str(steps))
    place = tmp_path / str(level)
    how: dict[str, Any] = {"words": words, "options": ("--fault", name), "run_dir": models}
    run(server, level, place, environment.python, short=True, **how)
    verdict, missed = judged(level, place, steps)
    assert verdict.verdict is Verdict.FAIL, verdict.reason
    found = next(check for check in missed if check.stage)
    assert found.stage == fault.stage, found.message
    assert found.step is not None
    assert found.step >= 1
    assert re.match(rf"step {found.step}(, \w+ [\w.]+)*: .+: expected .+, found .+", found.message), found.message
    assert bool(found.tensor) or fault.stage not in WITH_TENSOR, found.message
    assert ", row " in found.message or fault.stage not in WITH_ROW, found.message


def test_an_architecture_that_the_release_does_not_know_is_a_limitation(server: Server, environment: Environment, tmp_path: Path) -> None:
    place, words = tmp_path / "0", ("--max_steps", str(STEPS))
    assert run(server, 0, place, environment.python, short=True, words=words) is None
    config = tmp_path / "models" / "tiny-dense" / "config.json"
    config.write_text(config.read_text(encoding="utf-8").replace('"qwen2"', '"novel"'), encoding="utf-8")
    words_file = config.with_name("tokenizer_config.json")  # without an architecture nothing else tells the tokenizer's class
    words_file.write_text(words_file.read_text(encoding="utf-8").replace("TokenizersBackend", "Qwen2Tokenizer"), encoding="utf-8")
    shadow = phases_of(0, place, environment.python, words)[1]
    argv = [word for word in shadow.argv[3:] if word != "--variants"]
    assert server.ask(module="shadow", argv=argv, log=str(tmp_path / "log"), timeout=120)["exit"] == 0
    made = {check.stage: check for check in step_checks(place / "run", "run", STEPS)}
    assert {"data", "length", "reward", "schedule", "update"} <= set(made)
    assert not {"gradient", "logprob", "sampling", "logging"} & set(made)
    assert all(check.passed for check in made.values())
    assert any("does not know the architecture 'novel'" in text for text in limitations([place / "run"]))
