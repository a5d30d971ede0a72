"""Which reruns a failure of NeMo-RL has, and that their keys are those of its configuration."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from seatrial.core.loop import Context, Isolation
from seatrial.core.records import CheckResult, Diagnosis, LevelResult, PhaseOutcome
from seatrial.core.verdict import Boundary, Verdict
from seatrial.loops.nemo_rl.loop import ILLEGAL_ACCESS, LOOP, NOT_FULL
from seatrial.loops.nemo_rl.nemo_runs import TRANSPORTS, relaxed, variants
from seatrial.metrics.checks import tags
from seatrial.triage.signatures import GENERAL, load_signatures

NAMES = {0: "smoke", 1: "lora-checkpoint", 2: "refit", 3: "megatron-generation", 4: "parallelism"}
TMPE = 'max(data["train/token_mult_prob_error"]) < 1.05'
NUMERICS = ["no-rope-fusion", "short-sequences", "no-packing"]
PARALLEL = ["no-sequence-parallel", *NUMERICS, "tp-1"]
MEMORY_FAULT, GRAPH_FAULT, OTHER_FAULT = "accelerator-memory-fault", "cuda-graph-fault", "architecture-unsupported"
KEYS = {
    "policy.megatron_cfg.sequence_parallel",
    "policy.megatron_cfg.apply_rope_fusion",
    "policy.megatron_cfg.tensor_model_parallel_size",
    "policy.max_total_sequence_length",
    "policy.sequence_packing.enabled",
    "policy.generation.backend",
    "policy.generation.mcore_generation_config.num_cuda_graphs",
    "policy.generation.mcore_generation_config.use_cuda_graphs_for_non_decode_steps",
    "policy.generation.vllm_cfg.enforce_eager",
    "policy.generation.colocated.enabled",
    "checkpointing.enabled",
}
"""Composed with grpo_math_1B_megatron.yaml by NeMo-RL's own loader, at 7ea279ab: each is accepted."""


def failed(number: int = 0, verdict: Verdict = Verdict.FAIL, **fields: object) -> LevelResult:
    base = LevelResult(number=number, name=NAMES[number], title="x", verdict=verdict, reason="why")
    return base.model_copy(update=fields)


def missed(name: str = TMPE, number: int = 0, how: Mapping[str, Any] = MappingProxyType({}), **fields: object) -> LevelResult:
    tag = next(iter(tags(name)), "") if "data[" in name else ""
    check = CheckResult(name=name, passed=False, value=2.0, tag=tag).model_copy(update=fields)
    return failed(number, checks=(CheckResult(name="other", passed=True), check), **how)


def crashed(number: int, boundary: Boundary, signature: str | None = None) -> LevelResult:
    found = Diagnosis(boundary=boundary, verdict=Verdict.FAIL, cause="RuntimeError: x", signature=signature)
    died = PhaseOutcome(name="run", exit_code=1, ended="exited", seconds=1)
    return failed(number, boundary=boundary, diagnosis=found, phases=(died,))


def named(result: LevelResult) -> dict[str, Isolation]:
    return {item.name: item for item in LOOP.isolations(result)}


@pytest.mark.parametrize(
    "name", [TMPE, 'max(data["train/gen_kl_error"]) < 0.002', 'min(data["delta/train/probs_ratio_clamped_min"]) > 0.79']
)
def test_a_mismatch_has_many_suspects(name: str) -> None:
    found = named(missed(name))
    assert list(found) == [*NUMERICS, "megatron"]
    assert found["no-rope-fusion"].arguments == ("policy.megatron_cfg.apply_rope_fusion=false",)
    assert found["megatron"].arguments == ("policy.generation.backend=megatron",)
    assert not found["megatron"].reduced
    assert found["no-packing"].reduced
    assert not any(item.options for item in found.values())


def test_parallel_settings_are_switched_off_where_they_are_on() -> None:
    found = named(missed(number=4))
    assert list(found) == [*PARALLEL, "megatron"]
    assert found["tp-1"].reduced
    assert [list(named(missed(number=number)))[:3] for number in (0, 1, 2, 3)] == [NUMERICS] * 4


TP, SEQUENCE = "policy.megatron_cfg.tensor_model_parallel_size", "policy.megatron_cfg.sequence_parallel"


@pytest.mark.parametrize(
    ("arguments", "more"),
    [
        (f"{TP}=2 ++{SEQUENCE}=True", {"no-sequence-parallel", "tp-1"}),
        (f"{TP}=2", {"tp-1"}),
        (f"{SEQUENCE}=true", {"no-sequence-parallel"}),
        (f"{TP}=2 {TP}=1 {SEQUENCE}=False", set()),  # the last one counts
        ("policy.megatron_cfg={tensor_model_parallel_size:2}", {"tp-1"}),
        ("policy.dtensor_cfg.sequence_parallel=true", set()),
    ],
)
def test_the_arguments_of_the_trial_may_turn_them_on(arguments: str, more: set[str]) -> None:
    found = named(missed(how={"arguments": tuple(arguments.split())}))
    assert set(found) == {*NUMERICS, "megatron", *more}


def test_the_other_backend_is_that_of_the_level() -> None:
    assert named(missed(number=3))["vllm"].arguments == ("policy.generation.backend=vllm",)
    assert list(named(missed(number=2))) == [*NUMERICS, "full-transport", "colocated"]  # transports are for vLLM alone


def test_a_missed_proof_of_the_refit_is_a_mismatch() -> None:
    found = missed("every weight arrived", 2, kind="proof", boundary=Boundary.REFIT)
    assert "colocated" in named(found)
    assert LOOP.isolations(missed("a reward", kind="proof", boundary=Boundary.REWARD)) == ()


