"""How much of a broken training step do the proving levels see?

    python -m bench.mutants [--count 200] [--seed 1] [--jobs 2] [--out DIR] [--table FILE]

Takes the lines of TRL's trainer, PEFT's LoRA layers, accelerate's data loader and optimizer wrapper, transformers' trainer,
generation and model file that really run in a proving level, mutates one at a time, runs the level's own processes on each (driver
and shadow, forked from processes that have imported everything) and judges what they leave as the level does. Prints a table: killed,
by which stage, survived, equivalent: with the reason from `equivalent.toml`, or because every recorded bit of every step is that of
the clean run.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import tempfile
import time
import tomllib
from collections import Counter
from pathlib import Path
from typing import Any

from bench.mutants.harness import BLOCKED, Server, phases_of, run, same_record, spread, trl_python

from seatrial.core.records import CheckResult

HERE = Path(__file__).parent
TARGETS: dict[str, tuple[int, float, tuple[str, ...]]] = {
    "trl/trainer/grpo_trainer.py": (
        0,
        0.45,
        (
            *("get_train_dataloader", "_get_train_sampler", "_get_per_token_logps_and_entropies", "training_step", "_prepare_inputs"),
            *("_calculate_rewards", "_tokenize_prompts", "_generate_single_turn", "_generate", "_generate_and_score_completions"),
            *("compute_loss", "_compute_loss", "log"),
        ),
    ),
    "trl/trainer/utils.py": (
        0,
        0.12,
        (
            *(
                "__iter__",
                "__len__",
                "pad",
                "nanstd",
                "shuffle_sequence_dict",
                "split_tensor_dict",
                "nanmin",
                "nanmax",
                "fused_linear_log_probs",
            ),
            *("forward", "backward", "_chunked", "entropy_from_logits", "selective_log_softmax"),
        ),
    ),
    "trl/kernels/chunked_logprob.py": (0, 0.05, ("forward", "backward", "_forward_tile", "_backward_tile", "_torch_transform")),
    "trl/trainer/callbacks.py": (0, 0.03, ("on_step_end", "_sync_target_model", "sync_target_model")),
    "transformers/trainer.py": (
        0,
        0.1,
        (
            *("_run_epoch", "training_step", "_clip_grad_norm", "_get_grad_norm", "_maybe_log_save_evaluate", "get_decay_parameter_names"),
            *("create_optimizer", "create_scheduler", "get_batch_samples", "_get_learning_rate", "log", "get_optimizer_cls_and_kwargs"),
        ),
    ),
    "transformers/trainer_pt_utils.py": (0, 0.02, ("get_parameter_names", "nested_gather")),
    "transformers/optimization.py": (
        0,
        0.03,
        ("_get_cosine_schedule_with_warmup_lr_lambda", "get_cosine_schedule_with_warmup", "get_scheduler"),
    ),
    "transformers/generation/logits_process.py": (0, 0.05, ("__call__",)),
    "transformers/generation/stopping_criteria.py": (0, 0.02, ("__call__",)),
    "transformers/generation/utils.py": (
        0,
        0.05,
        (
            "_sample",
            "_get_logits_processor",
            "prepare_inputs_for_generation",
            "_update_model_kwargs_for_generation",
            "_get_stopping_criteria",
        ),
    ),
    "transformers/models/qwen2/modeling_qwen2.py": (
        0,
        0.08,
        ("forward", "rotate_half", "apply_rotary_pos_emb", "repeat_kv", "compute_default_rope_parameters", "__init__"),
    ),
    "accelerate/data_loader.py": (0, 0.03, ("__iter__", "_iter_with_no_split", "_iter_with_split", "synchronize_rng_state")),
    "accelerate/optimizer.py": (0, 0.02, ("step", "zero_grad")),
    "accelerate/accelerator.py": (0, 0.03, ("backward", "clip_grad_norm_", "gather", "_do_sync", "accumulate", "unscale_gradients")),
    "peft/tuners/lora/layer.py": (1, 0.1, ("forward", "update_layer", "reset_lora_parameters", "set_scale", "get_delta_weight")),
}
"""Files on the path of a step: the level that runs them, their share of the mutants, and the functions of the path."""
SAME = "every recorded bit of every step is that of the clean run"


def choose(server: Server, python: Path, work: Path, count: int, seed: int, short: bool = False) -> list[dict[str, Any]]:
    """Mutants of executed lines, spread over the files by their shares and in random order; `short` traces no variants."""
    site = python.parent.parent / "lib" / "python3.11" / "site-packages"
    draw = random.Random(seed)
    lines: dict[str, list[int]] = {}
    for number in sorted({level for level, _, _ in TARGETS.values()}):
        files = [str(site / name) for name, (level, _, _) in TARGETS.items() if level == number]
        place = work / f"trace-{number}"
        place.mkdir(parents=True)
        target = place / "lines.json"
        phase = phases_of(number, place, python)[0]
        words = [word for word in phase.argv[3:] if not short or word != "--variants"]
        answer = server.ask(module="train", argv=words, log=str(place / "log"), timeout=600, trace=files, lines=str(target))
        if answer["exit"] != 0:
            raise RuntimeError(f"the clean run failed: {place / 'log'}")
        lines |= json.loads(target.read_text())
    chosen = []
    for name, (number, share, functions) in TARGETS.items():
        file = str(site / name)
        ran = lines.get(file, [])
        found = [mutant for mutant in server.ask(list=file, lines=ran) if mutant["function"] in functions]
        for mutant in draw.sample(found, min(len(found), max(1, round(share * count)))):
            chosen.append({**mutant, "lines": ran, "level": number, "short": name})
    draw.shuffle(chosen)
    return chosen


def reasons() -> dict[tuple[str, int, str], str]:
    """Mutants that are known to be equivalent, each with the reason."""
    rows = tomllib.loads((HERE / "equivalent.toml").read_text(encoding="utf-8")).get("mutant", [])
    return {(row["file"], row["line"], row["after"]): row["reason"] for row in rows}


def outcome(
    server: Server, mutant: dict[str, Any], python: Path, work: Path, name: str, known: dict[tuple[str, int, str], str]
) -> dict[str, Any]:
    """The mutant with its outcome: the main run first, and the variants only if that passes."""
    number, place = mutant["level"], work / name
    found = run(server, number, place / str(number), python, short=True, mutant=mutant, run_dir=work)
    if found is None and number == 0:
        place = work / f"{name}-whole"
        found = run(server, number, place / str(number), python, mutant=mutant, run_dir=work)
    same = found is None and same_record(place / str(number), work / "clean" / str(number))
    shutil.rmtree(work / name, ignore_errors=True)
    shutil.rmtree(work / f"{name}-whole", ignore_errors=True)
    row = {key: value for key, value in mutant.items() if key != "lines"}
    if isinstance(found, CheckResult):
        return row | {"outcome": "killed", "by": found.stage or found.name, "message": found.message, "reason": ""}
    if found is not None and found.startswith((BLOCKED, "shadow")):
        return row | {"outcome": BLOCKED, "by": "", "message": found, "reason": found}
    if found is not None:
        return row | {"outcome": "killed", "by": found if found in ("crash", "hang") else "judge", "message": found, "reason": ""}
    reason = known.get((mutant["short"], mutant["line"], mutant["after"]), "") or (SAME if same else "")
    return row | {"outcome": "equivalent" if reason else "survived", "by": "", "message": "", "reason": reason}


def main() -> int:
    """Run the mutants and print the table; 1 when fewer than 95 % of those that are not equivalent were killed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--out", type=Path, help="keep what the mutants leave here")
    parser.add_argument("--table", type=Path, help="write the table as Markdown, too")
    parser.add_argument("--only", help="part of a file's name")
    arguments = parser.parse_args()
    python, work = trl_python(), arguments.out or Path(tempfile.mkdtemp(prefix="mutants-"))
    servers = [Server(python) for _ in range(arguments.jobs)]
    try:
        for level in (0, 1):
            clean = run(servers[0], level, work / "clean" / str(level), python, run_dir=work)
            if clean is not None:
                sys.exit(f"the clean run of level {level} does not pass: {clean}")
        chosen = choose(servers[0], python, work, arguments.count, arguments.seed)
        mutants = [mutant for mutant in chosen if not arguments.only or arguments.only in mutant["short"]]
        known, started, done = reasons(), time.monotonic(), Counter[str]()

        def told(server: Server, item: tuple[int, dict[str, Any]]) -> dict[str, Any]:
            row = outcome(server, item[1], python, work, f"{item[0]:04d}", known)
            done[row["outcome"]] += 1
            change = f"{row['before'][:60]!r} -> {row['after'][:60]!r}"
            count = f"{done.total()}/{len(mutants)}, {time.monotonic() - started:.0f} s"
            print(f"[{count}] {row['outcome']} {row['by']}: {row['short']}:{row['line']} {change}", flush=True)
            return row

        rows = spread(servers, list(enumerate(mutants)), told)
    finally:
        for server in servers:
            server.close()
    text, share = table(rows)
    print(text)
    (work / "rows.json").write_text(json.dumps(rows, indent=1))
    if arguments.table:
        arguments.table.write_text(text, encoding="utf-8")
    return 0 if share >= 0.95 else 1


