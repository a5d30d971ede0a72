"""Reruns that separate the suspects of a failed level: one setting each, by the keys of NeMo-RL's own configuration.

- A log-probability mismatch has many suspects: parallelism, kernels, packing, length, the other generation engine.
- An illegal memory access is rerun without CUDA graphs; that is a reduced optimisation, and its Pass none of the level.
- A crash in a checkpoint is rerun without checkpoints, one in the refit level with another way for the weights.
What a rerun changes on purpose is not claimed of it: see `relaxed`. A rerun that would change nothing is left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from seatrial.model.isolation import OPTION
from seatrial.model.loop import Isolation
from seatrial.model.record import LevelResult
from seatrial.model.verdict import Boundary, Verdict

MISMATCH = ("token_mult_prob_error", "seq_mult_prob_error", "gen_kl_error", "probs_ratio")
ILLEGAL_ACCESS = ("accelerator-memory-fault", "cuda-graph-fault")
"""Known failures, by id: the general one, and that of this loop."""
POLICY, GENERATION = "policy.megatron_cfg", "policy.generation"
MEGATRON_GENERATION, REFIT, PARALLELISM = "megatron-generation", "refit", "parallelism"
"""Names of the levels whose generator, transport or parallel sizes are others than those of the rest."""
NOT_FULL = {"packed", "reshard", "delta"}
FULL = {"transports": "full"}
"""Options of level 2: only this transport is run."""
OVERRIDDEN, NOT_RUN = "loop arguments override the level's own settings: ", "transport not run: "
"""Limitations of a result that tell how it was run."""


def isolations(result: LevelResult) -> tuple[Isolation, ...]:
    """The reruns of a failed level; none when there is nothing to separate."""
    if result.verdict is not Verdict.FAIL:
        return ()
    if _illegal_access(result):
        return (_without_graphs(result.name),)
    if _mismatch(result):
        return (*_numerics(result), *_transports(result))
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
    return found in ILLEGAL_ACCESS


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


def _numerics(result: LevelResult) -> tuple[Isolation, ...]:
    every = [
        Isolation("no-sequence-parallel", (f"{POLICY}.sequence_parallel=false",), "sequence parallelism", reduced=True),
        Isolation("no-rope-fusion", (f"{POLICY}.apply_rope_fusion=false",), "the fused rope kernel", reduced=True),
        Isolation("short-sequences", ("policy.max_total_sequence_length=256",), "what builds up over long sequences"),
        Isolation("no-packing", ("policy.sequence_packing.enabled=false",), "sequence packing", reduced=True),
        Isolation(
            "tp-1", (f"{POLICY}.tensor_model_parallel_size=1", f"{POLICY}.sequence_parallel=false"), "tensor parallelism", reduced=True
        ),
    ]
    idle = _idle(result)
    made = [item for item in every if item.name not in idle]
    if result.name == MEGATRON_GENERATION:
        made.append(Isolation("vllm", (f"{GENERATION}.backend=vllm",), "generation by Megatron"))
    elif result.name != REFIT:  # other transports than the default are for vLLM alone
        made.append(Isolation("megatron", (f"{GENERATION}.backend=megatron",), "generation by vLLM, or the export of weights to it"))
    return tuple(made)


def _idle(result: LevelResult) -> set[str]:
    """Names of reruns that would change nothing: only level 4, or the trial's own arguments, turn these settings on."""
    if result.name == PARALLELISM:
        return set()
    settings = {"no-sequence-parallel": ("sequence_parallel", "false"), "tp-1": ("tensor_model_parallel_size", "1")}
    return {name for name, (key, off) in settings.items() if not _turned_on(result, key, off)}


def _turned_on(result: LevelResult, key: str, off: str) -> bool:
    """Whether the trial's own loop arguments give the policy's setting another value than `off`; the last one counts."""
    own = [word for text in result.limitations if text.startswith(OVERRIDDEN) for word in text.removeprefix(OVERRIDDEN).split()]
    said = [word.lower() for word in own if POLICY in word and key in word]
    return bool(said) and not said[-1].endswith(f"={off}")


def _transports(result: LevelResult) -> tuple[Isolation, ...]:
    """Other ways for the weights, at the level that is about them: the full transport alone, unless nothing else was run, and no
    transfer between GPUs at all."""
    if result.name != REFIT:
        return ()
    full = Isolation("full-transport", (), "a transport other than full", reduced=True, options=FULL)
    left = {text.removeprefix(NOT_RUN).partition(",")[0] for text in result.limitations if text.startswith(NOT_RUN)}
    colocated = Isolation("colocated", (f"{GENERATION}.colocated.enabled=true",), "the transfer between workers", options=FULL)
    return (colocated,) if left == NOT_FULL else (full, colocated)
