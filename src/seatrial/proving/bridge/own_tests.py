"""The Bridge's own unit tests that match a diff, run on a CPU with our shims, and what they say about the change.

- A Pass has tests that passed, none whose failure is the change's (see `own_tests_sort`), and Megatron imported from the checkout.
  Tests that need CUDA or Transformer Engine are counted as not run, pre-existing failures as such; neither is a pass.
- The same files run at the base revision in a worktree of their own. What they gave there is kept in the cache, so it runs once per
  base, selection, environment and set of shims. A base that is what is under test would excuse everything, and is refused.
- None passed is Blocked; a test that ran at the base and not now is a note.
- Tests that did not end in time are Blocked: how much time they had depends on what ran before them.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pydantic import Field

from seatrial.loops import bridge_tests
from seatrial.model.errors import BlockedError, UserError
from seatrial.model.record import Record, RepoState
from seatrial.model.verdict import Verdict
from seatrial.proving.bridge.dead_paths import MEGATRON, dead_paths
from seatrial.proving.bridge.own_tests_base import Place, baseline, commit_to_compare
from seatrial.proving.bridge.own_tests_run import Ran, origin, own_modules, run
from seatrial.proving.bridge.own_tests_sort import Named, by_name, failures, lacking, unseen
from seatrial.trial.inject import stage_packages
from seatrial.trial.sides import CUT, JUNIT, LOG, Case, judge_side

SHOWN = 20


@dataclass(frozen=True, slots=True)
class Selection:
    """The tests of a diff."""

    files: tuple[str, ...]
    notes: tuple[str, ...]
    dead: tuple[str, ...]
    """`guide:line: path` of what the checkout's own guides name and what is not there."""


class OwnTests(Record):
    """What the Bridge's own tests showed."""

    verdict: Verdict
    reason: str
    files: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    dead: tuple[str, ...] = ()
    base: str | None = None
    """The commit that was compared with; None when there is no baseline."""
    passed: int = 0
    skipped: int = 0
    failed: int = 0
    """Failures that are the change's."""
    not_run: int = 0
    """Failures for want of CUDA, Transformer Engine or a package: these tests say nothing."""
    needs: dict[str, int] = Field(default_factory=dict)
    """How many of `not_run` lack which part."""
    pre_existing: int = 0
    failures: tuple[Named, ...] = ()
    missing: tuple[Named, ...] = ()
    """Of `not_run`."""
    known: tuple[Named, ...] = ()
    """Of `pre_existing`. All three lists end after some; the counts are whole."""
    shims: tuple[str, ...] = ()
    """Stand-ins that took part: a limitation of every pass."""
    seconds: float = 0


def select(repo: RepoState) -> Selection:
    """The unit tests that match the diff, and the paths that the checkout's guides name in vain."""
    root = Path(repo.path)
    files, notes = bridge_tests.chosen(repo)
    guides = dead_paths(root)
    if guides.elsewhere:
        notes = (
            *notes,
            f"{guides.elsewhere} paths that its skills name are in no directory of this checkout: other repositories', it seems",
        )
    if not (root / MEGATRON / "megatron").is_dir():
        notes = (*notes, f"{MEGATRON} is not populated: the environment's own Megatron-Core was used")
    return Selection(files, notes, guides.dead)


def judge(ran: Ran, checkout: Path, selection: Selection, base: str | None, before: Sequence[Case] | None) -> OwnTests:
    """The verdict; `before` are the cases at the commit `base`."""
    now, old = by_name(ran.cases or ()), by_name(before) if before is not None else None
    sorted_ = list(failures(now, old, own_modules(checkout)))
    kinds = {kind: tuple(named for one, named in sorted_ if one == kind) for kind in ("real", "not run", "pre-existing")}
    outcomes = [case.outcome for case in now.values()]
    gone = _gone(now, old or {})
    verdict, reason = _verdict(ran, checkout, old, kinds["real"], outcomes.count("passed"))
    others = {
        "skipped": outcomes.count("skipped"),
        "need what is not here": len(kinds["not run"]),
        "failed before": len(kinds["pre-existing"]),
    }
    counted = ", ".join(f"{count} {word}" for word, count in others.items() if count)
    return OwnTests(
        verdict=verdict,
        reason=f"{reason} ({counted})" if counted else reason,
        files=selection.files,
        notes=(*selection.notes, *([gone] if gone else [])),
        dead=selection.dead,
        base=base if before is not None else None,
        passed=outcomes.count("passed"),
        skipped=outcomes.count("skipped"),
        failed=len(kinds["real"]),
        not_run=len(kinds["not run"]),
        needs=dict(Counter(named.why for named in kinds["not run"])),
        pre_existing=len(kinds["pre-existing"]),
        failures=kinds["real"][:SHOWN],
        missing=kinds["not run"][:SHOWN],
        known=kinds["pre-existing"][:SHOWN],
        shims=ran.shims,
        seconds=round(ran.outcome.seconds, 2),
    )


