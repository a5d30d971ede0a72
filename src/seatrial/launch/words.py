"""Placeholders of a job, filled in where the values are known.

- In a script they become quoted variables, which the node sets: no value of theirs is ever shell text.
- On this machine they are replaced by the values at once.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence

from seatrial.model.job import PLACEHOLDER, variable_of


def bash_word(text: str) -> str:
    """One shell word, placeholders as quoted variables, everything else quoted literally."""
    done, place = "", 0
    for match in PLACEHOLDER.finditer(text):
        done += _quoted(text[place : match.start()]) + f'"${variable_of(match)}"'
        place = match.end()
    return done + _quoted(text[place:]) or "''"


def _quoted(text: str) -> str:
    return shlex.quote(text) if text else ""


def fill(text: str, variables: Mapping[str, str]) -> str:
    """The text with every placeholder replaced by its value."""

    def value(match: re.Match[str]) -> str:
        return variables[variable_of(match)]

    return PLACEHOLDER.sub(value, text)


def referred(texts: tuple[str, ...]) -> tuple[str, ...]:
    """Names of the services whose endpoints these texts need, each once."""
    found = [match[3] for text in texts for match in PLACEHOLDER.finditer(text) if match[3]]
    return tuple(dict.fromkeys(found))


def grouped(words: Sequence[str]) -> list[str]:
    """Words of a command as lines that a person can read: an option and its values on one line each."""
    groups: list[str] = []
    for word in words:
        if groups and not word.startswith("-"):
            groups[-1] += f" {word}"
        else:
            groups.append(word)
    return groups
