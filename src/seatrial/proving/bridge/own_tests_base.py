"""The Bridge's own tests at the base revision: run once, then read from the cache.

A file of the cache is for one commit, one selection of files, one environment, one set of shims and one state of the submodule. What did
not come to a proper end is not kept: it is no baseline.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import seatrial
from seatrial.evidence.git import commit_of, tree_of
from seatrial.files import read_model, write_json
from seatrial.launch.environments import default_root
from seatrial.model.errors import BlockedError, UserError
from seatrial.model.record import Record, RepoState
from seatrial.model.verdict import Boundary
from seatrial.proving.bridge.dead_paths import MEGATRON
from seatrial.proving.bridge.own_tests_run import origin, run
from seatrial.trial.sides import LOG, Case
from seatrial.trial.unchanged import unchanged

PROBES = Path(seatrial.__file__).parent / "probes"


class Recorded(Record):
    """What the tests gave at a commit."""

    commit: str
    files: tuple[str, ...]
    cases: tuple[Case, ...]


def commit_to_compare(repo: RepoState, base: str) -> str:
    """The commit of a revision; one that holds the same files as what is under test is refused."""
    root = Path(repo.path)
    commit = commit_of(root, base)
    if commit is None:
        raise UserError(f"{root}: no revision {base}", f"name one that it has: git -C {root} log --oneline")
    if not repo.dirty and tree_of(root, commit) == tree_of(root, repo.commit):
        raise UserError(f"{base} is what is under test: it would excuse every failure", "name the revision before the change")
    return commit


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where and with what the tests run."""

    python: Path
    instruments: Path
    out: Path
    deadline_s: float
    """Of the run at the base."""
    tell: Callable[[str], None]


def baseline(place: Place, repo: RepoState, commit: str, files: Sequence[str]) -> tuple[Case, ...]:
    """The cases of those files at a commit. A BlockedError or UserError says why there are none."""
    kept = default_root() / "bridge-tests" / f"{commit}-{_hash(files)}-{environment_hash(place.python, Path(repo.path))}.json"
    if kept.is_file():
        return read_model(kept, Recorded).cases
    out = place.out / "base"
    with unchanged([(repo, commit)], out / "tree") as (state,):
        root = Path(state.path)
        there = [file for file in files if (root / file).is_file()]
        if not there:
            raise BlockedError(Boundary.ENVIRONMENT, f"none of the test files exists at {commit[:12]}", "")
        place.tell(f"running {len(there)} test files of the Bridge at its base {commit[:12]}, once: {out / LOG}")
        ran = run(place.python, root, there, place.instruments, out, place.deadline_s)
        wrong = origin(ran, root)
    if ran.outcome.ended != "exited" or ran.outcome.exit_code not in (0, 1) or not ran.cases or wrong:
        how = wrong or f"{ran.outcome.ended}, exit code {ran.outcome.exit_code}: {ran.said.strip()[-300:]}"
        raise BlockedError(Boundary.ENVIRONMENT, f"the tests do not run at {commit[:12]}: {how}", f"see {out / LOG}")
    write_json(kept, Recorded(commit=commit, files=tuple(there), cases=ran.cases))
    return ran.cases


def environment_hash(python: Path, checkout: Path) -> str:
    """Over the interpreter, the packages beside it, our shims, and whether the submodule is there."""
    packages = sorted(found.name for found in python.parent.parent.glob("lib/python*/site-packages/*.dist-info"))
    shims = [*sorted((PROBES / "megatron").glob("*.py")), PROBES / "bridge" / "pytest_shims.py"]
    contents = [hashlib.sha256(file.read_bytes()).hexdigest() for file in shims]
    return _hash([str(python.absolute()), *packages, *contents, str((checkout / MEGATRON / "megatron").is_dir())])


def _hash(parts: Sequence[str]) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
