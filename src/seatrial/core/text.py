"""Turns recorded values into text that is safe to show.

- Control and bidirectional-override characters are made visible (`\\x1b`), never dropped: a log line cannot recolour a terminal,
  reorder a sentence or make XML invalid. Colour codes alone are removed; they carry no fact.
- `one_line` keeps a recorded text from starting a line of its own. `counted` puts a count before a noun.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_HIDDEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u00ad\u061c\u115f\u1160\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u2069\u3164\ufeff\uffa0"
    "\ufff9-\ufffb\ufffe\uffff\ud800-\udfff\U000e0000-\U000e007f]"
)

_ID = r"\b[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\b|\b(?=[a-f]*\d)(?=\d*[a-f])[0-9a-f]{8,}\b"
_OWN = re.compile(
    _ID + r"|\btmp(?=[a-z]*\d)[a-z0-9]{8}\b|0x[0-9a-fA-F]+|(?<![\w/.])\.{0,2}/[^\s'\",)]+|(?<![\w.])[-+]?\d[\d.]*(?:[eE][-+]?\d+)?\w*"
)
"""Of one run: a UUID or another long hexadecimal id, an address, an absolute path (or one that starts with dots), a number with its
unit. The 1 of `layers.1.mlp` is a name."""


def _escape(match: re.Match[str]) -> str:
    """As JSON writes it, but for controls below a space: those JSON has written out itself, so that JSON stays JSON."""
    code = ord(match.group())
    return f"\\x{code:02x}" if code < 0x20 else json.dumps(match.group())[1:-1] if code != 0x7F else "\\u007f"


def visible(text: str) -> str:
    """`text` with colour codes removed and every other invisible character written out; keeps tabs and newlines."""
    return _HIDDEN.sub(_escape, _COLOUR.sub("", text.replace("\r\n", "\n")))


def one_line(text: str) -> str:
    """`text` on one line, with single spaces."""
    return visible(" ".join(text.split()))


def as_rows(lines: Iterable[str]) -> str:
    """Lines as one text. What was recorded with a newline (the name of a metric) has none here, and cannot imitate a line."""
    return "\n".join(line.replace("\r", "\\r").replace("\n", "\\n") for line in lines)


def number(value: float | str | None) -> str:
    """A measured value for people: six significant digits; strings (such as "NaN") as they are."""
    if value is None:
        return "no value"
    return value if isinstance(value, str) else f"{value:.6g}"


def ranges(steps: Sequence[int]) -> str:
    """Steps as ranges: 1, 2, 3, 7 becomes `1-3, 7`."""
    parts: list[list[int]] = []
    for step in sorted(set(steps)):
        if parts and step == parts[-1][1] + 1:
            parts[-1][1] = step
        else:
            parts.append([step, step])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in parts)


def first_few(texts: Sequence[str], most: int = 3, before_more: str = " and ") -> str:
    """`a, b, c and 4 more`."""
    more = f"{before_more}{len(texts) - most} more" if len(texts) > most else ""
    return ", ".join(texts[:most]) + more


def shortened(text: str, width: int) -> str:
    """The beginning of a text, in at most so many characters."""
    return text if len(text) <= width else f"{text[: width - 1]}…"


def unique(texts: Iterable[str]) -> tuple[str, ...]:
    """The non-empty texts in their first order, each once."""
    return tuple(dict.fromkeys(text for text in texts if text.strip()))


def word_set(text: str) -> frozenset[str]:
    """The words of a list that is written as one text."""
    return frozenset(text.split())


def failure_identity(text: str) -> str:
    """What a failure says, without what differs between two runs that fail in the same way: two failures are the same if these are.

    Measured numbers, ids, addresses, temporary names and places of files are left out.
    """
    return _OWN.sub("#", text)


def counted(number: int, noun: str) -> str:
    """`1 shard`, `2 shards`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
