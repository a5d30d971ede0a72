"""Reruns that separate the suspects of a failed level: one setting each, by the keys of NeMo-RL's own configuration.

- A log-probability mismatch has many suspects: parallelism, kernels, packing, length, the other generation engine.
- An illegal memory access is rerun without CUDA graphs; that is a reduced optimisation, and its Pass none of the level.
- A crash in a checkpoint is rerun without checkpoints, one in a refit with another way for the weights.
What a rerun changes on purpose is not claimed of it: see `relaxed`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from seatrial.model.isolation import OPTION
from seatrial.model.loop import Isolation
from seatrial.model.record import LevelResult
from seatrial.model.verdict import Boundary, Verdict

MISMATCH = ("token_mult_prob_error", "seq_mult_prob_error", "gen_kl_error", "probs_ratio")
ILLEGAL_ACCESS = ("illegal_access", "cuda-graph")
POLICY, GENERATION = "policy.megatron_cfg", "policy.generation"
MEGATRON_GENERATION, REFIT = "megatron-generation", "refit"
"""Names of the levels whose generator, or whose transport, is another than that of the rest."""


def isolations(result: LevelResult) -> tuple[Isolation, ...]:
    """The reruns of a failed level; none when there is nothing to separate."""
    if result.verdict is not Verdict.FAIL:
        return ()
    if _illegal_access(result):
        return (_without_graphs(result.name),)
    if _mismatch(result):
        return (*_numerics(result.name), *(_transports(result) if result.name == REFIT else ()))
    if not _crashed(result):
        return ()
    if result.boundary is Boundary.CHECKPOINT:
        return (Isolation("no-checkpoint", ("checkpointing.enabled=false",), "saving or loading checkpoints, not the model"),)
    return _transports(result) if result.boundary is Boundary.REFIT else ()


def relaxed(claims: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """The claims of a call without those on keys that an isolation changes on purpose (see `OPTION`)."""
    changed = {word.partition("=")[0].lstrip("+~") for word in str(options.get(OPTION, "")).split()}
    return {key: value for key, value in claims.items() if key not in changed}


def _illegal_access(result: LevelResult) -> bool:
    found = result.diagnosis.signature if result.diagnosis else None
    return found is not None and any(word in found for word in ILLEGAL_ACCESS)


def _mismatch(result: LevelResult) -> bool:
    """Generator and trainer disagree: by a metric, or by a proof that weights arrived."""
    missed = [check for check in result.checks if not check.passed]
    return any(word in check.name for check in missed for word in MISMATCH) or any(
        check.kind == "proof" and check.boundary is Boundary.REFIT for check in missed
    )


def _crashed(result: LevelResult) -> bool:
    said = result.diagnosis is not None and result.diagnosis.verdict is not None
    return said or any(phase.ended != "exited" or phase.exit_code != 0 for phase in result.phases)


def _without_graphs(level: str) -> Isolation:
    if level == MEGATRON_GENERATION:
        place = f"{GENERATION}.mcore_generation_config"
        words = (f"{place}.num_cuda_graphs=null", f"{place}.use_cuda_graphs_for_non_decode_steps=false")
        return Isolation("no-cuda-graphs", words, "the CUDA graphs of Megatron generation", reduced=True)
    return Isolation("eager", (f"{GENERATION}.vllm_cfg.enforce_eager=true",), "the CUDA graphs of vLLM", reduced=True)


def _numerics(level: str) -> tuple[Isolation, ...]:
    made = [
        Isolation("no-sequence-parallel", (f"{POLICY}.sequence_parallel=false",), "sequence parallelism", reduced=True),
        Isolation("no-rope-fusion", (f"{POLICY}.apply_rope_fusion=false",), "the fused rope kernel", reduced=True),
        Isolation("short-sequences", ("policy.max_total_sequence_length=256",), "what builds up over long sequences"),
        Isolation("no-packing", ("policy.sequence_packing.enabled=false",), "sequence packing", reduced=True),
        Isolation(
            "tp-1", (f"{POLICY}.tensor_model_parallel_size=1", f"{POLICY}.sequence_parallel=false"), "tensor parallelism", reduced=True
        ),
    ]
    if level == MEGATRON_GENERATION:
        made.append(Isolation("vllm", (f"{GENERATION}.backend=vllm",), "generation by Megatron"))
    elif level != REFIT:  # other transports than the default are for vLLM alone
        made.append(Isolation("megatron", (f"{GENERATION}.backend=megatron",), "generation by vLLM, or the export of weights to it"))
    return tuple(made)


def _transports(result: LevelResult) -> tuple[Isolation, ...]:
    """Other ways for the weights; which key switches deltas off depends on the generation of the checkout."""
    older = any("delta_compression.enabled" in text for text in _texts(result))
    full = f"{GENERATION}.delta_compression.enabled=false" if older else f"{GENERATION}.refit_transport=null"
    made = [Isolation("full-transport", (full,), "the compressed or resharding transport", reduced=True)]
    if result.name == REFIT:
        made.append(Isolation("colocated", (f"{GENERATION}.colocated.enabled=true", full), "the transfer between workers"))
    return tuple(made)


def _texts(result: LevelResult) -> tuple[str, ...]:
    found = result.diagnosis
    said = (found.cause, found.advice, *found.excerpt) if found else ()
    return (*said, result.reason, *result.limitations, *(check.message for check in result.checks))
