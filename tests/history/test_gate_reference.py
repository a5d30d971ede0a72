"""What the gate compares with: never the commit under test, never what came later, never two levels at once."""

from __future__ import annotations

from pathlib import Path

import pytest

from seatrial.core.verdict import Verdict
from seatrial.history.store import Store, point
from tests.history.histories import TEST, gate, history, results, run

pytestmark = pytest.mark.slow

GOOD = [0.66, 0.662, 0.658, 0.661, 0.659, 0.663, 0.657, 0.66]
BAD = "b" * 40


def kept(path: Path, values: list[float]) -> Store:
    store = Store(path, write=True)
    for number, value in enumerate(values):
        store.add(run(number), [point("loss", value)])
    return store


def test_a_bad_commit_that_is_run_again_and_again_never_passes(tmp_path: Path) -> None:
    with kept(tmp_path / "h.sqlite", GOOD) as store:
        for again in range(20):
            store.add(run(100 + again, commit=BAD), [point("loss", 0.72)])
            assert gate(store, store.runs()[-1].id or 0).verdict is Verdict.FAIL


def test_neither_does_one_whose_commit_is_written_short(tmp_path: Path) -> None:
    with kept(tmp_path / "h.sqlite", GOOD) as store:
        for again in range(12):
            store.add(run(100 + again, commit=BAD if again % 2 else BAD[:9]), [point("loss", 0.72)])
            assert gate(store, store.runs()[-1].id or 0).verdict is Verdict.FAIL


@pytest.mark.parametrize("count", [5, 6, 7, 8])
def test_later_commits_with_the_same_defect_are_blocked_at_best(tmp_path: Path, count: int) -> None:
    with kept(tmp_path / "h.sqlite", GOOD[:count]) as store:
        verdicts = []
        for later in range(12):
            store.add(run(100 + later), [point("loss", 0.72 + GOOD[later % 8] - 0.66)])
            verdicts.append(gate(store, store.runs()[-1].id or 0).verdict)
    assert Verdict.PASS not in verdicts
    assert verdicts[0] is Verdict.FAIL


def test_a_step_in_the_reference_is_told_with_commands_that_work(tmp_path: Path) -> None:
    values = [*GOOD, *(value + 0.06 for value in GOOD)]
    with kept(tmp_path / "h.sqlite", values) as store:
        store.add(run(100), [point("loss", 0.72)])
    path = store.path
    before = history("gate", store=path, cwd=tmp_path)
    assert before.returncode == 99, before.stdout
    assert "the reference itself changed at run 9, commit 0000000000, 0.66 -> 0.72" in before.stdout
    assert "`seatrial history mark 9 --and-later --reason TEXT`" in before.stdout
    assert "`seatrial history mark 8 --and-earlier --reason TEXT`" in before.stdout
    assert history("mark", "8", "--and-earlier", "--reason", "old level", store=path, cwd=tmp_path).stdout.count("poisoned") == 8
    assert history("gate", store=path, cwd=tmp_path).returncode == 0
    assert history("mark", "8", "--and-earlier", "--clear", store=path, cwd=tmp_path).stdout.count("again") == 8
    assert history("mark", "9", "--and-later", "--reason", "bad level", store=path, cwd=tmp_path).returncode == 0
    assert history("gate", store=path, cwd=tmp_path).returncode == 1


def test_marking_a_side_keeps_reasons_and_other_series(tmp_path: Path) -> None:
    with kept(tmp_path / "h.sqlite", GOOD) as store:
        store.add(run(3, machine="other", digest="other"), [point("loss", 1.0)])
        store.mark(2, "throttled")
    assert history("mark", "4", "--and-earlier", "--reason", "old", store=store.path, cwd=tmp_path).returncode == 0
    with Store(store.path, write=False) as again:
        assert {one.id: one.poisoned for one in again.runs() if one.poisoned} == {1: "old", 2: "throttled", 3: "old", 4: "old"}


def test_a_drift_in_the_reference_is_blocked_too(tmp_path: Path) -> None:
    with kept(tmp_path / "h.sqlite", [1 + number / 10 + GOOD[number % 8] / 50 for number in range(20)]) as store:
        store.add(run(100), [point("loss", 2.5)])
        found = gate(store, store.runs()[-1].id or 0)
    assert found.verdict is Verdict.BLOCKED
    assert "the reference itself drifts from run 1 to run 20" in found.lines()[0]


def test_runs_of_the_same_second_are_ordered_by_their_number(tmp_path: Path) -> None:
    with Store(tmp_path / "h.sqlite", write=True) as store:
        for number in range(12):
            store.add(run(number, time=1e9), [point("loss", 0.66)])
        (judged,) = gate(store, 11).judged
        assert judged.band is not None
        assert judged.band.count == 10, "run 12 comes after run 11"


def test_a_file_that_is_kept_stands_where_its_run_stands(tmp_path: Path) -> None:
    store, ours = tmp_path / "h.sqlite", {"git_branch": "main", "git_dirty": False, "project": "p"}
    files = [
        results(tmp_path / f"r{number}.json", git_commit=f"{number:040x}", metrics={TEST: {"loss": 0.66 + number / 1000}}, **ours)
        for number in range(8)
    ]
    assert history("import", *map(str, files), store=store, cwd=tmp_path).returncode == 0
    assert "of 6 runs" in history("gate", str(files[6]), store=store, cwd=tmp_path).stdout


@pytest.mark.parametrize("made", [False, True])
def test_a_history_without_runs_is_blocked(tmp_path: Path, made: bool) -> None:
    store, file = tmp_path / "h.sqlite", results(tmp_path / "unit_results.json")
    if made:
        Store(store, write=True).__exit__(None, None, None)
    for words in ((), ("3",), (str(file),)):
        answer = history("gate", *words, store=store, cwd=tmp_path)
        assert answer.returncode == 99, answer.stdout + answer.stderr
        assert "no run is kept yet" in answer.stdout
    failed = history("gate", str(results(tmp_path / "bad.json", exit_status=1)), store=store, cwd=tmp_path)
    assert failed.returncode == 1, "a failed run fails with or without baselines"
    assert history("gate", "absent.json", store=store, cwd=tmp_path).returncode == 2
