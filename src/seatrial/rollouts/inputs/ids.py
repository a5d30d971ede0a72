"""Ids of rows: from their content, so that they stay the same when other rows are added, removed or reordered.

- An id is 16 hex digits of the sha256 over the dataset's name and the row as canonical JSON (sorted keys, without Gym's own `_ng_*`).
  The second row with the same content gets `-2`, the third `-3`: equal rows are interchangeable, so their order does not matter.
- The name is hashed too, since ids must be unique in a campaign whatever its other datasets hold: the same row under two agents or two
  system prompts is two tasks. To join them there is `content_of`, which leaves the name out; inputs.jsonl stores it as `content`.
- Two different rows with the same 64 bits would be told apart as if they were equal: nothing is lost by it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import orjson

_DIGITS = 16
_ALL = 1 << 64


def canonical(data: Mapping[str, Any]) -> bytes:
    """What is hashed of a row. A TypeError for what JSON does not hold."""
    kept = {key: value for key, value in data.items() if not key.startswith("_ng_")}
    return orjson.dumps(kept, option=orjson.OPT_SORT_KEYS)


def content_of(text: bytes) -> str:
    """The same for equal rows, in whatever dataset and campaign; takes what `canonical` gives."""
    return hashlib.sha256(text).hexdigest()[:_DIGITS]


class Ids:
    """Gives the rows of one dataset their ids, in order."""

    def __init__(self, dataset: str) -> None:
        self._name = dataset.encode() + b"\n"
        self._seen: set[int] = set()
        self._again: dict[int, int] = {}
        self.duplicates = 0
        """Rows that were there before."""

    def give(self, text: bytes) -> str:
        """The id of a row; takes what `canonical` gives."""
        digits = hashlib.sha256(self._name + text).hexdigest()[:_DIGITS]
        # Numbers instead of texts: half the memory, over as many rows as there are.
        number = int(digits, 16)
        if number not in self._seen:
            self._seen.add(number)
            return digits
        self.duplicates += 1
        self._again[number] = self._again.get(number, 1) + 1
        return f"{digits}-{self._again[number]}"


def is_chosen(task: str, weight: float) -> bool:
    """Whether a row belongs to the share `weight`; a larger share keeps all rows of a smaller one."""
    return int.from_bytes(hashlib.sha256(f"weight:{task}".encode()).digest()[:8], "big") < weight * _ALL
