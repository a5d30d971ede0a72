"""Judges of parity and of two ranks against one: what passes, and every way to fail."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

from seatrial.checks.bridge_rungs import RungJudgement, judge_parallel, judge_parity, where
from seatrial.checks.probe_facts import Row

Rows = list[Row]
Change = Callable[[Rows], object]
FIRST = {
    "megatron": "decoder.layers.0.input_layernorm",
    "hf": "model.layers.0.input_layernorm",
    "layer": 0,
    "what": "",
    "difference": 7e-3,
    "noise": 1.5e-7,
    "scale": 4.2,
}


def figures(largest: float, scale: float = 3.1, positions: int = 64) -> dict[str, Any]:
    return {
        "max": largest,
        "mean": largest / 6,
        "median": largest / 2,
        "agree": 1.0,
        "margin": 0.0,
        "cosine": 0.9999,
        "scale": scale,
        "positions": positions,
    }


def parity(dtype: str, error: float) -> Row:
    both = {"shape": [4, 16, 99], "wanted_shape": [4, 16, 99], "rerouted": 0, "routers": 0}
    own = {"megatron": figures(error), "megatron_error": figures(error), "hf_error": figures(error), "untouched": figures(error)}
    return {"fact": "parity", "model": "qwen2", "rung": "parity", "fault": None, "dtype": dtype, **both, **own}


def located(first: dict[str, Any] | None = None) -> Row:
    kind = "function: the parameters are those of the checkpoint" if first else ""
    suspicion = "epsilon is 1e-05, in transformers 3e-05" if first else ""
    split = {"positions": 4, "features": 9}
    return {
        "fact": "located",
        "compared": 27,
        "off": 26 if first else 0,
        "split": split,
        "first": first,
        "kind": kind,
        "suspicion": suspicion,
    }


def good() -> Rows:
    return [parity("float32", 2.4e-6), parity("bfloat16", 0.04), located()]


def failed(judged: RungJudgement) -> list[str]:
    return [check.name for check in judged.checks if not check.passed]


def changed(rows: Rows, change: Change) -> Rows:
    made = copy.deepcopy(rows)
    change(made)
    return made


def test_parity_passes_and_says_the_largest_difference() -> None:
    judged = judge_parity(good(), "cpu")
    assert not failed(judged)
    assert judged.figure == "2.4e-06"
    assert judged.limitations == ()
    assert len(judged.checks) == 16


@pytest.mark.parametrize(
    ("change", "missed"),
    [
        (lambda rows: rows.pop(0), "logits (float32)"),
        (lambda rows: rows.pop(1), "logits (bfloat16)"),
        (lambda rows: rows.append(rows[0]), "logits (float32)"),
        (lambda rows: rows.pop(2), "modules were compared one by one"),
        (lambda rows: rows[2].update(compared=0), "modules were compared one by one"),
        (lambda rows: rows[0].update(shape=[4, 16, 128]), "as many as transformers gives"),
        (lambda rows: rows[0].update(shape=[4, 0, 99], wanted_shape=[4, 0, 99]), "as many as transformers gives"),
        (lambda rows: rows[0]["megatron"].update(max=1.1e-5), "largest difference from transformers"),
        (lambda rows: rows[0]["megatron"].update(max="NaN"), "largest difference from transformers"),
        (lambda rows: rows[0]["megatron_error"].update(max="Infinity"), "logits (float32): largest error"),
        (lambda rows: rows[0]["megatron_error"].update(max=1.2e-5), "logits (float32): largest error"),
        (lambda rows: rows[0]["megatron_error"].update(median=4e-6), "logits (float32): typical error"),
        (lambda rows: rows[0]["megatron_error"].pop("median"), "logits (float32): typical error"),
        (lambda rows: rows[0]["megatron_error"].update(max=-1.0), "logits (float32): largest error"),
        (lambda rows: rows[0]["megatron_error"].update(max=True), "logits (float32): largest error"),
        (lambda rows: rows[0]["hf_error"].update(max="NaN"), "logits (float32): largest error"),
        (lambda rows: rows[0]["hf_error"].update(scale=0.0), "logits (float32): more than noise"),
        (lambda rows: rows[1]["hf_error"].update(scale=0.1), "logits (bfloat16): more than noise"),
        (lambda rows: rows[1]["megatron_error"].update(max=0.2), "logits (bfloat16): largest error"),
        (lambda rows: rows[1]["megatron_error"].update(median=0.05), "logits (bfloat16): typical error"),
        (lambda rows: rows[1]["megatron_error"].update(margin=0.5), "next token, margin where it differs"),
        (lambda rows: rows[1]["megatron_error"].update(cosine=0.98), "logits (bfloat16): cosine"),
        (lambda rows: rows[1]["megatron_error"].update(cosine="NaN"), "logits (bfloat16): cosine"),
        (lambda rows: rows[0]["hf_error"].update(max=4e-4), "logits (float32): transformers' own error"),
        (lambda rows: rows[0]["hf_error"].update(max="NaN"), "logits (float32): transformers' own error"),
        (lambda rows: rows[1]["hf_error"].update(max=0.7), "logits (bfloat16): transformers' own error"),
        (lambda rows: rows[1].update(megatron_error=None), "logits (bfloat16): largest error"),
    ],
)
def test_parity_is_missed(change: Change, missed: str) -> None:
    assert any(missed in name for name in failed(judge_parity(changed(good(), change), "cpu")))


def test_no_facts_at_all_miss_everything() -> None:
    assert len(failed(judge_parity([], "cpu"))) == 3
    assert judge_parity([], "cpu").figure == "none"


def test_a_near_tie_may_choose_another_token() -> None:
    rows = changed(good(), lambda rows: rows[1]["megatron_error"].update(margin=0.02, agree=0.98))
    assert not failed(judge_parity(rows, "cpu"))


def test_a_gpu_is_judged_by_its_own_noise_alone() -> None:
    rows = [parity("float32", 9e-5), parity("bfloat16", 0.04), located()]
    assert not failed(judge_parity(rows, "cuda"))
    rows = changed(good(), lambda rows: rows[0]["megatron_error"].update(max=1.3e-5))
    assert failed(judge_parity(rows, "cuda")) == ["logits (float32): largest error"]


def test_the_bar_holds_on_a_cpu_unless_transformers_itself_is_worse() -> None:
    rows = [parity("float32", 9e-6), parity("bfloat16", 0.04), located()]
    rows[0]["megatron"]["max"] = 1.5e-5
    assert failed(judge_parity(rows, "cpu")) == ["logits (float32): largest difference from transformers"]
    assert not failed(judge_parity([parity("float32", 5e-5), parity("bfloat16", 0.04), located()], "cpu"))


def test_a_failure_names_the_first_module_and_the_setting() -> None:
    rows = [parity("float32", 2.4e-6), parity("bfloat16", 0.04), located(FIRST)]
    rows[0]["megatron_error"]["max"] = rows[0]["megatron"]["max"] = 0.012
    judged = judge_parity(rows, "cpu")
    texts = [check.message for check in judged.checks if not check.passed]
    assert texts
    assert all("decoder.layers.0.input_layernorm" in text and "epsilon is 1e-05" in text for text in texts)
    assert all(not check.message for check in judged.checks if check.passed)


def test_a_module_that_differs_under_right_logits_is_a_limitation() -> None:
    judged = judge_parity([*good()[:2], located(FIRST)], "cpu")
    assert not failed(judged)
    assert "input_layernorm" in judged.limitations[0]


def rerouted(count: int, untouched: dict[str, Any] | None) -> Rows:
    rows = good()
    rows[1].update(rerouted=count, untouched=untouched, routers=2)
    rows[1]["megatron_error"]["max"] = 0.5
    return rows


def test_positions_after_another_choice_of_experts_are_judged_apart() -> None:
    judged = judge_parity(rerouted(16, figures(0.04, positions=48)), "cpu")
    assert not failed(judged)
    assert "16 positions follow another choice" in judged.limitations[0]
    assert "other 48" in judged.limitations[0]
    assert failed(judge_parity(rerouted(16, figures(0.3, positions=48)), "cpu")) == ["logits (bfloat16): largest error"]


def test_transformers_own_change_of_experts_widens_no_limit() -> None:
    rows = rerouted(0, None)
    rows[1]["hf_error"]["max"] = 2.0
    assert "logits (bfloat16): largest error" in failed(judge_parity(rows, "cpu"))
    rows[1].pop("routers")
    assert "logits (bfloat16): largest error" in failed(judge_parity(rows, "cpu")), "unknown is judged as routed"
    rows[1]["hf_error"].pop("median")
    assert "logits (bfloat16): largest error" in failed(judge_parity(rows, "cpu"))


def test_where_router_flips_reached_every_position_nothing_is_proven() -> None:
    assert failed(judge_parity(rerouted(64, None), "cpu")) == ["logits (bfloat16): positions that no router flip reached"]
    assert failed(judge_parity(rerouted(16, figures(0.04, positions=0)), "cpu"))
    assert failed(judge_parity(rerouted(16, None), "cpu")), "some are left, and their figures are missing"


def listed(*found: Any) -> dict[str, Any]:
    return {"count": len(found), "first": list(found)}


def rank(number: int) -> Row:
    wrong = {key: listed() for key in ("missing", "extra", "unequal", "reshaped", "retyped")}
    export = {"stored": 26, "made": 26, "equal": 26, **wrong}
    return {
        "rank": number,
        "parameters": 105600,
        "export": export,
        "single": figures(2.5e-6),
        "transformers": figures(2.9e-6),
        "located": located(),
        "gradients": {"tensors": 1, "largest": 0.09, "worst": listed({"name": "q_norm", "apart": 1e-8, "size": 1e-2, "noise": 2e-8})},
    }


def two(rung: str, **asked: Any) -> Rows:
    sizes = {"tp": 1, "pp": 1, "ep": 1, "cp": 1, "sp": False, **asked}
    fields = {"asked": sizes, "sizes": dict(sizes), "whole": 210432, "ranks": [rank(0), rank(1)], "hf_error": figures(3.1e-6)}
    return [{"fact": "parallel", "model": "qwen2", "rung": rung, "fault": None, "shape": [4, 16, 99], **fields}]


@pytest.mark.parametrize("asked", [{"tp": 2}, {"pp": 2}, {"ep": 2}, {"tp": 2, "sp": True}])
def test_two_ranks_pass(asked: dict[str, Any]) -> None:
    judged = judge_parallel(two("tp", **asked), "cpu")
    assert not failed(judged)
    assert judged.figure == "2.5e-06"


def test_what_megatron_does_not_train_has_no_gradients() -> None:
    rows = two("tp", tp=2)
    for each in rows[0]["ranks"]:
        del each["gradients"]
    assert failed(judge_parallel(rows, "cpu"))
    rows[0]["experts"] = 4
    judged = judge_parallel(rows, "cpu")
    assert not failed(judged)
    assert judged.limitations
    rows[0]["asked"]["sp"] = rows[0]["sizes"]["sp"] = True
    assert failed(judge_parallel(rows, "cpu"))


def test_context_parallel_has_the_whole_model_on_each_rank() -> None:
    rows = two("cp", cp=2)
    for each in rows[0]["ranks"]:
        each["parameters"] = 210432
    assert not failed(judge_parallel(rows, "cpu"))


@pytest.mark.parametrize(
    ("change", "missed"),
    [
        (lambda row: row["sizes"].update(tp=1), "divided"),
        (lambda row: row.update(asked={"tp": 1, "pp": 1, "ep": 1, "cp": 1, "sp": False}, sizes=row["asked"]), "divided"),
        (lambda row: row.update(asked=None, sizes=None), "divided"),
        (lambda row: row["ranks"].pop(), "divided"),
        (lambda row: row.update(ranks=[]), "divided"),
        (lambda row: row["ranks"][1].update(rank=0), "divided"),
        (lambda row: row["ranks"][1].update(parameters=210432), "divided"),
        (lambda row: row["ranks"][1].update(parameters=0), "divided"),
        (lambda row: row.pop("whole"), "divided"),
        (lambda row: row["ranks"][0]["located"]["split"].update(features=0), "divided"),
        (lambda row: row["ranks"][0]["located"]["split"].update(positions=0), "divided"),
        (lambda row: row["ranks"][1]["export"].update(missing=listed("a.weight")), "rank 1: export is the checkpoint"),
        (lambda row: row["ranks"][1]["export"].update(extra=listed("a.weight")), "rank 1: export is the checkpoint"),
        (lambda row: row["ranks"][1]["export"].update(unequal=listed({"name": "a"})), "rank 1: export is the checkpoint"),
        (lambda row: row["ranks"][1]["export"].update(reshaped=listed({"name": "a", "looks": "[2] instead of [3]"})), "export is"),
        (lambda row: row["ranks"][1]["export"].pop("retyped"), "rank 1: export is the checkpoint"),
        (lambda row: row["ranks"][1]["export"].pop("reshaped"), "rank 1: export is the checkpoint"),
        (lambda row: row["ranks"][0]["export"].update(stored=0, equal=0), "rank 0: export is the checkpoint"),
        (lambda row: row["ranks"][0].pop("export"), "rank 0: export is the checkpoint"),
        (lambda row: row["ranks"][0]["single"].update(max=1.1e-5), "rank 0: logits, largest difference from the single rank"),
        (lambda row: row["ranks"][1]["single"].update(max="NaN"), "rank 1: logits, largest difference from the single rank"),
        (lambda row: row["ranks"][1].pop("single"), "rank 1: logits, largest difference from the single rank"),
        (lambda row: row["ranks"][1]["transformers"].update(max=0.1), "rank 1: logits, largest difference from transformers"),
        (lambda row: row["ranks"][1]["transformers"].update(margin=0.1), "rank 1: next token"),
        (lambda row: row["hf_error"].update(max=4e-4), "transformers' own error"),
        (lambda row: row.pop("hf_error"), "largest difference from the single rank"),
        (lambda row: row["ranks"][1].pop("gradients"), "rank 1: every gradient"),
        (lambda row: row["ranks"][0]["gradients"].update(largest=0), "rank 0: there are gradients"),
        (lambda row: row["ranks"][1]["gradients"]["worst"]["first"][0].update(apart=5e-3), "rank 1: every gradient"),
    ],
)
def test_two_ranks_are_missed(change: Callable[[Row], object], missed: str) -> None:
    rows = two("sp", tp=2, sp=True)
    change(rows[0])
    assert any(missed in name for name in failed(judge_parallel(rows, "cpu")))


def test_no_fact_or_two_of_them_prove_nothing() -> None:
    assert failed(judge_parallel([], "cpu"))
    assert failed(judge_parallel(two("tp", tp=2) * 2, "cpu"))


def test_kept_padding_is_told_from_a_wrong_tensor() -> None:
    rows = two("tp", tp=2)
    looks = "[100, 64] instead of [99, 64]: right, with 1 more rows after it (padding kept)"
    rows[0]["ranks"][0]["export"].update(reshaped=listed({"name": "lm_head.weight", "looks": looks, "padded": True}), equal=25)
    (missed,) = [check for check in judge_parallel(rows, "cpu").checks if not check.passed]
    assert missed.name == "rank 0: export has no padding of the vocabulary"
    assert "lm_head.weight" in missed.message


def test_a_parallel_failure_names_what_any_rank_found() -> None:
    rows = two("pp", pp=2)
    rows[0]["ranks"][1]["located"] = located({**FIRST, "megatron": "output_layer", "hf": "lm_head"})
    for each in rows[0]["ranks"]:
        each["single"]["max"] = 21.7
    judged = judge_parallel(rows, "cpu")
    assert all("first at output_layer" in check.message for check in judged.checks if not check.passed)
    assert judged.figure == "2.2e+01"


def test_an_export_that_is_wrong_is_named() -> None:
    rows = two("ep", ep=2)
    rows[0]["ranks"][0]["export"].update(unequal=listed({"name": "model.layers.0.mlp.experts.2.up_proj.weight", "looks": "is another"}))
    (missed,) = [check for check in judge_parallel(rows, "cpu").checks if not check.passed]
    assert "experts.2.up_proj" in missed.message


def test_the_place_in_words() -> None:
    assert where({}) == ""
    assert where(located({**FIRST, "what": "activation"})).startswith(
        "first at decoder.layers.0.input_layernorm (activation), in transformers"
    )
