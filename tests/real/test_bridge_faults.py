"""Every seeded bug of the Bridge is caught by the rungs that it names, and what is wrong is named; without it the same rungs pass.

All run in one ladder: a fault is put into the process of its rung alone. That a rung passes without one is shown by test_bridge.py for
the families that it climbs, with the same ladder; only the others are climbed here. SEATRIAL_ALL_LEVELS=1 climbs all here, too, and
what `AGAIN` names.
"""

from __future__ import annotations

import pytest

from seatrial.checks.probe_facts import Facts
from seatrial.core.verdict import Verdict
from seatrial.instruments.bridge.faults import FAULTS
from tests.real.bridge_expected import ALL, LOOPS, RUNGS, TRIED
from tests.real.bridge_ladder import Item, answer, climb, missed

pytestmark = pytest.mark.real

CLIMBED = {*((model, rung) for model in TRIED for rung in RUNGS), *((model, "loop") for model in LOOPS)}
"""What test_bridge.py climbs without a fault."""
AGAIN = {"loop-export-stale": "the loop catches export-swapped, wrong after the first step as well, and the rung policy a stale tensor"}
"""Seeds of closed loops, which cost most, that repeat what is shown by default, and by what."""
SEEDED = [Item(fault.model, rung, name) for name, fault in FAULTS.items() if ALL or name not in AGAIN for rung in fault.rungs]
CLEAN = sorted({item._replace(fault=None) for item in SEEDED if ALL or (item.model, item.rung) not in CLIMBED})

KINDS = {
    "q/k/v interleave wrong": {"qkv-interleave", "qkv-interleave-export"},
    "gate and up swapped": {"gate-up-swapped", "gate-up-swapped-import", "gate-up-swapped-export"},
    "missing bias": {"missing-bias", "bias-misnamed"},
    "tied embedding not tied": {"tied-not-tied", "tied-head-unfilled", "tied-embedding-broken"},
    "rope base wrong": {"rope-ignored", "rope-base-wrong"},
    "norm epsilon wrong": {"epsilon-ignored", "norm-epsilon-wrong"},
    "expert permutation": {"expert-permutation", "expert-permutation-export", "expert-offset-wrong"},
    "vocabulary padding kept": {"vocab-padding-kept"},
    "LoRA on the wrong module": {"lora-wrong-module"},
    "optimizer state lost on resume": {"optimizer-state-lost", "checkpoint-step-lost", "checkpoint-settings-lost"},
    "norms exchanged": {"norms-exchanged"},
    "activation wrong": {"activation-wrong"},
    "softmax scale wrong": {"softmax-scale-wrong"},
    "ambiguous mapping": {"ambiguous-glob"},
    "tensor not exported": {"head-dropped", "expert-dropped"},
    "export through another dtype": {"export-rounded"},
    "export out of order": {"order-unstable", "layers-woven"},
    "export stale": {"export-stale", "policy-export-stale", "loop-export-stale"},
    "export wrong after a step": {"export-swapped"},
    "tensor-parallel shards wrong": {"tp-shard-swapped", "tp-shard-repeated"},
    "LoRA merge or export wrong": {"lora-merge-scale-wrong", "adapter-export-swapped", "adapter-export-drops"},
    "LoRA trains the base": {"lora-base-trains"},
    "gradients not averaged": {"ddp-no-average", "ddp-sum"},
    "gradient lost": {"router-detached", "norm-frozen"},
    "checkpoint incomplete": {"checkpoint-drops-tensor"},
    "optimizer does nothing": {"step-without-effect"},
}
"""Twelve kinds are the bar; the first ten are those that it names."""


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> Facts:
    """One ladder for all."""
    return climb(tmp_path_factory.mktemp("faults"), [*CLEAN, *SEEDED])


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_bug_has_its_seeds(kind: str) -> None:
    assert KINDS[kind] <= FAULTS.keys()


@pytest.mark.parametrize("item", SEEDED, ids=lambda item: f"{item.fault}-{item.rung}")
def test_a_seeded_bug_is_caught_and_named(item: Item, facts: Facts) -> None:
    result = answer(facts, item)
    assert result.verdict is Verdict.FAIL, f"{result.verdict}: {result.reason}"
    assert result.boundary is not None
    assert item.fault is not None
    assert FAULTS[item.fault].named in missed(result)


@pytest.mark.parametrize("item", CLEAN, ids=lambda item: f"{item.model}-{item.rung}")
def test_the_same_rung_passes_without_it(item: Item, facts: Facts) -> None:
    result = answer(facts, item)
    assert result.verdict is Verdict.PASS, missed(result)
