"""Judges of the rungs that train: good facts pass, and every way in which a fact can be bad, absent or vacuous is a missed check."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

from seatrial.checks.bridge_rungs import RungJudgement
from seatrial.checks.bridge_training import judge_checkpoint, judge_lora, judge_optimizer, judge_policy
from seatrial.checks.probe_facts import Row
from seatrial.core.verdict import Boundary
from seatrial.instruments.bridge.rungs_training import PLACEMENTS

NONE: Row = {"count": 0, "first": []}
BAD_NUMBERS = (None, "NaN", "Infinity", True, "1e-9")


def some(*names: str) -> Row:
    return {"count": len(names), "first": list(names)}


BAD_LISTS: tuple[Any, ...] = (some("decoder.wrong"), None, [], {"count": 0}, {"count": True, "first": []}, {"count": 0, "first": ["a"]})


def optimizer_rows() -> list[Row]:
    rows: list[Row] = [
        {"fact": "reference", "step": step, "loss": 0.4 - step, "norm": 2.8, "moved": 1e-3 * step, "where": "w", "control": 2e-3 * step}
        for step in (1, 2, 3)
    ]
    for kind in ("ddp", "distributed"):
        rows.append({"fact": "step", "kind": kind, "step": 0, "ranks": 2, "difference": 0.0, "worst": "w"})
        for step in (1, 2, 3):
            made = {"loss": 0.4 - step + 1e-8, "norms": [2.8000001, 2.8000001]}
            rows.append({"fact": "step", "kind": kind, "step": step, "ranks": 2, "difference": 1.5e-7, "worst": "decoder.w", **made})
    return rows


def checkpoint_rows() -> list[Row]:
    kinds = {"weight": 3, "main": 3, "exp_avg": 3, "exp_avg_sq": 3, "step": 3, "lr": 3, "weight_decay": 3, "betas": 3, "eps": 3}
    rows: list[Row] = []
    for dtype in ("float32", "bfloat16"):
        numbers = [[0.1, 2.6], [0.4, 2.8]]
        rows += [
            {"fact": "saved", "dtype": dtype, "tensors": 18, "kinds": kinds, "moved": 3, "weights": 3},
            {"fact": "spoiled", "dtype": dtype, "equal": NONE},
            {"fact": "loaded", "dtype": dtype, "tensors": 18, "kinds": dict(kinds), "unequal": NONE},
            {"fact": "resumed", "dtype": dtype, "steps": 2, "tensors": 18, "moved": 15, "unequal": NONE}
            | {"uninterrupted": numbers, "resumed": copy.deepcopy(numbers)},
        ]
    return rows


def lora_rows() -> list[Row]:
    empty = {"without": NONE, "beside": NONE, "base_trains": NONE}
    return [
        *({"fact": "placed", "targets": list(targets), "asked": 4, "found": 4, "trainable": 8, **empty} for targets in PLACEMENTS),
        {"fact": "trained", "losses": [0.4, 0.1], "norms": [0.8, 0.7], "adapters": 8, "unmoved": NONE, "base": 16, "base_moved": NONE},
        {"fact": "merged", "tensors": 26, "unmerged": NONE, "changed": 14, "wrong": NONE},
        {"fact": "sum", "compared": 14, "apart": 0.0, "worst": "q_proj.weight"},
        {"fact": "adapter", "tensors": 28, "packed": 0, "missing": NONE, "unexpected": NONE, "unequal": NONE},
        {"fact": "outputs", "scale": 4.0, "start": 0.0, "effect": 5.0, "floor": 3e-6, "merged": 4e-6, "adapter": 3e-6},
    ]


def gradients(**changed: Any) -> Row:
    return {"count": 2, "first": [{"name": "q_norm", "apart": 1e-8, "size": 1e-2, "noise": 2e-8, **changed}]}


def policy_rows() -> list[Row]:
    rows: list[Row] = []
    for step in range(5):
        made: Row = {"loss": 0.4, "norm": 2.8, "unmoved": NONE, "unchanged": NONE} if step else {}
        numbers = {"count": 120, "finite": True, "largest": 1.000002, "mean": 1.0000004, "stale": 1 + 2.0 * step}
        rows.append({"fact": "step", "step": step, "tensors": 26, "parameters": 16, **numbers, **made})
    worst = [{"name": "q_proj", "apart": 1e-8, "size": 1e-2, "noise": 2e-8}, {"name": "gate", "apart": 1e-9, "size": 0.0, "noise": 0.0}]
    return [*rows, {"fact": "gradients", "tensors": 2, "largest": 0.09, "worst": {"count": 2, "first": worst}}]


CASES: dict[str, tuple[Callable[[Any, str], RungJudgement], Callable[[], list[Row]]]] = {
    "optimizer": (judge_optimizer, optimizer_rows),
    "checkpoint": (judge_checkpoint, checkpoint_rows),
    "lora": (judge_lora, lora_rows),
    "policy": (judge_policy, policy_rows),
}


def missed(rung: str, rows: list[Row], device: str = "cpu") -> list[str]:
    """What the missed checks say."""
    judge = CASES[rung][0]
    return [f"{check.name}: {check.value}: {check.message}" for check in judge(rows, device).checks if not check.passed]


@pytest.mark.parametrize("rung", CASES)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_good_facts_pass(rung: str, device: str) -> None:
    judge, rows = CASES[rung]
    found = judge(rows(), device)
    assert found.checks
    assert found.figure
    assert missed(rung, rows(), device) == []


@pytest.mark.parametrize("rung", CASES)
def test_absent_facts_are_missed(rung: str) -> None:
    judge, rows = CASES[rung]
    assert missed(rung, [])
    assert not any(check.passed for check in judge([], "cpu").checks)
    for place in range(len(rows())):
        assert missed(rung, rows()[:place] + rows()[place + 1 :]), rows()[place]


@pytest.mark.parametrize("rung", CASES)
def test_a_fact_that_comes_twice_is_none(rung: str) -> None:
    rows = CASES[rung][1]()
    for row in rows:
        assert missed(rung, [*rows, row]), row


@pytest.mark.parametrize(
    ("rung", "fact", "keys"),
    [
        ("optimizer", "reference", ("loss", "norm", "moved", "control")),
        ("optimizer", "step", ("difference", "loss", "norms")),
        ("checkpoint", "resumed", ("resumed", "uninterrupted")),
        ("lora", "trained", ("losses", "norms")),
        ("lora", "outputs", ("start", "effect", "merged", "adapter")),
        ("lora", "sum", ("apart",)),
        ("policy", "step", ("largest", "mean", "stale", "loss", "norm")),
    ],
)
def test_what_is_no_number_is_missed(rung: str, fact: str, keys: tuple[str, ...]) -> None:
    for key in keys:
        for value in BAD_NUMBERS:
            rows = CASES[rung][1]()
            row = [row for row in rows if row["fact"] == fact][-1]
            row[key] = [value] if isinstance(row[key], list) else value
            assert missed(rung, rows), (key, value)


@pytest.mark.parametrize("rung", CASES)
def test_lists_that_are_not_empty_or_not_lists_are_missed(rung: str) -> None:
    """`unmoved` of policy is the one list that may have names, and not all of them."""
    for place, row in enumerate(CASES[rung][1]()):
        for key in (key for key, value in row.items() if value == NONE):
            for value in BAD_LISTS:
                rows = CASES[rung][1]()
                rows[place][key] = value
                told = missed(rung, rows)
                assert told or (key == "unmoved" and rung == "policy" and value == some("decoder.wrong")), (key, value)
                if value == some("decoder.wrong") and told:
                    assert any("decoder.wrong" in text for text in told)


@pytest.mark.parametrize(
    ("rung", "place", "change", "named"),
    [
        ("optimizer", 4, {"difference": 1e-4, "worst": "decoder.norm"}, "decoder.norm"),
        ("optimizer", 4, {"norms": [5.6, 5.6]}, "gradient norm"),
        ("optimizer", 4, {"norms": [2.8, 2.9]}, "gradient norm"),
        ("optimizer", 4, {"norms": [2.8]}, "gradient norm"),
        ("optimizer", 4, {"loss": 0.5}, "loss"),
        ("optimizer", 3, {"difference": 1e-9}, "starts with"),
        ("optimizer", 3, {"ranks": 1}, "several ranks"),
        ("optimizer", 0, {"moved": 0.0}, "the reference moves"),
        ("optimizer", 0, {"control": 1e-5}, "without one rank's half"),
        ("checkpoint", 0, {"moved": 0}, "moves weights"),
        ("checkpoint", 0, {"weights": 0}, "moments"),
        ("checkpoint", 0, {"kinds": {"weight": 3, "main": 3}}, "moments"),
        ("checkpoint", 2, {"kinds": {"weight": 3}}, "moments"),
        ("checkpoint", 2, {"tensors": 0}, "after the load"),
        ("checkpoint", 2, {"unequal": some("exp_avg of w")}, "exp_avg of w"),
        ("checkpoint", 3, {"moved": 0}, "after the resume"),
        ("checkpoint", 3, {"resumed": [[0.1, 2.6], [0.4000001, 2.8]]}, "uninterrupted"),
        ("checkpoint", 3, {"resumed": [], "uninterrupted": []}, "uninterrupted"),
        ("checkpoint", 3, {"steps": 0}, "uninterrupted"),
        ("lora", 0, {"asked": 0}, "every module asked for"),
        ("lora", 0, {"found": 0}, "only adapters"),
        ("lora", 0, {"trainable": 7}, "only adapters"),
        ("lora", 0, {"without": some("layers.0.linear_proj")}, "layers.0.linear_proj"),
        ("lora", 3, {"adapters": 0}, "every adapter trains"),
        ("lora", 4, {"changed": 0}, "merged export changes"),
        ("lora", 5, {"compared": 0}, "tensor by tensor"),
        ("lora", 5, {"apart": 0.04, "worst": "k_proj.weight"}, "k_proj.weight"),
        ("lora", 6, {"tensors": 0}, "PEFT"),
        ("lora", 7, {"start": 1e-9}, "untrained"),
        ("lora", 7, {"effect": 1e-4}, "trained adapters change"),
        ("lora", 7, {"merged": 1e-3}, "the merged export computes"),
        ("lora", 7, {"adapter": 1e-3, "floor": 1.0}, "the adapter export computes"),
        ("policy", 0, {"largest": 1.01}, "step 0"),
        ("policy", 2, {"largest": 1.001}, "largest exp"),
        ("policy", 2, {"largest": 0.5, "mean": 0.5}, "largest exp"),
        ("policy", 2, {"finite": False}, "largest exp"),
        ("policy", 2, {"count": 0}, "largest exp"),
        ("policy", 2, {"stale": 1.0005}, "stale"),
        ("policy", 2, {"norm": 0.0}, "moved weights"),
        ("policy", 2, {"unmoved": {"count": 16, "first": ["w"]}}, "moved weights"),
        ("policy", 2, {"unchanged": some("q_proj")}, "q_proj"),
        ("policy", 2, {"unmoved": some("w"), "unchanged": {"count": 26, "first": ["q_proj"]}}, "q_proj"),
        ("policy", 2, {"unmoved": some("w"), "unchanged": some("q_proj", "k_proj")}, "q_proj"),
        ("policy", 2, {"unmoved": some("experts.3.linear_fc1.weight"), "unchanged": some("gate", "up", "norm")}, "norm"),
        ("policy", 2, {"unmoved": {"count": 2, "first": ["w"]}, "unchanged": some(*"abcde")}, "a, b, c"),
        ("policy", 2, {"step": 3}, "step 2"),
        ("policy", 2, {"step": 1}, "step 1"),
        ("policy", 5, {"worst": gradients(apart=1e-2)}, "q_norm"),
        ("policy", 5, {"worst": gradients(apart=2e-6)}, "q_norm"),
        ("policy", 5, {"worst": gradients(apart="Infinity")}, "q_norm"),
        ("policy", 5, {"worst": gradients(noise="NaN")}, "q_norm"),
        ("policy", 5, {"worst": gradients(apart=1e-2, noise=1e-2)}, "q_norm"),
        ("policy", 5, {"worst": {"count": 2, "first": []}}, "every gradient"),
        ("policy", 5, {"worst": {"count": 2, "first": ["q_norm", "k_norm"]}}, "every gradient"),
        ("policy", 5, {"tensors": 3}, "every gradient"),
        ("policy", 5, {"largest": 0.0}, "there are gradients"),
        ("policy", 5, {"largest": "NaN"}, "there are gradients"),
    ],
)
def test_each_way_to_fail(rung: str, place: int, change: Row, named: str) -> None:
    rows = CASES[rung][1]()
    rows[place] |= change
    assert any(named in text for text in missed(rung, rows)), missed(rung, rows)


def test_a_gpu_is_measured_against_its_own_floor() -> None:
    rows = lora_rows()
    rows[-1] |= {"floor": 1e-3, "merged": 5e-3, "adapter": 5e-3}
    assert missed("lora", rows)
    assert not missed("lora", rows, "cuda")
    rows[-1] |= {"floor": 0.1}
    assert missed("lora", rows, "cuda"), "a floor that is a defect itself excuses nothing"
    steps = policy_rows()
    for row in steps:
        row["largest"] = 1.0005
    assert missed("policy", steps)
    assert not missed("policy", steps, "cuda")
    for row in steps:
        row["largest"] = 1.5
    assert missed("policy", steps, "cuda")


def test_boundaries() -> None:
    found = {rung: {check.boundary for check in judge(rows(), "cpu").checks} for rung, (judge, rows) in CASES.items()}
    assert found["optimizer"] == {Boundary.DDP, Boundary.OPTIMIZER}
    assert (found["checkpoint"], found["lora"], found["policy"]) == ({Boundary.CHECKPOINT}, {Boundary.PEFT}, {Boundary.PROVIDER})


def test_an_idle_expert_excuses_its_own_tensors_alone() -> None:
    rows = policy_rows()
    names = ("experts.3.linear_fc1.weight", "experts.3.linear_fc2.weight")
    rows[2] |= {"unmoved": some(*names), "unchanged": some("gate_proj", "up_proj", "down_proj")}
    assert not missed("policy", rows)
    rows[2] |= {"unchanged": some("gate_proj", "up_proj", "down_proj", "norm")}
    assert missed("policy", rows)


def test_a_checkpoint_of_one_rank_says_that_nothing_was_sharded() -> None:
    assert any("nothing was sharded" in text for text in judge_checkpoint(checkpoint_rows(), "cpu").limitations)


def test_packed_expert_adapters_are_a_limitation() -> None:
    rows = lora_rows()
    rows[6]["packed"] = 56
    assert "56 names" in judge_lora(rows, "cpu").limitations[0]
    assert not missed("lora", rows)
    rows[6]["bare"] = {"count": 12, "first": ["mlp.down_proj.lora_A.weight"]}
    assert "bare" in judge_lora(rows, "cpu").limitations[1]
    assert not missed("lora", rows)
