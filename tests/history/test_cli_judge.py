"""`seatrial history` trend, gate, calibrate and mark as commands: exit codes, and what bad input is told."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from seatrial.core.files import write_json
from seatrial.history.auto_import import auto_import
from seatrial.history.store import Store, point
from tests.history.histories import TEST, history, results, run
from tests.report import trials

pytestmark = pytest.mark.slow

VALUES = [1.0, 1.01, 0.99, 1.02, 0.98, 1.0, 1.01, 0.99, 1.0, 1.02]


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """30 runs: a level, then one that is 1 higher; the last run is like those before it."""
    with Store(tmp_path / "h.sqlite", write=True) as kept:
        for number in range(30):
            kept.add(run(number), [point("loss", VALUES[number % 10] + (number >= 15)), point("where", "node 1")])
    return kept.path


def test_trend_names_the_commits_around_a_step(tmp_path: Path, store: Path) -> None:
    answer = history("trend", "loss", store=store, cwd=tmp_path)
    assert answer.returncode == 0, answer.stderr
    assert "step" in answer.stdout
    assert "run 15" in answer.stdout
    assert "run 16" in answer.stdout


@pytest.mark.parametrize(("value", "code"), [(2.0, 0), (9.0, 1), (-9.0, 1)])
def test_gate_ends_with_the_verdict(tmp_path: Path, store: Path, value: float, code: int) -> None:
    with Store(store, write=True) as kept:
        kept.add(run(40, trusted=False), [point("loss", value), point("where", "node 2")])
    answer = history("gate", "--last", "10", store=store, cwd=tmp_path)
    assert answer.returncode == code, answer.stdout + answer.stderr
    assert "false alarms, if values are normal: at most 0.0" in answer.stdout
    assert "where: is text" in answer.stdout


def test_gate_is_blocked_by_too_few_baselines(tmp_path: Path) -> None:
    with Store(tmp_path / "few.sqlite", write=True) as kept:
        for number in range(5):
            kept.add(run(number), [point("loss", 1.0)])
    answer = history("gate", store=kept.path, cwd=tmp_path)
    assert answer.returncode == 99
    assert "4 trusted runs, 5 are needed" in answer.stdout


def test_gate_judges_a_file_without_keeping_it(tmp_path: Path) -> None:
    place, store = tmp_path / "r", tmp_path / "h.sqlite"
    ours = {"git_branch": "main", "git_dirty": False, "project": "p"}
    for number in range(6):
        made = {TEST: {"loss": 1 + number / 100}}
        file = results(
            place / f"{number}.json", start_time=f"2025-03-24 23:34:1{number}", metrics=made, git_commit=f"{number:040x}", **ours
        )
        assert history("import", str(file), store=store, cwd=tmp_path).returncode == 0
    good = results(tmp_path / "good.json", start_time="2025-03-25 00:00:00", metrics={TEST: {"loss": 1.02}}, **ours)
    bad = results(tmp_path / "bad.json", start_time="2025-03-25 00:00:00", metrics={TEST: {"loss": 5.0}}, **ours)
    assert history("gate", str(good), store=store, cwd=tmp_path).returncode == 0
    answer = history("gate", str(bad), store=store, cwd=tmp_path)
    assert answer.returncode == 1
    assert "lies above" in answer.stdout
    assert history("gate", str(place), store=store, cwd=tmp_path).returncode == 2, "six runs are not one"
    with Store(store, write=False) as kept:
        assert len(kept.runs()) == 6


def test_calibrate_says_how_many_runs_a_rate_takes(tmp_path: Path, store: Path) -> None:
    few = history("calibrate", "loss", store=store, cwd=tmp_path)
    assert few.returncode == 0, few.stderr
    assert "199 runs are needed" in few.stdout
    enough = history("calibrate", "loss", "--false-alarms", "0.2", store=store, cwd=tmp_path)
    assert "  --check 'mean(data[" in enough.stdout
    assert history("calibrate", "loss", "--false-alarms", "2", store=store, cwd=tmp_path).returncode == 2


def test_a_marked_run_is_no_baseline_until_it_is_cleared(tmp_path: Path, store: Path) -> None:
    for number in range(16, 26):
        assert history("mark", str(number), "--reason", "wrong driver", store=store, cwd=tmp_path).returncode == 0
    assert history("gate", "30", store=store, cwd=tmp_path).returncode == 1, "only old baselines and four new ones are left"
    for number in range(16, 26):
        assert history("mark", str(number), "--clear", store=store, cwd=tmp_path).returncode == 0
    assert history("gate", "30", "--last", "10", store=store, cwd=tmp_path).returncode == 0


@pytest.mark.parametrize("words", [("trend", "los"), ("calibrate", "los"), ("show", "los"), ("gate", "--metric", "los"), ("gate", "999")])
def test_what_is_not_there_is_exit_2_and_named(tmp_path: Path, store: Path, words: tuple[str, ...]) -> None:
    answer = history(*words, store=store, cwd=tmp_path)
    assert answer.returncode == 2, answer.stdout
    assert words[-1] in answer.stderr
    assert "Traceback" not in answer.stderr


def newer(path: Path) -> None:
    with Store(path, write=True):
        pass
    with sqlite3.connect(path) as opened:
        opened.execute("UPDATE meta SET value = '99'")
    opened.close()


STORES: dict[str, Callable[[Path], object]] = {
    "newer": newer,
    "directory": Path.mkdir,
    "empty": Path.touch,
    "words": lambda path: path.write_text("words " * 1000, encoding="utf-8"),
}


@pytest.mark.parametrize("words", [("show", "loss"), ("trend", "loss"), ("gate",), ("calibrate", "loss"), ("mark", "1", "--clear")])
@pytest.mark.parametrize("kind", STORES)
def test_a_store_that_cannot_be_used_is_exit_2_and_named(tmp_path: Path, kind: str, words: tuple[str, ...]) -> None:
    place = tmp_path / "odd.sqlite"
    STORES[kind](place)
    answer = history(*words, store=place, cwd=tmp_path)
    assert answer.returncode == 2, answer.stdout + answer.stderr
    assert "odd.sqlite" in answer.stderr
    assert "Traceback" not in answer.stderr


@pytest.mark.parametrize("content", ["", '{"exit_status": 0, "metr', "[1, 2]", "3"])
def test_a_file_that_is_torn_or_empty_is_exit_2_for_import_and_gate(tmp_path: Path, store: Path, content: str) -> None:
    file = tmp_path / "unit_results.json"
    file.write_text(content, encoding="utf-8")
    for word in ("import", "gate"):
        answer = history(word, str(file), store=store, cwd=tmp_path)
        assert answer.returncode == 2, answer.stdout + answer.stderr
        assert "unit_results.json" in answer.stderr
        assert "Traceback" not in answer.stderr


def test_a_finished_run_directory_goes_from_import_to_show(tmp_path: Path) -> None:
    directory = tmp_path / "trial"
    trials.write_run(directory, trials.passed())
    write_json(directory / "trial.json", trials.passed())
    store = tmp_path / "h.sqlite"
    assert history("import", str(directory), store=store, cwd=tmp_path).returncode == 0
    shown = history("show", "*/seconds", store=store, cwd=tmp_path)
    assert shown.returncode == 0, shown.stderr
    assert "trial" in shown.stdout


def test_queries_read_their_words_without_pydantic(tmp_path: Path, store: Path) -> None:
    import subprocess
    import sys

    code = (
        "import json, sys\nfrom seatrial.cli.history import app\n"
        f"try:\n    app(['show', 'loss', '--limit', '3', '--store', {str(store)!r}])\nexcept SystemExit:\n    pass\n"
        "print(json.dumps('pydantic' in sys.modules))\n"
    )
    answer = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True)
    assert "the last 3 of 30 runs" in answer.stdout
    assert json.loads(answer.stdout.splitlines()[-1]) is False


@pytest.mark.parametrize("command", ["show", "trend", "calibrate"])
def test_all_that_take_metrics_choose_runs_alike(tmp_path: Path, store: Path, command: str) -> None:
    help_ = history(command, "--help", store=store, cwd=tmp_path).stdout
    assert all(f"--{option} " in help_ for option in ("store", "project", "name", "machine", "take"))
    nobody = history(command, "*", "--machine", "no such machine", store=store, cwd=tmp_path)
    everybody = history(command, "*", store=store, cwd=tmp_path)
    assert everybody.returncode == 0, everybody.stderr
    assert nobody.stdout != everybody.stdout
    wrong = history(command, "*", "--take", "middle", store=store, cwd=tmp_path)
    assert (wrong.returncode, "--take middle" in wrong.stderr) == (2, True)


def test_a_path_whose_run_is_kept_is_judged_as_that_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SEATRIAL_HISTORY", str(tmp_path / "h.sqlite"))
    file = tmp_path / "out" / "metrics.json"
    write_json(file, {"loss": {"1": 0.5}})
    assert "kept as run 1" in auto_import(file, project="p", name="functional out", passed=False)
    answer = history("gate", str(file), store=tmp_path / "h.sqlite", cwd=tmp_path)
    assert (answer.returncode, "the run itself failed" in answer.stdout) == (1, True), answer.stdout
    assert "name no machine" not in answer.stdout
    write_json(file, {"loss": {"1": 0.75}})
    other = history("gate", str(file), store=tmp_path / "h.sqlite", cwd=tmp_path)
    assert (other.returncode, "--machine names it" in other.stdout) == (99, True), other.stdout


@pytest.mark.parametrize(("option", "own"), [("--project", "p"), ("--name", "unit"), ("--machine", "m")])
def test_a_number_of_a_run_that_is_not_what_the_options_say_is_refused(tmp_path: Path, store: Path, option: str, own: str) -> None:
    words = ("gate", "30", "--last", "10", option)
    assert history(*words, own, store=store, cwd=tmp_path).returncode == 0
    wrong = history(*words, "zz", store=store, cwd=tmp_path)
    assert wrong.returncode == 2, wrong.stdout
    assert f"{option} zz: run 30 is of {option[2:]} {own!r}" in wrong.stderr


FILTERS = {"--project": "'p'", "--name": "'unit'", "--machine": "'m'"}
HAVE = [
    *((words, option) for words in (("show", "loss"), ("trend", "loss"), ("calibrate", "loss"), ("gate",)) for option in FILTERS),
    (("export",), "--project"),
    (("export",), "--name"),
    (("compare", "0" * 40, f"{1:040x}"), "--project"),
]


@pytest.mark.parametrize(("words", "option"), HAVE)
def test_options_that_choose_no_run_are_named_with_what_there_is(tmp_path: Path, store: Path, words: tuple[str, ...], option: str) -> None:
    answer = history(*words, option, "zz", store=store, cwd=tmp_path)
    assert (answer.returncode, answer.stdout) == (2, "")
    assert f"{option} zz: no run of this {option[2:]} among all in {store}" in answer.stderr
    assert f"{option} takes one of: {FILTERS[option]}" in answer.stderr


def test_options_that_choose_runs_only_one_by_one_are_told_so(tmp_path: Path, store: Path) -> None:
    with Store(store, write=True) as kept:
        kept.add(run(50, name="other", machine="n"), [point("reward", 1.0)])
    both = history("show", "loss", "--name", "other", "--machine", "m", store=store, cwd=tmp_path)
    assert (both.returncode, both.stdout) == (2, "")
    assert "--machine m: no run of this machine among those of --name other" in both.stderr
    assert "--machine takes one of: 'n'" in both.stderr
    for command in ("show", "trend", "calibrate", "export"):
        lacks = history(command, "loss", "--name", "other", store=store, cwd=tmp_path)
        assert (lacks.returncode, lacks.stdout) == (2, ""), command
        assert "among those of --name other" in lacks.stderr
