"""A Pass does not survive what is done to its files afterwards; an untouched, copied or re-reported trial stays one."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest

from seatrial.core.files import read_json, read_model, write_json
from seatrial.core.records import Report, Trial
from seatrial.core.verdict import Verdict
from seatrial.history import import_runs as history
from seatrial.report.outcomes import OLDER
from seatrial.trial import run_dir
from tests.cli.command import Answer, inside
from tests.trial.fake import FakeLoop
from tests.trial.test_signals import run_words

PASS, FAIL, BLOCKED = 0, 1, 99
NAN = '{"step": 1, "train/loss": "NaN", "train/reward": 1}\n{"step": 2, "train/loss": 0.5, "train/reward": 2}\n'
CRASH = (
    'fake: imports\nfake: model\nTraceback (most recent call last):\n  File "x.py", line 1, in <module>\nRuntimeError: the model broke\n'
)


def call(*words: str | Path) -> Answer:
    with mock.patch("seatrial.loops.get_loop", return_value=FakeLoop()):
        return inside(*words, cwd=Path("/"))


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trial of two levels that passed."""
    out = tmp_path_factory.mktemp("recorded") / "run"
    with mock.patch("seatrial.runtime.process._TICK_S", 0.05), mock.patch.object(os, "fsync"):
        answer = call(*run_words(out, "0-1"))
    assert answer.code == PASS, answer.err
    return out


@pytest.fixture
def run(recorded: Path, tmp_path: Path) -> Path:
    """A copy of it, which a test may alter."""
    return Path(shutil.copytree(recorded, tmp_path / "elsewhere" / "copy"))


