"""Seatrial may be killed at any moment: every prefix of its writes is no trial yet, or one that `resume` finishes.

A cut ends this process's writes at the n-th one, as a kill does: nothing that comes later, no clean-up either, reaches the disk.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from seatrial.core.errors import UserError
from seatrial.core.records import Trial
from seatrial.core.verdict import Verdict
from seatrial.runtime.process import Outcome, ProcessSpec
from seatrial.trial import run_dir, verify
from tests.trial import fake_process
from tests.trial.conftest import Bench

WRITES = ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.symlink", "os.link", "shutil.copyfile", "shutil.copytree")
STEP = 1 if os.environ.get("SEATRIAL_ALL_LEVELS") else 4
"""Every so many writes are tried; all of them take minutes."""
MANY = f"{os.sep}instruments{os.sep}"
"""Files that are staged: all alike, and written again by every attempt. Few of them are cut."""


class KilledError(BaseException):
    """Stands for the kill."""


class Cutter:
    """Counts what a process writes below a directory, and ends it at one of these writes."""

    def __init__(self) -> None:
        self.below, self.left, self.seen, self.staged, self.active = "", 0, 0, 0, False
        sys.addaudithook(self._hook)

    def _hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.active or (event != "open" and event not in WRITES):
            return
        place = str(arguments[1] if event == "os.rename" else arguments[0])
        flags = arguments[2] if event == "open" else os.O_CREAT
        if (
            not place.startswith(self.below)
            or not isinstance(flags, int)
            or not flags & (os.O_CREAT | os.O_WRONLY | os.O_RDWR | os.O_TRUNC)
        ):
            return
        self.staged += MANY in place
        if MANY in place and self.staged % 97:
            return
        self.seen += 1
        if self.seen > self.left:
            raise KilledError

    @contextlib.contextmanager
    def cut(self, below: Path, after: int) -> Iterator[None]:
        """Let so many writes below a directory happen, and none that comes later."""
        self.below, self.left, self.seen, self.staged, self.active = str(below), after, 0, 0, True
        try:
            yield
        finally:
            self.active = False


CUTTER = Cutter()


def run_here(spec: ProcessSpec, _: object) -> Outcome:
    """The process of the fake loop, in this one."""
    words = list(spec.argv)
    spec.log.parent.mkdir(parents=True, exist_ok=True)
    before, code = sys.argv, 0
    try:
        sys.argv = words[words.index(str(fake_process.__file__)) :]
        with spec.log.open("w") as log, contextlib.redirect_stdout(log):
            fake_process.main()
    except SystemExit as end:
        code = int(end.code or 0)
    finally:
        sys.argv = before
    return Outcome(code, None, "exited", 0.1)


@pytest.fixture
def cuts(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> Bench:
    monkeypatch.setattr("seatrial.trial.level.run_stoppable", run_here)
    return bench


def sweep(bench: Bench, levels: tuple[int, ...], verdict: Verdict, every: int = 1) -> tuple[int, int]:
    """Cut a trial after each write, and finish it: how often that was resumed, and how often there was nothing to resume."""
    top, resumed, refused = bench.out.parent, 0, 0
    for after in range(0, 10_000, every):
        bench.out = run_dir.named_directory(top / f"run {after}")
        try:
            with CUTTER.cut(bench.out, after):
                bench.start(*levels)
        except KilledError:
            pass
        else:
            return resumed, refused
        trial = resume(bench)
        resumed, refused = resumed + (trial is not None), refused + (trial is None)
        if trial is None:  # the same directory takes the trial anew
            run_dir.named_directory(bench.out)
            trial = bench.start(*levels)
        assert (trial.status, trial.verdict) == ("done", verdict), (after, trial.reason)
        assert verify.load(bench.out).alterations == (), after
    raise AssertionError("the trial never came to its end")


def resume(bench: Bench) -> Trial | None:
    """The finished trial; None where there is none yet, and nothing ran."""
    if (bench.out / "trial.json").exists():
        return bench.resume()
    with pytest.raises(UserError, match=r"no trial\.json there"):
        bench.resume()
    assert not list(bench.out.rglob("run.log"))
    return None


def test_one_write_in_thirteen_may_be_the_last(cuts: Bench) -> None:
    resumed, refused = sweep(cuts, (0, 1), Verdict.PASS, every=13)
    assert resumed > 2
    assert refused


@pytest.mark.slow
def test_any_write_may_be_the_last(cuts: Bench) -> None:
    resumed, refused = sweep(cuts, (0, 1), Verdict.PASS, every=STEP)
    assert resumed > refused > 3


@pytest.mark.slow
def test_any_write_of_a_trial_of_uncommitted_work_may_be_the_last(cuts: Bench, repo: Path) -> None:
    (repo / "pkg" / "smoke.py").write_text("a = 2\n")
    cuts.changes = (repo,)
    resumed, refused = sweep(cuts, (0,), Verdict.PASS, every=STEP + 1)
    assert resumed > refused > 3


@pytest.mark.slow
def test_any_write_of_a_trial_whose_pass_is_revoked_may_be_the_last(cuts: Bench, repo: Path) -> None:
    (repo / "pkg" / "smoke.py").write_text("a = 2\n")
    cuts.changes, cuts.words = (repo,), {0: "unloaded"}
    assert sweep(cuts, (0,), Verdict.BLOCKED, every=STEP + 1)[0]


def test_a_revoked_pass_that_only_the_level_knows_of_is_revoked(bench: Bench, repo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seatrial was killed between the two records of a level: neither a Pass nor a refusal."""
    monkeypatch.setattr("seatrial.trial.level.run_stoppable", run_here)
    (repo / "pkg" / "smoke.py").write_text("a = 2\n")
    bench.changes, bench.words = (repo,), {0: "unloaded"}
    monkeypatch.setattr("seatrial.trial.runner.TrialRunner._finish", lambda *_, **__: (_ for _ in ()).throw(KilledError))
    with pytest.raises(KilledError):
        bench.start(0)
    assert run_dir.read(bench.out).levels[0].verdict is Verdict.PASS
    assert run_dir.load(bench.out).levels[0].verdict is Verdict.BLOCKED
    monkeypatch.undo()


def test_a_resume_may_be_killed_too(cuts: Bench) -> None:
    """Levels that ended keep their digests; what runs again has none meanwhile."""
    cuts.words = {1: "flat"}
    cuts.start(0, 1)
    cuts.words = {}
    for after in range(0, 200, 9):
        before = cuts.level(0).joinpath("run.log").stat().st_mtime_ns
        with contextlib.suppress(KilledError), CUTTER.cut(cuts.out, after):
            cuts.resume()
        assert cuts.level(0).joinpath("run.log").stat().st_mtime_ns == before
        assert verify.examine(cuts.out, run_dir.read(cuts.out)) == ()
    assert cuts.resume().verdict is Verdict.PASS