def table(rows: list[dict[str, Any]]) -> tuple[str, float]:
    """The table as Markdown, and the share that was killed of those that are not equivalent."""
    outcomes = Counter(row["outcome"] for row in rows)
    killed, missed = outcomes["killed"], outcomes["survived"] + outcomes[BLOCKED]
    share = killed / max(1, killed + missed)
    by = Counter(row["by"] for row in rows if row["outcome"] == "killed")
    lines = [
        f"{len(rows)} mutants: {killed} killed, {outcomes['survived']} survived, {outcomes[BLOCKED]} blocked, "
        f"{outcomes['equivalent']} equivalent: {100 * share:.1f} % of those that are not equivalent are killed",
        "",
    ]
    lines += ["| killed by | mutants |", "|---|---|", *(f"| {name} | {count} |" for name, count in by.most_common()), ""]
    lines += ["| outcome | file, line | before | after | why |", "|---|---|---|---|---|"]
    for row in sorted((row for row in rows if row["outcome"] != "killed"), key=lambda row: (row["outcome"], row["short"], row["line"])):
        before, after = (row[key].replace("|", "\\|").replace("\n", " ")[:90] for key in ("before", "after"))
        lines.append(f"| {row['outcome']} | {row['short']}:{row['line']} | `{before}` | `{after}` | {row['reason']} |")
    return "\n".join(lines) + "\n", share


if __name__ == "__main__":
    sys.exit(main())
