"""What a Pass in this configuration must not be read as, beside what the level itself says."""

from __future__ import annotations

from seatrial.loops.nemo_rl.runs import checkout, variants
from seatrial.loops.options import number
from seatrial.model.knowledge import Level
from seatrial.model.loop import Context


def limitations(level: Level, context: Context) -> tuple[str, ...]:
    """What this configuration leaves out."""
    made = []
    if level.name in ("lora-checkpoint", "learning") and (why := variants.no_peft(context.options, variants.offered(context))):
        made.append(why)
    if level.name != "parallelism" and "recipe" not in context.options and "policy.megatron_cfg" not in " ".join(context.arguments):
        made.append("all parallel sizes were 1, but for experts where they are named: use level 4")
    if level.name == "parallelism" and "recipe" not in context.options and number(context.options, "ep", 1) == 1:
        made.append("expert parallel size 1: routing across ranks was not exercised")
    made += _foreign_core(context)
    if level.name == "refit":
        made.append("full and packed leave the same trace: that tensors were packed rests on the size of the buckets that was set")
        run, here = variants.transports(context), variants.available(variants.offered(context))
        left = [name for name in variants.TRANSPORTS if name not in run]
        made += [f"transport not run: {name}{'' if name in here else ', which this checkout does not have'}" for name in left]
    if any("enforce_eager=true" in word.lower() or "num_cuda_graphs=null" in word for word in context.arguments):
        made.append("CUDA graphs were off: this is a reduced-optimization run")
    return tuple(made)


def _foreign_core(context: Context) -> list[str]:
    """Of a Bridge under test without a Megatron-LM of its own."""
    tested = [repo.path for repo in context.changes if "megatron.bridge" in repo.packages and not repo.companion]
    cores = checkout.bundled_core(context)
    if not tested or not cores or any(core.is_relative_to(path) for core in cores for path in tested):
        return []
    return [f"the Bridge under test has no Megatron-LM (an empty submodule?): Megatron-Core came from {cores[0]}"]
