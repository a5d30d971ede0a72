"""What is known beforehand: levels, what of a diff asks for them, milestones and signatures of known failures.

They are written as TOML beside the loop they belong to; `Record` refuses unknown keys, so a typo there is an
error that names the key instead of a rule that silently never applies.
"""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from seatrial.model.globs import matches
from seatrial.model.record import Cost, Record
from seatrial.model.verdict import Boundary, Verdict


class CheckSpec(Record):
    """A check of a level: an expression of the check language, why it is there and where a miss points to."""

    expr: str
    why: str
    boundary: Boundary = Boundary.METRICS
    driver: bool = False
    """Rests on what Seatrial's own driver sets up or measures: files of other runs need not hold its metrics."""


class Level(Record):
    """One rung of a loop's coverage ladder."""

    number: int
    name: str
    """Short, for directory names: `smoke`."""
    title: str
    required_when: tuple[str, ...] = ()
    """Globs over changed paths (`**` crosses directories), beside the loop's concerns."""
    words: tuple[str, ...] = ()
    """Words in changed lines that require the level."""
    default: bool = False
    """Runs when nothing is said, and when a changed path matches no level."""
    proves: str
    claims_not: tuple[str, ...] = ()
    """What a Pass of this level must not be read as; recorded as limitations."""
    steps: int | None = None
    deadline_minutes: float = 15
    stall_minutes: float = 5
    cost: Cost
    checks: tuple[CheckSpec, ...] = ()
    skip: str | None = None
    """Set when the level cannot run yet, with the reason."""
    left_out: tuple[str, ...] = ()
    """Parts that cannot be run in this configuration, each with the reason: they are Skipped."""


class Named(Record):
    """Changed paths that are meant by a row of a table."""

    name: str
    globs: tuple[str, ...]
    """Over changed paths."""
    unless: tuple[str, ...] = ()
    """Globs of paths that are not meant, although `globs` match them."""

    def glob_of(self, path: str) -> str | None:
        """The glob that means this path, or None."""
        if any(matches(path, glob) for glob in self.unless):
            return None
        return next((glob for glob in self.globs if matches(path, glob)), None)


class Concern(Named):
    """A row of the table from a diff to levels: a kind of change, how it is recognised, and the levels that it needs."""

    levels: tuple[int, ...] = ()
    """None: such paths are known to need no level. They then count for no other row either, and no word in them does."""
    package: str | None = None
    """Only in a checkout that provides this package: what `docs/` or `examples/` hold differs from one to another."""
    words: tuple[str, ...] = ()
    """Words in changed lines of any other path that ask for the row, too."""
    only_with: tuple[str, ...] = ()
    """The row counts only where a changed line of such a path, or what stands around it, says one of these words."""

    @model_validator(mode="after")
    def _whole(self) -> Self:
        if not self.levels and (self.package is None or self.words or self.only_with):
            raise ValueError(f"{self.name}: paths that need no level are those of one package, whatever their lines say")
        return self


class Conformance(Named):
    """What of the conformance ladder a change of such paths asks for."""

    rungs: tuple[str, ...] = ()
    families: tuple[str, ...] = ()
    """Model families that show it, where the default one does not."""
    without: tuple[str, ...] = ()
    """Rungs that its families fail as released: what other rows ask for does not go for them."""


class Surface(Record):
    """What a loop imports from a module of the checkout under test."""

    module: str
    names: tuple[str, ...] = ()
    """Functions and classes; none: all of the module."""
    levels: tuple[int, ...] = (0,)

    def is_file(self, path: str) -> bool:
        """Whether a path of the repository is this module."""
        place = self.module.replace(".", "/")
        return path.removeprefix("src/") in (f"{place}.py", f"{place}/__init__.py")


class Milestone(Record):
    """A log line that proves how far a loop got."""

    id: str
    pattern: str
    """Regular expression, searched in each line."""
    boundary: Boundary
    """Where an unknown failure sits if this is the last milestone reached."""
    verdict: Verdict = Verdict.FAIL
    """What an unknown failure after this milestone means: Blocked before the model is built, Fail from then on."""
    late: bool = False
    """Its line may come after that of the next milestone, since two streams write them: it is then no step back."""


class Signature(Record):
    """A known failure (or a known harmless line)."""

    id: str
    pattern: str
    """Regular expression, searched in each line of the log."""
    also: tuple[str, ...] = ()
    """Further patterns that must occur somewhere in the log for the signature to count."""
    unless: tuple[str, ...] = ()
    """Patterns that acquit: if one occurs anywhere, the signature does not count."""
    boundary: Boundary | None = None
    """Required unless the line is harmless."""
    verdict: Verdict = Verdict.FAIL
    advice: str = ""
    harmless: bool = False
    """Noise that looks like a failure and is none; mentioned, never a cause."""
    frame: bool = False
    """The pattern is searched in the frames of the first cause, and only where no other signature explains it."""
    silent: bool = False
    """Counts even when the process exited with 0 and reached every step (swallowed errors)."""
    tolerated: int = Field(default=0, ge=0)
    """Of a silent one: how many such lines a healthy run may print. Only more of them count."""
    share: float = Field(default=0.0, ge=0, lt=1)
    """The same as a share of the run's steps; the larger of both is the limit."""
    ending: bool = False
    """Of a harmless one: only where no further steps follow."""
    training: bool = False
    """Of a line that a run got over: counts only between the first and the last step. Before, it is about the start."""
    bare: bool = False
    """Of a line that a run got over: searched only in exceptions without a traceback (`Name: message`). None of them is tolerated."""
    seen_in: str = Field(default="")
    """System and version where it was observed."""
