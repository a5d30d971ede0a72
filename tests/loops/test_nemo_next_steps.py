"""A hub that does not serve: the snapshot that is there is named, with its path."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from seatrial.core.loop import Context
from seatrial.core.records import Diagnosis, LevelResult
from seatrial.core.verdict import Boundary, Verdict
from seatrial.loops.nemo_rl.loop import LOOP

MODEL = "Qwen/Qwen2.5-0.5B"


def result(signature: str) -> LevelResult:
    found = Diagnosis(verdict=Verdict.BLOCKED, boundary=Boundary.ENVIRONMENT, signature=signature)
    return LevelResult(number=0, name="smoke", title="t", verdict=Verdict.BLOCKED, reason="r", diagnosis=found)


def steps(signature: str, model: str = MODEL) -> tuple[str, ...]:
    return LOOP.next_steps(result(signature), Context(run_dir=Path("/r"), python=Path("/p"), model=model))


def test_a_snapshot_in_the_cache_is_named_with_how_to_check_and_use_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    stored = tmp_path / "models--Qwen--Qwen2.5-0.5B"
    place = stored / "snapshots" / "abc"
    place.mkdir(parents=True)
    (stored / "refs").mkdir()
    (stored / "refs" / "main").write_text("abc")
    (place / "config.json").write_text("{}")
    check, use = steps("hub-rate-limit")
    assert f"{place}" in check
    assert "local_files_only=True" in check
    assert f"--model {place}" in use
    assert "HF_HUB_OFFLINE=1" in use


def test_the_command_that_checks_a_snapshot_survives_the_shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "it's mine" / "models--Qwen--Qwen2.5-0.5B"
    monkeypatch.setenv("HF_HUB_CACHE", str(place.parent))
    (place / "snapshots" / "abc").mkdir(parents=True)
    (place / "refs").mkdir()
    (place / "refs" / "main").write_text("abc")
    (place / "snapshots" / "abc" / "config.json").write_text("{}")
    check, use = steps("hub-rate-limit")
    program = shlex.split(check.partition("uv run ")[2])[-1]
    assert f"p = {str(place / 'snapshots' / 'abc')!r};" in program
    compile(program, "program", "exec")
    assert str(place / "snapshots" / "abc") in shlex.split(use)


def test_without_a_snapshot_the_cache_that_was_looked_at_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    (said,) = steps("hub-offline")
    assert f"{tmp_path} holds no snapshot of {MODEL}" in said


def test_other_failures_and_local_models_need_no_snapshot(tmp_path: Path) -> None:
    assert steps("gpu.oom") == ()
    assert steps("hub-rate-limit", str(tmp_path)) == ()


def test_rewards_without_spread_need_more_samples() -> None:
    made = LevelResult(
        number=0, name="smoke", title="t", verdict=Verdict.BLOCKED, reason="r", boundary=Boundary.REWARD, vacuous=True, diagnosis=None
    )
    (said,) = LOOP.next_steps(made, Context(run_dir=Path("/r"), python=Path("/p"), model=MODEL))
    assert "grpo.num_prompts_per_step=8" in said
