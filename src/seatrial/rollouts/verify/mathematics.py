r"""Mathematical equivalence, by math-verify, in worker processes with a real time limit.

- The expected answer is read as LaTeX (delimiters around it do not matter), the answer as math-verify extracts it: \boxed{} first,
  then what looks like a final answer. Both as NeMo Gym's math_with_judge does without its judge.
- An expected answer that cannot be read, and an answer that takes longer than `timeout_s`, are failures of class `reward`: nobody
  knows whether the answer is right. Gym counts them as wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from seatrial.model.errors import UserError
from seatrial.rollouts.campaign import Verify
from seatrial.rollouts.record import FailureKind
from seatrial.rollouts.verify.truth import Truth
from seatrial.rollouts.verify.workers import WorkerError, Workers
from seatrial.rollouts.work import RolloutError, Row, Score

_DELIMITERS = (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"))


class Mathematics:
    """A `Verifier`."""

    def __init__(self, verify: Verify, truth: Truth) -> None:
        self._truth = truth
        self._workers = Workers(["math"], verify.timeout_s)

    async def score(self, row: Row, text: str, output: Sequence[Mapping[str, Any]]) -> Score:  # noqa: ARG002
        expected = self._truth.expected(row)
        try:
            said = await self._workers.ask({"expected": expected, "text": text})
        except WorkerError as error:
            raise RolloutError(FailureKind.REWARD, f"math-verify: {error}", heals=error.heals) from error
        if "error" in said:
            raise RolloutError(FailureKind.REWARD, f"{row.source or row.id}: {said['error']}")
        fields = {"expected_answer": expected[0], "extracted_answer": said["answer"]}
        return Score(float(said["right"]), said["answer"], fields)

    async def close(self) -> None:
        await self._workers.close()


def equivalence() -> Callable[[Mapping[str, Any]], dict[str, Any]]:
    """For a worker: answers {"expected", "text"} by {"right", "answer"}, or {"error"}. No time limit of its own."""
    try:
        from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify  # type: ignore[import-untyped]
    except ImportError as error:
        raise UserError("the verifier math needs math-verify, which is not installed", 'pip install "seatrial[rollouts]"') from error

    def answer(request: Mapping[str, Any]) -> dict[str, Any]:
        golds = []
        for expected in request["expected"]:
            gold = parse(rf"\boxed{{{bare(expected)}}}", [LatexExtractionConfig()], parsing_timeout=None)
            if not gold:
                return {"error": f"the expected answer cannot be read as mathematics: {expected!r:.200}"}
            golds.append(gold)
        found = parse(request["text"], [ExprExtractionConfig(), LatexExtractionConfig()], parsing_timeout=None)
        right = any(verify(gold, found, timeout_seconds=None) for gold in golds)
        # The first entry is what the extracted text means, so that equal answers vote together.
        return {"right": right, "answer": str(found[0]) if found else None}

    return answer


def bare(text: str) -> str:
    """Without the delimiters of LaTeX around it."""
    text = text.strip()
    for left, right in _DELIMITERS:
        if text.startswith(left) and text.endswith(right) and len(text) > len(left) + len(right):
            return text[len(left) : -len(right)].strip()
    return text
