"""What a bisect stores, and the words it uses.

- A *point* is one state of the repositories that can be tested: for one repository a commit, for several one commit of each.
- A *run* is one execution of the command on one point. It ends with a *mark*: good, bad or skip. Every run is a row of the journal,
  which is the truth: everything else (what to run next, the answer, the report) is a function of the plan and the rows.
- A skip carries its reason, and never counts against a commit.
- A *failure* says how a bad run failed. A run that fails in another way than the bad end does is a skip.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import Literal

from pydantic import Field

from seatrial.core.records import Record
from seatrial.core.verdict import Boundary

VERSION = 1
_COMMIT = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")


Stage = Literal["ends", "search", "conviction", "replay"]
"""Why a point is run: an end is verified, the first bad point is searched, a repository is convicted or acquitted; or it is not run,
because a log that was replayed has its mark."""


class Mark(StrEnum):
    """What a run says of its point; the words of `git bisect`."""

    GOOD = "good"
    BAD = "bad"
    SKIP = "skip"


class SkipKind(StrEnum):
    """Why a point could not be judged."""

    COMMAND = "command"
    TREE = "tree"
    MISSING = "missing"
    ABSENT = "absent"
    UNEDITED = "unedited"
    BUILD = "build"
    BUILD_COMMAND = "build-command"
    ENVIRONMENT = "environment"
    OTHER_FAILURE = "other-failure"
    METRIC = "metric"
    TRIAL = "trial"
    HAND = "hand"


SKIP_REASONS = {
    SkipKind.COMMAND: "the command asked for it (exit code 125)",
    SkipKind.TREE: "the tree could not be made",
    SkipKind.MISSING: "a file that the command names does not exist there",
    SkipKind.ABSENT: "a file that the command names does not exist there",  # found before anything ran
    SkipKind.UNEDITED: "a file of --edit does not exist there",
    SkipKind.BUILD: "the environment could not be built",
    SkipKind.BUILD_COMMAND: "the build command failed",
    SkipKind.ENVIRONMENT: "the machine, the network or the cluster failed, not the commit",
    SkipKind.OTHER_FAILURE: "it failed in another way than the bad end",
    SkipKind.METRIC: "the metric is missing or not finite",
    SkipKind.TRIAL: "the trial was Blocked or Skipped",
    SkipKind.HAND: "a person said so",
}


class Pin(Record):
    """One repository at one commit."""

    repo: str
    """Its name in the plan."""
    commit: str
    place: str = "."
    """Where it lies in the tree of a step: `.` for the whole tree; a submodule's path for what replaces that submodule."""


class Point(Record):
    """One state that can be tested."""

    repo: str
    """The repository whose commit made this state out of the one before."""
    commit: str
    subject: str
    time: int
    """Commit time, seconds since 1970."""
    parents: tuple[int, ...] = ()
    """Indices of the points before it. None: whatever comes before is taken as good."""
    outside: tuple[str, ...] = ()
    """Commits right before it that are no points: they lie before the good end, and were not seen to be good."""
    pins: tuple[Pin, ...]
    contents: str
    """Identity of the files: points with the same contents give the same results."""

    @property
    def id(self) -> str:
        """Unique in a bisect, and the same in every session."""
        return point_id(self.pins)


def point_id(pins: Sequence[Pin]) -> str:
    """The commit, where there is one repository; else `repo@commit` of each, sorted."""
    return pins[0].commit if len(pins) == 1 else "+".join(sorted(f"{pin.repo}@{pin.commit}" for pin in pins))


@dataclass(frozen=True)
class History:
    """The points between a good and a bad end. Parents come before children; the first is the good end, the last the bad one."""

    points: tuple[Point, ...]

    @cached_property
    def ancestors(self) -> tuple[int, ...]:
        """Of each point, itself and what comes before it, as bits."""
        found: list[int] = []
        for index, point in enumerate(self.points):
            bits = 1 << index
            for parent in point.parents:
                bits |= found[parent]
            found.append(bits)
        return tuple(found)

    @cached_property
    def by_id(self) -> dict[str, int]:
        return {point.id: index for index, point in enumerate(self.points)}

    @property
    def last(self) -> int:
        return len(self.points) - 1


