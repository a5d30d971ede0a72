"""Rungs build, import, roundtrip, reload, mapping, order: what their judges demand, and what their measurements find, without torch."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from seatrial.checks import bridge_rungs
from seatrial.checks.bridge_rungs import RungJudge, RungJudgement
from seatrial.checks.probe_facts import Row
from seatrial.core.verdict import Boundary
from seatrial.instruments.bridge import rungs_weights
from seatrial.instruments.bridge.faults import FAULTS
from seatrial.instruments.bridge.rungs import TABLE
from seatrial.instruments.megatron import shims
from seatrial.instruments.megatron import shims as local_names
from seatrial.instruments.megatron.shims import NORMS

NONE = {"count": 0, "first": []}
COMPARED = ("missing", "extra", "unequal", "reshaped", "retyped", "wider", "tied_absent", "tied_extra")


def _found(*names: Any) -> Row:
    return {"count": len(names), "first": list(names)}


def _compared(fact: str, **fields: Any) -> Row:
    return {"fact": fact, "stored": 26, "made": 26, "equal": 26, **dict.fromkeys(COMPARED, NONE), **fields}


def _setting(field: str, value: Any, provider: Any) -> Row:
    return {"key": field, "config": value, "field": field, "provider": provider}


CLEAN: dict[str, tuple[RungJudge, list[Row]]] = {
    "build": (
        bridge_rungs.judge_build,
        [
            {
                "fact": "build",
                "parameters": {"a": [2]},
                "settings": [_setting(field, 64, 64) for field in ("hidden_size", "num_layers", "vocab_size")],
            }
        ],
    ),
    "import": (
        bridge_rungs.judge_import,
        [{"fact": "import", "parameters": 16, "stored": 26, "padding_rows": 0, "unreached": NONE, "unread": NONE, "nan_on_disk": NONE}],
    ),
    "roundtrip": (bridge_rungs.judge_roundtrip, [_compared("roundtrip", dtype=dtype) for dtype in ("float32", "bfloat16")]),
    "reload": (
        bridge_rungs.judge_reload,
        [
            _compared("saved"),
            {
                "fact": "reload",
                "loading": dict.fromkeys(("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"), NONE),
                "logits_equal": True,
                "logits_finite": True,
                "max_difference": 0.0,
                "config": NONE,
                "tokenizer": {"files": ["tokenizer.json"], "lost": [], "same": True},
            },
        ],
    ),
    "mapping": (
        bridge_rungs.judge_mapping,
        [
            {
                "fact": "mapping",
                "megatron": 16,
                "stored": 26,
                "norms": 2,
                **dict.fromkeys(("unmapped", "ambiguous", "repeated", "renamed", "unused", "norms_unlike"), NONE),
                **dict.fromkeys(("hf_unmapped", "hf_ambiguous", "hf_absent"), NONE),
            }
        ],
    ),
    "order": (
        bridge_rungs.judge_order,
        [
            {
                "fact": "order",
                "names": 26,
                "second": 26,
                "stored": 26,
                "experts": None,
                "expert_layers": 0,
                **dict.fromkeys(
                    ("missing", "unknown", "twice", "moved", "out_of_order", "split", "expert_lacking", "aliases", "stale"), NONE
                ),
            }
        ],
    ),
}


def _judged(rung: str, change: Callable[[list[Row]], Any] = lambda rows: rows) -> RungJudgement:
    judge, rows = CLEAN[rung]
    rows = [dict(row) for row in rows]
    change(rows)
    return judge(rows, "cpu")


def _missed(found: RungJudgement) -> str:
    return " | ".join(f"{check.name}: {check.value}: {check.message}" for check in found.checks if not check.passed)


@pytest.mark.parametrize("rung", CLEAN)
def test_a_clean_rung_passes_with_its_figure_and_boundary(rung: str) -> None:
    found = _judged(rung)
    assert not _missed(found)
    assert found.checks
    assert found.figure in {"3/3", "16/16", "26/26"}
    assert {check.boundary for check in found.checks} == {Boundary.REFIT if rung == "order" else Boundary.PROVIDER}


@pytest.mark.parametrize("rung", CLEAN)
def test_missing_and_doubled_facts_miss_every_check_they_carry(rung: str) -> None:
    nothing = CLEAN[rung][0]([], "cpu")
    assert nothing.checks
    assert not any(check.passed for check in nothing.checks)
    assert _missed(_judged(rung, lambda rows: rows.append(dict(rows[0]))))


NOTES = {"repeated", "renamed", "unused", "aliases", "wider", "tied_extra"}


@pytest.mark.parametrize(
    ("rung", "place", "key"),
    [
        (rung, place, key)
        for rung, (_, rows) in CLEAN.items()
        for place, row in enumerate(rows)
        for key, value in row.items()
        if value is NONE
    ],
)
def test_every_list_of_a_fact_is_judged_and_named(rung: str, place: int, key: str) -> None:
    wrong = _judged(rung, lambda rows: rows[place].update({key: _found({"name": "layers.0.x", "looks": "is y"})}))
    if key == "tied_absent":  # it makes up for a tensor that is not equal, and here none is
        assert "every tensor was compared" in _missed(wrong)
        return
    if key in NOTES:
        assert not _missed(wrong)
        assert wrong.limitations or key in {"unused", "tied_extra"}
        return
    assert "layers.0.x (is y)" in _missed(wrong)
    assert "no facts" in _missed(_judged(rung, lambda rows: rows[place].pop(key)))
    assert "no facts" in _missed(_judged(rung, lambda rows: rows[place].update({key: {"count": 0, "first": ["x"]}})))


@pytest.mark.parametrize(
    ("rung", "fields"),
    [
        ("build", {"parameters": {}}),
        ("build", {"settings": []}),
        ("import", {"parameters": 0}),
        ("import", {"stored": 0}),
        ("roundtrip", {"stored": 0, "equal": 0}),
        ("roundtrip", {"equal": 25}),
        ("roundtrip", {"equal": True}),
        ("mapping", {"megatron": 0}),
        ("mapping", {"stored": 0}),
        ("order", {"names": 0, "second": 0}),
        ("order", {"second": 25}),
    ],
)
def test_a_vacuous_fact_is_a_miss(rung: str, fields: Row) -> None:
    assert _missed(_judged(rung, lambda rows: rows[0].update(fields)))


@pytest.mark.parametrize(
    ("value", "provider"), [(1e-6, 1e-5), (True, False), (True, 1), (50000.0, None), (8, "8"), ("NaN", 1.0), (None, None)]
)
def test_a_setting_that_the_provider_does_not_carry_is_named(value: Any, provider: Any) -> None:
    found = _judged("build", lambda rows: rows[0].update(settings=[*rows[0]["settings"], _setting("rms_norm_eps", value, provider)]))
    assert "rms_norm_eps" in _missed(found)
    assert found.figure == "3/4"


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"loading": {}}, "missing_keys: not reported"),
        (
            {"loading": {**dict.fromkeys(("unexpected_keys", "mismatched_keys"), NONE), "missing_keys": _found("lm_head.weight")}},
            "lm_head.weight",
        ),
        ({"logits_equal": False, "max_difference": 0.1}, "difference 0.1"),
        ({"logits_finite": False, "max_difference": "NaN"}, "difference NaN"),
        ({"tokenizer": {"files": ["tokenizer.json"], "lost": ["tokenizer.json"], "same": None}}, "tokenizer.json"),
        ({"tokenizer": {"files": ["tokenizer.json"], "lost": [], "same": False}}, "tokenizer"),
        ({"tokenizer": None}, "tokenizer"),
    ],
)
def test_a_reload_that_differs_is_a_miss(fields: Row, named: str) -> None:
    assert named in _missed(_judged("reload", lambda rows: rows[1].update(fields)))


def test_what_was_not_tried_is_a_limitation() -> None:
    bare = _judged("reload", lambda rows: rows[1].update(tokenizer={"files": [], "lost": [], "same": None}))
    assert not _missed(bare)
    assert "no tokenizer" in bare.limitations[0]
    assert "29 rows of padding" in _judged("import", lambda rows: rows[0].update(padding_rows=29)).limitations[0]
    assert "no fused norm" in _judged("mapping", lambda rows: rows[0].update(norms=0)).limitations[0]
    assert _missed(_judged("mapping", lambda rows: rows[0].pop("norms")))
    assert "one tensor per layer" in _judged("order", lambda rows: rows[0].update(experts=4)).limitations[0]
    assert _missed(_judged("roundtrip", lambda rows: rows.pop()))  # bf16 was not measured


def test_a_tied_head_may_be_left_out_of_the_export() -> None:
    head = {"made": 25, "equal": 25, "tied_absent": _found("lm_head.weight")}
    assert not _missed(_judged("roundtrip", lambda rows: [row.update(head) for row in rows]))


def test_settings_compare_only_what_the_configuration_says() -> None:
    config = SimpleNamespace(
        hidden_size=64, rope_parameters={"rope_theta": 5e4}, num_experts=4, num_experts_per_tok=2, tie_word_embeddings=None
    )
    provider = SimpleNamespace(hidden_size=64, rotary_base=(1, 2), num_moe_experts=4, vocab_size=9)
    found = {item["key"]: (item["config"], item["provider"]) for item in rungs_weights.provider_settings(config, provider)}
    assert found == {"hidden_size": (64, 64), "rope_theta": (5e4, "(1, 2)"), "num_experts": (4, 4)}
    nested = SimpleNamespace(rope_parameters={"full_attention": {"rope_theta": 1.0}}, num_key_value_heads=2)
    assert rungs_weights.provider_settings(nested, SimpleNamespace(rotary_base=1.0, num_query_groups=2, multi_latent_attention=True)) == []


NAMES = ["embed.weight", "m.layers.0.q", "m.layers.0.k", "m.layers.1.q", "m.layers.1.k"]
TASKS = [["embed.weight"], ["m.layers.0.q", "m.layers.0.k"], ["m.layers.1.q", "m.layers.1.k"]]


def test_order_finds_late_names_and_torn_groups() -> None:
    assert rungs_weights._out_of_order(NAMES, TASKS) == [] == rungs_weights._split(NAMES, TASKS)
    woven = ["m.layers.0.q", "m.layers.1.q", "m.layers.0.k", "m.layers.1.k", "embed.weight"]
    assert rungs_weights._out_of_order(woven, TASKS) == ["m.layers.0.k", "embed.weight"]
    assert [item["name"] for item in rungs_weights._split(woven, TASKS)] == ["m.layers.0.q", "m.layers.1.q"]


def test_order_finds_experts_that_are_not_whole() -> None:
    names = [f"m.layers.{layer}.experts.{expert}.{kind}" for layer in range(2) for expert in range(2) for kind in ("up", "down")]
    assert rungs_weights._experts(names, 2)["expert_lacking"] == NONE
    assert rungs_weights._experts(names[:-1], 2)["expert_lacking"] == _found("m.layers.1.experts.1.down")
    assert rungs_weights._experts(names, 3)["expert_lacking"]["count"] == 4
    assert rungs_weights._experts(["embed.weight"], None) == {"expert_layers": 0, "expert_tensors": 0, "expert_lacking": NONE}


class _Mapping:
    def __init__(self, megatron_param: str, hf_param: Any, grouped: bool = False) -> None:
        self.megatron_param, self.hf_param, self.is_grouped_export = megatron_param, hf_param, grouped

    def resolve(self, captures: tuple[str, ...]) -> _Mapping:
        return _Mapping(self.megatron_param, self.hf_param.replace("*", captures[0]), self.is_grouped_export)


def test_mapping_holds_a_name_against_every_pattern() -> None:
    registry = [
        _Mapping("layers.*.w", "h.*.w"),
        _Mapping("layers.**", "all.*"),
        _Mapping("layers.0.w", "zero"),
        _Mapping("layers.*.b", "h.*.b"),
    ]
    assert [rungs_weights._mapping_said(found) for found in rungs_weights._matching("layers.0.w", registry)] == [
        "_Mapping to h.0.w",
        "_Mapping to all.0.w",
        "_Mapping to zero",
    ]
    assert rungs_weights._matching("xlayers.0.w", registry) == []


def test_mapping_counts_the_experts_of_one_tensor_once() -> None:
    plain, fused = _Mapping("a", {"q": "h.q", "k": "h.k"}), _Mapping("e", "h.experts", grouped=True)
    assert rungs_weights._claims({"a": plain, "b": None, "e.0": fused, "e.1": fused}) == {"h.q": ["a"], "h.k": ["a"], "h.experts": ["e.0"]}
    assert rungs_weights._claims({"a": plain, "b": _Mapping("b", "h.q")})["h.q"] == ["a", "b"]


class _OtherMapping(_Mapping):
    pass


FUSED, LOCAL = next(iter(NORMS.items()))
HF = "model.layers.*.input_layernorm.weight"


@pytest.mark.parametrize(
    ("registry", "looks"),
    [
        ([_Mapping(FUSED, HF), _Mapping(LOCAL, HF)], ""),
        ([_Mapping(LOCAL, HF)], ""),
        ([_Mapping(FUSED, "model.layers.*.no_such_norm.weight"), _Mapping(LOCAL, HF)], "no_such_norm"),
        ([_OtherMapping(FUSED, HF), _Mapping(LOCAL, HF)], "_OtherMapping to"),
        ([_Mapping(FUSED, HF)], "not mapped"),
        ([_Mapping(FUSED, HF), _Mapping(LOCAL, HF), _OtherMapping(LOCAL, HF)], "_OtherMapping to"),
        ([_Mapping(FUSED, "elsewhere.*"), _Mapping(LOCAL, "elsewhere.*")], "not on disk: elsewhere.0"),
    ],
)
def test_mapping_holds_fused_norms_against_local_ones(registry: list[_Mapping], looks: str) -> None:
    found = rungs_weights._norms_unlike(registry, {"model.layers.0.input_layernorm.weight"})
    assert [item["name"] for item in found] == ([FUSED] if looks else [])
    assert all(looks in item["looks"] for item in found)


def test_a_local_norm_keeps_the_class_of_the_familys_mapping(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shims, "used", lambda name: None)
    plain = _OtherMapping(FUSED, HF)
    (made,) = local_names._norms({FUSED: plain})
    assert (type(made), made.megatron_param, made.hf_param, plain.megatron_param) == (_OtherMapping, LOCAL, HF, FUSED)


def test_every_fault_names_rungs_of_the_ladder() -> None:
    assert len(FAULTS) >= 50
    for fault in FAULTS.values():
        assert fault.rungs
        assert set(fault.rungs) <= set(TABLE)
        assert fault.named
        assert fault.text
