"""Hand-written bugs, each with the stage that must name it, and harmless refactorings, which must pass.

    python -m bench.mutants.edits [--jobs 2] [--only TEXT]

They are what sceptics found: kinds of bugs that no random mutation is, and ways to write the same thing that an instrument must not
mind. One line each, in a copy of the package that lives only in a forked process.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.mutants.harness import Outcome, Server, run, spread, trl_python

from seatrial.model.record import CheckResult

TRAINER, UTILS = "trl/trainer/grpo_trainer.py", "trl/trainer/utils.py"
BASE, DECODING, PROCESSORS = "transformers/trainer.py", "transformers/generation/utils.py", "transformers/generation/logits_process.py"
TILES = "trl/kernels/chunked_logprob.py"
LORA = "peft/tuners/lora/layer.py"
DRAW = "next_tokens = torch.multinomial(probs, num_samples=1).squeeze(1)"
ORDER = "indexes = torch.randperm(self.num_samples, generator=self.generator).tolist()"
SEEDED = "generator=torch.Generator().manual_seed(input_ids.shape[1])"
GENERATE = "**generate_inputs, generation_config=self.generation_config"
CHECKPOINTED = "return self._gradient_checkpointing_func(partial(super().__call__, **kwargs), *args)"


@dataclass(frozen=True)
class Edit:
    """One change of one file; `stage` (or the start of a check's name) must name it, none means that it must pass."""

    name: str
    file: str
    before: str
    after: str
    stage: str = ""
    level: int = 0
    steps: int = 4
    variants: bool = False
    sample: bool = False
    """Whether the test suite runs it."""


EDITS = (
    Edit("loss in chunks", TRAINER, "            compute_entropy=True,", "            batch_size=4, compute_entropy=True,", sample=True),
    Edit(
        "prompts by another keyword",
        TRAINER,
        GENERATE,
        'inputs=generate_inputs["input_ids"], attention_mask=generate_inputs["attention_mask"], generation_config=self.generation_config',
        sample=True,
    ),
    Edit(
        "drawn by hand, as well",
        DECODING,
        DRAW,
        "next_tokens = (probs.cumsum(-1) < torch.rand(len(probs), 1) * probs.sum(-1, keepdim=True)).sum(-1).clamp(max=probs.shape[1] - 1)",
    ),
    Edit("tiles are not rescaled", TILES, "sum_exp.mul_(rescale).add_(", "sum_exp.add_(", "logprob", variants=True),
    Edit("same order in each epoch", UTILS, ORDER, f"self.generator.manual_seed(self.seed); {ORDER}", "data", steps=8),
    Edit("reversed order", UTILS, ORDER, "indexes = list(range(self.num_samples))[::-1]", "data"),
    Edit("rows are not mixed", TRAINER, "generation_batch = shuffle_sequence_dict(generation_batch)", "pass", "data", sample=True),
    Edit(
        "prompts of others for rewards", TRAINER, "prompts=prompts, completions=", "prompts=prompts[1:] + prompts[:1], completions=", "data"
    ),
    Edit("same noise at each position", DECODING, DRAW, DRAW.replace("num_samples=1", f"num_samples=1, {SEEDED}"), "sampling"),
    Edit("a little colder", DECODING, DRAW, DRAW.replace("(probs,", "(probs ** 1.02,"), "sampling", sample=True),
    Edit(
        "top-k less one", PROCESSORS, "top_k = min(self.top_k, scores.size(-1))", "top_k = min(self.top_k - 1, scores.size(-1))", "sampling"
    ),
    Edit("no reward is zero", TRAINER, "reward if reward is not None else torch.nan for", "reward or 0.0 for", "reward"),
    Edit("floor of the deviation", TRAINER, "advantages / (std_rewards + 1e-4)", "advantages / (std_rewards + 1e-6)", "advantage"),
    Edit(
        "small advantages dropped",
        TRAINER,
        "advantages = torch.nan_to_num(advantages, nan=0.0)",
        "advantages = torch.nan_to_num(advantages, nan=0.0); advantages = advantages * (advantages.abs() > 0.018)",
        "advantage",
        level=1,
    ),
    Edit(
        "raw rewards where no spread is",
        TRAINER,
        "advantages = rewards - mean_grouped_rewards",
        "advantages = torch.where(std_rewards == 0, rewards, rewards - mean_grouped_rewards)",
        "advantage",
        sample=True,
    ),
    Edit(
        "lower clip is reciprocal",
        TRAINER,
        "torch.clamp(coef_1, 1 - self.epsilon_low,",
        "torch.clamp(coef_1, 1 / (1 + self.epsilon_low),",
        "ratio",
    ),
    Edit("model left in evaluation", TRAINER, "unwrapped_model.generate(", "unwrapped_model.eval().generate(", "gradient"),
    Edit("checkpointed layers do nothing", "transformers/modeling_layers.py", CHECKPOINTED, "return args[0]", "logprob", variants=True),
    Edit(
        "KL is logged without a mask", TRAINER, "append(global_masked_mean(per_token_kl))", "append(per_token_kl.mean().item())", "logging"
    ),
    Edit("history is one step late", BASE, '"step": self.state.global_step}', '"step": self.state.global_step - 1}', "logging"),
    Edit("mean loss of one step less", BASE, "/ max(num_steps_trained, 0.001)", "/ max(num_steps_trained - 1, 0.001)", "logging"),
    Edit(
        "weights rounded at the end",
        BASE,
        "self.control = self.callback_handler.on_train_end(",
        "[p.data.copy_(p.data.bfloat16()) for p in self.model.parameters()]; self.control = self.callback_handler.on_train_end(",
        "update",
        sample=True,
    ),
    Edit(
        "constant adapters",
        LORA,
        "nn.init.kaiming_uniform_(self.lora_A[adapter_name].weight, a=math.sqrt(5))",
        "nn.init.constant_(self.lora_A[adapter_name].weight, 0.1)",
        "weights",
        level=1,
    ),
    Edit("no generation prompt", TRAINER, "add_generation_prompt=True,", "add_generation_prompt=False,", "data", variants=True),
    Edit(
        "settings change when saved",
        BASE,
        "self.model.save_pretrained(output_dir, state_dict=state_dict)",
        "self.model.config.rms_norm_eps = 1e-5; self.model.save_pretrained(output_dir, state_dict=state_dict)",
        "saved settings",
    ),
)


def outcome(server: Server, edit: Edit, python: Path, work: Path) -> Outcome:
    """What the level says of an edit."""
    site = python.parent.parent / "lib" / "python3.11" / "site-packages"
    mutant: dict[str, Any] = {"file": str(site / edit.file), "before": edit.before, "after": edit.after}
    how = {"words": () if edit.variants else ("--max_steps", str(edit.steps)), "run_dir": work}
    place = work / edit.name.replace(" ", "-") / str(edit.level)
    return run(server, edit.level, place, python, short=not edit.variants, mutant=mutant, **how)


def wrong(edit: Edit, found: Outcome) -> str:
    """Why an outcome is not what it should be; empty if it is."""
    if not edit.stage:
        return "" if found is None else f"a harmless change is called wrong: {getattr(found, 'message', '') or found}"
    if not isinstance(found, CheckResult):
        return f"not named: {found}"
    if found.stage != edit.stage and not found.name.startswith(edit.stage):
        return f"named {found.stage or found.name}: {found.message}"
    return ""


def main() -> int:
    """Run them all; 1 when one is not as it should be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--only", default="")
    arguments = parser.parse_args()
    python, work = trl_python(), Path(tempfile.mkdtemp(prefix="edits-"))
    chosen = [edit for edit in EDITS if arguments.only in edit.name]
    servers = [Server(python) for _ in range(arguments.jobs)]

    def told(server: Server, edit: Edit) -> str:
        problem = wrong(edit, outcome(server, edit, python, work))
        print(f"{edit.name}: {problem or (edit.stage and 'named at ' + edit.stage) or 'passes'}", flush=True)
        return problem

    try:
        bad = [problem for problem in spread(servers, chosen, told) if problem]
    finally:
        for server in servers:
            server.close()
    print(f"{len(chosen)} hand-written changes, {len(bad)} not as they should be")
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
