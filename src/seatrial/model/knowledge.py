"""What is known beforehand: levels, milestones and signatures of known failures.

They are written as TOML beside the loop they belong to; `Record` refuses unknown keys, so a typo there is an
error that names the key instead of a rule that silently never applies.
"""

from __future__ import annotations

from pydantic import Field

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
    """Globs over changed paths (`**` crosses directories)."""
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
    seen_in: str = Field(default="")
    """System and version where it was observed."""
