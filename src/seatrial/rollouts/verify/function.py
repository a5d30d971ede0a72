"""The user's own function, in worker processes of its own: it may crash or hang without hurting the collector.

It is loaded once in each of up to four processes, so it should keep no state, and is called with (row, text): the row as the user
wrote it, and the model's last message. It gives a number, or a dict with `reward` and perhaps `answer`; numbers beside them become
metrics, everything is kept in the row. Anything else, NaN and infinities included, is a failure of class `reward`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from seatrial.model.errors import UserError
from seatrial.rollouts.campaign import Verify
from seatrial.rollouts.record import FailureKind
from seatrial.rollouts.verify.truth import undisturbed
from seatrial.rollouts.verify.workers import WorkerError, Workers
from seatrial.rollouts.work import RolloutError, Row, Score


class Function:
    """A `Verifier`."""

    def __init__(self, verify: Verify, base: Path) -> None:
        assert verify.function is not None
        module, colon, name = verify.function.rpartition(":")
        if not colon or not module or not name.isidentifier():
            raise UserError(f"verifiers: function = {verify.function!r} names no function", "write module:name, or path/file.py:name")
        if module.endswith(".py") and not (base / module).is_file():
            raise UserError(f"verifiers: function: {base / module} does not exist", f"a relative path starts at {base}")
        self._name = verify.function
        self._workers = Workers(["function", str(base.absolute()), verify.function], verify.timeout_s)

    async def score(self, row: Row, text: str, output: Sequence[Mapping[str, Any]]) -> Score:  # noqa: ARG002
        try:
            with undisturbed(FailureKind.REWARD):
                said = await self._workers.ask({"row": dict(row.data), "text": text})
        except WorkerError as error:
            raise RolloutError(FailureKind.REWARD, f"{self._name}: {error}", heals=error.heals) from error
        if "error" in said:
            raise RolloutError(FailureKind.REWARD, f"{self._name}: {said['error']}")
        return self._score(said["value"])

    async def close(self) -> None:
        await self._workers.close()

    def _score(self, value: Any) -> Score:
        fields: Mapping[str, Any] = value if isinstance(value, dict) else {"reward": value}
        reward = fields.get("reward")
        if not isinstance(reward, int | float) or not math.isfinite(reward):
            raise RolloutError(FailureKind.REWARD, f"{self._name} gave {value!r:.200}, and no finite reward")
        for key, number in fields.items():
            if isinstance(number, float) and not math.isfinite(number):
                raise RolloutError(FailureKind.REWARD, f"{self._name} gave {key} = {number}, which is not finite")
        answer = fields.get("answer")
        numbers = {key: float(number) for key, number in fields.items() if isinstance(number, int | float) and key != "reward"}
        kept = {key: inner for key, inner in fields.items() if key != "reward"}
        return Score(float(reward), None if answer is None else str(answer), kept, numbers)
