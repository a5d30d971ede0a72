"""What tests of verifiers share: rows, a verifier from a table, and the failure that a score must be."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from seatrial.rollouts.campaign import Dataset, SandboxLimits, Verify
from seatrial.rollouts.rollout_record import InputRow, RolloutError, Score, Verifier
from seatrial.rollouts.verifiers import Asker, make_verifier

DATASETS = {"d": Dataset(name="d", path="d.jsonl"), "e": Dataset(name="e", path="e.jsonl", prompt="q", answer="gold")}


def row(dataset: str = "d", **data: Any) -> InputRow:
    return InputRow(0, "t0", dataset, data, source="d.jsonl:1")


def made(base: Path = Path("/"), policy: Asker | None = None, limits: SandboxLimits | None = None, **table: Any) -> Verifier:
    return make_verifier(Verify.model_validate(table), limits or SandboxLimits(), base, policy, DATASETS)


def talk(make: Callable[[], Verifier], use: Callable[[Verifier], Awaitable[None]]) -> None:
    """Use a verifier in a loop of its own, and close it."""

    async def main() -> None:
        verifier = make()
        try:
            await use(verifier)
        finally:
            await verifier.close()

    asyncio.run(main())


def score(verifier: Verifier, given: InputRow, text: str) -> Score:
    """One score of a verifier that starts nothing."""
    return asyncio.run(verifier.score(given, text, ()))


async def failure(verifier: Verifier, given: InputRow, text: str = "x") -> RolloutError:
    with pytest.raises(RolloutError) as raised:
        await verifier.score(given, text, ())
    return raised.value
