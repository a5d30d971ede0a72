r"""Multiple choice: the answer is a letter.

Where it is looked for, in this order; at each place the last one counts:
1. `pattern`, if there is one (and then nowhere else);
2. \boxed{}: a letter, with signs or \text{} around it, or the text of one option;
3. "Answer: C", "the answer is (C)", in bold or not: a letter, or the text of one option;
4. a last line that is a letter and nothing else ("(C)", "C.", "**C**"), a letter before the text of its option, or that text.
Letters are capitals, so that no article is taken for one; "A" and "I" before another word are none either. Two letters at once
("B or C") are no answer. Options are the row's `options` or `choices`: a list of {"A": text}, an object, or a list of texts.
Gym's mcqa with its strict grading takes the first box instead of the last, and boxes alone.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from seatrial.rollouts.campaign import Verify
from seatrial.rollouts.record import FailureKind
from seatrial.rollouts.verify.exact import last_match
from seatrial.rollouts.verify.truth import Truth, boxed, last_line, texts_of
from seatrial.rollouts.work import RolloutError, Row, Score

_STATED = re.compile(r"(?i:\banswer)[*_]{0,3}(?:\s+(?i:is|would\s+be|should\s+be))?[*_]{0,3}\s*[:：]?[*_]{0,3}[ \t]*(?P<said>[^\n]+)")
_LEADING = re.compile(r"[\s*_(\[{$]*(?:(?i:option|choice)\s+)?[\s*_(\[{$]*(?P<letter>[A-Z])(?![A-Za-z0-9])(?P<rest>.*)", re.S)
_ALTERNATIVE = re.compile(r"[\s*_)\]}$]*(?:,|/|\bor\b|\band\b|&)\s*[*_(\[{$]*[A-Z](?![A-Za-z0-9'])", re.S)
_SIGN_NEXT = re.compile(r"\s*(?:[^\w\s]|$)")
_WRAPPED = re.compile(r"\\(?:text|textbf|mathrm|mathbf|mathsf)\s*\{([^{}]*)\}")
_WORDS = ("A", "I")
_NONE = "expects {0!r:.200}, which is no letter and no option"


class Choice:
    """A `Verifier`."""

    def __init__(self, verify: Verify, truth: Truth) -> None:
        self._pattern = re.compile(verify.pattern) if verify.pattern is not None else None
        self._truth = truth

    async def score(self, row: Row, text: str, output: Sequence[Mapping[str, Any]]) -> Score:  # noqa: ARG002
        options = options_of(row.data)
        expected = self._truth.expected(row)
        letters = {_expected_letter(known, options) for known in expected}
        if None in letters:
            raise RolloutError(FailureKind.REWARD, f"{row.source or row.id}: {_NONE.format(expected)}")
        answer = self._extract(text, options)
        return Score(float(answer in letters), answer, {"expected_answer": expected[0], "extracted_answer": answer})

    async def close(self) -> None:
        """Nothing was started."""

    def _extract(self, text: str, options: Mapping[str, str]) -> str | None:
        if self._pattern is not None:
            return _read(last_match(self._pattern, text) or "", options, alone=True)
        box = boxed(text)
        if box is not None:
            return _read(box, options, alone=True)
        for stated in reversed([*_STATED.finditer(text)]):
            if (letter := _read(stated["said"], options, alone=False)) is not None:
                return letter
        return _read(last_line(text), options, alone=True)


def options_of(data: Mapping[str, Any]) -> dict[str, str]:
    """Texts of the options by letter; empty when the row has none that can be read."""
    given = data.get("options") or data.get("choices")
    if isinstance(given, Mapping):
        pairs = [*given.items()]
    elif isinstance(given, list | tuple) and all(isinstance(entry, Mapping) for entry in given):
        pairs = [pair for entry in given for pair in entry.items()]
    elif isinstance(given, list | tuple):
        pairs = [(chr(ord("A") + place), entry) for place, entry in enumerate(given[:26])]
    else:
        pairs = []
    return {key.upper(): str(text) for key, text in pairs if isinstance(key, str) and re.fullmatch("[A-Za-z]", key) and text is not None}


def why_no_choice(data: Mapping[str, Any], expected: Any) -> str | None:
    """None, or why a row that expects this cannot be scored, whatever the answer."""
    options, known = options_of(data), texts_of(expected)
    if known is not None and all(_expected_letter(text, options) for text in known):
        return None
    return _NONE.format(expected)


def _expected_letter(text: str, options: Mapping[str, str]) -> str | None:
    letter = text.strip(" \t\n().:").upper()
    if re.fullmatch("[A-Z]", letter) and (not options or letter in options):
        return letter
    return _option(text, options)


def _read(said: str, options: Mapping[str, str], *, alone: bool) -> str | None:
    """The letter that something said means; `alone`: nothing but the letter, or the text of its option, may stand there."""
    bare = _WRAPPED.sub(r"\1", said).strip()
    if (letter := _option(bare, options)) is not None:
        return letter
    match = _LEADING.match(bare)
    if match is None or (options and match["letter"] not in options) or _ALTERNATIVE.match(match["rest"]):
        return None
    letter, rest = match["letter"], match["rest"]
    text = rest.strip(" \t\n.*_)]}$:：,-")
    if not text or (letter in options and _same(text, options[letter])):
        return letter
    if alone or (letter in _WORDS and not _SIGN_NEXT.match(rest)):
        return None
    return letter


def _option(text: str, options: Mapping[str, str]) -> str | None:
    """The one option with this text."""
    found = [letter for letter, option in options.items() if _same(text, option)]
    return found[0] if len(found) == 1 else None


def _same(text: str, option: str) -> bool:
    return bool(option.strip()) and _plain(text) == _plain(option)


def _plain(text: str) -> str:
    return " ".join(text.casefold().split()).strip(" .*_$")