class Failure(Record):
    """How a run failed, without what differs between two runs that fail alike."""

    kind: Literal["exit", "timeout", "check", "trial", "pattern"]
    missed: bool = False
    """Of a check: it was missed by what it measured, not for want of a value."""
    boundary: Boundary | None = None
    signature: str | None = None
    cause: str = ""
    """The first cause, numbers and places taken out (`report.text.generic`); empty when the log shows none."""
    exit_code: int | None = None
    shown: str = ""
    """For people: the cause as it was printed."""
    beside: tuple[str, ...] = ()
    """Ids of failures of the machine that the run met on its way and survived. They do not make two failures different; see `observe`."""

    def same(self, other: Failure) -> bool:
        mine, its = ((one.kind, one.boundary, one.signature, one.cause) for one in (self, other))
        # Without a cause the exit code is all there is.
        return mine == its and (bool(self.cause or self.signature) or self.exit_code == other.exit_code)


COPIED = "not run: the same files as a point that was"


class BisectRun(Record):
    """One row of the journal."""

    number: int
    """Counts from 1, in the order of the journal."""
    stage: Stage
    history: int = 0
    """Which history: 0 for the one that was asked for, 1 and up for those inside a submodule."""
    round: int
    point: str
    commit: str
    """Of the point, for people."""
    subject: str = ""
    """Of that commit, for people; or in words what state it is, where it is on no history's line."""
    mark: Mark
    value: float | str | None = None
    """What the check measured; a marked string for what is not finite."""
    passed: bool | None = None
    """Whether the check passed; None without a check."""
    skip: SkipKind | None = None
    reason: str = ""
    """Why this mark, in one line."""
    failure: Failure | None = None
    exit_code: int | None = None
    started: str = ""
    """UTC."""
    seconds: float = 0.0
    environment: str = ""
    """Hash of the environment, or empty for the caller's own."""
    built: bool = False
    """Whether its environment was built for this run."""
    directory: str = ""
    """Where its files are, in the bisect directory; empty for what was not run (replayed, or known from equal contents)."""
    notes: tuple[str, ...] = ()
    copied: bool = Field(default_factory=lambda data: COPIED in data.get("notes", ()))
    """It was not run: it is the row of another point with the same contents. A row of an older version says so in its notes alone."""
    unedited: tuple[str, ...] = ()
    """Files in which an edit changed nothing."""
    by_hand: bool = False
    """A person changed its mark in the journal."""


class BegunRecord(Record):
    """step.json of a run: what it was begun for. A job that outlived its Seatrial is known by it."""

    point: str
    stage: Stage
    history: int


class SetupRecord(Record):
    """ready.json of a run: what its command was begun with, for a job that outlives its Seatrial."""

    started: str
    """UTC."""
    began: float
    """The same in seconds since 1970."""
    stamp: float
    """When its command was written, on the clock of the file system."""
    python: str | None
    variables: dict[str, str]
    environment: str
    built: bool
    notes: tuple[str, ...]
    unedited: tuple[str, ...] = ()


class Edit(Record):
    """Clauses of sed for one file of the tree."""

    file: str
    clauses: str


class Patch(Record):
    """What is applied to the trees of a range that is broken for another reason."""

    source: str
    """A commit of the main repository, or a file below `patches/` of the bisect directory."""
    since: str | None = None
    """Only to commits that contain this one; None: wherever it is missing."""

    @property
    def by_history(self) -> bool:
        """Whether two commits with the same files may get different ones by it."""
        return self.since is not None or _COMMIT.fullmatch(self.source) is not None


class Repo(Record):
    """A repository whose history is searched."""

    name: str
    path: str
    """The user's checkout (its top level). Read only, and never written to."""
    good: str
    bad: str
    """Commits."""
    place: str = "."
    """As in `Pin`."""


