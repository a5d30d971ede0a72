"""Climbing the conformance ladder of Megatron-Bridge in its environment: many questions, one process, every answer judged on its own."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from seatrial.checks.probe_facts import Facts
from seatrial.core.files import write_json
from seatrial.evidence.redact import Redactor
from seatrial.loops import environments
from seatrial.probes.bridge_run import LADDER
from seatrial.probes.bridge_verdict import BridgeRequest, RungResult, judge_ladder
from seatrial.probes.probe_process import LOG, Driver, trouble
from seatrial.runtime.environments import Environments
from seatrial.trial.staging import stage

ENVIRONMENT = "megatron-cpu"
MINUTES = 9
"""Below the limit of one test, so that a ladder that hangs says so itself."""
STEPS = 20


class Item(NamedTuple):
    """One rung of one family, as it is or with a seeded bug."""

    model: str
    rung: str
    fault: str | None = None


def python() -> Path:
    """The interpreter with Megatron. Without it the test fails: a skip would look like success."""
    cache = Environments()
    found = cache.find(ENVIRONMENT, environments()[ENVIRONMENT])
    if found is None:
        pytest.fail(
            f"the environment {ENVIRONMENT} is not built in {cache.root}: run `seatrial env build {ENVIRONMENT}` first", pytrace=False
        )
    return found.python


def climb(out: Path, items: Sequence[Item]) -> Facts:
    """What one ladder leaves of all these items: a plan that no call of the command makes, since a call has one fault or none."""
    plan, asked = out / "plan.json", [item._asdict() for item in items]
    write_json(plan, {"device": "cpu", "models": dict.fromkeys(item.model for item in items), "items": asked, "options": {"steps": STEPS}})
    driver = Driver(out=out, instruments=stage(out), redactor=Redactor(os.environ))
    ended = driver.run([str(python()), "-m", LADDER, str(plan), str(out)], LOG, 60 * MINUTES)
    if said := trouble(ended, out / LOG, 60 * MINUTES):
        pytest.fail(f"the ladder did not come to its end: {said}", pytrace=False)
    return driver.facts(())


def answer(facts: Facts, item: Item) -> RungResult:
    """The verdict on one item."""
    (family,) = judge_ladder(facts, BridgeRequest(models=(item.model,), rungs=(item.rung,), fault=item.fault)).families
    assert family.rungs, f"{item.model}: {family.reason}"
    return family.rungs[0]


def missed(result: RungResult) -> str:
    """All that a rung says about what it missed, or what it raised."""
    return "\n".join([result.reason, *(f"{check.name} ({check.value}): {check.message}" for check in result.checks if not check.passed)])