def test_every_known_failure_that_is_named_exists() -> None:
    ids = {signature.id for signature in (*load_signatures(GENERAL), *LOOP.signatures())}
    assert {MEMORY_FAULT, GRAPH_FAULT, OTHER_FAULT, *ILLEGAL_ACCESS} <= ids
    assert set(ILLEGAL_ACCESS) == {MEMORY_FAULT, GRAPH_FAULT}


@pytest.mark.parametrize("signature", [MEMORY_FAULT, GRAPH_FAULT])
@pytest.mark.parametrize(
    ("number", "arguments"),
    [
        (
            3,
            (
                "policy.generation.mcore_generation_config.num_cuda_graphs=null",
                "policy.generation.mcore_generation_config.use_cuda_graphs_for_non_decode_steps=false",
            ),
        ),
        (0, ("policy.generation.vllm_cfg.enforce_eager=true",)),
    ],
)
def test_an_illegal_access_is_rerun_without_graphs(number: int, arguments: tuple[str, ...], signature: str) -> None:
    (only,) = LOOP.isolations(crashed(number, Boundary.ROLLOUT, signature))
    assert (only.arguments, only.reduced) == (arguments, True)


def test_a_crash_in_a_checkpoint_is_rerun_without() -> None:
    (only,) = LOOP.isolations(crashed(1, Boundary.CHECKPOINT))
    assert only.arguments == ("checkpointing.enabled=false",)
    assert LOOP.isolations(failed(1, boundary=Boundary.CHECKPOINT)) == ()  # a missed proof is not separated by saving nothing


def test_a_crash_in_a_refit_is_rerun_another_way() -> None:
    found = named(crashed(2, Boundary.REFIT))
    assert list(found) == ["full-transport", "colocated"]
    assert [item.options for item in found.values()] == [{"transports": "full"}] * 2
    assert found["full-transport"].arguments == ()
    assert found["colocated"].arguments == ("policy.generation.colocated.enabled=true",)
    assert LOOP.isolations(crashed(0, Boundary.REFIT)) == ()  # no transport is chosen there


def context(item: Isolation | None = None, transports: str = "full,delta") -> Context:
    """Of a trial of level 2, or of one of its reruns."""
    if item is None:
        return Context(Path("run"), Path("python"), LOOP.default_model, options={"transports": transports})
    options = {"transports": transports, **item.options, "isolation": " ".join(item.arguments)}
    return Context(Path("run"), Path("python"), LOOP.default_model, arguments=item.arguments, options=options)


def test_a_rerun_of_the_refit_has_no_phase_that_would_be_vacuous() -> None:
    assert [call.name for call in variants("refit", context())] == ["full", "delta"]
    found = named(crashed(2, Boundary.REFIT))
    (full,) = variants("refit", context(found["full-transport"]))
    (colocated,) = variants("refit", context(found["colocated"]))
    place = "policy.generation.colocated.enabled"
    assert (full.name, full.claims[place]) == ("full", False)
    assert (colocated.name, place in colocated.claims) == ("full", False)
    assert not full.claims.keys() - colocated.claims.keys() - {place}


def test_the_full_transport_alone_is_no_rerun_of_itself() -> None:
    assert {"full", *NOT_FULL} == set(TRANSPORTS)
    levels = [LOOP.configured({"transports": names}).levels()[2] for names in ("full", "delta")]
    full, delta = (missed(number=2, how={"not_taken": level.not_taken}) for level in levels)
    assert list(named(full)) == [*NUMERICS, "colocated"]
    assert list(named(delta)) == [*NUMERICS, "full-transport", "colocated"]


@pytest.mark.parametrize("verdict", [Verdict.PASS, Verdict.BLOCKED, Verdict.SKIPPED])
def test_only_a_fail_is_isolated(verdict: Verdict) -> None:
    assert LOOP.isolations(missed().model_copy(update={"verdict": verdict})) == ()


def test_a_crash_elsewhere_has_no_reruns() -> None:
    assert LOOP.isolations(crashed(0, Boundary.PROVIDER, OTHER_FAULT)) == ()


def every() -> list[Isolation]:
    cases = [missed(number=number) for number in (0, 2, 3, 4)]
    cases += [crashed(number, Boundary.ROLLOUT, GRAPH_FAULT) for number in (0, 3)]
    cases += [crashed(1, Boundary.CHECKPOINT), crashed(2, Boundary.REFIT)]
    return [item for case in cases for item in LOOP.isolations(case)]


def test_every_key_is_one_of_the_configuration_and_none_can_be_split() -> None:
    words = [word for item in every() for word in item.arguments]
    assert {word.partition("=")[0] for word in words} == KEYS
    assert all(re.fullmatch(r"[\w.]+=\w+", word) for word in words)
    assert all(re.fullmatch(r"[a-z0-9-]+", item.name) for item in every())
    assert {name for item in every() for name in item.options} <= {option.name for option in LOOP.options}


def test_what_a_rerun_changes_is_not_claimed_of_it() -> None:
    claims = {"policy.generation.backend": "vllm", "policy.megatron_cfg.enabled": True, "policy.generation.refit_transport": None}
    assert relaxed(claims, {}) == claims
    assert relaxed(claims, {"isolation": ""}) == claims
    assert relaxed(claims, {"isolation": "policy.generation.backend=megatron ++policy.generation.refit_transport=null"}) == {
        "policy.megatron_cfg.enabled": True
    }
