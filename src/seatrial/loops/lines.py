"""The lines of a console log as a loop's readers need them: without colours and time stamps, with the writing process apart.

- Our own time stamp, and the label that a script's `sed 's/^/[mcore 1step] /'` puts before every line, are removed.
- The prefix of Ray names the process; the parts of a progress bar (`\\r`) are yielded one by one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from seatrial.files import read_text

ANSI = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")
HEAD = re.compile(r"^(?:\d{4}-\d\d-\d\dT[\d:.]+Z )?(?:\[\w+ \d+step\] )?")
PREFIX = re.compile(r"(?:\((?:[\w.:\[\]=-]+ )?pid=\d+(?:, ip=[^)\s]+)?\) )*")
"""Ray's: the processes that a line came through, as `(MegatronPolicyWorker[rank=0] pid=7, ip=192.0.2.1) `."""


def lines(log: Path) -> Iterator[tuple[int, str, str]]:
    """Number, process prefix and text of each line."""
    for number, raw in enumerate(read_text(log).split("\n"), 1):
        text = HEAD.sub("", ANSI.sub("", raw), count=1)
        match = PREFIX.match(text)
        prefix = match[0] if match else ""
        for part in text[len(prefix) :].split("\r"):
            yield number, prefix, part
