"""A log as searchable lines; how exceptions, records and kills look in it; what it merely quotes.

- Line numbers count newline characters only, as `sed -n Np` does; the segments of a progress bar share the number of their line.
- The shapes describe the form of Python, Ray, torch, multiprocessing, pytest and shell output, never a particular failure.
- A phrase in a sample or inside quotation marks is a quotation.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from seatrial.core.errors import UserError
from seatrial.core.files import read_pieces
from seatrial.core.guarded import open_file
from seatrial.core.log_text import ANSI, MAY_BEGIN, in_sample, is_sample, split_process, without_head
from seatrial.core.text import word_set

_REPEATED = re.compile(r" ?\[repeated \d+x across cluster\].*$")
"""What Ray puts behind a line that it shows once for several processes; a frame or a message ends before it."""


class Line(NamedTuple):
    """One line, or one segment of a line with a progress bar."""

    number: int
    process: str
    """The prefix of the writing process, empty for the main process."""
    body: str
    text: str
    """The text with it, and with the mark of a line that stands for several."""


@dataclass(frozen=True, slots=True)
class Log:
    """A readable log file."""

    path: Path

    def __iter__(self) -> Iterator[Line]:
        process, blank, new = "", 0, tuple.__new__
        for number, start, piece in read_pieces(self.path):
            if blank:
                yield Line(blank, "", "", "")
            blank = 0 if piece else number  # what follows the last line feed is no line
            if blank:
                continue
            if start and piece[0] not in MAY_BEGIN and piece.isprintable() and "| " not in piece:  # nearly every line
                yield new(Line, (number, "", _REPEATED.sub("", piece) if " across cluster]" in piece else piece, piece))
                continue
            if start:
                process, body, text = _head(piece.rstrip("\r"))
            else:
                body = text = ANSI.sub("", piece) if "\x1b" in piece else piece
            if "\r" not in text and start:
                yield Line(number, process, body, text)
                continue
            for segment in body.split("\r"):
                if segment.strip():
                    yield Line(number, process, segment, f"{process} {segment}" if process else segment)

    def between(self, first: int, last: int) -> Iterator[Line]:
        """The lines whose numbers are within `first` and `last`, both included."""
        for line in self:
            if line.number > last:
                return
            if line.number >= first:
                yield line


def read_log(path: Path) -> Log:
    """Open a log; a missing or unreadable file is a UserError that names it."""
    try:
        with open_file(path):
            return Log(path)
    except (OSError, ValueError) as error:
        what = error.strerror if isinstance(error, OSError) else None
        message = f"{path}: cannot read the log: {what or error}".replace("\0", "\\0")
        raise UserError(message, "give the path of a log file that you may read") from error


def _head(text: str) -> tuple[str, str, str]:
    """The process, the body and the text of the beginning of a line; later parts of it belong to the same process."""
    if "\x1b" in text:
        text = ANSI.sub("", text)
    text = without_head(text)
    process, body = split_process(text)
    return process.strip(), _REPEATED.sub("", body) if " across cluster]" in body else body, text


_NAME = r"(?:[A-Za-z_]\w*\.)*(?:[A-Z]\w*|gaierror|herror|error|timeout)(?:\([\w.]+\))?"
RAISED = re.compile(rf"({_NAME})(?:: ?(.*)|$)")
"""The line that ends a traceback. Only meaningful where one is expected."""
BARE = re.compile(r"((?:[A-Za-z_]\w*\.)*\w*(?:Error|Exception|RemoteTraceback))(?:: ?(.*)|$)|(?:[\w./-]+: )?(error|fatal|ERROR): (.+)")
"""An exception or a tool's error message, printed without a traceback."""
REPORT = re.compile(r"FAIL(?:ED)?[ :]+(?=\w)(.+)|\S+ FAIL(?:ED)? (?=\w)(.*(?:Error|Exception)\b.*)")
"""A stage or test runner's own word that something failed."""
REPORTED = re.compile(r"\b((?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception))\b:? ?(.*)")
TEST = re.compile(r"E {2,}(?:((?:[A-Za-z_]\w*\.)*\w*(?:Error|Exception|Failed|Exit)): ?(.*)|(assert .*))$")
"""pytest's `E   ` lines."""
HEADER = "Traceback (most recent call last):"
CONNECTOR = re.compile(r"(?:The above exception was the direct cause|During handling of the above exception)")
GROUP = re.compile(r" *[+|](?:-[+-]*-+(?: \d+ -+)?$| |$)")
PROGRESS = re.compile(r"\d+%\||\dit/s|s/it|\d/\d+ \[")
NOT_NAMES = frozenset({"Warning", "Note", "Hint", "INFO", "DEBUG", "WARNING", "ERROR", "CRITICAL"})

