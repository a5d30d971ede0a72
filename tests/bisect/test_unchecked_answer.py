"""Nobody is blamed before forks, other repositories and submodules were looked at; and a report needs nothing but its directory."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from seatrial.bisect import bisect_dir
from seatrial.bisect.bisect_records import BisectAnswer
from seatrial.bisect.bisect_report import write_reports
from seatrial.bisect.bisect_runner import unchecked
from seatrial.bisect.runners import JOB, JOBS, job_of
from seatrial.core.files import write_json
from seatrial.core.jobs import Batch, Profile, Submission
from seatrial.runtime import jobdir
from tests.bisect.bisects import answer, history
from tests.bisect.calls import Place
from tests.bisect.prepared import plan_of, prepared_of
from tests.bisect.repos import Commit, Link, submodule
from tests.bisect.several import Bisect, Changes, bisect, line, main_line, repository
from tests.bisect.test_several import BROKEN, three

NO_BAD = ("sh", "-c", "! test -e bad")


def test_what_the_search_alone_says_blames_nobody() -> None:
    past = history(4)
    for suspects in ((2,), (2, 3)):
        found = unchecked(answer(past, *suspects))
        assert found.state == "open"
        assert "not yet checked" in found.why
        assert all(past.points[index].commit[:12] in found.why for index in suspects)
    assert unchecked(BisectAnswer(state="open", why="so")).why == "so"


def forked(root: Path) -> Place:
    """The good end has a mend that a branch lacks, which is merged later; then it breaks again."""
    commits = [
        Commit({"bad": "1"}),
        Commit({"bad": None, "mended": "1"}),
        Commit({"side": "1"}, parents=(0,)),
        Commit({"side": "2"}),
        Commit({"side": "2"}, parents=(1, 3)),
        Commit({"bad": "1"}, subject="broken again"),
    ]
    place = Place(root, commits)
    place.ids[0] = place.ids[1]
    return place


@pytest.mark.slow
def test_a_report_after_a_kill_before_the_fork_was_run_blames_nobody(tmp_path: Path) -> None:
    one = forked(tmp_path)
    done = one.bisect("--env", "none", command=NO_BAD)
    assert (done.code, done.rows[-1].stage) == (99, "conviction")
    journal = done.directory / "runs.jsonl"
    rows = journal.read_text().splitlines(keepends=True)
    journal.write_text("".join(text for text, row in zip(rows, done.rows, strict=True) if row.stage != "conviction"))
    told = one.go_on("report")
    assert told.code == 99
    assert told.report["answer"]["state"] == "open"
    assert "not yet checked" in told.summary.splitlines()[0]
    assert one.ids[2][:12] in told.summary.splitlines()[0]
    assert "# first bad commit" not in (done.directory / "bisect.log").read_text()
    assert one.go_on().suspects == []


@pytest.mark.slow
def test_nothing_that_is_written_during_the_search_says_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At every moment before the end, the reports on disk blame nobody."""
    written: list[str] = []

    def spy(*words: object) -> None:
        found = words[4]
        assert isinstance(found, BisectAnswer)
        written.append(found.state)
        write_reports(*words)  # type: ignore[arg-type]

    monkeypatch.setattr("seatrial.bisect.bisect_runner.write_reports", spy)
    repos = three(tmp_path, {"b": 2}, 4)
    done = bisect(tmp_path, repos)
    assert done.found == repos["b"].ids[2]
    assert written[-1] == "found"
    assert set(written[:-1]) == {"open"}


def library_with_an_old_branch(root: Path) -> Bisect:
    """The repository of the review: the submodule was bad, mended, a branch from before the mend is merged, then it breaks again."""
    lib = repository(
        root / "library",
        [
            Commit({"broken": ""}, subject="c0 bad"),
            Commit({"broken": None, "mended": ""}, subject="c1 mend"),
            Commit({"side": "1"}, parents=(0,), subject="s2 innocent"),
            Commit({"side": "2"}, subject="s3 innocent"),
            Commit({"side": "2"}, parents=(1, 3), subject="c4 merge"),
            Commit({"broken": ""}, subject="c5 broken again"),
        ],
    )
    changes: Changes = {0: submodule("lib", lib.path, lib.ids[1]), 2: {"lib": Link(lib.ids[5])}}
    return bisect(root, {"a": repository(root / "a", main_line(4, changes))})


@pytest.mark.slow
def test_a_branch_of_a_submodule_that_was_bad_before_is_not_blamed(tmp_path: Path) -> None:
    done = library_with_an_old_branch(tmp_path)
    assert done.verdicts == {"lib": ("convicted", None)}
    assert "innocent" not in done.headline
    assert any("its branch forked off before the good end" in note for note in done.report.answer.notes)