class EnvironmentPlan(Record):
    """How the environment of a commit is made."""

    kind: Literal["none", "pip", "uv"]
    lock: str = ""
    """Path of the lock in the tree."""
    python: str = ""
    """Version such as 3.11; empty for Seatrial's own."""
    build: tuple[str, ...] = ()
    """A command that builds the tree before the command runs; its failure is a skip."""
    packages: tuple[str, ...] = ()
    """Requirements that are installed beside what the lock asks for, and change nothing of that."""


class BisectPlan(Record):
    """bisect.json: everything that a bisect was asked to do; nothing else decides what it does."""

    version: int = VERSION
    created: str
    repos: tuple[Repo, ...] = Field(min_length=1)
    """The first is the main one: its tree is where the command runs."""
    first_parent: bool = False
    command: tuple[str, ...]
    """Words may hold placeholders, see `PLACEHOLDERS`. With `trial`: the words after `seatrial run`."""
    extra: tuple[str, ...] = ()
    """Further arguments that change what is measured; they stand at the end of the command."""
    trial: bool = False
    check: str | None = None
    metrics: str = "{output}"
    """Where the command leaves its metrics; relative to the tree."""
    failure: str | None = None
    """A pattern that the log of a bad run must hold; it then replaces the comparison of failures."""
    any_failure: bool = False
    nightly: str | None = None
    """The script, when this is the bisect of a nightly."""
    environment: EnvironmentPlan
    variables: dict[str, str] = Field(default_factory=dict)
    """Set for every run, with placeholders."""
    edits: tuple[Edit, ...] = ()
    patches: tuple[Patch, ...] = ()
    jobs: int = 1
    on: str | None = None
    """`slurm:PROFILE`, or None for this machine."""
    repeat: int = 1
    confidence: float = 0.99
    retries: int = 2
    """How often a run is tried again that the machine failed, not the commit."""
    minutes: float = 60.0
    descend: bool = True
    """Whether a first bad commit that moves a submodule is followed into that submodule."""
    notes: tuple[str, ...] = ()
    """What the reader of the answer must know, such as uncommitted changes that were not tested."""


PLACEHOLDERS = ("tree", "output", "checkpoints", "commit", "python")
"""In words of the command and values of variables: the tree of this run, a directory for its files and one for its checkpoints (both
fresh), the commit, and the interpreter of the environment. The variables SEATRIAL_TREE, SEATRIAL_OUTPUT, SEATRIAL_CHECKPOINTS and
SEATRIAL_COMMIT carry the same."""


def tree_variable(repo: str) -> str:
    """The variable that names the place of a further repository."""
    return "SEATRIAL_TREE_" + re.sub(r"[^A-Z0-9_]", "_", repo.upper())


class Suspect(Record):
    """A point that may be the first bad one."""

    point: str
    repo: str
    commit: str
    subject: str
    probability: float


class Standing(Record):
    """What was found out about one repository of several, or about a submodule."""

    repo: str
    verdict: Literal["convicted", "acquitted", "accomplice", "unknown"]
    commit: str | None = None
    subject: str = ""
    """Of the commit, where it is none of the searched history: inside of a submodule."""
    confidence: float = 1.0
    """That it is this commit, given that the one that moves the submodule is the right one."""
    why: str


class BisectAnswer(Record):
    """What the rows say so far."""

    state: Literal["found", "range", "open"]
    """`found`: one commit; `range`: it is one of several, and no more can be told; `open`: not finished."""
    suspects: tuple[Suspect, ...] = ()
    """Most probable first; together they have `confidence`."""
    confidence: float = 0.0
    last_good: str | None = None
    """The newest point before the suspects that is good, by id."""
    first_bad: str | None = None
    """The oldest point from the suspects on that was seen to be bad, by id."""
    why: str = ""
    """Why it is only a range."""
    model: str = ""
    """How noise was treated, in words; empty without noise."""
    flaky: tuple[str, ...] = ()
    """Points whose runs disagree, by id."""
    standings: tuple[Standing, ...] = ()
    notes: tuple[str, ...] = ()