RECORD = re.compile(
    r"(?P<vllm>DEBUG|INFO|WARNING|ERROR|CRITICAL) \d\d-\d\d \d\d:\d\d:\d\d(?:\.\d+)? \[[^\]]*\](?: |$)"
    r"|\[?(?P<glog>[DIWEF])\d{4} \d\d:\d\d:\d\d\.\d+ +\d+ [^\]]*\](?: |$)"
)
"""A log record's head that is repeated on every line of a traceback, so that it can be cut off."""
LEVEL = re.compile(
    r"[\s\d\-:.,/+TZ|\[\]()]*(?:\[[\w.]+\])?[\s\-|\[]*\b(DEBUG|INFO|WARNING|WARN|ERROR|CRITICAL|FATAL)\b|\[?([DIWEF])\d{4} \d\d:\d\d"
)
SEVERE = frozenset({"ERROR", "CRITICAL", "FATAL", "E", "F"})
WARNINGS = frozenset({"WARNING", "WARN", "W"})
NATIVE = re.compile(r"\s*(?:@ +(?:0x|\()|PC: @|#\d+ +0x|/\S+\.so\S*\(|\*\*\* StackTrace Information)")
"""A frame of a C++ stack: it belongs to a crash, never to the exception above it."""

NOTED = re.compile(r"Exception ignored in|--- Logging error ---|exception was never retrieved")
"""Lines before a traceback that is printed and dropped by the interpreter."""
ASIDE = re.compile(r"Exception in thread |Error in atexit")
"""Lines before a traceback that ends a thread or an exit handler, but not the process."""

KILLED = re.compile(
    r"(?:\[[^\]]*\] \S+ )?\*\*\* SIG(?:TERM|INT|HUP|QUIT|USR\d) received"
    r"|(?:Terminated|Killed|Hangup|KeyboardInterrupt)$|.*: line \d+: +\d+ (?:Terminated|Killed)\b"
    r"|(?:slurmstepd|srun): .*(?:CANCELLED|TIME LIMIT|PREEMPT|oom.kill|Killed|Terminated)"
    r"|.*\b[Rr]eceived (?:SIGTERM|SIGINT|signal 15|signal 2)\b"
)
FORCED = re.compile(r"\bKilled\b|oom.kill|SIGKILL", re.IGNORECASE)
"""A kill that nobody sends to a process that is done: the machine ran out of memory."""
CRASHED = re.compile(
    r"Fatal Python error: |(?:\[[^\]]*\] \S+ )?\*\*\* SIG(?:SEGV|ABRT|BUS|FPE|ILL) received"
    r"|(?:.*: line \d+: +\d+ )?(?:Segmentation fault|Aborted|Bus error)\b|terminate called after throwing an instance of "
)
INTERRUPTS = frozenset({"KeyboardInterrupt", "SignalException"})
WRAPPER = "RayTaskError"
"""Printed first of a remote exception, and always followed by what it wraps."""
LAUNCHERS = frozenset({"ChildFailedError"})
"""Raised by a launcher at its own end, whatever it logged just before."""

