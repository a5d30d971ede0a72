"""What to do about a level that is no Pass, with the paths of this machine."""

from __future__ import annotations

import shlex
from pathlib import Path

from seatrial.loops.hub import hub_cache, snapshot
from seatrial.model.loop import Context
from seatrial.model.record import LevelResult
from seatrial.model.verdict import Boundary

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
    """DTensor instead of Megatron."""
    fell = any("policy.megatron_cfg.enabled" in check.message for check in result.checks if not check.passed)
    words = "-- policy.dtensor_cfg.enabled=false policy.megatron_cfg.enabled=true"
    return [f"the policy was not Megatron's: use a configuration of Megatron, or add {words}"] if fell else []


def _even(result: LevelResult) -> list[str]:
    """Nothing to learn from: a small model answers the few prompts of a step all rightly, or all wrongly."""
    words = "-- grpo.num_prompts_per_step=8 grpo.num_generations_per_prompt=4 policy.train_global_batch_size=32"
    even = result.vacuous and result.boundary is Boundary.REWARD
    return [f"more samples per step make uneven rewards likely: {words}"] if even else []


def _early(result: LevelResult) -> list[str]:
    """Fewer steps than planned, without an error."""
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
    place = snapshot(context.model)
    if not (place / "config.json").is_file():
        fix = "download it once, on a machine that may, or name a directory with --model"
        return (f"{hub_cache()} holds no snapshot of {context.model}: {fix}",)
    loads, model = shlex.quote(LOADS.format(path=str(place))), shlex.quote(str(place))
    return (
        f"a snapshot is at {place}; check that it loads: uv run python -c {loads}",
        f"then run offline: HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 seatrial run nemo-rl … --model {model} (model and tokenizer)",
    )
