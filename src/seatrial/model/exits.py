"""What a line says about how a program ended: exit codes in every common spelling, signals, and words of schedulers and services."""

from __future__ import annotations

import re

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
    rf"\$\?\s*[:=]\s*{_CODE}",
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
    r"|(?P<dumped>\bcore dumped\b)|\b(?P<oom>OOMKilled|BackoffLimitExceeded|DeadlineExceeded)\b|\b(?P<cancelled>(?-i:CANCELLED))\b"
    r"|\b(?:job|jobstate|state|status|result|step|task)\b.{0,40}?\b(?P<state>(?-i:FAILED|TIMEOUT|OUT_OF_MEMORY|NODE_FAIL|PREEMPTED)"
    r"|DUE TO TIME LIMIT|out of memory)\b|\b(?P<killed>oom[-_ ]kill\w*)"
    r"|\b(?P<failed>(?:job|run|script|command|training|process|launch|kernel|pod|container)"
    r"(?: \S{1,40})? (?:has )?(?:failed|died|crashed))\b(?! to\b)",
    re.IGNORECASE,
)
_ENDED_BY_US = re.compile(r"\b15\b|SIGTERM|\bterminated\b", re.IGNORECASE)
_SERVICE = re.compile(
    r"\b(?:servers?|services?|\w{0,20}engines?\w{0,12}|routers?|vllm|sglang|raylet|tensorboard|wandb|replicas?)\b", re.IGNORECASE
)
"""They are ended with the run."""
_MAY_EXIT = re.compile(
    r"exit|\$\?|\brc\b|\bret|code|status|fail|kill|abort|fault|\berror|signal|\bsig[a-z]|terminat|died|crash|cancel|oom|memory|timeout|preempt|hangup"
    r"|illegal|exception|dumped|result|\bdone|finish|ended|complete|stopped|quit|node_fail|time limit|exceeded",
    re.IGNORECASE,
)


def exit_value(text: str) -> str | None:
    """The exit code or signal that a line says, as text; None for none. `ExitCode 0:9` has code and signal."""
    if not _MAY_EXIT.search(text):
        return None
    code = next((match["code"] or match.groupdict().get("bare") for pattern in _EXITED if (match := pattern.search(text))), None)
    if code is not None and failed(code):
        return code
    if (match := _SIGNALLED.search(text)) and not (_ENDED_BY_US.search(match[0]) and _SERVICE.search(text)):
        return next(f"signal {value}" if name in ("signal", "name") else value for name, value in match.groupdict().items() if value)
    return code


def failed(code: str) -> bool:
    parts = code.lstrip("+").split(":")
    try:
        return any(int(part, 0) if part.lower().startswith(("0x", "-0x")) else int(part) for part in parts) and code != str(TIMED_OUT)
    except ValueError:
        return True
