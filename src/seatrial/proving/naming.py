"""What a wrong tensor looks like, by hashes alone: a pure function of what was sent and what was found.

A kind is named only where it is certain: one explanation fits and no other does. Two tensors of the same bits (norms of
ones) explain each other equally well, and then nothing is claimed beyond "differs".

- `stale`: the bits of an older version of the same name.
- `swapped`: the bits of another name, which in turn holds those of this one.
- `shifted layer`: the bits of the same tensor in a neighbouring layer.
- `other name`: the bits of another name, which holds something else.
- `zero`, `NaN`: seen by whoever read the tensor; a hash cannot say it.
- `torn`, `output`, `moved`: what a driver writes in the place of a hash when copies of a tied weight disagree, a module computes
  something else than its weights say, or a buffer changed that nothing was sent for.
- `not there`: the name was sent and nothing was read for it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

Hashes = Mapping[str, str]

MARKS = {
    "torn-": "torn (copies of a tied weight differ)",
    "output-off-": "its module's output is not that of these weights",
    "moved-": "changed, although nothing was sent for it",
}
_LAYER = re.compile(r"^(.*?\.)?(\d+)(?=\.|$)")


@dataclass(frozen=True, slots=True)
class Seen:
    """What one replica holds at one version, by exported name."""

    hashes: Hashes
    zeros: frozenset[str] = frozenset()
    nans: Mapping[str, int] = field(default_factory=dict)


def differing(sent: Hashes, seen: Hashes) -> list[str]:
    """Sent names whose hashes differ or were not read, and names that nobody sent."""
    return [name for name in sent if seen.get(name) != sent[name]] + [name for name in seen if name not in sent]


def looks_like(name: str, version: int, sent: Mapping[int, Hashes], seen: Seen) -> str:
    """What the tensor `name` looks like at `version`; "" when nothing is certain."""
    found, now = seen.hashes.get(name), sent.get(version, {})
    if found is None:
        return "not there"
    for mark, words in MARKS.items():
        if found.startswith(mark):
            return words
    if name in seen.nans:
        return f"NaN ({seen.nans[name]} elements)"
    if name in seen.zeros:
        return "zero"
    older = [number for number in sorted(sent) if number < version and sent[number].get(name) == found]
    others = [other for other, value in now.items() if other != name and value == found]
    if older and not others:
        return f"stale (equals version {older[-1]})"
    if len(others) == 1 and not older:
        return _of_another(name, others[0], now, seen)
    return ""


def _of_another(name: str, other: str, now: Hashes, seen: Seen) -> str:
    if seen.hashes.get(other) == now.get(name):
        return f"swapped with {other}"
    if _neighbours(name, other):
        return f"shifted layer (holds {other})"
    return f"other name (holds {other})"


def _neighbours(name: str, other: str) -> bool:
    """Whether two names are the same tensor of layers that follow each other."""
    one, two = _LAYER.match(name), _LAYER.match(other)
    if one is None or two is None or one[1] != two[1] or name[one.end() :] != other[two.end() :]:
        return False
    return abs(int(one[2]) - int(two[2])) == 1
