r"""Exact match: the answer is the same text as the expected one, but for white space and, unless told otherwise, case.

The answer is the last match of `pattern` (its first group, if it has one). Without a pattern it is what the last \boxed{} holds, else
the last line that is not empty. A row may expect one of several answers: a list.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from seatrial.rollouts.campaign import Verify
from seatrial.rollouts.verify.truth import Truth, boxed, last_line
from seatrial.rollouts.work import Row, Score


class Exact:
    """A `Verifier`."""

    def __init__(self, verify: Verify, truth: Truth) -> None:
        self._pattern = re.compile(verify.pattern) if verify.pattern is not None else None
        self._ignore_case = verify.ignore_case
        self._truth = truth

    async def score(self, row: Row, text: str, output: Sequence[Mapping[str, Any]]) -> Score:  # noqa: ARG002
        expected = self._truth.expected(row)
        answer = self._extract(text)
        right = answer is not None and self._plain(answer) in {self._plain(known) for known in expected}
        return Score(float(right), answer, {"expected_answer": expected[0], "extracted_answer": answer})

    async def close(self) -> None:
        """Nothing was started."""

    def _extract(self, text: str) -> str | None:
        if self._pattern is not None:
            return last_match(self._pattern, text)
        found = boxed(text)
        return (last_line(text) if found is None else found) or None

    def _plain(self, text: str) -> str:
        bare = " ".join(text.split())
        return bare.casefold() if self._ignore_case else bare


def last_match(pattern: re.Pattern[str], text: str) -> str | None:
    """The last match: its first group, if the pattern has one and it took part; stripped."""
    found = deque(pattern.finditer(text), maxlen=1)
    if not found:
        return None
    last = found[0]
    return ((last[1] if pattern.groups and last[1] is not None else last[0]) or "").strip() or None
