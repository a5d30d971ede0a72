"""Lines of any log: heads that a launcher puts before them, samples, exit codes, and a quick search for words.

- `without_head` drops time stamps, container marks and script labels; `split_process` splits off the prefix of the writing process.
- `Samples` and `is_sample` recognise prompts and completions that a log prints.
- `exit_value` reads how a program ended: exit codes in every common spelling, signals, words of schedulers and services.
- `Finder` keeps slow patterns away from most lines, and never from one that holds a required word.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache
from re import _constants as _codes  # type: ignore[attr-defined]
from re import _parser  # type: ignore[attr-defined]
from typing import Any, NamedTuple

ANSI = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\^_])")
_CLOCK = r"\d\d:\d\d:\d\d(?:[.,]\d+)?"
_STAMP = (
    rf"(?:\[?\d{{4}}[-/]\d\d[-/]\d\d[T ]{_CLOCK}(?:Z| ?[-+]\d\d:?\d\d)?\]?"  # 2026-11-15T01:02:03.4Z, [2026-11-15 01:02:03]
    rf"|\[?{_CLOCK}\]?|\d{{10}}(?:\.\d+)?|\[ {{0,8}}\d{{1,8}}\.\d+\]"  # 01:02:03, epoch seconds, [   12.345] since the boot
    rf"|(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec) [ \d]\d {_CLOCK}(?: [\w.-]{{1,64}} [\w./-]{{1,64}}\[\d{{1,8}}\]:)?"
    # the line above: of a journal
    r") (?:std(?:out|err) [FP] )?"  # a container runtime's `stdout F`
)
_LOGGER = r"(?:- )?\[?INFO\]?(?: -|:)? "
_COMPOSE = r"[\w.-]+[-_]\d+ +\| |\[pod/[\w./-]{1,200}\] "
"""`trainer-0  | `, of docker compose; `[pod/trainer-0/main] `, of kubectl."""
_LABEL = r"\[\w+ \d+step\] "
"""What a script puts before every line of one of its runs (`sed 's/^/[mcore 1step] /'`)."""
_HEAD = re.compile(rf"(?:{_COMPOSE})?(?:{_STAMP}(?:{_LOGGER})?){{0,2}}(?:{_LABEL})?")
_MAY_HEAD = re.compile(r"[\w.-]{1,60}[-_]\d+ +\| ")
_HEADS = frozenset("[0123456789JFMASOND")
_FAR = 200
_PROCESS = re.compile(
    r"(?:\((?:[A-Za-z_][\w.:-]*|(?:[A-Za-z_][\w.:\[\]=-]* )?pid=\d+(?:, ip=[^)\s]+)?)\)(?: |$)"  # (name[rank=0] pid=7, ip=…), (name)
    r"|\[(?:rank|default|trainer|worker)?\d+(?:\|\d+)?\]: ?"  # [rank1]:, [trainer0|1]:
    r"|\d{1,5}: )+"  # srun --label
)
_PREFIXES = frozenset("([0123456789")
MAY_BEGIN = _HEADS | _PREFIXES
"""What heads and prefixes begin with, but for the label of a container."""
_SAID = r"prompt|response|question|completion|output|ground_truth|input|answer|sample"
_BEGIN = re.compile(
    r"\s*\[(?:prompt|response|question|completion|output)\](?: |$)|(?:Prompt|Response|Completion|Generated text|Sample \d+):\s*$"
)
_END = re.compile(
    r"\s*\[(?:score|ground_truth|reward|acc|extra_info)\w*\]|\s*\{['\"]|.*\bstep:\d+ - |={10,}|-{10,}|(?:Reward|Score|Ground truth): "
    r"|.*Traceback \(most recent call last\):"
)
_MAY_OPEN = frozenset("[PRCGS")
_CLOSED = re.compile(r"\s*\[(?:score|ground_truth|reward)\w*\]")
_LONGEST = 400
_IN_SAMPLE = re.compile(
    rf"""(?:["'])(?:{_SAID}|generat\w+|text|content|solution|rollout|chosen|rejected|instruction|query|pred\w*"""
    rf""")s?["']: ?\[?(["'])(?:(?!\1).)*$""",
    re.IGNORECASE,
)
MARGIN = "│┃║╎"
_MARGINS = frozenset(MARGIN) | {""}
_SPEAKER = re.compile(
    rf"\s*+(?:\[(?:{_SAID})\]|>|<\|?\w{{1,80}}\|?>"
    r"|\W*+(?:samples?|completions?|responses?|answers?|outputs?|prompts?|generat(?:ion|ions|ed)|questions?|solutions?|rollouts?|text|content"
    r"|assistant|user|human|system|(?:an? |the )?model(?: (?:wrote|said|answered|generated))?)"
    r"(?: (?:\d+|text|\([^)]{0,20}\)))?[\"']? ?[:=])",
    re.IGNORECASE,
)


def without_head(text: str) -> str:
    """A line without what a launcher put before it."""
    if text[:1] not in _HEADS and ("| " not in text[:_FAR] or not _MAY_HEAD.match(text)):
        return text
    found = _HEAD.match(text)
    return text[found.end() :] if found else text


def split_process(text: str) -> tuple[str, str]:
    """The prefix of the writing process, empty for the main process, and the rest of the line."""
    found = _PROCESS.match(text) if text[:1] in _PREFIXES else None
    return (found.group(), text[found.end() :]) if found else ("", text)


class Samples:
    """Tells the blocks that a model wrote from the lines of the run, by process."""

    def __init__(self) -> None:
        self._inside: dict[str, int] = {}
        self._broken: dict[str, int] = {}
        self.later: list[tuple[str, int, int]] = []
        """Process, first and last line of what was a sample after all: it was closed behind its traceback."""

    def holds(self, process: str, body: str, number: int = 0) -> bool:
        """Whether this line is inside a printed sample of its process. A traceback may be the run's own: it ends a sample at once."""
        if self._broken and (at := self._broken.get(process)) is not None and _CLOSED.match(body):
            self.later.append((process, at, number))
            del self._broken[process]
        left = self._inside.get(process, 0)
        if (body[:1] in _MAY_OPEN or body[:1].isspace()) and _BEGIN.match(body):
            self._inside[process] = _LONGEST
            self._broken.pop(process, None)
            return True
        if not left:
            return False
        over = _END.match(body) is not None
        self._inside[process] = 0 if over else left - 1
        if over and "Traceback" in body:
            self._broken[process] = number
        return not over


def in_sample(before: str) -> bool:
    """Whether what follows this text on its line is within the quoted text of a sample: `{'step': 3, 'completion': 'I think …`."""
    return _IN_SAMPLE.search(before) is not None


def is_sample(text: str) -> bool:
    """Whether one line is a row of a table, or what somebody is quoted with."""
    begin = text.lstrip()[:1]
    if begin in _MARGINS:
        return begin != ""
    return (begin in "[><" or ":" in text or "=" in text) and _SPEAKER.match(text) is not None


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


_RUN = re.compile(r"[a-z]+")
_SHORTEST, _BRANCHES = 3, 40
"""Texts that are worth a search, and how many of them."""
_MOST = 200_000
"""Words that are remembered."""


def words_of(lower: str) -> frozenset[str]:
    """The words of a text in small letters."""
    return frozenset(_RUN.findall(lower))


class Stems:
    """Whether a text holds one of these stems, which may have blanks and signs in them; as a text they stand between bars."""

    def __init__(self, stems: str | Iterable[str]) -> None:
        stems = tuple(stems.split("|") if isinstance(stems, str) else stems)
        self._signs = tuple(stem for stem in stems if not _RUN.search(stem))
        self._runs = tuple((stem, *_longest(stem)) for stem in stems if _RUN.search(stem))
        self._harmless: set[str] = set()
        self._telling: dict[str, tuple[str, ...]] = {}
        """The stems that a text may hold for a word; none where the word alone holds one."""

    @classmethod
    def of(cls, patterns: Iterable[re.Pattern[str]], shortest: int) -> Stems:
        """Texts of which every match of one of these patterns holds one; they have `shortest` letters and more."""
        found = [required(pattern, shortest) for pattern in patterns]
        assert all(found), "a pattern requires no text"
        return cls(dict.fromkeys(text for words in found if words is not None for text in words.texts))

    def within(self, lower: str, words: frozenset[str]) -> bool:
        """Whether a text in small letters, of these words, holds one."""
        for word in words - self._harmless:
            stems = self._telling.get(word)
            if stems is None:
                stems = self._stems_for(word)
                if stems is None:
                    continue
            if not stems or any(stem in lower for stem in stems):
                return True
        return any(sign in lower for sign in self._signs)

    def _stems_for(self, word: str) -> tuple[str, ...] | None:
        """The stems that a text may hold for this word; None for none."""
        if len(self._harmless) + len(self._telling) >= _MOST:
            self._harmless.clear()
            self._telling.clear()
        found = tuple(
            stem
            for stem, run, begins, ends, whole in self._runs
            if (word == run if whole else word.startswith(run) if begins else word.endswith(run) if ends else run in word)
        )
        if not found:
            self._harmless.add(word)
            return None
        self._telling[word] = () if any(stem in word for stem in found) else found
        return self._telling[word]


def _longest(stem: str) -> tuple[str, bool, bool, bool]:
    """The longest word of a stem, and whether a word of a text must begin with it, end with it, or be it."""
    found = max(_RUN.finditer(stem), key=lambda run: run.end() - run.start())
    begins, ends = found.start() > 0, found.end() < len(stem)
    return found[0], begins and not ends, ends and not begins, begins and ends


class RequiredWords(NamedTuple):
    """Texts of which every match of a pattern holds one."""

    texts: tuple[str, ...]
    lower: bool
    """They are in small letters, and to be looked for in a text in small letters."""


class Finder:
    """A pattern that is searched only in texts that hold what every match holds."""

    def __init__(self, pattern: re.Pattern[str]) -> None:
        self._pattern = pattern
        self._needed = required(pattern)

    def search(self, text: str, lower: str | None = None) -> re.Match[str] | None:
        """As of the pattern itself; `lower` is the text in small letters, where it is there already."""
        if self._needed is None:
            return self._pattern.search(text)
        where = text if not self._needed.lower else text.lower() if lower is None else lower
        for one in self._needed.texts:
            if one in where:
                return self._pattern.search(text)
        return None


@lru_cache(maxsize=1024)
def required(pattern: re.Pattern[str], shortest: int = _SHORTEST) -> RequiredWords | None:
    """What every match of a pattern holds; None where that cannot be told from it, or says too little."""
    small = bool(pattern.flags & re.IGNORECASE) or "(?i" in pattern.pattern
    found = _of_sequence(_parser.parse(pattern.pattern, pattern.flags & ~re.DEBUG), shortest)
    if found is None or (small and not all(text.isascii() for text in found)):
        return None
    return RequiredWords(tuple(sorted({text.lower() if small else text for text in found})), small)


def _of_sequence(parts: Iterable[tuple[Any, Any]], shortest: int) -> list[str] | None:
    """The best of what each part of a sequence requires: the one whose shortest text is longest."""
    candidates: list[list[str]] = []
    run = ""
    for kind, value in parts:
        if kind is _codes.LITERAL:
            run += chr(value)
            continue
        if run:
            candidates.append([run])
        run = ""
        inner = _of_part(kind, value, shortest)
        candidates += [] if inner is None else [inner]
    candidates += [[run]] if run else []
    long = [texts for texts in candidates if min(map(len, texts)) >= shortest and len(texts) <= _BRANCHES]
    return max(long, key=lambda texts: (min(map(len, texts)), -len(texts)), default=None)


def _of_part(kind: Any, value: Any, shortest: int) -> list[str] | None:
    if kind is _codes.SUBPATTERN:
        return _of_sequence(value[3], shortest)
    if kind in (_codes.MAX_REPEAT, _codes.MIN_REPEAT, _codes.POSSESSIVE_REPEAT):
        return _of_sequence(value[2], shortest) if value[0] >= 1 else None
    if kind is _codes.ATOMIC_GROUP:
        return _of_sequence(value, shortest)
    if kind is _codes.BRANCH:
        branches = [_of_sequence(branch, shortest) for branch in value[1]]
        return [text for branch in branches for text in branch or ()] if all(branches) else None
    return None
