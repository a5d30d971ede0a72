"""From outcomes and selections to recall; pure.

- changed: outcome is not that of the clean tree. Tests that are flaky on the clean tree are left out; so is a test that is gone from a
  file that can be collected: nobody can run it.
- missed = changed − seen. Seen is what a selector would run, and tests of a file that its own session could not collect.
- A selector whose session did not come to a collection, where the full suite's did, has crashed: it saw nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

UNCOLLECTED = "uncollected"


@dataclass(frozen=True)
class Baseline:
    """The clean tree."""

    outcomes: Mapping[str, str]
    seconds: Mapping[str, float]
    flaky: frozenset[str]


@dataclass
class Tally:
    """One selector over all mutations."""

    name: str
    mutations: int = 0
    effective: int = 0
    changed: int = 0
    missed: int = 0
    missing_mutations: int = 0
    crashes: list[str] = field(default_factory=list)
    tests: float = 0.0
    passing: float = 0.0
    """Of the tests that pass on the clean tree: one that skips itself proves nothing, and ours runs it every time."""
    seconds: float = 0.0
    misses: list[tuple[str, list[str]]] = field(default_factory=list)

    @property
    def recall(self) -> float:
        return 1.0 if not self.changed else 1 - self.missed / self.changed


def baseline(runs: Sequence[Mapping[str, Mapping[str, object]]]) -> Baseline:
    """Several plain runs of the clean tree, of all workers."""
    tests = {test for run in runs for test in run["outcomes"]}
    first = {test: str(runs[0]["outcomes"].get(test, "")) for test in tests}
    flaky = {test for test in tests if len({run["outcomes"].get(test, "") for run in runs}) > 1}
    seconds = {test: min(float(str(run["seconds"].get(test, 0))) for run in runs) for test in tests}
    return Baseline(first, seconds, frozenset(flaky))


def changed(clean: Baseline, outcomes: Mapping[str, str], broken: Collection[str], aborted: bool) -> dict[str, str]:
    """Test → its new outcome."""
    found = {}
    for test in sorted(set(clean.outcomes) | set(outcomes)):
        after = outcomes.get(test)
        if after is None:
            if not aborted and not _within(test, broken):
                continue
            after = UNCOLLECTED
        if test not in clean.flaky and after != clean.outcomes.get(test):
            found[test] = after
    return found


def seen(tests: Iterable[str], selected: Collection[str], broken: Collection[str], both_aborted: bool) -> set[str]:
    """Which of `tests` a selector's session runs or fails for."""
    chosen = set(selected)
    return {test for test in tests if both_aborted or test in chosen or _within(test, broken)}


def add(
    tally: Tally, clean: Baseline, what: str, differs: Mapping[str, str], full: Mapping[str, object], row: Mapping[str, object]
) -> None:
    """Count one mutation."""
    selected = {test for test in list_of(row["selected"]) if test not in clean.flaky}
    aborted = bool(row["aborted"])
    if aborted and not full["aborted"]:
        tally.crashes.append(what)
    got = seen(differs, selected, list_of(row["broken"]), aborted and bool(full["aborted"]))
    missed = sorted(set(differs) - got)
    tally.mutations += 1
    tally.effective += bool(differs)
    tally.changed += len(differs)
    tally.missed += len(missed)
    if missed:
        tally.missing_mutations += 1
        tally.misses.append((what, [f"{test} ({clean.outcomes.get(test, 'new')} → {differs[test]})" for test in missed]))
    known = [test for test in clean.outcomes if test not in clean.flaky]
    run = selected if not aborted else set(known)
    tally.tests += len(run & set(known)) / max(1, len(known))
    passing = {test for test in known if clean.outcomes[test] == "passed"}
    tally.passing += len(run & passing) / max(1, len(passing))
    whole = sum(clean.seconds[test] for test in known)
    tally.seconds += sum(clean.seconds.get(test, 0.0) for test in run) / max(whole, 1e-9)


def list_of(value: object) -> list[str]:
    return [str(one) for one in value] if isinstance(value, list) else []


def _within(test: str, files: Collection[str]) -> bool:
    return any(test == file or test.startswith((f"{file}::", f"{file}/")) or not file for file in files)
