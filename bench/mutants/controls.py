"""Clean controls: unchanged packages under many settings. None of them may be called wrong.

    python -m bench.mutants.controls [--jobs 2] [--out DIR] [--table FILE] [--only TEXT]

Seeds, accumulation, batch sizes, loss types, reward scalings, iterations, schedules, optimizers, LoRA variants, temperatures, two
ranks, and models of other families, made locally.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from bench.mutants.harness import Server, run, spread, trl_python

FAMILIES = ("llama", "qwen3", "mistral", "gemma2", "phi3", "gpt2", "olmo2", "qwen3-moe", "gemma3")
MAKE = """
import sys
from pathlib import Path
from seatrial.instruments.trl import models_on_disk
import torch, transformers
family, place = sys.argv[1], Path(sys.argv[2])
words = models_on_disk.tokenizer()
torch.manual_seed(7)
sizes = models_on_disk.sizes(words)
common = dict(sizes, intermediate_size=160)
made = {
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**common, attention_bias=True, tie_word_embeddings=False)),
    "qwen3": lambda: transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**common, head_dim=32)),
    "mistral": lambda: transformers.MistralForCausalLM(transformers.MistralConfig(**common, sliding_window=16)),
    "gemma2": lambda: transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**common, head_dim=24, sliding_window=32)),
    "gemma3": lambda: transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(**common, head_dim=24, sliding_window=32)),
    "phi3": lambda: transformers.Phi3ForCausalLM(transformers.Phi3Config(**common)),
    "olmo2": lambda: transformers.Olmo2ForCausalLM(transformers.Olmo2Config(**common)),
    "gpt2": lambda: transformers.GPT2LMHeadModel(transformers.GPT2Config(
        vocab_size=len(words), n_positions=256, n_embd=96, n_layer=2, n_head=4, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        pad_token_id=words.pad_token_id, eos_token_id=words.eos_token_id, bos_token_id=None)),
    "qwen3-moe": lambda: models_on_disk.new_model("moe", words),
}[family]()
made.save_pretrained(place)
words.save_pretrained(place)
"""
WORDS: tuple[tuple[int, str], ...] = (
    *((0, f"--seed {seed}") for seed in range(1, 11)),
    *(
        (0, f"--gradient_accumulation_steps {steps} --per_device_train_batch_size {rows}")
        for steps, rows in ((1, 32), (2, 16), (4, 8), (2, 24))
    ),
    *((0, f"--loss_type {kind}") for kind in ("grpo", "bnpo", "dr_grpo", "cispo", "sapo", "vespo", "luspo")),
    *((0, f"--scale_rewards {kind}") for kind in ("batch", "none")),
    (0, "--multi_objective_aggregation normalize_then_sum"),
    *((0, f"--num_iterations {count}") for count in (1, 3, 4)),
    *((0, f"--lr_scheduler_type {kind}") for kind in ("constant", "linear", "constant_with_warmup", "polynomial", "inverse_sqrt")),
    (0, "--warmup_steps 0.3"),
    *((0, f"--optim {kind}") for kind in ("adamw_torch", "sgd", "adagrad", "rmsprop", "adafactor")),
    *((0, f"--temperature {heat}") for heat in (0.5, 1.0, 1.7)),
    (0, "--top_k 5 --top_p 0.5"),
    (0, "--top_k 0 --top_p 1.0 --min_p 0.0 --repetition_penalty 1.0"),
    (0, "--max_completion_length 3"),
    (0, "--max_completion_length 16 --mask_truncated_completions true"),
    (0, "--num_generations 2"),
    (0, "--num_generations 12"),
    (0, "--steps_per_generation 6 --num_iterations 1"),
    (0, "--importance_sampling_level sequence"),
    (0, "--max_grad_norm 0"),
    (0, "--top_entropy_quantile 0.3 --entropy_coef 0.01"),
    (0, "--shuffle_dataset false"),
    (0, "--gradient_checkpointing true"),
    *((1, f"--seed {seed}") for seed in (3, 4, 5)),
    (1, "--loss_type dapo --scale_rewards group"),
    (2, "--temperature 0.7 --top_k 10"),
    (2, "--seed 5 --loss_type grpo"),
)
LORA = (
    "--lora-rank 2 --lora-alpha 7",
    "--rslora",
    "--dora",
    "--lora-targets q_proj,v_proj --lora-rank 16",
    "--lora-targets gate_proj,up_proj,down_proj",
    "--lora-dropout 0.1",
)
RANKS = ("--seed 1", "--seed 2", "--loss_type grpo", "--loss_type dr_grpo --scale_rewards batch")


Control = tuple[str, int, tuple[str, ...], tuple[str, ...], str]
"""Name, level, loop arguments, options of the driver, and model."""


def controls(python: Path, work: Path) -> list[Control]:
    """All of them; models of other families are made below `work`."""
    made: list[Control] = [(f"level {number}: {words}", number, tuple(words.split()), (), "tiny-dense") for number, words in WORDS]
    made += [(f"level 1: {options}", 1, (), tuple(options.split()), "tiny-dense") for options in LORA]
    made += [(f"level 4: {words}", 4, tuple(words.split()), (), "tiny-dense") for words in RANKS]
    for family in FAMILIES:
        place = work / "families" / family
        subprocess.run(
            [str(python), "-c", MAKE, family, str(place)],
            check=True,
            capture_output=True,
            env={"PYTHONPATH": "src", "PATH": "/usr/bin:/bin"},
        )
        made.append((f"level 0: model {family}", 0, (), (), str(place)))
        made.append((f"level 1: model {family}", 1, (), (), str(place)))
    return made


def main() -> int:
    """Run the controls and print the table; 1 when one of them is called wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--table", type=Path)
    parser.add_argument("--only", default="")
    arguments = parser.parse_args()
    python, work = trl_python(), arguments.out or Path(tempfile.mkdtemp(prefix="controls-"))
    chosen = [control for control in controls(python, work) if arguments.only in control[0]]
    servers = [Server(python) for _ in range(arguments.jobs)]

    def told(server: Server, item: tuple[int, Control]) -> tuple[str, str]:
        index, (name, number, words, options, model) = item
        how = {"words": words, "options": options, "model": model, "run_dir": work}
        found = run(server, number, work / f"{index:03d}" / str(number), python, short=True, **how)
        text = "Pass" if found is None else f"ALARM: {getattr(found, 'name', found)} {getattr(found, 'message', '')}"
        print(f"[{index + 1} of {len(chosen)}] {name}: {text}", flush=True)
        return name, text

    try:
        rows = spread(servers, list(enumerate(chosen)), told)
    finally:
        for server in servers:
            server.close()
    text = table(rows)
    print(text.splitlines()[0])
    if arguments.table:
        arguments.table.write_text(text, encoding="utf-8")
    return int(any(outcome != "Pass" for _, outcome in rows))


def table(rows: Sequence[tuple[str, str]]) -> str:
    """As Markdown."""
    alarms = sum(outcome != "Pass" for _, outcome in rows)
    lines = [f"{len(rows)} clean controls: {alarms} alarms", "", "| control | outcome |", "|---|---|"]
    return "\n".join([*lines, *(f"| {name} | {outcome} |" for name, outcome in rows)]) + "\n"


if __name__ == "__main__":
    sys.exit(main())
