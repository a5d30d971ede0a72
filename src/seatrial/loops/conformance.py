"""Conformance of the Megatron-Bridge under test, before the levels of a loop that is built on it.

- The diff says which rungs of the ladder, for which families (conformance.toml). A diff that touches no source asks for none.
- It is a gate: a rung that fails, and did not before the change, ends the trial before anything runs on a GPU.
- It runs in an environment of its own, on a CPU. Where that is not built the deliverable is Blocked, with the command that
  builds it; the levels run all the same.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

from seatrial.loops.engines import MEGATRON_CPU
from seatrial.loops.knowledge import read_tables
from seatrial.model.knowledge import Conformance
from seatrial.model.loop import Context, SideTests
from seatrial.model.record import RepoState

NAMES = {"megatron.bridge": "bridge", "megatron.core": "megatron"}
"""What the probe calls the checkouts that it can run."""
MINUTES, MINUTES_OF_A_FAMILY = 10, 10


@cache
def rows() -> tuple[Conformance, ...]:
    """Those of conformance.toml; the first holds for any source."""
    return read_tables(Path(__file__).parent / "conformance.toml", "conformance", Conformance)


def conformance(context: Context) -> tuple[SideTests, ...]:
    """The probe of the checkouts under test; nothing where there is none, where it is switched off, or nothing asks for it.

    Families that are not to climb the same rungs have a probe each.
    """
    tested = [(name, repo) for repo in context.changes if (name := _name(repo)) and not repo.companion]
    if not tested or context.options.get("tests") == "off":
        return ()
    unknown = any(not repo.changed for _, repo in tested)
    meant = _meant(path for _, repo in tested for path in repo.changed) or ([rows()[0]] if unknown else [])
    bases = [(repo, repo.base) for _, repo in tested if repo.base]
    arguments = [word for name, repo in tested for word in ("--change", f"{name}={repo.path}")]
    if len(tested) == len(bases) == 1:  # the probe takes one revision, and two repositories have none in common
        arguments += ["--base", bases[0][1]]
    note = "what the change touches is not known (name --base): only the general rungs were chosen"
    common = SideTests(
        key="conformance",
        name="Bridge conformance",
        argv=(sys.executable, "-m", "seatrial.cli.main", "probe", "bridge", *arguments),
        cwd=context.run_dir,
        notes=(note,) if unknown else (),
        blocked=None
        if MEGATRON_CPU in context.environments
        else f"the environment {MEGATRON_CPU} is not built: seatrial env build {MEGATRON_CPU}",
        kind="probe",
        gate=True,
        bases=tuple(bases) if len(bases) == len(tested) else (),
    )
    return tuple(_probe(common, number, families, rungs) for number, (rungs, families) in enumerate(_groups(meant).items()))


def _probe(common: SideTests, number: int, families: Sequence[str], rungs: Sequence[str]) -> SideTests:
    """The probe of some families; all but the first are called by theirs."""
    models = [word for family in families for word in ("--model", family)]
    return replace(
        common,
        key=f"{common.key}-{families[0]}" if number else common.key,
        name=f"{common.name} of {', '.join(families)}" if number else common.name,
        argv=(*common.argv, *models, "--rungs", ",".join(rungs), "--no-base", "--no-tests"),
        minutes=MINUTES + MINUTES_OF_A_FAMILY * len(families),
    )


def _groups(meant: Sequence[Conformance]) -> dict[tuple[str, ...], list[str]]:
    """The families that climb the same rungs, by these."""
    rungs = _each(row.rungs for row in meant)
    made: dict[tuple[str, ...], list[str]] = {}
    for family in _each(row.families for row in meant):
        left_out = {rung for row in rows() if family in row.families for rung in row.without}
        made.setdefault(tuple(rung for rung in rungs if rung not in left_out), []).append(family)
    return made


def _name(repo: RepoState) -> str | None:
    return next((name for package, name in NAMES.items() if package in repo.packages), None)


def _meant(paths: Iterable[str]) -> list[Conformance]:
    """The rows that a changed path asks for, in their order."""
    touched = list(paths)
    return [row for row in rows() if any(row.glob_of(path) for path in touched)]


def _each(lists: Iterable[Sequence[str]]) -> tuple[str, ...]:
    """Each name once, in the order in which it is first asked for."""
    return tuple(dict.fromkeys(name for names in lists for name in names))
