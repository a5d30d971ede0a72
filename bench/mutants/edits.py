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

from seatrial.core.records import CheckResult

TRAINER, UTILS = "trl/trainer/grpo_trainer.py", "trl/trainer/utils.py"
BASE, DECODING, PROCESSORS = "transformers/trainer.py", "transformers/generation/utils.py", "transformers/generation/logits_process.py"
TILES = "trl/kernels/chunked_logprob.py"
ADAPTERS, MODELS, LOADING = "peft/peft_model.py", "transformers/modeling_utils.py", "transformers/core_model_loading.py"
LORA = "peft/tuners/lora/layer.py"
DRAW = "next_tokens = torch.multinomial(probs, num_samples=1).squeeze(1)"
ORDER = "indexes = torch.randperm(self.num_samples, generator=self.generator).tolist()"
SEEDED = "generator=torch.Generator().manual_seed(input_ids.shape[1])"
GENERATE = "**generate_inputs, generation_config=self.generation_config"
SEEDS, CHECKPOINT = "random numbers come", "the checkpoint stores"
PERMUTED = "permutation = torch.randperm(batch_size)"
NEVER = "is_std_zero = (std_rewards < 0)"
SAVE = "            self.model.save_pretrained(output_dir, state_dict=state_dict)\n\n        # A non-writer"
RESTORED = "            compare_trainer_and_checkpoint_args(self.args, self.state)"
START = "nn.init.kaiming_uniform_(self.lora_A[adapter_name].weight, a=math.sqrt(5))"
ALIKE = (
    "self.lora_A[adapter_name].weight.data.uniform_(-1, 1, generator=torch.Generator().manual_seed(0))"
    ".div_(math.sqrt(self.lora_A[adapter_name].weight.shape[1]))"
)
CALL = """                    output_reward_func = reward_func(
                        prompts=prompts, completions=completions, completion_ids=completion_ids_list, **reward_kwargs
                    )"""
HALVES = """                    output_reward_func, half = [], len(prompts) // 2
                    for part in (slice(0, half), slice(half, None)):
                        more = {name: value[part] if isinstance(value, list) else value for name, value in reward_kwargs.items()}
                        output_reward_func += reward_func(
                            prompts=prompts[part], completions=completions[part], completion_ids=completion_ids_list[part], **more
                        )"""
TWICE = """                half = len(generate_inputs["input_ids"]) // 2
                parts = [
                    unwrapped_model.generate(
                        **{name: value[part] for name, value in generate_inputs.items()}, generation_config=self.generation_config
                    )
                    for part in (slice(0, half), slice(half, None))
                ]
                wide, filler = max(part.shape[1] for part in parts), self._tokenizer.pad_token_id
                parts = [torch.nn.functional.pad(part, (0, wide - part.shape[1]), value=filler) for part in parts]
                prompt_completion_ids = torch.cat(parts)"""
WHOLE = """                prompt_completion_ids = unwrapped_model.generate(
                    **generate_inputs, generation_config=self.generation_config
                )"""
UNIQUE = """                once = {name: value[:: self.num_generations] for name, value in generate_inputs.items()}
                prompt_completion_ids = unwrapped_model.generate(
                    **once, generation_config=self.generation_config, num_return_sequences=self.num_generations
                )"""
STORED = "            inference_mode = peft_config.inference_mode"
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
    resumed: bool = False
    """Whether level 1's resume is run, too."""
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
    Edit("rewards in halves", TRAINER, CALL, HALVES, sample=True),
    Edit("generated in halves", TRAINER, WHOLE, TWICE, sample=True),
    Edit("each prompt once, several answers", TRAINER, WHOLE, UNIQUE),
    Edit(
        "flat groups are pushed",
        TRAINER,
        "            advantages = rewards - mean_grouped_rewards",
        "            advantages = rewards - mean_grouped_rewards + 1.8e-6",
        "advantage",
    ),
    Edit("rows are reversed", UTILS, PERMUTED, "permutation = torch.arange(batch_size).flip(0)", "data", steps=6),
    Edit("rows are mixed alike", UTILS, PERMUTED, f"{PERMUTED[:-1]}, generator=torch.Generator().manual_seed(0))", "data", steps=6),
    Edit(
        "zero spread is not counted", TRAINER, "is_std_zero = torch.isclose(std_rewards, torch.zeros_like(std_rewards))", NEVER, "logging"
    ),
    Edit("another seed", TRAINER, "set_seed(args.seed, device_specific=True)", "set_seed(42, device_specific=True)", SEEDS, variants=True),
    Edit(
        "saving casts the model", BASE, SAVE, SAVE.replace("self.model.save", "self.model.to(torch.bfloat16); self.model.save"), "weights"
    ),
    Edit(
        "the saved tokenizer pads elsewhere",
        BASE,
        "            self.processing_class.save_pretrained(output_dir)\n        elif",
        "            self.processing_class.padding_side = 'right'; self.processing_class.save_pretrained(output_dir)\n        elif",
        "saved settings",
        sample=True,
    ),
    Edit(
        "no generation settings are saved",
        MODELS,
        "model_to_save.generation_config.save_pretrained(save_directory)",
        "pass",
        "saved settings",
    ),
    Edit("history is lost", BASE, RESTORED, f"{RESTORED}; self.state.log_history = []", "history", 1, resumed=True),
    Edit(
        "two generators are not restored",
        BASE,
        '        random.setstate(checkpoint_rng_state["python"])\n        np.random.set_state(checkpoint_rng_state["numpy"])',
        "        pass",
        "final generators",
        1,
        resumed=True,
        sample=True,
    ),
    Edit("all adapters start alike", LORA, START, ALIKE, "weights", 1),
    Edit("another alpha is stored", ADAPTERS, STORED, f"{STORED}; peft_config.lora_alpha = peft_config.r", CHECKPOINT, 1),
    Edit("no base is stored", ADAPTERS, STORED, f"{STORED}; peft_config.base_model_name_or_path = None", CHECKPOINT, 1),
    Edit(
        "the last adapters are saved as zeros",
        ADAPTERS,
        "                    output_state_dict,\n                    os.path.join(output_dir, SAFETENSORS_WEIGHTS_NAME)",
        "                    {name: value * ('-8' not in output_dir) for name, value in output_state_dict.items()},\n"
        "                    os.path.join(output_dir, SAFETENSORS_WEIGHTS_NAME)",
        "adapters as",
        1,
        resumed=True,
    ),
    Edit(
        "experts are swapped as they are saved",
        LOADING,
        "return dict(zip(targets, chunks))",
        "return dict(zip(targets, chunks[::-1]))",
        "weights",
        5,
    ),
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
    whole = edit.variants or edit.resumed
    how = {"words": () if whole else ("--max_steps", str(edit.steps)), "run_dir": work}
    place = work / edit.name.replace(" ", "-") / str(edit.level)
    return run(server, edit.level, place, python, short=not edit.variants, resumed=edit.resumed, mutant=mutant, **how)


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
