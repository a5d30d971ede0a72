"""What a Pass is worth once everything has run: nothing, when the change was edited meanwhile or never used.

A Fail or a block is not excused by either.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from seatrial.evidence.redact import Redactor
from seatrial.evidence.repos import differs
from seatrial.evidence.use import not_loaded, read_loaded, unused
from seatrial.model.errors import UserError
from seatrial.model.record import LevelResult, RepoState, SideResult
from seatrial.model.verdict import Boundary, Verdict


def moved(changes: Sequence[RepoState], run_dir: Path, redactor: Redactor) -> str | None:
    """Why what ran is not what was recorded: a checkout was edited while the trial ran, or is not there any more."""
    for repo in changes:
        try:
            same = differs(repo, run_dir / "evidence", redactor) is None
        except UserError:
            same = False
        if not same:
            return f"{repo.path} was changed while the trial ran, so what ran is not what was recorded"
    return None


def levels_unless_moved(results: list[LevelResult], why: str | None) -> list[LevelResult]:
    """The levels, without a Pass if a checkout moved."""
    update = {"verdict": Verdict.BLOCKED, "boundary": Boundary.ENVIRONMENT, "reason": why}
    return [result.model_copy(update=update) if why and result.verdict is Verdict.PASS else result for result in results]


def sides_unless_moved(results: Sequence[SideResult], why: str | None) -> tuple[SideResult, ...]:
    """The tests before the levels, without a Pass if a checkout moved."""
    update = {"verdict": Verdict.BLOCKED, "reason": why}
    return tuple(result.model_copy(update=update) if why and result.verdict is Verdict.PASS else result for result in results)


def unless_unused(changes: Sequence[RepoState], results: list[LevelResult], run_dir: Path) -> list[LevelResult]:
    """A change of which no process loaded a file was not tested; files that nothing loaded are a limitation."""
    tested = [repo for repo in changes if not repo.companion]
    if not tested or not any(result.verdict is Verdict.PASS for result in results):
        return results
    loaded: frozenset[str] = frozenset()
    try:
        loaded = read_loaded(sorted(run_dir.glob("levels/*/loaded.jsonl")))
        problem = next((text for repo in tested if (text := unused(repo, loaded))), None)
    except UserError as error:
        problem = error.message
    if problem:
        update = {"verdict": Verdict.BLOCKED, "boundary": Boundary.CONFIG, "reason": f"vacuous: {problem}", "vacuous": True}
        return [result.model_copy(update=update) if result.verdict is Verdict.PASS else result for result in results]
    left = tuple(text for repo in tested if (text := not_loaded(repo, loaded)))
    return [
        result.model_copy(update={"limitations": tuple(dict.fromkeys((*result.limitations, *left)))}) if result.phases else result
        for result in results
    ]
