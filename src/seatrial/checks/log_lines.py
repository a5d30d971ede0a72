"""What the lines of a log say beside metrics: how the run exited, values that are no numbers, and a process that died before another began.

Pure functions over lines. What a model wrote into a sample is text about anything: samples that a loop prints are left out.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from seatrial.checks.probe_facts import proof
from seatrial.core.log_text import Finder, Samples, exit_value, failed, in_sample, is_sample
from seatrial.core.records import CheckResult, replace
from seatrial.core.verdict import Boundary


class LogLine(Protocol):
    """One line of a log, with the prefix of the writing process apart."""

    @property
    def number(self) -> int: ...
    @property
    def process(self) -> str: ...
    @property
    def body(self) -> str: ...


LONGEST_LINE = 20_000
"""Characters of a line that are looked at: the longest record of a loop has a third of it."""
LAST = 8
"""Lines at the end of a log in which a launcher's line is looked for, if the log does not show the end of the run."""
_BLANKS = re.compile(r"\s{5,}")
_SHORT = 400
_OF_RAY = re.compile(r"\bpid=\d+")
"""Processes of a cluster: their lines say nothing about the exit of the run."""
_NUMBER = (
    r"(?:np\.\w+\(|numpy\.\w+\(|tensor\(|array\(|\{[\"']?\w+[\"']?: ?)?\[*[-+]?"
    r"(?:nan\((?:ind|[sq]nan)?\)|1\.#(?:[qs]nan|ind|inf)|(?:nan|inf(?:inity)?)\b(?!_|\w|\())"
)
_METRIC = (
    r"(?:(?:train|training|eval|val|validation|test|actor|critic|policy|value|avg|average|mean|total|pg|vf|kl|lm|sft|dpo|ce)[ _/.-]+){0,3}"
    r"(?:loss(?:es)?|grad(?:ient)?[ _]norm|gradnorm|gnorm|rewards?(?:[ _/](?:mean|std))?"
    r"|kl(?:[ _](?:loss|div(?:ergence)?))?|ppo[ _]kl|approx[ _]kl"
    r"|total[ _]norm|entropy|learning[ _]rate|lr|advantages?(?:/\w+)?|returns?|scores?(?:/\w+)?|perplexity|ppl"
    r"|log[ _]?probs?|accuracy|token_mult_prob_error|gen_kl_error)"
)
_NOT_FINITE = re.compile(
    rf"(?<![\w.-])[\"']?(?P<name>{_METRIC})[\"']?(?:\s*(?:[:=]|[-=]?>|\||→)\s*|\s+(?:is|was|became|went|turned|=|(?:in)?to)?\s*){{1,2}}[\"']?(?P<value>{_NUMBER})"
    rf"|\b(?P<value2>nan|non-?finite)\s+(?P<name2>loss|grad(?:ient)?s?(?:[ _]norm)?|reward)"
    r"(?=\s+(?:encountered|detected|found|at|in|on)\b|[!.,]*\s*$)",
    re.IGNORECASE,
)
_NO_NUMBER = re.compile(r"\b(?:nan|inf|infinity|non-?finite)\b|\b1\.#", re.IGNORECASE)
_HARMLESS = re.compile(
    r"\b(?:no|without|not|never|0|skip|check|detect|if|when|whether|should|would|must|avoid|prevent)\b[^.]{0,30}$", re.IGNORECASE
)
_BEST = re.compile(r"\b(?:best|lowest|highest|initial|min(?:imum)?)\b[^.,;]{0,20}$", re.IGNORECASE)
"""The best value so far is infinite before the first."""
_HEADER, _TOP = re.compile(r"\s*Traceback \(most recent call last\):$"), re.compile(r'\s*File "(?!<)[^"]+", line \d+, in <module>$')
_MAY_RESUME = ("esum", "heckpoint", "ontinuing", "global step")
_RESUMED = re.compile(
    r"\bresum(?:ed|ing)\b(?! ?[=:'\"])|\bcontinuing training from\b|\bcheckpoint model loaded\b"
    r"|\bsetting global step to [1-9]|\bload(?:ed|ing)? from checkpoint",
    re.IGNORECASE,
)
_LAUNCHER = re.compile(r"(?:rc|exit[ _]?(?:code|status))\s*[=:]\s*(?P<code>-?\d+)\s*$", re.IGNORECASE)

_SIGNAL = re.compile(r"(?:Terminated|Killed|Hangup|Aborted|Segmentation fault)(?: \(core dumped\))?\s*")
"""What a shell says of a command that a signal ended."""


class Said(NamedTuple):
    number: int
    text: str
    value: str


@dataclass(slots=True)
class LogFacts:
    """What one pass over a log found."""

    exits: list[Said] = field(default_factory=list)
    """Exit codes and signals, after the end of the run or in the last lines."""
    not_finite: list[Said] = field(default_factory=list)
    resumed: bool = False
    """Whether a line says that the run went on from a checkpoint."""
    died: Said | None = None
    """A process that ended with an exception or an exit code before more lines of training."""


