"""What stands in the lines of any log beside the words of the run: heads that a launcher puts before them, and samples.

- `without_head`: time stamps, the mark of a container runtime, the label of a script, a logger's `INFO`. `split_process`: the prefix of
  the writing process, as `(Worker pid=7) ` or `[rank1]: `.
- `Samples`, `is_sample`: a log of reinforcement learning prints what models wrote, and that may be anything: `Killed`, `loss: nan`. Loops
  mark such text: by `[prompt]` … `[score]`, by a speaker, tables by their margin.
"""

from __future__ import annotations

import re

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
