"""Metrics, benchmarks, trials and campaigns."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pytest_seatrial.gpus import gpu_counts, machine_here
from seatrial.core.files import write_json
from seatrial.history.auto_import import TRUSTED
from seatrial.history.importing import Added, Stated, add
from seatrial.history.store import Kind, Store
from seatrial.rollouts.results.profile_build import make_profile
from seatrial.rollouts.results.profile_writer import write_profile
from tests.report import trials
from tests.rollouts import profiled


def imported(tmp_path: Path, path: Path, **stated: object) -> list[Added]:
    with Store(tmp_path / "h.sqlite", write=True) as store:
        return list(add(store, path, Stated(**stated), TRUSTED))  # type: ignore[arg-type]


def values(tmp_path: Path, metric: str) -> list[float | None]:
    with Store(tmp_path / "h.sqlite", write=False) as store:
        return [one.value for one in store.values(metric)]


def test_metrics_json_is_a_run_that_can_be_stated_to_have_passed(tmp_path: Path) -> None:
    file = tmp_path / "exp" / "metrics.json"
    write_json(file, {"train/loss": {"1": 0.5, "2": 0.25}, "note": 3})
    (one,) = imported(tmp_path, file, commit="a" * 40, branch="main", clean=True, passed=True)
    assert one.run is not None
    assert (one.run.kind, one.run.name, one.run.trusted) == (Kind.METRICS, "exp", True)
    assert values(tmp_path, "train/loss") == [0.25]
    assert not imported(tmp_path, file)[0].new


def test_damaged_metrics_are_kept_and_never_trusted(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"step": 1, "loss": 0.5}\n{"step": 2, "lo', encoding="utf-8")
    (one,) = imported(tmp_path, file, commit="a" * 40, branch="main", clean=True, passed=True)
    assert one.run is not None
    assert "torn" in one.run.why_untrusted


def test_metrics_of_two_runs_with_the_same_values_are_two_runs(tmp_path: Path) -> None:
    import os

    for number in (1, 2):
        write_json(tmp_path / str(number) / "metrics.json", {"loss": {"1": 0.5}})
        os.utime(tmp_path / str(number) / "metrics.json", (number, number))
    assert [one.new for one in imported(tmp_path, tmp_path, name="same")] == [True, True]
    assert values(tmp_path, "loss") == [0.5, 0.5]


def test_lines_of_benchmarks_are_runs_and_a_wrong_line_is_told(tmp_path: Path) -> None:
    file = tmp_path / "bench.jsonl"
    line: dict[str, Any] = {"benchmark": "startup", "metrics": {"ms": 80}, "time": 5, "commit": "b" * 40}
    file.write_text(f"{json.dumps(line)}\n{json.dumps(line | {'time': 6})}\n", encoding="utf-8")
    assert [one.new for one in imported(tmp_path, file, project="p")] == [True, True]
    file.write_text(f"{json.dumps(line)}\n{json.dumps(line | {'tiem': 6})}\n", encoding="utf-8")
    (bad,) = imported(tmp_path, file)
    assert bad.error is not None
    assert "bench.jsonl:2: unknown key 'tiem'" in bad.error.message


def test_pytest_benchmark_is_read(tmp_path: Path) -> None:
    file = tmp_path / "0001.json"
    stats = {"min": 1.0, "mean": 1.5, "rounds": 5, "outliers": "1;2"}
    commit = {"id": "c" * 40, "branch": "main", "dirty": False, "project": "p"}
    data = {"machine_info": {"machine": "x86_64", "cpu": {"count": 2}}, "commit_info": commit, "datetime": "2025-03-24T23:34:12+00:00"}
    write_json(file, data | {"benchmarks": [{"name": "test_a", "fullname": "t.py::test_a", "stats": stats}]})
    (one,) = imported(tmp_path, file)
    assert one.run is not None
    assert one.run.trusted
    assert values(tmp_path, "t.py::test_a/mean") == [1.5]


@pytest.fixture
def trial(tmp_path: Path) -> Path:
    path = tmp_path / "trials" / "one"
    found = trials.passed()
    write_json(path / "trial.json", found)
    for level in found.levels:
        folder = path / (level.directory or f"levels/{level.number}-{level.name}")
        folder.mkdir(parents=True)
        (folder / "metrics.jsonl").write_text('{"step": 1, "data": {"loss": 0.5}}\n{"step": 2, "data": {"loss": 0.25}}\n', encoding="utf-8")
    return path


def test_a_trial_gives_the_metrics_of_its_levels(tmp_path: Path, trial: Path) -> None:
    (one,) = imported(tmp_path, trial.parent)
    assert one.run is not None
    assert (one.run.kind, one.run.passed, one.run.trusted) == (Kind.TRIAL, True, False)
    assert "not clean" in one.run.why_untrusted
    level = trials.passed().levels[0]
    assert values(tmp_path, f"{level.number}-{level.name}/loss") == [0.25]


def test_a_trial_that_was_resumed_is_one_run(tmp_path: Path, trial: Path) -> None:
    imported(tmp_path, trial)
    write_json(trial / "trial.json", trials.passed().model_copy(update={"reason": "resumed"}))
    assert imported(tmp_path, trial)[0].new
    with Store(tmp_path / "h.sqlite", write=False) as store:
        assert len(store.runs()) == 1


def test_a_campaign_gives_its_rewards(tmp_path: Path) -> None:
    place = profiled.campaign(tmp_path, {"a": profiled.questions(2)})
    profiled.collected(place, [[profiled.ok(1.0)] * 4, [profiled.ok(0.0)] * 4])
    write_profile(make_profile(place), place.profile)
    (one,) = imported(tmp_path, place.root)
    assert one.run is not None
    assert (one.run.kind, one.run.passed) == (Kind.CAMPAIGN, True)
    assert "no commit" in one.run.why_untrusted
    assert values(tmp_path, "overall/mean") == [0.5]
    write_profile(make_profile(place), place.profile)
    assert not imported(tmp_path, place.root)[0].new


def test_what_names_no_machine_ran_on_an_unknown_one(tmp_path: Path, trial: Path) -> None:
    metrics, lines = tmp_path / "exp" / "metrics.json", tmp_path / "bench.jsonl"
    write_json(metrics, {"loss": {"1": 0.5}})
    lines.write_text('{"benchmark": "startup", "metrics": {"ms": 80}}\n', encoding="utf-8")
    place = profiled.campaign(tmp_path, {"a": profiled.questions(1)})
    profiled.collected(place, [[profiled.ok(1.0)] * 4])
    write_profile(make_profile(place), place.profile)
    for path in (metrics, lines, place.root):
        (one,) = imported(tmp_path, path)
        assert one.run is not None
        assert one.run.machine == "unknown machine"
    (own,) = imported(tmp_path, trial)
    assert own.run is not None
    environment = trials.passed().environment
    assert own.run.machine == (gpu_counts(environment.gpus) if environment and environment.gpus else "unknown machine")


def test_a_machine_can_be_stated_and_is_this_one_right_after_a_run(tmp_path: Path) -> None:
    for name, stated, machine in (("a", {"machine": "8 x H100"}, "8 x H100"), ("b", {"here": True}, machine_here())):
        file = tmp_path / name / "metrics.json"
        write_json(file, {"loss": {"1": 0.5}})
        (one,) = imported(tmp_path, file, **stated)
        assert one.run is not None
        assert one.run.machine == machine
