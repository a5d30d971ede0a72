"""What a loop declares beforehand: levels, the globs and words that require them, milestones, signatures, the meaning of metrics.

- Declarations are TOML files beside the loop. `Record` refuses unknown keys: a typo is an error that names the key, never a rule that
  silently does not apply.
- Globs: `*` stays within a directory, `**` crosses them, `{a,b}` is one of several. Case counts.
- `Signals` maps metrics to meanings. Each name is a regular expression that must match a whole tag behind the prefix of its run
  (`full/train/loss` is `train/loss` of the run `full/`).
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Self

from pydantic import Field, model_validator

from seatrial.core.records import Cost, Record
from seatrial.core.verdict import Boundary, Verdict

_PARTS = re.compile(r"\*\*/|\*\*|\*|\?|\{|\}|,|[^*?{},]+")
_MEANING = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
_BRACES = {"{": "(?:", ",": "|", "}": ")"}


@lru_cache(maxsize=4096)
def _compiled(glob: str) -> re.Pattern[str]:
    depth, made = 0, []
    for part in _PARTS.findall(glob):
        closes = part == "}" and depth > 0
        special = part == "{" or (part in ",}" and depth > 0)
        depth += (part == "{") - closes
        made.append(_BRACES[part] if special else _MEANING.get(part, re.escape(part)))
    if depth:
        raise ValueError(f"glob {glob!r}: a brace is not closed")
    return re.compile("".join(made))


def matches(path: str, glob: str) -> bool:
    """Whether the whole path is matched."""
    return _compiled(glob).fullmatch(path) is not None


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
    not_taken: tuple[str, ...] = ()
    """Names of variants, such as transports, that this configuration does not run."""


class Named(Record):
    """Changed paths that are meant by a row of a table."""

    name: str
    globs: tuple[str, ...]
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
    machine: str = ""
    """Set where the machine is at fault, whatever the files under test are: why it may come and go."""
    seen_in: str = Field(default="")
    """System and version where it was observed."""


@dataclass(frozen=True, slots=True)
class Bound:
    """Where a metric of a sound run stays. Outside of it a run is inconclusive."""

    tag: str
    low: float = -math.inf
    high: float = math.inf
    """General limits: they hold whatever the run's first steps show."""
    floor: float = math.inf
    """Values up to this are never called diverged."""
    growth: float = 1.0
    """How often the size of the first steps may be exceeded, above the floor."""


@dataclass(frozen=True, slots=True)
class Signals:
    """The metrics that a training run of one loop is judged by."""

    loss: tuple[str, ...]
    grad_norm: tuple[str, ...]
    rate: tuple[str, ...]
    reward: tuple[str, ...] = ()
    """A run that logs none is supervised."""
    spreads: tuple[tuple[str, str], ...] = ()
    """Largest and smallest value of what a step learns from (plain tags): equal ends are nothing to learn. The first pair that is logged
    counts."""
    deviations: tuple[str, ...] = ()
    """Zero where there was nothing to learn."""
    ties: tuple[str, ...] = ()
    """One where there was nothing to learn: the share of groups whose rewards are equal."""
    lengths: tuple[str, ...] = ()
    """Mean and largest length of what was generated, or tokens in the loss: zero is nothing to train on."""
    entropy: tuple[str, ...] = ()
    moving: tuple[str, ...] = ()
    """Besides loss, gradient, reward and entropy: numbers that no two steps share."""
    counters: tuple[str, ...] = ()
    """Never fall from one step to the next within one run."""
    shares: tuple[str, ...] = ()
    """Lie within 0 and 1 by definition."""
    not_negative: tuple[str, ...] = ()
    """Besides gradient norms, learning rates, deviations, lengths and shares."""
    ordered: tuple[tuple[str, str], ...] = ()
    """Plain tags of which the first never exceeds the second at one step."""
    bounds: tuple[Bound, ...] = ()
    control: str = ""
    """The prefix of a run that is to learn nothing: its learning rate may be zero."""

    @property
    def every_step(self) -> tuple[str, ...]:
        """What each logged step has, where the loop logs it at all."""
        ends = tuple(tag for pair in self.spreads for tag in pair)
        return (*self.loss, *self.grad_norm, *self.rate, *self.reward, *ends, *self.deviations, *self.ties, *self.lengths, *self.entropy)

    @property
    def every(self) -> tuple[str, ...]:
        """All that are numbers by definition."""
        ordered = tuple(tag for pair in self.ordered for tag in pair)
        bounded = tuple(bound.tag for bound in self.bounds)
        return (*self.every_step, *self.moving, *self.counters, *self.shares, *self.not_negative, *ordered, *bounded)
