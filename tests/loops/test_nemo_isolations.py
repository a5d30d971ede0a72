"""Which reruns a failure of NeMo-RL has, and that their keys are those of its configuration."""

from __future__ import annotations

import re

import pytest

from seatrial.loops.nemo_rl.runs.isolations import isolations, relaxed
from seatrial.model.loop import Isolation
from seatrial.model.record import CheckResult, Diagnosis, LevelResult, PhaseOutcome
from seatrial.model.verdict import Boundary, Verdict

NAMES = {0: "smoke", 1: "lora-checkpoint", 2: "refit", 3: "megatron-generation", 4: "parallelism"}
TMPE = 'max(data["train/token_mult_prob_error"]) < 1.05'
NUMERICS = ["no-sequence-parallel", "no-rope-fusion", "short-sequences", "no-packing", "tp-1"]
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
    "policy.generation.refit_transport",
    "checkpointing.enabled",
}
"""Composed with grpo_math_1B_megatron.yaml by NeMo-RL's own loader, at 7ea279ab: each is accepted."""


def failed(number: int = 0, verdict: Verdict = Verdict.FAIL, **fields: object) -> LevelResult:
    base = LevelResult(number=number, name=NAMES[number], title="x", verdict=verdict, reason="why")
    return base.model_copy(update=fields)


def missed(name: str = TMPE, number: int = 0, **fields: object) -> LevelResult:
    check = CheckResult(name=name, passed=False, value=2.0).model_copy(update=fields)
    return failed(number, checks=(CheckResult(name="other", passed=True), check))


def crashed(number: int, boundary: Boundary, signature: str | None = None, excerpt: tuple[str, ...] = ()) -> LevelResult:
    found = Diagnosis(boundary=boundary, verdict=Verdict.FAIL, cause="RuntimeError: x", signature=signature, excerpt=excerpt)
    died = PhaseOutcome(name="run", exit_code=1, ended="exited", seconds=1)
    return failed(number, boundary=boundary, diagnosis=found, phases=(died,))


def named(result: LevelResult) -> dict[str, Isolation]:
    return {item.name: item for item in isolations(result)}


@pytest.mark.parametrize(
    "name", [TMPE, 'max(data["train/gen_kl_error"]) < 0.002', 'min(data["delta/train/probs_ratio_clamped_min"]) > 0.79']
)
def test_a_mismatch_has_many_suspects(name: str) -> None:
    found = named(missed(name))
    assert list(found) == [*NUMERICS, "megatron"]
    assert found["no-rope-fusion"].arguments == ("policy.megatron_cfg.apply_rope_fusion=false",)
    assert found["megatron"].arguments == ("policy.generation.backend=megatron",)
    assert not found["megatron"].reduced
    assert found["tp-1"].reduced


def test_the_other_backend_is_that_of_the_level() -> None:
    assert named(missed(number=3))["vllm"].arguments == ("policy.generation.backend=vllm",)
    assert list(named(missed(number=2))) == [*NUMERICS, "full-transport", "colocated"]  # transports are for vLLM alone


def test_a_missed_proof_of_the_refit_is_a_mismatch() -> None:
    found = missed("every weight arrived", 2, kind="proof", boundary=Boundary.REFIT)
    assert "colocated" in named(found)
    assert isolations(missed("a reward", kind="proof", boundary=Boundary.REWARD)) == ()


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
def test_an_illegal_access_is_rerun_without_graphs(number: int, arguments: tuple[str, ...]) -> None:
    (only,) = isolations(crashed(number, Boundary.ROLLOUT, "gpu.illegal_access"))
    assert (only.arguments, only.reduced) == (arguments, True)


def test_a_crash_in_a_checkpoint_is_rerun_without() -> None:
    (only,) = isolations(crashed(1, Boundary.CHECKPOINT))
    assert only.arguments == ("checkpointing.enabled=false",)
    assert isolations(failed(1, boundary=Boundary.CHECKPOINT)) == ()  # a missed proof is not separated by saving nothing


def test_a_crash_in_a_refit_is_rerun_another_way() -> None:
    found = named(crashed(2, Boundary.REFIT))
    assert found["full-transport"].arguments == ("policy.generation.refit_transport=null",)
    assert found["colocated"].arguments == ("policy.generation.colocated.enabled=true", "policy.generation.refit_transport=null")
    older = crashed(2, Boundary.REFIT, excerpt=("policy.generation.delta_compression.enabled=true",))
    assert named(older)["full-transport"].arguments == ("policy.generation.delta_compression.enabled=false",)


@pytest.mark.parametrize("verdict", [Verdict.PASS, Verdict.BLOCKED, Verdict.SKIPPED])
def test_only_a_fail_is_isolated(verdict: Verdict) -> None:
    assert isolations(missed().model_copy(update={"verdict": verdict})) == ()


def test_a_crash_elsewhere_has_no_reruns() -> None:
    assert isolations(crashed(0, Boundary.PROVIDER, "bridge.arch_unsupported")) == ()


def every() -> list[Isolation]:
    cases = [missed(number=0), missed(number=2), missed(number=3), crashed(0, Boundary.ROLLOUT, "gpu.illegal_access")]
    cases += [crashed(3, Boundary.ROLLOUT, "gpu.illegal_access"), crashed(1, Boundary.CHECKPOINT), crashed(2, Boundary.REFIT)]
    return [item for case in cases for item in isolations(case)]


def test_every_key_is_one_of_the_configuration_and_none_can_be_split() -> None:
    words = [word for item in every() for word in item.arguments]
    assert {word.partition("=")[0] for word in words} == KEYS
    assert all(re.fullmatch(r"[\w.]+=\w+", word) for word in words)
    assert all(re.fullmatch(r"[a-z0-9-]+", item.name) for item in every())


def test_what_a_rerun_changes_is_not_claimed_of_it() -> None:
    claims = {"policy.generation.backend": "vllm", "policy.megatron_cfg.enabled": True, "policy.generation.refit_transport": None}
    assert relaxed(claims, {}) == claims
    assert relaxed(claims, {"isolation": ""}) == claims
    assert relaxed(claims, {"isolation": "policy.generation.backend=megatron ++policy.generation.refit_transport=null"}) == {
        "policy.megatron_cfg.enabled": True
    }
