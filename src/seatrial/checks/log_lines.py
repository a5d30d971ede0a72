"""What the lines of a log say beside metrics: how the run exited, values that are no numbers, and a process that died before another began.

Pure functions over lines. What a model wrote into a sample is text about anything: samples that a loop prints are left out.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from seatrial.model.log_text import Samples, is_sample
from seatrial.model.record import CheckResult
from seatrial.model.verdict import Boundary


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
TIMED_OUT = 124
"""The exit code of `timeout`: it ended the program after its work, or before; the log says which."""
_CODE = r"(?P<code>[-+]?(?:0x[0-9a-f]+|\d+)(?::\d+)?)(?!\.?\d|[\w/-])"
_WORD = (
    r"(?:rc|exit(?=\s*=)|ret(?:val|code)?|return(?:[ _-]?(?:code|value|status)|code)"
    r"|exit(?:[ _-]?(?:code|status|value)|code|status)|errorlevel"
    r"|error[ _-]code)"
)
_NOUN = r"(?:(?:an?|the)\s+)?(?:non-?zero\s+)?(?:exit\s*|return\s*)?(?:code|status|value|error|signal)"
_EXIT = (
    rf"(?<![/\w]){_WORD}\b[\"']?(?: (?:is|was|of))?\s*[:=]*\s*[\"'(]*{_CODE}",  # rc=1, returncode: -9, ExitCode 1:0, exitcode  : 1 (pid: 7)
    # exited with code 1, Exited (137)
    rf"(?<![/\w])exit(?:ed|s|ing)?\b[,:]?\s*(?:with\s+|due to\s+)?(?:{_NOUN}\s*[:=(]*\s*[\"']?|\(\s*){_CODE}",
    rf"(?<![/\w])exit(?:ed|s|ing)?\b[,:]?\s*(?:with\s+)?{_CODE}(?=\W*$|\s{{2,}}|\))",  # + exit 1, [1]+  Exit 1   python train.py
    rf"\b(?:failed|terminated|finished|ended|died|completed|stopped|returned|crashed|quit|done)\b[^.;]{{0,40}}?\bwith\s+"
    rf"(?:{_NOUN}\s*[:=(]*\s*{_CODE}|(?P<bare>-?\d+)(?=\W*$))",  # script failed with 1
    rf"\breturned\s+{_CODE}(?=\W*$)",
    rf"\bmake\b[^*]{{0,80}}: \*\*\* [^*]{{0,400}}?\bError {_CODE}",
    rf"^\s*\[\d+\][+-]?\s+(?:Exit|Done)\s*\(?{_CODE}",  # of a shell's jobs
    r"\bstatus=(?P<code>\d+)/",  # of systemd
    rf"^\W*(?:status|result|code)\s*[:=]\s*{_CODE}\W*$",
)
_EXITED = tuple(re.compile(pattern, re.IGNORECASE) for pattern in _EXIT)
_SIGNALS = r"SIG(?:KILL|TERM|SEGV|ABRT|BUS|INT|HUP|QUIT|FPE|ILL|XCPU)"
_SIGNALLED = re.compile(
    r"\b(?:killed|terminated|died|crashed|ended|exited|stopped|caught|received|fatal|failed)\b[^.;]{0,40}"
    rf"\bsignal\b\s*[:=(#]*\s*(?P<signal>\d+|{_SIGNALS})"
    rf"|\b(?:killed|terminated|died|crashed|ended|exited|stopped)\b[^.;]{{0,30}}\b(?P<name>{_SIGNALS})\b"
    r"|\b(?:received|caught|got) (?P<got>SIG(?:KILL|SEGV|ABRT|BUS|FPE|ILL))\b"
    r"|\b(?P<seen>SIG(?:KILL|SEGV|ABRT|BUS|FPE|ILL)) (?:received|caught)\b"
    r"|^(?:\S+: )?(?:line \d+: +)?(?:\d+ )?(?P<word>Segmentation fault|Aborted|Killed|Terminated|Bus error|Floating point exception"
    r"|Illegal instruction|Hangup|Out of memory|FAILED)(?=\W*$|\s*\(|\s{2,}|[:;!])"
    r"|\bSignals\.(?P<signals>SIG[A-Z]+)|\bsignal \d+ \((?P<given>SIG[A-Z]+)\) (?:was )?(?:received|caught|sent)"
    r"|\b(?P<nonzero>(?:a |with )?non-?zero (?:exit )?(?:status|code|return code|result))\b"
    r"|\b(?P<abnormal>(?:exit\w*|ended|terminat\w+) abnormally|abnormal (?:exit|termination)|with result 'exit-code')"
    r"|\bbuild (?:step )?.{0,60}(?P<build>marked .{0,20}as failure)"
    r"|\b(?:pod )?(?:phase|status|state|finished|conclusion|result)\s*[:=]\s*[\"']?(?P<phase>fail(?:ed|ure))\b"
    r"|`[^`]{1,200}` (?P<quoted>failed)\b|\b(?P<sacct>(?-i:FAILED|TIMEOUT|OUT_OF_ME\w*|NODE_FAIL|PREEMPTED|CANCELLED\+?))\s+\d+:\d+\s*$"
    r"|\b(?P<limit>DUE TO TIME LIMIT)\b|^(?:\S*\.)?(?P<system>SystemExit: *[1-9]\d*)"
    r"|(?P<dumped>\bcore dumped\b)|\b(?P<oom>OOMKilled)\b|\b(?P<cancelled>(?-i:CANCELLED))\b"
    r"|\b(?:job|jobstate|state|status|result|step|task)\b.{0,40}?\b(?P<state>(?-i:FAILED|TIMEOUT|OUT_OF_MEMORY|NODE_FAIL|PREEMPTED)"
    r"|DUE TO TIME LIMIT|out of memory)\b|\b(?P<killed>oom[-_ ]kill\w*)"
    r"|\b(?P<failed>(?:job|run|script|command|training|process|launch|kernel)(?: \S{1,40})? (?:has )?(?:failed|died|crashed))\b(?! to\b)",
    re.IGNORECASE,
)
_ENDED_BY_US = re.compile(r"\b15\b|SIGTERM|\bterminated\b", re.IGNORECASE)
_SERVICE = re.compile(r"\b(?:servers?|services?|engines?|routers?|vllm|sglang|raylet|tensorboard|wandb|replicas?)\b", re.IGNORECASE)
"""They are ended with the run."""
_MAY_EXIT = re.compile(
    r"exit|\brc\b|\bret|code|status|fail|kill|abort|fault|\berror|signal|\bsig[a-z]|terminat|died|crash|cancel|oom|memory|timeout|preempt|hangup"
    r"|illegal|exception|dumped|result|\bdone|finish|ended|complete|stopped|quit|node_fail|time limit",
    re.IGNORECASE,
)
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
    r"|entropy|learning[ _]rate|lr|advantages?(?:/\w+)?|returns?|scores?(?:/\w+)?|perplexity|ppl"
    r"|log[ _]?probs?|accuracy|token_mult_prob_error|gen_kl_error)"
)
_NOT_FINITE = re.compile(
    rf"(?<![\w.-])[\"']?(?P<name>{_METRIC})[\"']?(?:\s*[:=|]\s*|\s+(?:is|was|became|went|turned|=|to)?\s*){{1,2}}[\"']?(?P<value>{_NUMBER})"
    rf"|\b(?P<value2>nan|non-?finite)\s+(?P<name2>loss|grad(?:ient)?s?(?:[ _]norm)?|reward)"
    r"(?=\s+(?:encountered|detected|found|at|in|on)\b|[!.,]*\s*$)",
    re.IGNORECASE,
)
_NO_NUMBER = re.compile(r"\b(?:nan|inf|infinity|non-?finite)\b|\b1\.#", re.IGNORECASE)
_HARMLESS = re.compile(
    r"\b(?:no|without|not|never|0|skip|check|detect|if|when|whether|should|would|must|avoid|prevent)\b[^.]{0,30}$", re.IGNORECASE
)
_HEADER, _TOP = re.compile(r"\s*Traceback \(most recent call last\):$"), re.compile(r'\s*File "(?!<)[^"]+", line \d+, in <module>$')
_MAY_RESUME = re.compile(r"[Rr]esum|[Cc]heckpoint|[Cc]ontinuing|global step")
_RESUMED = re.compile(
    r"\bresum(?:ed|ing)\b(?! ?[=:'\"])|\bcontinuing training from\b|\bcheckpoint model loaded\b"
    r"|\bsetting global step to [1-9]|\bload(?:ed|ing)? from checkpoint",
    re.IGNORECASE,
)
_LAUNCHER = re.compile(r"(?:rc|exit[ _]?(?:code|status))\s*[=:]\s*(?P<code>-?\d+)\s*$", re.IGNORECASE)


class Said(NamedTuple):
    """A line that says something."""

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


def read_facts(lines: Iterable[LogLine], done: re.Pattern[str] = NEVER, step: re.Pattern[str] = NEVER) -> LogFacts:
    """One pass over the lines; `done` finds the line that closes a run, `step` those that only training writes."""
    found = LogFacts()
    ended = False
    last: list[LogLine] = []
    header = False
    dead: Said | None = None
    for line in _without_samples(lines):
        body = squeezed(line.body)
        if not body.strip():
            continue
        found.resumed = found.resumed or (_MAY_RESUME.search(body) is not None and _RESUMED.search(body) is not None)
        if (said := not_finite(body)) is not None:
            found.not_finite.append(Said(line.number, body.strip()[:200], said))
        if step.search(body) or (dead is not None and done.search(body)):
            if dead is not None and found.died is None:
                found.died = dead
        elif not line.process and header and _TOP.match(body):
            dead = Said(line.number, body.strip()[:200], "an exception")
        elif not line.process and (match := _LAUNCHER.match(body)) and match["code"].strip("-0"):
            dead = Said(line.number, body.strip()[:200], f"exit code {match['code']}")
        header = not line.process and _HEADER.match(body) is not None
        if ended and not _OF_RAY.search(line.process) and (code := exit_value(body)) is not None:
            found.exits.append(Said(line.number, body.strip()[:200], code))
        ended = ended or done.search(body) is not None
        if not line.process:
            last = [*last[-LAST + 1 :], line]
    if not ended:
        codes = ((line, exit_value(squeezed(line.body))) for line in last)
        found.exits += [Said(line.number, line.body.strip()[:200], code) for line, code in codes if code is not None]
    return found


def _without_samples(lines: Iterable[LogLine]) -> Iterator[LogLine]:
    """The lines that no model wrote, as far as the loop marks them."""
    samples = Samples()
    return (line for line in lines if not samples.holds(line.process, line.body) and not is_sample(line.body))


def squeezed(text: str) -> str:
    """A line as far as it is looked at, without long runs of blanks: patterns with several gaps cost the square of them."""
    return _BLANKS.sub("    ", text)[:LONGEST_LINE] if len(text) > _SHORT else text


def exit_value(text: str) -> str | None:
    """The exit code or signal that a line says, as text; None for none. `ExitCode 0:9` has code and signal."""
    if not _MAY_EXIT.search(text):
        return None
    code = next((match["code"] or match.groupdict().get("bare") for pattern in _EXITED if (match := pattern.search(text))), None)
    if code is not None and _failed(code):
        return code
    if (match := _SIGNALLED.search(text)) and not (_ENDED_BY_US.search(match[0]) and _SERVICE.search(text)):
        return next(f"signal {value}" if name in ("signal", "name") else value for name, value in match.groupdict().items() if value)
    return code


def _failed(code: str) -> bool:
    parts = code.lstrip("+").split(":")
    try:
        return any(int(part, 0) if part.lower().startswith(("0x", "-0x")) else int(part) for part in parts) and code != str(TIMED_OUT)
    except ValueError:
        return True


def not_finite(text: str) -> str | None:
    """The name of a metric that a line gives a value which is no number."""
    small = text.lower()
    if not ("nan" in small or "inf" in small or "finite" in small or "1.#" in small) or not _NO_NUMBER.search(
        text
    ):  # a search for words costs less
        return None
    for match in _NOT_FINITE.finditer(text):
        if not _HARMLESS.search(text[: match.start()]):
            return match["name"] or match["name2"]
    return None


def exited(facts: LogFacts) -> list[CheckResult]:
    """The exit code, where the log says one: every one of them is 0."""
    if not facts.exits:
        return []
    bad = next((said for said in facts.exits if _failed(said.value)), None)
    shown = bad or facts.exits[-1]
    value: float | str = int(shown.value) if re.fullmatch(r"-?\d+", shown.value) and len(shown.value) < 12 else shown.value
    message = f"line {bad.number}: {bad.text}" if bad else ""
    line = shown.number
    return [
        CheckResult(
            name="exit code", kind="proof", passed=bad is None, value=value, message=message, boundary=Boundary.ENVIRONMENT, line=line
        )
    ]


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
