"""Exact match and multiple choice: what is read out of an answer, and what is not."""

from __future__ import annotations

import asyncio
import signal
from typing import Any

import pytest

from seatrial.rollouts.rollout_record import FailureKind, RolloutError
from seatrial.rollouts.verifiers.text_verifiers import boxed, last_line, undisturbed
from seatrial.runtime.interrupt import Interruptible
from tests.rollouts.verifiers import failure, made, row, score

OPTIONS = [{"A": "first"}, {"B": "second"}, {"C": "third"}, {"D": "fourth"}]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (r"\boxed{1} then \boxed{ 2 }", "2"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\text{a {b} c}}.", r"\text{a {b} c}"),
        (r"\boxed{3} and \boxed{4 was cut", "3"),
        (r"\boxed{}", ""),
        ("no box", None),
        (r"\boxed {1}", None),
    ],
)
def test_the_last_box_that_is_closed(text: str, found: str | None) -> None:
    assert boxed(text) == found


def test_the_last_line() -> None:
    assert (last_line("a\n b \n\n \n"), last_line(""), last_line("\n")) == ("b", "", "")


@pytest.mark.parametrize(
    ("table", "expected", "text", "reward", "answer"),
    [
        ({}, "Paris", "I think so.\n  paris ", 1.0, "paris"),
        ({}, "Paris", "Paris\nor perhaps Rome", 0.0, "or perhaps Rome"),
        ({}, "new  york", r"It is \boxed{New York}, surely.", 1.0, "New York"),
        ({"ignore_case": False}, "Paris", "paris", 0.0, "paris"),
        ({}, 42, "42", 1.0, "42"),
        ({}, ["UK", "United Kingdom"], "united kingdom", 1.0, "united kingdom"),
        ({"pattern": r"ANSWER=(\w+)"}, "b", "ANSWER=a ANSWER=b c", 1.0, "b"),
        ({"pattern": r"\d+"}, "7", "7 8", 0.0, "8"),
        ({"pattern": r"\d+"}, "7", "seven", 0.0, None),
        ({"pattern": r"(x)|y"}, "y", "x y", 1.0, "y"),
        ({}, "a", "", 0.0, None),
        ({}, "a", r"\boxed{}", 0.0, None),
    ],
)
def test_exact(table: dict[str, Any], expected: Any, text: str, reward: float, answer: str | None) -> None:
    result = score(made(kind="exact", **table), row(answer=expected), text)
    assert (result.reward, result.answer) == (reward, answer)
    assert result.fields["extracted_answer"] == answer


def test_the_expected_answer_stands_where_the_dataset_says() -> None:
    assert score(made(kind="exact"), row("e", gold="x", answer="y"), "x").reward == 1.0


@pytest.mark.parametrize(
    "data", [{}, {"answer": ""}, {"answer": None}, {"answer": []}, {"answer": {"a": 1}}, {"answer": ["a", None]}, {"answer": True}]
)
@pytest.mark.parametrize("kind", ["exact", "choice"])
def test_a_row_without_an_expected_answer_is_a_failure_never_a_zero(kind: str, data: dict[str, Any]) -> None:
    error = asyncio.run(failure(made(kind=kind), row(**data)))
    assert (error.kind, error.heals) == ("reward", False)
    assert "d.jsonl:1" in str(error)


LETTERS = {
    r"\boxed{C}": "C",
    r"\boxed{\text{(C)}}": "C",
    r"\boxed{\textbf{D}}": "D",
    r"\boxed{C. third}": "C",
    r"\boxed{third}": "C",
    r"\boxed{A} no, \boxed{B}": "B",
    r"\boxed{E}": None,
    r"\boxed{c}": None,
    r"\boxed{A \text{ or } B}": None,
    r"\boxed{A fine day}": None,
    r"\boxed{} Answer: B": None,
    "Answer: C": "C",
    "**Answer:** (C)": "C",
    "Final answer: **D**": "D",
    "The answer is C.": "C",
    "The answer is C because of that": "C",
    "The correct answer is option **B**.": "B",
    "Answer: third": "C",
    "Answer: B. Wait.\nAnswer: D": "D",
    "the answer is (C), not (A)": "C",
    "Answer: A.": "A",
    "Answer: A, since it is first": "A",
    "Answer\nB": "B",
    "(C)": "C",
    "Some thoughts.\n\n**C**": "C",
    "C) third": "C",
    "third.": "C",
    "Answer: A good one": None,
    "The answer is a bit odd": None,
    "A good idea": None,
    "I think B": None,
    "Option B is right": None,
    "Answer: B or C": None,
    "Answer: A/B": None,
    "Answer: (A) and (B)": None,
    "Answer: E": None,
    "": None,
}


@pytest.mark.parametrize("text", LETTERS)
def test_choice_reads_letters_and_nothing_else(text: str) -> None:
    for expected in "ABCD":
        result = score(made(kind="choice"), row(options=OPTIONS, expected_answer=expected), text)
        assert (result.answer, result.reward) == (LETTERS[text], float(LETTERS[text] == expected))


@pytest.mark.parametrize("options", [OPTIONS, {"A": "first", "b": "second", "C": "third"}, ["first", "second", "third"], None])
def test_options_in_every_shape(options: Any) -> None:
    given = {"choices": options} if options else {}
    assert score(made(kind="choice"), row(answer="(b)", **given), "Answer: B").reward == 1.0


def test_the_expected_answer_may_be_the_text_of_an_option() -> None:
    assert score(made(kind="choice"), row(options=["x ray", "y"], answer="X  ray"), r"\boxed{A}").reward == 1.0


@pytest.mark.parametrize("answer", ["E", "fifth", 2])
def test_an_expected_answer_that_is_no_option_is_a_failure(answer: Any) -> None:
    assert "no letter and no option" in str(asyncio.run(failure(made(kind="choice"), row(options=OPTIONS, answer=answer))))


def test_two_options_with_one_text_are_told_apart_by_letter_only() -> None:
    given = row(options=["same", "same", "other"], answer="B")
    assert score(made(kind="choice"), given, r"\boxed{same}").answer is None
    assert score(made(kind="choice"), given, r"\boxed{B}").reward == 1.0


def test_a_pattern_alone_decides() -> None:
    verifier = made(kind="choice", pattern=r"<<(.*?)>>")
    assert score(verifier, row(options=OPTIONS, answer="B"), r"<<A>> <<second>> \boxed{C}").answer == "B"
    assert score(verifier, row(options=OPTIONS, answer="C"), r"\boxed{C}").answer is None


def test_a_score_that_a_request_to_stop_fell_into_is_none() -> None:
    with Interruptible() as stop:
        with undisturbed(FailureKind.SANDBOX):
            pass
        with pytest.raises(RolloutError, match="asked to stop while it was scored") as raised, undisturbed(FailureKind.SANDBOX):
            stop.signal = signal.SIGTERM
        assert (raised.value.kind, raised.value.heals) == ("sandbox", True)
        with undisturbed(FailureKind.SANDBOX):
            pass  # what begins later was not sent the signal
