"""What the commands of the history say and refuse: exports, single runs, torn files, numbers in sentences, checks from calibrate."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from seatrial.evidence.git import git, line
from seatrial.history.auto_import import import_unit_results
from seatrial.history.store import Store, point
from seatrial.metrics.read import read_metrics
from tests.history.histories import TEST, filled, history, points, results, run

OURS = {"git_branch": "main", "git_dirty": False, "project": "p"}


@pytest.fixture
def store(tmp_path: Path) -> Path:
    with filled(tmp_path / "h.sqlite", 3) as kept:
        kept.add(run(9), points("other", 1))
    return kept.path


def test_show_of_one_run_shows_that_run_only(tmp_path: Path, store: Path) -> None:
    answer = history("show", "*", "--run", "2", store=store, cwd=tmp_path)
    assert answer.returncode == 0, answer.stderr
    assert [row.split()[0] for row in answer.stdout.splitlines() if " unit " in row] == ["2"]
    for more in ((), ("--points",)):
        wrong = history("show", "*", "--run", "99", *more, store=store, cwd=tmp_path)
        assert (wrong.returncode, "99" in wrong.stderr) == (2, True)


def test_an_export_says_what_it_wrote(tmp_path: Path, store: Path) -> None:
    for name, said in (("a.json", "json, 4 runs"), ("a.jsonl", "json, 4 runs"), ("a.csv", "csv, 4 rows"), ("A.CSV", "csv, 4 rows")):
        answer = history("export", "--out", name, store=store, cwd=tmp_path)
        assert answer.stdout == f"wrote {name}: {said}\n", answer.stderr
    assert (tmp_path / "a.csv").read_text(encoding="utf-8").startswith("run,start_time,")
    assert history("export", "--out", "a.txt", "--format", "csv", store=store, cwd=tmp_path).returncode == 0


def test_an_ending_against_the_format_is_refused_and_nothing_is_written(tmp_path: Path, store: Path) -> None:
    answer = history("export", "--out", "a.json", "--format", "csv", store=store, cwd=tmp_path)
    assert (answer.returncode, "the ending says json" in answer.stderr) == (2, True)
    assert not (tmp_path / "a.json").exists()
    assert history("export", "--out", "a.txt", store=store, cwd=tmp_path).returncode == 2


def test_torn_results_of_any_name_are_told_when_a_directory_is_imported(tmp_path: Path) -> None:
    place = tmp_path / "r"
    results(place / "good.json", **OURS)
    torn = results(place / "torn.json", **OURS)
    torn.write_text(torn.read_text(encoding="utf-8")[:60], encoding="utf-8")
    (place / "notes.json").write_text("{ not ours", encoding="utf-8")
    answer = history("import", str(place), store=tmp_path / "h.sqlite", cwd=tmp_path)
    assert answer.returncode == 2
    assert "torn.json: not imported" in answer.stderr
    assert "notes.json" not in answer.stderr
    assert "good.json: run 1" in answer.stdout


def test_one_is_singular(tmp_path: Path, store: Path) -> None:
    file = results(tmp_path / "unit_results.json", metrics={TEST: {"loss": 1.0}})
    assert ", 1 point, " in history("import", str(file), store=store, cwd=tmp_path).stdout
    assert history("show", "other", "--points", store=store, cwd=tmp_path).stdout.splitlines()[0].endswith(", 1 point")
    assert ": 1 run, " in history("trend", "other", store=store, cwd=tmp_path).stdout


def test_the_fix_of_a_wrong_metric_is_a_command_that_works(tmp_path: Path, store: Path) -> None:
    answer = history("gate", "--metric", "*/lss", store=store, cwd=tmp_path)
    assert (answer.returncode, "seatrial history show '*' lists" in answer.stderr) == (2, True)
    assert history("show", "*", store=store, cwd=tmp_path).returncode == 0


def test_checks_of_calibrate_judge_the_results_they_came_from(tmp_path: Path) -> None:
    import shlex

    metric = f"{TEST}[it's]/loss"
    with Store(tmp_path / "h.sqlite", write=True) as kept:
        for number in range(30):
            kept.add(run(number), [point(metric, 1 + (number * 7 % 10) / 100), point("coverage", 80 + number * 7 % 10)])
    said = history("calibrate", "*", "--false-alarms", "0.2", store=kept.path, cwd=tmp_path).stdout
    checks = [shlex.split(row)[1] for row in said.splitlines() if row.startswith("  --check ")]
    assert len(checks) == 4, said
    for value, code in ((1.05, 0), (3.0, 1), ("slow", 1), (None, 1)):
        file = results(tmp_path / "unit_results.json", metrics={f"{TEST}[it's]": {"loss": value}}, coverage=85)
        command = [sys.executable, "-m", "seatrial.cli.main", "check", str(file), *checks]
        answer = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
        assert answer.returncode == code, answer.stdout + answer.stderr


def test_results_are_series_of_one_point_and_text_is_none(tmp_path: Path) -> None:
    found = read_metrics([results(tmp_path / "unit_results.json", metrics={TEST: {"loss": 2, "where": "node 1"}})])
    assert {tag: (list(series.steps), list(series.values)) for tag, series in found.series.items()} == {f"{TEST}/loss": ([0], [2.0])}
    assert found.scalars["exit_status"] == 0
    torn = read_metrics([results(tmp_path / "unit_results.json", metrics={TEST: 3})])
    assert "is no table of metrics" in str(torn.damage[0])


def test_results_in_another_repository_are_vouched_for_by_that_of_the_session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("own", "other"):
        (tmp_path / name).mkdir()
        git(tmp_path / name, "init", "-q", "-b", "main")
        git(tmp_path / name, "-c", "user.name=a", "-c", "user.email=a@b", "commit", "-q", "--allow-empty", "-m", name)
    monkeypatch.setenv("SEATRIAL_HISTORY", str(tmp_path / "h.sqlite"))
    commit = line(git(tmp_path / "own", "rev-parse", "HEAD"))
    file = results(tmp_path / "other" / "unit_results.json", git_commit=commit, **OURS)
    assert import_unit_results(file, repo=tmp_path / "own") == f"history: kept as run 1 in {tmp_path / 'h.sqlite'}"
    second = results(tmp_path / "other" / "unit_results.json", git_commit=commit, start_time="2025-03-24 23:34:13", **OURS)
    assert "is not known in" in import_unit_results(second)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--format", "xml"), "--format xml: no such format"),
        (("--format", "xml", "--out", "a.csv"), "--format xml: no such format"),
        (("--out", "a.xml"), "--out a.xml: .xml is the ending of no format"),
    ],
)
def test_a_format_that_there_is_not_names_the_option_and_those_there_are(
    tmp_path: Path, store: Path, words: tuple[str, ...], said: str
) -> None:
    answer = history("export", *words, store=store, cwd=tmp_path)
    assert answer.returncode == 2
    assert said in answer.stderr
    assert "--format takes one of json, csv, parquet" in answer.stderr


def test_the_gate_leaves_out_what_is_excluded(tmp_path: Path, store: Path) -> None:
    with Store(store, write=True) as kept:
        for number in range(20, 30):
            kept.add(run(number, name="timed"), [point("t::a/loss", 1.0), point("t::a/odd", float(number % 2) * 1000 * (number == 29))])
    judged = history("gate", "--name", "timed", store=store, cwd=tmp_path)
    assert judged.returncode == 1, judged.stdout
    without = history("gate", "--name", "timed", "--exclude", "*/odd", store=store, cwd=tmp_path)
    assert (without.returncode, "left out by --exclude '*/odd': 1 metric" in without.stdout) == (0, True), without.stdout