@pytest.mark.slow
def test_a_line_that_passes_beside_the_good_end_of_one_of_several(tmp_path: Path) -> None:
    """The second repository's good end is on a side branch with a mend; its main line was bad all along."""
    a = repository(tmp_path / "a", main_line(3))
    b = repository(
        tmp_path / "b",
        [
            Commit({"broken": ""}, subject="b0 bad"),
            Commit({"broken": None}, subject="b1 mend on a branch"),
            Commit({"more": "1"}, parents=(0,), subject="b2 innocent"),
            Commit({"more": "2"}, parents=(2, 1), subject="b3 merge"),
        ],
    )
    b.ids[0] = b.ids[1]
    done = bisect(tmp_path, {"a": a, "b": b})
    assert (done.said.code, done.report.answer.suspects) == (99, ())
    assert "line of first parents" in done.headline
    assert {verdict for verdict, _ in done.verdicts.values()} == {"unknown"}


def moved_submodule(root: Path) -> Bisect:
    lib = repository(root / "library", line(4, {2: BROKEN}, name="lib"))
    a = repository(root / "a", main_line(4, {0: submodule("lib", lib.path, lib.ids[0]), 2: {"lib": Link(lib.ids[3])}}))
    return bisect(root, {"a": a})


@pytest.mark.slow
@pytest.mark.parametrize("ask", [moved_submodule, lambda root: bisect(root, three(root, {"b": 2}, 4))], ids=["submodule", "several"])
def test_a_report_is_a_function_of_its_directory(tmp_path: Path, ask: Callable[[Path], Bisect]) -> None:
    """Also after clean, with the repositories gone; and it makes no stores."""
    done = ask(tmp_path)
    before = done.report
    assert done.said.code == 0, done.said
    assert done.again("clean").said.code == 0
    for name in ("a", "b", "c", "library"):
        shutil.rmtree(tmp_path / name, ignore_errors=True)
    told = done.again("report")
    assert told.said.code == 0, told.said
    assert told.report == before
    assert not (done.path / "stores").exists()


@pytest.mark.slow
def test_a_directory_of_an_older_seatrial_asks_git(tmp_path: Path) -> None:
    done = moved_submodule(tmp_path)
    before = done.report
    for file in (*done.path.glob("history*.json"), *done.path.glob("moves-*.json")):
        file.unlink()
    told = done.again("report")
    assert (told.said.code, told.report) == (0, before)


@pytest.mark.slow
def test_secrets_are_not_kept_with_the_history(tmp_path: Path) -> None:
    secret = "hf_" + "qZ7Lw2Xv9Rk4Tn6Bs8Dm1Fc3Gh5J"
    one = Place(tmp_path, [Commit({"a": "1"}), Commit({"b": "1"}, subject=f"use {secret}"), Commit({"bad": "1"})])
    done = one.bisect("--env", "none", command=NO_BAD, HF_TOKEN=secret)
    assert done.code == 0, done.err
    assert secret not in (done.directory / "history.json").read_text()


def a_bisect(root: Path) -> tuple[Path, list[Path]]:
    """A directory with stores and the trees of two steps; one of them has a directory that a build made read-only."""
    path = bisect_dir.create_bisect(root, root / "out", plan_of("true"))
    steps = [path / "steps" / name for name in ("0001-aaaaaaaaaaaa", "0002-bbbbbbbbbbbb")]
    for step in steps:
        (step / "tree/made").mkdir(parents=True)
        (step / "tree/made/file").touch()
    (steps[0] / "tree/made").chmod(0o500)
    (path / "stores/main.git").mkdir(parents=True)
    return path, steps


def test_clean_removes_read_only_directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As root the mode of a directory stops nobody, so the test does."""
    remove = shutil.rmtree

    def strict(path: Path) -> None:
        if any(not Path(parent).stat().st_mode & 0o200 for parent, _, _ in os.walk(path)):
            raise PermissionError(13, "Permission denied", str(path))
        remove(path)

    monkeypatch.setenv("SEATRIAL_CACHE", str(tmp_path / "cache"))
    path, steps = a_bisect(tmp_path)
    monkeypatch.setattr(shutil, "rmtree", strict)
    assert len(bisect_dir.clean_bisect(path, lambda _: None)) == 3
    assert not any((step / "tree").exists() for step in steps)
    assert not (path / "stores").exists()


def test_clean_keeps_what_a_job_may_still_use_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SEATRIAL_CACHE", str(tmp_path / "cache"))
    path, steps = a_bisect(tmp_path)
    batch = steps[1] / JOBS
    jobdir.save(batch, Batch(jobs=(job_of(plan_of("true"), prepared_of(plan_of("true"), tmp_path / "other"), Profile()),)))
    # Its controller does not answer.
    away = Submission(job=JOB, name="x", slurm="7", profile="p", units=(0,), submitted=0, cluster=str(tmp_path / "none.conf"))
    write_json(jobdir.job_dir(batch, JOB).submission_file, away)
    told: list[str] = []
    assert bisect_dir.clean_bisect(path, told.append) == ("steps/0001-aaaaaaaaaaaa/tree",)
    assert (steps[1] / "tree/made/file").exists()
    assert (path / "stores/main.git").exists()
    assert "jobs may still be in the queue" in told[0]
    assert f"{steps[1]}: its tree and the stores are kept" in told[1]
