"""What the demo asks: sums, and which of four numbers is the largest; each with its answer and how hard it is.

Standard library only: the tiny model learns from the same questions in its own environment, where nothing else of Seatrial is.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

LETTERS = "ABCD"


@dataclass(frozen=True, slots=True)
class Question:
    """One row of the demo."""

    prompt: str
    answer: str
    difficulty: str


def sum_of(draw: random.Random, digits: int) -> Question:
    """A sum of two numbers with so many digits."""
    low, high = (0, 9) if digits == 1 else (10 ** (digits - 1), 10**digits - 1)
    left, right = draw.randint(low, high), draw.randint(low, high)
    return Question(f"What is {left}+{right}?", str(left + right), f"{digits}-digit")


def largest_of(draw: random.Random, near: bool) -> Question:
    """Four two-digit numbers; `near`: the largest two begin with the same digit."""
    while True:
        numbers = draw.sample(range(10, 100), len(LETTERS))
        second, first = sorted(numbers)[-2:]
        if (first // 10 == second // 10) == near:
            break
    options = " ".join(f"{letter}) {number}" for letter, number in zip(LETTERS, numbers, strict=True))
    return Question(f"Which is largest? {options}", LETTERS[numbers.index(first)], "near" if near else "far")


MAKERS: dict[str, tuple[Callable[[random.Random], Question], ...]] = {
    "sums": (lambda draw: sum_of(draw, 1), lambda draw: sum_of(draw, 2), lambda draw: sum_of(draw, 3)),
    "largest": (lambda draw: largest_of(draw, False), lambda draw: largest_of(draw, True)),
}
"""Datasets, and their questions from easy to hard. Nobody taught the model the last kind of sums."""


def different(make: Callable[[random.Random], Question], count: int, draw: random.Random) -> list[Question]:
    """So many questions of one kind, none of them twice."""
    found: dict[str, Question] = {}
    while len(found) < count:
        question = make(draw)
        found.setdefault(question.prompt, question)
    return list(found.values())
