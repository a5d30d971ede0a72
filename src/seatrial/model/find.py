"""A quick search for many words at once: it keeps slow patterns from most lines of a log, and never from one that holds a word.

Lines of a log are made of the same few thousand words. Each is looked at once; a line of words that are all known to be harmless costs
one comparison of sets.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from re import _constants as _codes  # type: ignore[attr-defined]
from re import _parser  # type: ignore[attr-defined]
from typing import Any, NamedTuple

_RUN = re.compile(r"[a-z]+")
_SHORTEST, _BRANCHES = 3, 40
"""Texts that are worth a search, and how many of them."""
_MOST = 200_000
"""Words that are remembered."""


def words_of(lower: str) -> frozenset[str]:
    """The words of a text in small letters."""
    return frozenset(_RUN.findall(lower))


class Stems:
    """Whether a text holds one of these stems, which may have blanks and signs in them."""

    def __init__(self, stems: Iterable[str]) -> None:
        stems = tuple(stems)
        self._signs = tuple(stem for stem in stems if not _RUN.search(stem))
        self._runs = tuple((stem, *_longest(stem)) for stem in stems if _RUN.search(stem))
        self._harmless: set[str] = set()
        self._telling: dict[str, tuple[str, ...]] = {}
        """The stems that a text may hold for a word; none where the word alone holds one."""

    def within(self, lower: str, words: frozenset[str]) -> bool:
        """Whether a text in small letters, of these words, holds one."""
        for word in words - self._harmless:
            stems = self._telling.get(word)
            if stems is None:
                stems = self._look(word)
                if stems is None:
                    continue
            if not stems or any(stem in lower for stem in stems):
                return True
        return any(sign in lower for sign in self._signs)

    def _look(self, word: str) -> tuple[str, ...] | None:
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


class Required(NamedTuple):
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
        needed = self._needed
        if needed is not None:
            where = text if not needed.lower else text.lower() if lower is None else lower
            for one in needed.texts:
                if one in where:
                    break
            else:
                return None
        return self._pattern.search(text)


def required(pattern: re.Pattern[str]) -> Required | None:
    """What every match of a pattern holds; None where that cannot be told from it, or says too little."""
    small = bool(pattern.flags & re.IGNORECASE) or "(?i" in pattern.pattern
    found = _of_sequence(_parser.parse(pattern.pattern, pattern.flags & ~re.DEBUG))
    if found is None or (small and not all(text.isascii() for text in found)):
        return None
    return Required(tuple(sorted({text.lower() if small else text for text in found})), small)


def _of_sequence(parts: Iterable[tuple[Any, Any]]) -> list[str] | None:
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
        inner = _of_part(kind, value)
        if inner is not None:
            candidates.append(inner)
    candidates += [[run]] if run else []
    long = [texts for texts in candidates if min(map(len, texts)) >= _SHORTEST and len(texts) <= _BRANCHES]
    return max(long, key=lambda texts: (min(map(len, texts)), -len(texts)), default=None)


def _of_part(kind: Any, value: Any) -> list[str] | None:
    if kind is _codes.SUBPATTERN:
        return _of_sequence(value[3])
    if kind in (_codes.MAX_REPEAT, _codes.MIN_REPEAT, _codes.POSSESSIVE_REPEAT):
        return _of_sequence(value[2]) if value[0] >= 1 else None
    if kind is _codes.ATOMIC_GROUP:
        return _of_sequence(value)
    if kind is _codes.BRANCH:
        branches = [_of_sequence(branch) for branch in value[1]]
        return [text for branch in branches for text in branch or ()] if all(branches) else None
    return None
