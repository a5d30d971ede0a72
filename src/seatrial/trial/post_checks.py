"""Revokes a Pass if a checkout was edited during the run, or if nothing of the change ran.

A Fail or a block is not excused by either.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from functools import reduce
from pathlib import Path

from seatrial.core.errors import UserError
from seatrial.core.loop import Loop
from seatrial.core.records import LevelResult, RepoState, SideResult, replace
from seatrial.core.verdict import Boundary, Verdict
from seatrial.evidence.changes import read_changed
from seatrial.evidence.imports import (
    EXECUTED_FILE,
    Executed,
    idle,
    limitations,
    loads_itself,
    not_loaded,
    read_executed,
    read_loaded,
    required,
    unused,
)
from seatrial.evidence.redact import Redactor
from seatrial.evidence.repos import differs
from seatrial.trial.plan import Diff, read_diff


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
    return [replace(result, **update) if why and result.verdict is Verdict.PASS else result for result in results]


def sides_unless_moved(results: Sequence[SideResult], why: str | None) -> tuple[SideResult, ...]:
    """The tests before the levels, without a Pass if a checkout moved."""
    update = {"verdict": Verdict.BLOCKED, "reason": why}
    return tuple(replace(result, **update) if why and result.verdict is Verdict.PASS else result for result in results)


def unless_unused(changes: Sequence[RepoState], results: list[LevelResult], run_dir: Path, loop: Loop) -> list[LevelResult]:
    """A change of which nothing ran was not tested: no Pass. What else of it did not run is a limitation.

    Functions count that ran in a level which passed. A level that passed without running any, while another one ran some, keeps its
    Pass, and says so.
    """
    tested = [repo for repo in changes if not repo.companion]
    if not tested or not any(result.verdict is Verdict.PASS for result in results):
        return results
    try:
        use = _Use(results, run_dir, loop)
        problem = next((text for repo in tested if (text := use.problem(repo))), None)
    except UserError as error:
        return _without_pass(results, error.message)
    if problem:
        return _without_pass(results, problem)
    left = [text for repo in tested for text in use.limitations(repo)]
    made = []
    for result in results:
        here = [text for repo in tested if (text := use.elsewhere(repo, result))]
        limits = tuple(dict.fromkeys((*result.limitations, *left, *here)))
        made.append(replace(result, limitations=limits) if result.phases else result)
    return made


def _without_pass(results: list[LevelResult], problem: str) -> list[LevelResult]:
    update = {"verdict": Verdict.BLOCKED, "boundary": Boundary.CONFIG, "reason": f"vacuous: {problem}", "vacuous": True}
    return [replace(result, **update) if result.verdict is Verdict.PASS else result for result in results]


class _Use:
    """What a trial loaded and ran of its change."""

    def __init__(self, results: Sequence[LevelResult], run_dir: Path, loop: Loop) -> None:
        self.loop, self.results = loop, results
        self.loaded = read_loaded(sorted(run_dir.glob("levels/*/loaded.jsonl")))
        self.code = read_changed(run_dir / "evidence")
        self.levels = {
            result.number: read_executed(run_dir / result.directory / EXECUTED_FILE) if result.directory else Executed()
            for result in results
        }
        passed = (self.levels[result.number] for result in results if result.verdict is Verdict.PASS)
        self.executed = reduce(operator.or_, passed, Executed())

    def problem(self, repo: RepoState) -> str | None:
        """Why this change was not tested, or None."""
        unread = any(not file.readable for file in self.code.of(repo.name))
        if not self._by_function(repo) or not (required(repo, self.code) or unread):
            return unused(repo, self.loaded)  # nothing can be seen to run, but a file can be seen to be loaded
        problem = unused(replace(repo, changed=()), self.loaded) or idle(repo, self.code, self.executed)
        return f"{problem}; {self._advice(repo)}" if problem else None

    def limitations(self, repo: RepoState) -> Iterator[str]:
        """What a Pass of this trial does not speak of."""
        for place in loads_itself(repo):
            yield f"every Python of the loop runs {place} as it starts; what that loads or runs does not count as used by the loop"
        if text := not_loaded(repo, self.loaded):
            yield text
        if self._by_function(repo):
            yield from limitations(repo, self.code, self.executed)
        elif repo.base is None:
            yield f"{repo.name}: no base is known, so that only loaded files were checked, not which changed functions ran (name --base)"
        elif repo.name in self.code.unknown:
            yield f"{repo.name}: which functions changed is not known, so only loaded files were checked: {self.code.unknown[repo.name]}"
        elif repo.changed:
            why = f": {self.executed.why}" if self.executed.why else ""
            yield f"{repo.name}: which functions ran was not recorded{why}; only loaded files were checked"

    def elsewhere(self, repo: RepoState, result: LevelResult) -> str | None:
        """That a level which passed ran nothing of what changed, and which levels did."""
        if result.verdict is not Verdict.PASS or not self._by_function(repo) or not required(repo, self.code):
            return None
        if idle(repo, self.code, self.levels[result.number]) is None:
            return None
        others = [item for item in self.results if item.verdict is Verdict.PASS and not idle(repo, self.code, self.levels[item.number])]
        named = ", ".join(f"level {item.number} ({item.name})" for item in others)
        return f"none of the changed functions of {repo.name} ran in this level; {named} ran some"

    def _by_function(self, repo: RepoState) -> bool:
        return repo.base is not None and repo.name not in self.code.unknown and self.executed.recorded

    def _advice(self, repo: RepoState) -> str:
        """Which levels the loop's own table names for the files of what did not run."""
        paths = tuple(dict.fromkeys(file.path for file, _ in required(repo, self.code))) or repo.changed
        causes = read_diff(self.loop, Diff(repo.name, repo.base or "", paths, packages=repo.packages)).causes
        ran = {result.number for result in self.results if result.phases}
        named = {level.number: level for level in self.loop.levels() if level.skip is None and level.number not in ran}
        wanted = sorted({cause.level for cause in causes} & set(named))
        if not wanted:
            return f"no further level of {self.loop.title} is known to run it: change what calls it, or choose another loop"
        levels = ", ".join(f"{number} ({named[number].name})" for number in wanted)
        return f"these paths ask for level {levels}: seatrial run {self.loop.name} --level {','.join(map(str, wanted))}"
