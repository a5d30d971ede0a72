"""Logs that hold no training but a list of stages, or refits of a generator: what they show on their own.

- A stage is a line that begins or ends with PASS; one that ends with FAIL is a failure (one that begins with it is
  found by triage). A refit is a row with the largest relative error of token probabilities after new weights arrived.
- A list that was cut off looks like one that ended. So it is complete only with a stage that closes such lists (a
  reload of what was saved, an export), and if every stage that ran with a switch off also ran with it on.
- A refit shows something only beside a control: a row measured before the new weights arrived, which must be off. Its
  log is complete when the shell says that the program is over.
- What is not complete is inconclusive, never a Pass.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from pathlib import Path

from seatrial.model.guarded import BadValue, parse_float
from seatrial.model.record import CheckResult
from seatrial.model.verdict import Boundary, Verdict
from seatrial.triage.diagnose import stage_boundary
from seatrial.triage.log import read_log
from seatrial.trial.judge import Judgement

STAGE = re.compile(r"PASS (?P<head>\S.*)|(?P<tail>\S.*) (?P<word>PASS|FAIL)$")
REFIT = re.compile(
    r"""(?:\{"tag": "|\s+)(?P<tag>initial|stale|after).*(?:"token_mult_prob_error": |mult_err )(?P<error>[\d.e+-]+|nan|inf)"""
)
MEASURED = re.compile(r"token_mult_prob_error\S* .*= (?P<error>[\d.e+-]+|nan|inf)$")
CLOSING = re.compile(r"save\S*load|save_hf_pretrained|\breload|adapter export", re.IGNORECASE)
SWITCH = re.compile(r"(\w+=)(True|False)\b")
ENDED = re.compile(r"\b(?:rc|exit code)[ =:]*0\b|real\s+\d+m[\d.]+s$")
"""The shell's word that the program is over: its exit code, or its time."""
TOLERANCE = 1.05
"""The relative error of token probabilities that a refit may leave; what a stale weight leaves is above it."""


@dataclass(slots=True)
class Stages:
    """What a list of stages shows."""

    passed: dict[int, str] = field(default_factory=dict)
    """Stages by line."""
    refits: dict[int, float] = field(default_factory=dict)
    """Errors after a refit, by line."""
    failed: tuple[int, str, Boundary] | None = None
    controls: int = 0
    ended: bool = False
    text: dict[int, str] = field(default_factory=dict)

    def checks(self) -> tuple[CheckResult, ...]:
        """One for each line that shows something."""
        stages = [CheckResult(name=f"line {n}: {name[:60]}", kind="proof", passed=True) for n, name in self.passed.items()]
        refits = [
            CheckResult(
                name=f"line {n}: the generator agrees after a refit",
                kind="proof",
                passed=error <= TOLERANCE,
                value=str(error),
                threshold=f"<= {TOLERANCE}",
                boundary=Boundary.REFIT,
            )
            for n, error in self.refits.items()
        ]
        return (*stages, *refits)

    def line(self) -> int:
        """The decisive one: the first failure, else the last stage that closes the list, or the last refit."""
        if self.failed is not None:
            return self.failed[0]
        closing = [n for n, name in self.passed.items() if CLOSING.search(name)]
        return max([*closing, *self.refits], default=max(self.passed, default=0))

    def judgement(self) -> Judgement:
        """The verdict on the list."""
        if self.failed is not None:
            return Judgement(Verdict.FAIL, f"the log shows a failure: {self.failed[1]}", self.failed[2])
        if missing := self._missing():
            return Judgement(Verdict.BLOCKED, f"inconclusive: {missing}", Boundary.METRICS, vacuous=True)
        count = len(self.passed) + len(self.refits)
        return Judgement(Verdict.PASS, f"{count} stages passed, with the one that closes the list; no training is shown")

    def _missing(self) -> str | None:
        if self.refits and not self.passed:
            if not self.controls:
                return "no control shows that the refit had something to change"
            return None if self.ended else "the log does not show the end of the program"
        if not any(CLOSING.search(name) for name in self.passed.values()):
            return "no stage closes the list (a reload of what was saved, or an export): it may have been cut off"
        switched = {(SWITCH.sub(r"\1", _name(name)), match[2]) for name in self.passed.values() if (match := SWITCH.search(_name(name)))}
        alone = sorted(name for name, value in switched if (name, str(value != "True")) not in switched)
        return f"only one setting of {alone[0]!r} was run: the list may have been cut off" if alone else None


def read_stages(log: Path) -> Stages | None:
    """The stages and refits of a log; None when it holds none."""
    found = Stages()
    for line in read_log(log):
        if stage := STAGE.match(line.body):
            name = stage["head"] or stage["tail"]
            if stage["word"] == "FAIL":
                found.failed = found.failed or (line.number, line.body.strip(), stage_boundary(name))
            else:
                found.passed[line.number] = name
        elif refit := REFIT.match(line.body) or MEASURED.match(line.body):
            _add_refit(found, line.number, refit)
        elif ENDED.search(line.body):
            found.ended = True
        else:
            continue
        found.text[line.number] = line.body.strip()
    return found if found.passed or found.refits or found.failed else None


def _add_refit(found: Stages, number: int, row: re.Match[str]) -> None:
    try:
        error = parse_float(row["error"])
    except BadValue:
        error = math.nan  # a measurement that cannot be read shows no agreement
    tag = row.groupdict().get("tag", "after")
    if tag == "stale":
        found.controls += error > TOLERANCE
    elif tag == "after":
        found.refits[number] = error
        if not error <= TOLERANCE and found.failed is None:
            found.failed = (number, row.string.strip(), Boundary.REFIT)


def _name(stage: str) -> str:
    """The name of a stage, without what it measured."""
    return re.split(r" [(\[]|: ", stage)[0]