def _gone(now: dict[str, Case], before: dict[str, Case]) -> str:
    """A note about tests that passed at the base and do not run now."""
    names = unseen(now, before)
    names += [name for name, case in before.items() if case.outcome == "passed" and name in now and now[name].outcome == "skipped"]
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{len(names)} tests that passed at the base did not run now: {', '.join(names[:3])}{more}" if names else ""


def _verdict(ran: Ran, checkout: Path, before: dict[str, Case] | None, real: Sequence[Named], passed: int) -> tuple[Verdict, str]:
    """By the first rule that applies. A failure is a Fail only where it is known that the base has it not."""
    if ran.outcome.ended == "exited" and not ran.cases:
        return _nothing(ran, checkout, before or {})
    if ran.outcome.ended in ("deadline", "stalled"):
        return Verdict.BLOCKED, f"no end within the {ran.outcome.seconds:.0f} s that were left for them"
    if ran.outcome.ended != "exited" or ran.cases is None:
        return judge_side(ran.outcome, ran.cases, ran.said, ())
    if real:
        more = f"; and {len(real) - 3} more" if len(real) > 3 else ""
        named = "; ".join(f"{one.name}: {one.message} ({one.why})" for one in real[:3])
        blamed = Verdict.FAIL if before is not None else Verdict.BLOCKED
        return blamed, f"{len(real)} of {len(ran.cases)} tests failed: {named}{more}"
    if wrong := origin(ran, checkout):
        return Verdict.BLOCKED, wrong
    bad = any(case.outcome in ("failed", "error") for case in ran.cases)
    if ran.outcome.exit_code != int(bad):
        return Verdict.FAIL, f"exit code {ran.outcome.exit_code} does not fit what {JUNIT} says"
    if cut := CUT.search(ran.said):
        return Verdict.FAIL, f"it stopped before its last test: {cut[1]}"
    if not passed:
        return Verdict.BLOCKED, f"vacuous: none of {len(ran.cases)} tests passed"
    return Verdict.PASS, f"{passed} tests passed"


def _nothing(ran: Ran, checkout: Path, before: dict[str, Case]) -> tuple[Verdict, str]:
    """No test ran: the change's fault when they ran at the base, or when it is the checkout that cannot be imported."""
    verdict, reason = judge_side(ran.outcome, ran.cases, ran.said, ())
    last = ran.said.splitlines()[-1] if ran.said.splitlines() else ""
    message = last.removeprefix("E").strip()
    own = "ImportError:" in message or "ModuleNotFoundError:" in message
    if any(case.outcome == "passed" for case in before.values()):
        return Verdict.FAIL, f"no test ran, and at the base they did: {reason}"
    return (Verdict.FAIL, reason) if own and lacking(message, own_modules(checkout)) is None else (verdict, reason)


def own_tests(python: Path, repo: RepoState, out: Path, deadline_s: float, base: str | None, tell: Callable[[str], None]) -> OwnTests:
    """Choose, run at the base and now, compare. Both runs have `deadline_s` together, the base at most half of it.

    `base` is a revision, None when none is known.
    """
    ends = time.monotonic() + deadline_s
    selection, out = select(repo), out.absolute()
    if not selection.files:
        reason = f"{repo.path}: none of the focused tests exists"
        return OwnTests(verdict=Verdict.SKIPPED, reason=reason, notes=selection.notes, dead=selection.dead)
    place = Place(python=python, instruments=stage_packages((), out), out=out, deadline_s=deadline_s / 2, tell=tell)
    commit, before, note = _before(place, repo, selection.files, base)
    selection = replace(selection, notes=(*selection.notes, *([note] if note else [])))
    tell(f"running {len(selection.files)} test files of the Bridge: {out / LOG}")
    try:
        ran = run(python, Path(repo.path), selection.files, place.instruments, out, ends - time.monotonic())
    except BlockedError as error:
        return OwnTests(verdict=Verdict.BLOCKED, reason=error.message, files=selection.files, notes=selection.notes, dead=selection.dead)
    return judge(ran, Path(repo.path), selection, commit, before)


def _before(place: Place, repo: RepoState, files: tuple[str, ...], base: str | None) -> tuple[str | None, tuple[Case, ...] | None, str]:
    """The commit of the base and its cases; a note when there are none."""
    if base is None:
        return (
            None,
            None,
            (
                "no base is known (name --base): a failure that was there before counts as the change's, "
                "and a test that ran without CUDA before and needs it now is not seen"
            ),
        )
    try:
        commit = commit_to_compare(repo, base)
        return commit, baseline(place, repo, commit, files), ""
    except (BlockedError, UserError) as error:
        return None, None, f"there is no baseline: {error.message}"
