"""How exceptions, log records and kills look in a log: the regular expressions of the chain reader.

- Everything here describes the form of Python, Ray, torch, multiprocessing, pytest and shell output, never the text of
  one known failure: those are signatures.
- A *carrier* is an exception that only reports another one (a remote traceback, a dead child): never a first cause
  while anything better is known.
"""

from __future__ import annotations

import re

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
"""The margin of an exception group."""
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

_CARRIERS = frozenset(
    {
        # Ray
        WRAPPER,
        "RayActorError",
        "ActorDiedError",
        "ActorUnavailableError",
        "WorkerCrashedError",
        "OwnerDiedError",
        # multiprocessing and torch
        "RemoteTraceback",
        "_RemoteTraceback",
        "ProcessRaisedException",
        "ProcessExitedException",
        "BrokenProcessPool",
        "ChildFailedError",
        "CalledProcessError",
        # engines and exception groups
        "EngineDeadError",
        "ExceptionGroup",
        "BaseExceptionGroup",
        "CancelledError",
        "SystemExit",
        # a peer that is gone
        "DistBackendError",
        "DistNetworkError",
        "BrokenPipeError",
        "ConnectionResetError",
    }
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
