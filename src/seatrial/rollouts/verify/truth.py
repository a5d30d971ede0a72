"""What verifiers know of a row: its question and its expected answer; and what they share in reading an answer."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from seatrial.launch.interrupt import stop_requested
from seatrial.rollouts.campaign import Dataset
from seatrial.rollouts.inputs.prompts import expected, prompt_messages
from seatrial.rollouts.record import FailureKind
from seatrial.rollouts.work import RolloutError, Row

Asker = Callable[[str], Awaitable[str]]
"""Asks a model a prompt, gives its text. Raises RolloutError. One with a `close` is closed with its verifier."""


class Truth:
    """Reads rows as their datasets say."""

    def __init__(self, datasets: Mapping[str, Dataset]) -> None:
        self._datasets = datasets

    def expected(self, row: Row) -> tuple[str, ...]:
        """The answers that are right, one or several; a failure of class `reward` when the row has none."""
        value = expected(row.data, self._datasets[row.dataset])
        known = texts_of(value)
        if known is None:
            raise RolloutError(FailureKind.REWARD, f"{row.source or row.id}: no expected answer that is a text or a number: {value!r:.200}")
        return known

    def question(self, row: Row) -> str:
        """What the user said, as text."""
        messages = prompt_messages(row.data, self._datasets[row.dataset])
        return "\n\n".join(_content(message.get("content")) for message in messages if message.get("role") == "user").strip()


@contextmanager
def undisturbed(kind: FailureKind) -> Iterator[None]:
    """Around a score that comes of programs: none, when we are asked to stop meanwhile. Whoever asks, asks every process of the job,
    and a test that was ended by that must not look like a wrong answer."""
    before = stop_requested()
    yield
    if stop_requested() and not before:
        raise RolloutError(kind, "asked to stop while it was scored", heals=True)


def texts_of(value: Any) -> tuple[str, ...] | None:
    """Expected answers, one or a list of them, as texts; None when one of them is none, or there is none."""
    texts = [text_of(item) for item in (value if isinstance(value, list | tuple) else [value])]
    known = tuple(text for text in texts if text is not None and text.strip())
    return known if known and len(known) == len(texts) else None


def text_of(value: Any) -> str | None:
    """An expected answer as text; None for what is none."""
    if isinstance(value, str):
        return value
    return str(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def boxed(text: str) -> str | None:
    r"""The content of the last \boxed{…} that is closed, however braces are nested in it."""
    mark = r"\boxed{"
    found = text.rfind(mark)
    while found >= 0:
        depth = 0
        for place in range(found + len(mark) - 1, len(text)):
            depth += (text[place] == "{") - (text[place] == "}")
            if depth == 0:
                return text[found + len(mark) : place].strip()
        found = text.rfind(mark, 0, found)
    return None


def last_line(text: str) -> str:
    """The last line with something on it, or nothing."""
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")


def _content(content: Any) -> str:
    if isinstance(content, str):
        return content
    parts: Sequence[Any] = content if isinstance(content, list | tuple) else ()
    return "\n".join(part["text"] for part in parts if isinstance(part, Mapping) and isinstance(part.get("text"), str))
