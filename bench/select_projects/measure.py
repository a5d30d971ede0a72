"""What one worker measures: baselines on the clean tree, then mutation after mutation.

- Ground truth is the full suite without any selection plugin: a test is changed when its outcome is not that of the clean tree.
- Each selector chooses with the state that it recorded on the clean tree; the state is put back before every choice.
- A test that cannot be collected is seen by a selector whose own session stumbles over the same file: that session fails.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

from select_projects import projects
from select_projects.mutators import Mutation
from select_projects.projects import Project
from select_projects.running import Ran, pytest_run

RECORD_LIMIT_S = 1500.0
TRIES = 3


@dataclass(frozen=True)
class Selector:
    """How a selector is asked."""

    name: str
    record: tuple[str, ...]
    choose: tuple[str, ...]
    state: str


PLUGIN = ("-p", "pytest_seatrial.select.select_plugin", "-p", "no:pytest-testmon")
OURS = Selector("ours", (*PLUGIN, "--seatrial-record"), (*PLUGIN, "--seatrial-select", "--collect-only"), ".seatrial-select.sqlite")
TESTMON = Selector("testmon", ("--testmon",), ("--testmon", "--testmon-nocollect", "--collect-only"), ".testmondata")
SELECTORS = (OURS, TESTMON)


class Worker:
    """One tree; nobody else works in it."""

    def __init__(self, project: Project, number: int) -> None:
        self.project, self.number = project, number
        self.tree = projects.tree(project, number)
        self.states = self.tree.parent / "states"

    def plain(self) -> dict[str, object]:
        """The clean tree, without a selector."""
        self.reset()
        ran = self._run(("-p", "no:pytest-testmon"), limit=RECORD_LIMIT_S, test_s=120)
        if ran.aborted or ran.overran:
            raise SystemExit(f"{self.project.name}: the clean tree does not run:\n{ran.tail}")
        return {"outcomes": ran.outcomes, "seconds": ran.seconds, "wall": ran.wall, "broken": ran.broken}

    def record(self, selector: Selector) -> dict[str, object]:
        """A selector's recording run; its state is kept."""
        self.reset(states=True)
        ran = self._run(selector.record, limit=RECORD_LIMIT_S, test_s=120)
        kept = self.states / selector.name
        shutil.rmtree(kept, ignore_errors=True)
        kept.mkdir(parents=True)
        for file in self.tree.glob(f"{selector.state}*"):
            if file.is_file():
                shutil.copy2(file, kept / file.name)
        if not (kept / selector.state).exists():
            raise SystemExit(f"{self.project.name}: {selector.name} recorded nothing:\n{ran.tail}")
        return {"outcomes": ran.outcomes, "wall": ran.wall, "tail": ran.tail[-600:]}

    def full(self, mutation: Mutation, limit: float) -> dict[str, object]:
        """Outcomes of the whole suite with the mutation."""
        self.reset()
        self._apply(mutation)
        outcomes: dict[str, str] = {}
        items: list[str] | None = None
        broken: list[str] = []
        wall = 0.0
        for _ in range(TRIES):
            ran = self._run(
                ("-p", "no:pytest-testmon", "--continue-on-collection-errors"), limit=limit, test_s=self.project.test_s, skip=outcomes
            )
            wall += ran.wall
            items, broken = (ran.items if items is None else items), broken or ran.broken
            outcomes.update(ran.outcomes)
            if ran.running:
                outcomes[ran.running] = "timeout" if ran.overran else "crash"
            if not ran.running or ran.items is None:
                break
        for test in items or ():
            outcomes.setdefault(test, "timeout")
        self.reset()
        return {"outcomes": outcomes, "broken": broken, "aborted": items is None, "wall": wall}

    def alone(self, mutation: Mutation, tests: Sequence[str], limit: float) -> dict[str, str]:
        """Outcomes of some tests with the mutation, each in a session of its own."""
        self.reset()
        self._apply(mutation)
        found: dict[str, str] = {}
        for test in tests:
            found.update(self._run(("-p", "no:pytest-testmon", test), limit=limit, test_s=self.project.test_s).outcomes)
        self.reset()
        return found

    def choose(self, selector: Selector, mutation: Mutation | None) -> dict[str, object]:
        """What a selector would run."""
        self.reset(states=True)
        for file in (self.states / selector.name).iterdir():
            shutil.copy2(file, self.tree / file.name)
        if mutation is not None:
            self._apply(mutation)
        ran = self._run(selector.choose, limit=240)
        self.reset(states=True)
        tail = ran.tail[-1500:] if ran.aborted else ""
        return {"selected": ran.items or [], "broken": ran.broken, "aborted": ran.aborted, "wall": ran.wall, "tail": tail}

    def reset(self, states: bool = False) -> None:
        """The clean tree again."""
        git = ["git", "-C", str(self.tree)]
        keep = [] if states else [word for selector in SELECTORS for word in ("-e", f"{selector.state}*")]
        for words in (["checkout", "-q", "--", "."], ["clean", "-ffdxq", *keep]):
            subprocess.run([*git, *words], check=True, timeout=120, stdin=subprocess.DEVNULL, capture_output=True)

    def _apply(self, mutation: Mutation) -> None:
        path = self.tree / mutation.file
        path.write_bytes(mutation.applied(path.read_bytes().decode()).encode())

    def _run(self, words: Sequence[str], *, limit: float, test_s: float = 0, skip: Sequence[str] | dict[str, str] = ()) -> Ran:
        return pytest_run(self.project.python, self.tree, [*words, *self.project.words], limit=limit, test_s=test_s, skip=skip)
