"""What to do about a NeMo-RL level that is no Pass: reruns that separate the suspects, and next steps with paths of this machine."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from seatrial.core.loop import Context, Isolation
from seatrial.core.records import OPTION, LevelResult
from seatrial.core.verdict import Boundary, Verdict
from seatrial.loops.model_files import hub_cache, hub_snapshot

MISMATCH = ("token_mult_prob_error", "seq_mult_prob_error", "gen_kl_error", "probs_ratio")
ILLEGAL_ACCESS = ("accelerator-memory-fault", "cuda-graph-fault")
"""Known failures, by id: the general one, and that of this loop."""
POLICY, GENERATION = "policy.megatron_cfg", "policy.generation"
MEGATRON_GENERATION, REFIT, PARALLELISM = "megatron-generation", "refit", "parallelism"
"""Names of the levels whose generator, transport or parallel sizes are others than those of the rest."""
NOT_FULL = {"packed", "reshard", "delta"}
FULL = {"transports": "full"}
"""Options of level 2: only this transport is run."""


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
    return any(word in check.tag for check in missed for word in MISMATCH) or any(
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
    said = [word.lower() for word in result.arguments if POLICY in word and key in word]
    return bool(said) and not said[-1].endswith(f"={off}")


def _transports(result: LevelResult) -> tuple[Isolation, ...]:
    """Other ways for the weights, at the level that is about them: the full transport alone, unless nothing else was run, and no
    transfer between GPUs at all."""
    if result.name != REFIT:
        return ()
    full = Isolation("full-transport", (), "a transport other than full", reduced=True, options=FULL)
    colocated = Isolation("colocated", (f"{GENERATION}.colocated.enabled=true",), "the transfer between workers", options=FULL)
    return (colocated,) if set(result.not_taken) == NOT_FULL else (full, colocated)


NOT_SERVED = ("hub-rate-limit", "hub-offline")
DEATHS = ("SIGSEGV", "SIGABRT", "SIGBUS", "ActorDiedError", "worker died")
LOADS = (
    "from transformers import AutoConfig, AutoTokenizer; p = {path!r}; "
    "AutoConfig.from_pretrained(p, local_files_only=True); AutoTokenizer.from_pretrained(p, local_files_only=True)"
)


def next_steps(result: LevelResult, context: Context) -> tuple[str, ...]:
    """By what went wrong: the hub, the backend, rewards without spread, an early end, a worker's death."""
    return (*_hub(result, context), *_backend(result), *_even(result), *_early(result), *_death(result))


def _backend(result: LevelResult) -> list[str]:
    fell = any(f"{POLICY}.enabled" in check.settings for check in result.checks if not check.passed)
    words = "-- policy.dtensor_cfg.enabled=false policy.megatron_cfg.enabled=true"
    return [f"the policy was not Megatron's: use a configuration of Megatron, or add {words}"] if fell else []


def _even(result: LevelResult) -> list[str]:
    """Nothing to learn from: a small model answers the few prompts of a step all rightly, or all wrongly."""
    words = "-- grpo.num_prompts_per_step=8 grpo.num_generations_per_prompt=4 policy.train_global_batch_size=32"
    even = result.vacuous and result.boundary is Boundary.REWARD
    return [f"more samples per step make uneven rewards likely: {words}"] if even else []


def _early(result: LevelResult) -> list[str]:
    reached, expected = result.steps_reached, result.steps_expected
    ended = all(phase.exit_code == 0 for phase in result.phases) and not (result.diagnosis and result.diagnosis.verdict)
    if not ended or expected is None or (reached or 0) >= expected:
        return []
    why = f"see the last lines of {result.directory}/run.log (a time limit, no more data, a skipped step)"
    return [f"NeMo-RL ended by itself after step {reached or 0} of {expected}: {why}"]


def _death(result: LevelResult) -> list[str]:
    """A worker that was killed, or crashed in native code, without a known cause."""
    found = result.diagnosis
    if found is None or found.signature is not None or not any(word in " ".join(found.excerpt) for word in DEATHS):
        return []
    where = "its last lines in Ray's own logs (worker-*.err), and the kernel's out-of-memory killer (dmesg)"
    return [f"a worker died: look for {where}; run the baseline, to see whether it dies there, too"]


def _hub(result: LevelResult, context: Context) -> tuple[str, ...]:
    """Where a local snapshot of the model is, when the hub did not serve it."""
    signature = result.diagnosis.signature if result.diagnosis else None
    if signature not in NOT_SERVED or Path(context.model).exists():
        return ()
    place = hub_snapshot(context.model)
    if not (place / "config.json").is_file():
        fix = "download it once, on a machine that may, or name a directory with --model"
        return (f"{hub_cache()} holds no snapshot of {context.model}: {fix}",)
    loads, model = shlex.quote(LOADS.format(path=str(place))), shlex.quote(str(place))
    return (
        f"a snapshot is at {place}; check that it loads: uv run python -c {loads}",
        f"then run offline: HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 seatrial run nemo-rl … --model {model} (model and tokenizer)",
    )