_CARRIERS = word_set(
    # Ray
    "RayTaskError RayActorError ActorDiedError ActorUnavailableError WorkerCrashedError OwnerDiedError "
    # multiprocessing and torch
    "RemoteTraceback _RemoteTraceback ProcessRaisedException ProcessExitedException BrokenProcessPool ChildFailedError CalledProcessError "
    # engines and exception groups
    "EngineDeadError ExceptionGroup BaseExceptionGroup CancelledError SystemExit "
    # a peer that is gone
    "DistBackendError DistNetworkError BrokenPipeError ConnectionResetError"
)
_CARRIED = re.compile(
    r"Caught \w+ in (?:DataLoader worker|replica|pin memory)|[Ss]ee (?:stack trace|root cause|the (?:stack|error|log))|root cause above"
    r"|check the stack trace above|\b(?:[Ww]eight transfer|[Uu]pdating weights)\b.{0,60} failed during"
    r"|(?:[Pp]rocess|[Ww]orker|[Aa]ctor|[Ee]ngine|[Ss]erver|[Ss]cheduler|[Cc]hild)\b.{0,120}"
    r"(?:finished unexpectedly|died|exited|terminated|crashed|is dead|was killed|failed to start|initialization failed|exit code)"
    r"|[Cc]onnection (?:closed|reset) by peer|Broken pipe"
)


def short(name: str) -> str:
    """An exception's class name without module and without Ray's `(Cause)`."""
    return name.split("(")[0].rsplit(".", 1)[-1]


def carries(name: str, message: str) -> bool:
    """Whether this exception only reports another one."""
    return short(name) in _CARRIERS or _CARRIED.search(message) is not None


_RECORD = re.compile(r"""\{.*["'](?:message|msg|event)["']: ?["'][^"']*$""")
_DENIED = re.compile(r"(?:\b(?:no|not any|zero|without|never|avoids?|prevents?)|(?<![\d.])0)\s+(?:\w+\s+)?$", re.IGNORECASE)
_NONE_OF = re.compile(
    r"(?<![\d.])0 (?:nan|inf|failed|row|sample|batch|skipped|dropped|error|worker|prompt|rollout|request|example|record|restart)",
    re.IGNORECASE,
)
"""`no stale weights`, `0 rows skipped`."""
_NOTHING = re.compile(r"\w*\s*[:=]\s*(?:0(?:\.0+)?%?|false|none|\[\])(?=\W*$|[,;|)])", re.IGNORECASE)
"""`skipped batches: 0`."""
_PLANNED = re.compile(r"\b(?:will|would|may|might|shall)\s+$", re.IGNORECASE)
_CONDITION = re.compile(r"\b(?:if|when(?:ever)?|unless|in case)\b", re.IGNORECASE)
"""`will skip the step if …`: what a run would do."""
_WORDS = 14
"""Words that may stand before a phrase: heads of log records and a short subject. After more it is prose."""


def says(text: str, found: re.Match[str]) -> bool:
    """Whether a phrase is the line's own word: not a quotation, not a part of a sample, and not denied."""
    if _NOTHING.match(text, found.end()) or (_PLANNED.search(text[: found.start()]) and _CONDITION.search(text, found.end())):
        return False
    return not denied(text[: found.start()]) and not _NONE_OF.search(found[0]) and not quoted(text, found)


def denied(before: str) -> bool:
    """Whether what stands before a phrase denies it."""
    return _DENIED.search(before) is not None


def quoted(text: str, found: re.Match[str]) -> bool:
    """Whether a phrase is a quotation, a part of a sample, or prose."""
    before = text[: found.start()]
    if is_sample(text) or (text.lstrip().startswith("|") and (before.strip() or text.rstrip().endswith("|"))):
        return True
    if in_sample(before):
        return True
    if _RECORD.match(before):
        return False
    if before.count('"') % 2 or before.count("`") % 2 or before.count("“") > before.count("”") or before.count("«") > before.count("»"):
        return True
    if len(re.findall(r"(?<!\w)'|'(?!\w)", before)) % 2:
        return True
    return len(before.split()) > _WORDS