def replace(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def edit(path: Path, change: Callable[[dict[str, object]], None]) -> None:
    data = read_json(path)
    change(data)
    write_json(path, data)


def swap(run: Path) -> None:
    one, two = run / "levels/0-smoke/run.log", run / "levels/1-second/run.log"
    one.write_text("fake: imports\nfake: model\nfake: step 3\nfake: done\nlevel 0\n")
    kept = one.read_bytes()
    one.write_bytes(two.read_bytes())
    two.write_bytes(kept)


def link(run: Path) -> None:
    log = run / "levels/0-smoke/run.log"
    log.rename(run / "moved.log")
    log.symlink_to(run / "moved.log")


def link_level(run: Path) -> None:
    (run / SMOKE).rename(run / "moved")
    (run / SMOKE).symlink_to(run / "moved")


def without_level(data: dict[str, object]) -> None:
    data["levels"] = data["levels"][:1]  # type: ignore[index]
    data["plan"]["levels"] = data["plan"]["levels"][:1]  # type: ignore[index]


def all_false(path: Path) -> None:
    write_json(path, [{**check, "passed": False} for check in read_json(path)])


def as_failed(path: Path) -> None:
    edit(path, lambda data: data.update(verdict="Fail", reason="it failed"))


SMOKE = "levels/0-smoke"
FALSIFIED: dict[str, tuple[Callable[[Path], object], int, str]] = {
    "metrics of the level are NaN": (lambda run: (run / SMOKE / "metrics.jsonl").write_text(NAN), FAIL, f"{SMOKE}/metrics.jsonl changed"),
    "metrics of the run are NaN": (lambda run: (run / SMOKE / "run/metrics.jsonl").write_text(NAN), FAIL, "run/metrics.jsonl changed"),
    "the log is a crash": (lambda run: (run / SMOKE / "run.log").write_text(CRASH), FAIL, f"{SMOKE}/run.log changed"),
    "checks are all false": (lambda run: all_false(run / SMOKE / "checks.json"), FAIL, "checks.json changed"),
    "facts are empty": (lambda run: (run / SMOKE / "run/facts.jsonl").write_text(""), BLOCKED, "run/facts.jsonl changed"),
    "facts are gone": (lambda run: (run / SMOKE / "run/facts.jsonl").unlink(), FAIL, "run/facts.jsonl is gone"),
    "evidence is gone": (lambda run: shutil.rmtree(run / "evidence"), BLOCKED, "evidence/config.json is gone"),
    "a piece of evidence is gone": (lambda run: (run / "evidence/environment.json").unlink(), BLOCKED, "environment.json is gone"),
    "evidence is edited": (lambda run: replace(run / "evidence/config.json", "{", "{ "), BLOCKED, "evidence/config.json changed"),
    "imports are edited": (lambda run: write_json(run / "evidence/imports.json", []), BLOCKED, "evidence/imports.json changed"),
    "a level is gone": (lambda run: shutil.rmtree(run / SMOKE), FAIL, f"{SMOKE}/run.log is gone"),
    "a level is renamed": (lambda run: (run / SMOKE).rename(run / "levels/5-smoke"), FAIL, f"{SMOKE}/run.log is gone"),
    "a level failed by its own record": (lambda run: as_failed(run / SMOKE / "result.json"), FAIL, "result.json changed"),
    "a reason was edited": (lambda run: replace(run / SMOKE / "result.json", "smoke works", "it works"), BLOCKED, "result.json changed"),
    "the record of a level is gone": (lambda run: (run / SMOKE / "result.json").unlink(), BLOCKED, "result.json is gone"),
    "the verdict was edited": (
        lambda run: edit(run / "trial.json", lambda data: data.update(reason="fine")),
        BLOCKED,
        "trial.json was edited",
    ),
    "a level is gone from the record": (lambda run: edit(run / "trial.json", without_level), BLOCKED, "trial.json was edited"),
    "digests are gone": (lambda run: edit(run / "trial.json", lambda data: data.update(files={})), BLOCKED, "has no digests"),
    "digests and seal are gone": (
        lambda run: edit(run / "trial.json", lambda data: data.update(files={}, seal="")),
        BLOCKED,
        "older Seatrial",
    ),
    "files are swapped": (swap, BLOCKED, "levels/1-second/run.log changed"),
    "a level is a link": (link_level, BLOCKED, f"{SMOKE} is a link now"),
    "a file is a link": (link, BLOCKED, f"{SMOKE}/run.log is a link now"),
    "a file lost its last byte": (
        lambda run: (run / SMOKE / "run.log").write_bytes((run / SMOKE / "run.log").read_bytes()[:-1]),
        BLOCKED,
        "run.log changed",
    ),
    "the command was edited": (lambda run: replace(run / SMOKE / "command.sh", "level 0", "level 1"), BLOCKED, "command.sh changed"),
    "metrics were added": (lambda run: (run / SMOKE / "run/more.jsonl").write_text(NAN), BLOCKED, "run/more.jsonl was added"),
}


@pytest.mark.parametrize("name", FALSIFIED)
def test_a_pass_does_not_survive(run: Path, name: str) -> None:
    falsify, code, said = FALSIFIED[name]
    falsify(run)
    record = (run / "trial.json").read_bytes()
    answer = call("report", run)
    assert answer.code == code, answer.out
    assert said in answer.out
    assert "Result: Pass" not in answer.out
    built = read_model(run / "report.json", Report)
    assert built.trial.alterations
    assert call("report", run).code == code  # again: nothing was learned from what is there now
    resumed = call("resume", run)
    assert resumed.code == code, resumed.err
    assert said in resumed.out
    assert (run / "trial.json").read_bytes() == record


def touch_all(run: Path) -> None:
    for path in run.rglob("*"):
        os.utime(path, (1, 1))


def add_attempt(run: Path) -> None:
    (run / SMOKE / "attempts/1").mkdir(parents=True)
    (run / SMOKE / "attempts/1/run.log").write_text(CRASH)


def without_reports(run: Path) -> None:
    for name in ("report.json", "summary.md", "report.html", "junit.xml"):
        (run / name).unlink()


def make_read_only(run: Path) -> None:
    for path in run.rglob("*"):
        if path.is_file():
            path.chmod(0o444)


HARMLESS: dict[str, Callable[[Path], object]] = {
    "nothing": lambda _: None,
    "desktop files": lambda run: [(run / place / ".DS_Store").write_text("x") for place in (".", SMOKE, "evidence", f"{SMOKE}/run")],
    "notes": lambda run: [(run / place / "notes.txt").write_text("x") for place in (".", SMOKE, "evidence")],
    "an editor": lambda run: (run / SMOKE / "run.log~").write_text("x"),
    "a summary of one's own": lambda run: (run / "summary.md").write_text("mine"),
    "reports are gone": without_reports,
    "touched": touch_all,
    "instruments are gone": lambda run: shutil.rmtree(run / "instruments"),
    "an attempt": add_attempt,
    "read-only": make_read_only,
}


@pytest.mark.parametrize("name", HARMLESS)
def test_a_healthy_trial_stays_a_pass(run: Path, name: str) -> None:
    HARMLESS[name](run)
    for _ in range(2):
        answer = call("report", run)
        assert answer.code == PASS, answer.out
        assert read_model(run / "report.json", Report).trial.alterations == ()
    assert call("resume", run).code == PASS
    assert call("report", run).code == PASS


def test_deleted_checkpoints_are_no_evidence(run: Path) -> None:
    trial = read_model(run / "trial.json", Trial)
    place = run / SMOKE / "run"
    for name in ("checkpoint-4/optimizer.pt", "checkpoint-4/trainer_state.json", "final/model.safetensors", "final/config.json"):
        (place / name).parent.mkdir(exist_ok=True)
        (place / name).write_text("{}")
    (place / "final" / "train.log").write_text("x")
    assert run_dir.level_digests(run, SMOKE).keys() - trial.files.keys() == {f"{SMOKE}/run/final/train.log"}


def test_a_fail_is_not_excused_by_what_happens_to_its_files(tmp_path: Path) -> None:
    with mock.patch("seatrial.loops.get_loop", return_value=FakeLoop({0: "stuck"})):
        assert inside(*run_words(tmp_path / "run", "0"), cwd=Path("/")).code == FAIL
    (tmp_path / "run" / SMOKE / "run/facts.jsonl").write_text('{"fact": "state", "moved": true}\n')
    answer = call("report", tmp_path / "run")
    assert answer.code == FAIL
    assert "missed: weights changed" in answer.out


def test_a_verdict_that_was_edited_by_hand_is_computed_again(tmp_path: Path) -> None:
    with mock.patch("seatrial.loops.get_loop", return_value=FakeLoop({0: "stuck"})):
        assert inside(*run_words(tmp_path / "run", "0"), cwd=Path("/")).code == FAIL
    for file in ("trial.json", f"{SMOKE}/result.json"):
        replace(tmp_path / "run" / file, '"Fail"', '"Pass"')
    for words in (("report",), ("resume",)):
        answer = call(*words, tmp_path / "run")
        assert answer.code in (FAIL, BLOCKED), answer.out
        assert "trial.json was edited" in answer.out


def test_a_forged_report_is_made_anew(run: Path) -> None:
    (run / SMOKE / "run.log").write_text(CRASH)
    shutil.copytree(run, run.with_name("other"))
    report = read_model(run / "report.json", Report)
    assert report.result is Verdict.PASS  # as it was written before
    assert call("resume", run).code == FAIL
    assert read_model(run / "report.json", Report).result is Verdict.FAIL


def test_a_trial_of_an_older_seatrial_is_not_a_silent_pass(run: Path) -> None:
    old = read_json(run / "trial.json")
    for key in ("files", "seal", "alterations"):
        del old[key]
    write_json(run / "trial.json", old | {"schema_version": 1})
    answer = call("report", run)
    assert answer.code == BLOCKED
    assert OLDER in answer.out


def test_the_history_keeps_no_altered_pass(run: Path) -> None:
    assert (history.read_trial(run).passed, history.read_trial(run).flaws) == (True, [])
    (run / SMOKE / "run.log").write_text(CRASH)
    draft = history.read_trial(run)
    assert draft.passed is False
    assert any("run.log changed" in flaw for flaw in draft.flaws)


def test_digests_are_relative_and_every_level_has_its_own(recorded: Path) -> None:
    trial = read_model(recorded / "trial.json", Trial)
    assert not any(Path(path).is_absolute() for path in trial.files)
    for path in ("evidence/request.json", f"{SMOKE}/run.log", f"{SMOKE}/run/facts.jsonl", "levels/1-second/metrics.jsonl"):
        assert trial.files[path] == run_dir.digest(recorded / path)
    assert run_dir.is_sealed(recorded)
    assert json.loads((recorded / "trial.json").read_text())["schema_version"] == 2


def put(how: str, file: Path) -> None:
    """Put something else where a file was."""
    kept = file.read_bytes()
    file.unlink()
    match how:
        case "pipe":
            os.mkfifo(file)
        case "directory":
            file.mkdir()
        case "endless":
            file.symlink_to("/dev/zero")
        case "itself":
            file.symlink_to(file.name)
        case "nowhere":
            file.symlink_to("nowhere")
        case "deep":
            file.write_text("[" * 100_000)
        case "zeros":
            file.write_bytes(bytes(len(kept)))
        case "empty":
            file.touch()
        case "windows":
            file.write_bytes(kept.replace(b"\n", b"\r\n") + b"\r\n")
        case _:
            raise ValueError(how)


PUT = ("pipe", "directory", "endless", "itself", "nowhere", "deep", "zeros", "empty", "windows")
PLACES = (
    *(f"{SMOKE}/{name}" for name in ("run.log", "metrics.jsonl", "checks.json", "phases.json", "result.json", "command.sh")),
    *(f"{SMOKE}/run/facts.jsonl", f"{SMOKE}/run/metrics.jsonl", "evidence/request.json", "evidence/imports.json"),
)


@pytest.mark.parametrize("place", PLACES)
def test_whatever_lies_where_a_file_was_neither_passes_nor_hangs_nor_crashes(recorded: Path, tmp_path: Path, place: str) -> None:
    for how in PUT:
        if how == "windows" and place.endswith((run_dir.RESULT, run_dir.IMPORTS)):
            continue  # the same JSON: these two are compared by what they say
        run = Path(shutil.copytree(recorded, tmp_path / how))
        put(how, run / place)
        for words in (("report",), ("report", "--format", "json"), ("resume",), ("history", "import", "--store", tmp_path / "history")):
            answer = call(*words, run)
            assert answer.code in ((0, 2) if words[0] == "history" else (FAIL, BLOCKED)), (how, words, answer.out, answer.err)
            assert "internal error" not in answer.err


@pytest.mark.parametrize("folder", ["levels", "evidence", f"{SMOKE}/run"])
def test_a_folder_that_is_a_link_now(run: Path, folder: str) -> None:
    (run / folder).rename(run / "elsewhere")
    (run / folder).symlink_to(run / "elsewhere")
    answer = call("report", run)
    assert answer.code == BLOCKED
    assert f"{folder} is a link now" in answer.out


def test_a_key_that_stands_twice_is_an_edit(run: Path) -> None:
    replace(run / "trial.json", '"status": "done"', '"verdict": "Fail",\n  "status": "done"')
    assert call("report", run).code == BLOCKED


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two other trials of the same levels: one that passed, one that failed in level 1."""
    place = tmp_path_factory.mktemp("others")
    for name, words, code in (("passed", {}, PASS), ("failed", {1: "stuck"}, FAIL)):
        with mock.patch("seatrial.loops.get_loop", return_value=FakeLoop(words)):
            assert inside(*run_words(place / name, "0-1"), cwd=Path("/")).code == code
    return place


def taken(run: Path, other: Path, *names: str) -> None:
    for name in names:
        if (run / name).is_dir():
            shutil.rmtree(run / name)
            shutil.copytree(other / name, run / name)
        else:
            shutil.copy(other / name, run / name)


SECOND = "levels/1-second"
MIXED: dict[str, tuple[str, tuple[str, ...]]] = {
    "a level of another trial": ("passed", (SMOKE,)),
    "a failed level of another trial": ("failed", (SECOND,)),
    "all levels of another trial": ("passed", ("levels",)),
    "the record of another trial": ("passed", ("trial.json",)),
    "the record of a failed trial": ("failed", ("trial.json",)),
    "the log of another trial": ("failed", (f"{SECOND}/run/facts.jsonl",)),
    "the verdict of a failed level": ("failed", (f"{SECOND}/result.json",)),
}


@pytest.mark.parametrize("name", MIXED)
def test_parts_of_other_trials_prove_nothing(run: Path, others: Path, name: str) -> None:
    other, names = MIXED[name]
    taken(run, others / other, *names)
    for words in (("report",), ("resume",)):
        answer = call(*words, run)
        assert answer.code in (FAIL, BLOCKED), answer.out


def test_a_failed_trial_under_the_record_of_one_that_passed(run: Path, others: Path, tmp_path: Path) -> None:
    failed = Path(shutil.copytree(others / "failed", tmp_path / "failed"))
    taken(failed, run, "trial.json", f"{SMOKE}/result.json", f"{SECOND}/result.json")
    for words in (("report",), ("resume",)):
        assert call(*words, failed).code == FAIL


def test_a_record_that_is_no_record(run: Path) -> None:
    whole = (run / "trial.json").read_text()
    for text in (
        "",
        "[]",
        "NaN",
        "{",
        whole[:500],
        '{"a":' * 50_000,
        whole.replace('"schema_version": 2', '"schema_version": 99', 1) + "x",
    ):
        (run / "trial.json").write_text(text)
        for words in (("report",), ("resume",), ("attach",), ("history", "import")):
            answer = call(*words, run)
            assert answer.code in (1, 2, BLOCKED), (text[:20], words, answer.err)
            assert "internal error" not in answer.err