NEVER = re.compile(r"(?!)")


def read_facts(lines: Iterable[LogLine], closing: re.Pattern[str] = NEVER, training: re.Pattern[str] = NEVER) -> LogFacts:
    """One pass over the lines; `closing` finds the line that closes a run, `training` those that only training writes."""
    found = LogFacts()
    done, step = Finder(closing), Finder(training)
    ended = False
    last: list[LogLine] = []
    header = False
    dead: Said | None = None
    samples = Samples()
    named: list[str] = []
    for line in lines:
        if samples.holds(line.process, line.body, line.number) or is_sample(line.body):
            continue  # written by a model
        body = squeezed(line.body)
        if not body.strip():
            continue
        found.resumed = found.resumed or (any(word in body for word in _MAY_RESUME) and _RESUMED.search(body) is not None)
        if (said := not_finite(body)) is not None:
            found.not_finite.append(Said(line.number, body.strip()[:200], said))
            named.append(line.process)
        if step.search(body) or (dead is not None and done.search(body)):
            if dead is not None and found.died is None:
                found.died = dead
        elif not line.process and header and _TOP.match(body):
            dead = Said(line.number, body.strip()[:200], "an exception")
        elif not line.process and body[:1] in "rReE" and (match := _LAUNCHER.match(body)) and match["code"].strip("-0"):
            dead = Said(line.number, body.strip()[:200], f"exit code {match['code']}")
        elif not line.process and body[:1] in "TKHAS" and _SIGNAL.fullmatch(body):
            dead = Said(line.number, body.strip()[:200], f"{body.strip()!r}")
        header = not line.process and "Traceback" in body and _HEADER.match(body) is not None
        if ended and not _OF_RAY.search(line.process) and (code := exit_value(body)) is not None:
            found.exits.append(Said(line.number, body.strip()[:200], code))
        ended = ended or done.search(body) is not None
        if not line.process:
            last = [*last[-LAST + 1 :], line]
    if samples.later:
        found.not_finite = [
            one
            for one, process in zip(found.not_finite, named, strict=True)
            if not any(process == whose and first <= one.number <= last for whose, first, last in samples.later)
        ]
    if not ended:
        codes = ((line, exit_value(squeezed(line.body))) for line in last)
        found.exits += [Said(line.number, line.body.strip()[:200], code) for line, code in codes if code is not None]
    return found


def squeezed(text: str) -> str:
    """A line as far as it is looked at, without long runs of blanks: patterns with several gaps cost the square of them."""
    return _BLANKS.sub("    ", text)[:LONGEST_LINE] if len(text) > _SHORT else text


def not_finite(text: str) -> str | None:
    """The name of a metric that a line gives a value which is no number."""
    small = text.lower()
    if not ("nan" in small or "inf" in small.replace("info", "") or "finite" in small or "1.#" in small) or not _NO_NUMBER.search(
        text
    ):  # a search for words costs less
        return None
    for match in _NOT_FINITE.finditer(text):
        before = text[: match.start()]
        if (
            not _HARMLESS.search(before)
            and not (_BEST.search(before) and "inf" in (match["value"] or "").lower())
            and not in_sample(before)
        ):
            return match["name"] or match["name2"]
    return None


def exited(facts: LogFacts) -> list[CheckResult]:
    if not facts.exits:
        return []
    bad = next((said for said in facts.exits if failed(said.value)), None)
    shown = bad or facts.exits[-1]
    value: float | str = float(shown.value) if re.fullmatch(r"-?\d+", shown.value) and len(shown.value) < 12 else shown.value
    message = f"line {bad.number}: {bad.text}" if bad else ""
    return [replace(proof("exit code", bad is None, value, Boundary.ENVIRONMENT, message=message), line=shown.number)]


def finite(facts: LogFacts) -> list[CheckResult]:
    """No line gives a metric a value that is no number. Made only where one does: text that names no metric proves nothing."""
    if not facts.not_finite:
        return []
    first = facts.not_finite[0]
    message = f"line {first.number} says that {first.value} is not finite: {first.text}"
    return [
        CheckResult(name="the log says no NaN", kind="proof", passed=False, value=len(facts.not_finite), message=message, line=first.number)
    ]


def one_run(facts: LogFacts) -> list[CheckResult]:
    """No process died before more training was done. Made only where one did."""
    if facts.died is None:
        return []
    several = "and another follows: the log holds several runs; judge one at a time"
    message = f"a run ended with {facts.died.value} (line {facts.died.number}) {several}"
    died = facts.died
    return [CheckResult(name="the log holds one run", kind="proof", passed=False, value=died.text, message=message, line=died.number)]
