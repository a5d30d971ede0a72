"""`seatrial history`: what is printed, what is refused, and what other commands keep by themselves."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from seatrial.core.errors import UserError
from seatrial.history.auto_import import HistorySettings, auto_import, history_settings, import_unit_results, store_path
from seatrial.history.store import Store, point
from tests.history.histories import TEST, filled, history, points, results, run


@pytest.fixture
def store(tmp_path: Path) -> Path:
    with filled(tmp_path / "h.sqlite", 3) as kept:
        kept.add(run(7, trusted=False, why_untrusted="the tree was not clean", dirty=True), points("loss", 1, math.nan))
        kept.mark(2, "throttled")
    return kept.path


def test_show_has_a_line_per_run_with_its_marks(tmp_path: Path, store: Path) -> None:
    answer = history("show", "loss", store=store, cwd=tmp_path)
    assert answer.returncode == 0, answer.stderr
    lines = answer.stdout.splitlines()
    assert len([line for line in lines if "unit" in line]) == 4
    assert "poisoned: throttled" in answer.stdout
    assert "not trusted: the tree was not clean" in answer.stdout
    assert "nan" in answer.stdout


def test_show_says_how_many_runs_it_leaves_out(tmp_path: Path, store: Path) -> None:
    assert "the last 2 of 4 runs" in history("show", "loss", "--limit", "2", store=store, cwd=tmp_path).stdout


def test_show_points_gives_every_step(tmp_path: Path, store: Path) -> None:
    assert [line.split() for line in history("show", "loss", "--points", store=store, cwd=tmp_path).stdout.splitlines()[2:4]] == [
        ["1", "1"],
        ["2", "nan"],
    ]
    assert history("show", "loss", "--points", "--run", "99", store=store, cwd=tmp_path).returncode == 2


def test_an_unknown_metric_names_the_nearest(tmp_path: Path, store: Path) -> None:
    answer = history("show", "los", store=store, cwd=tmp_path)
    assert answer.returncode == 2
    assert "nearest: loss" in answer.stderr


@pytest.mark.parametrize(
    "words", [("show", "loss", "--take", "median"), ("mark", "1"), ("mark", "99", "--reason", "x"), ("runs", "--kind", "toast")]
)
def test_what_makes_no_sense_is_refused(tmp_path: Path, store: Path, words: tuple[str, ...]) -> None:
    assert history(*words, store=store, cwd=tmp_path).returncode == 2


@pytest.mark.parametrize(
    ("words", "said", "there"),
    [
        (("--project", "zz"), "--project zz: no run of this project among all in ", "--project takes one of: 'p'"),
        (("--name", "zz"), "--name zz: no run of this name among all in ", "--name takes one of: 'unit'"),
        (("--project", "p", "--name", "zz"), "--name zz: no run of this name among those of --project p in ", "'unit'"),
        (("--kind", "campaign"), "--kind campaign: no run of this kind among all in ", "--kind takes one of: 'test'"),
        (("--name", "unit", "--branch", "zz"), "--branch zz: no run of this branch among those of --name unit in ", "'main'"),
    ],
)
def test_runs_refuses_options_that_choose_none_and_says_what_there_is(
    tmp_path: Path, store: Path, words: tuple[str, ...], said: str, there: str
) -> None:
    answer = history("runs", *words, store=store, cwd=tmp_path)
    assert (answer.returncode, answer.stdout) == (2, "")
    assert said in answer.stderr
    assert there in answer.stderr


def test_mark_and_clear(tmp_path: Path, store: Path) -> None:
    assert history("mark", "1", "--reason", "wrong driver", store=store, cwd=tmp_path).returncode == 0
    assert "poisoned: wrong driver" in history("runs", store=store, cwd=tmp_path).stdout
    assert history("mark", "1", "--clear", store=store, cwd=tmp_path).returncode == 0
    assert "wrong driver" not in history("runs", store=store, cwd=tmp_path).stdout


def test_without_a_store_the_first_step_is_told(tmp_path: Path) -> None:
    answer = history("show", "loss", store=tmp_path / "none", cwd=tmp_path)
    assert answer.returncode == 2
    assert "seatrial history import" in answer.stderr


def test_the_store_is_found_in_its_order(tmp_path: Path) -> None:
    found = HistorySettings(store=Path("/configured"))
    assert store_path(Path("/asked"), found, {"SEATRIAL_HISTORY": "/variable"}) == Path("/asked")
    assert store_path(None, found, {"SEATRIAL_HISTORY": "/variable"}) == Path("/variable")
    assert store_path(None, found, {}) == Path("/configured")
    assert store_path(None, HistorySettings(), {"XDG_DATA_HOME": "/data"}) == Path("/data/seatrial/history.sqlite")
    assert store_path(None, HistorySettings(), {}) == Path.home() / ".local/share/seatrial/history.sqlite"
    with pytest.raises(UserError, match="turns the history off"):
        store_path(None, HistorySettings(), {"SEATRIAL_HISTORY": "off"})


def test_the_configuration_is_read_strictly(tmp_path: Path) -> None:
    file = tmp_path / "seatrial.toml"
    file.write_text('[history]\nstore = "h.sqlite"\ntrusted = ["trunk"]\n', encoding="utf-8")
    assert history_settings(tmp_path / "below") == HistorySettings(tmp_path / "h.sqlite", ("trunk",))
    file.write_text('[history]\ntrust = ["trunk"]\n', encoding="utf-8")
    with pytest.raises(UserError, match=r"history\.trust") as caught:
        history_settings(tmp_path)
    assert "trusted" in caught.value.fix


def test_keeping_says_one_quiet_line_and_nothing_when_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = results(tmp_path / "unit_results.json")
    assert import_unit_results(path) == ""
    monkeypatch.setenv("SEATRIAL_HISTORY", str(tmp_path / "h.sqlite"))
    assert "kept as run 1 (no baseline: it is not known whether the tree was clean)" in import_unit_results(path)
    with Store(tmp_path / "h.sqlite", write=False) as kept:
        assert len(kept.values(f"{TEST}/_elapsed")) == 1


def test_keeping_that_fails_is_said_and_never_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "h.sqlite").write_text("words " * 1000, encoding="utf-8")
    monkeypatch.setenv("SEATRIAL_HISTORY", str(tmp_path / "h.sqlite"))
    assert auto_import(results(tmp_path / "unit_results.json")).startswith("history: run not recorded: ")
    assert auto_import(tmp_path / "absent").startswith("history: run not recorded: ")


def test_a_defect_in_keeping_is_said_and_never_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SEATRIAL_HISTORY", str(tmp_path / "h.sqlite"))

    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError("defect")

    monkeypatch.setattr("seatrial.history.auto_import._keep", broken)
    assert auto_import(tmp_path) == "history: run not recorded: ZeroDivisionError: defect"


def test_a_single_value_is_a_point_without_a_step(tmp_path: Path) -> None:
    with Store(tmp_path / "h.sqlite", write=True) as kept:
        kept.add(run(1), [point("loss", 2)])
        assert [(one.step, one.value) for one in kept.points(1, "loss")] == [(None, 2.0)]


def test_a_second_reason_says_what_it_replaces(tmp_path: Path, store: Path) -> None:
    answer = history("mark", "2", "--reason", "wrong driver", store=store, cwd=tmp_path)
    assert answer.stdout == "run 2: poisoned: wrong driver (replaces: throttled)\n"
    assert history("mark", "1", "--reason", "new", store=store, cwd=tmp_path).stdout == "run 1: poisoned: new\n"


def test_clearing_says_how_many_marks_went(tmp_path: Path, store: Path) -> None:
    with Store(store, write=True) as kept:
        kept.mark(1, "throttled too")
    answer = history("mark", "3", "--clear", "--and-earlier", store=store, cwd=tmp_path)
    assert answer.stdout.splitlines() == [
        "run 3: had no mark",
        "run 1: may be a baseline again",
        "run 2: may be a baseline again",
        "2 marks cleared",
    ]
    history("mark", "4", "--reason", "x", store=store, cwd=tmp_path)
    own = history("mark", "4", "--clear", store=store, cwd=tmp_path).stdout
    assert "no baseline all the same: the tree was not clean" in own
    assert own.endswith("1 mark cleared\n")
