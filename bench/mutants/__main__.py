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
import dataclasses
import json
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from seatrial.launch.environments import Environments
from seatrial.loops.trl.loop import LOOP
from seatrial.loops.trl.proofs import prove
from seatrial.metrics.checks import evaluate
from seatrial.model.loop import Context, Phase
from seatrial.model.record import CheckResult, PhaseOutcome
from seatrial.model.verdict import Verdict
from seatrial.trial.judge import Evidence, Judgement, judge
from seatrial.trial.level_files import read_level_metrics

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
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
TIMEOUT = 180.0
Outcome = CheckResult | str | None
BLOCKED = "blocked"
"""No Pass, and no Fail either: counts as missed."""
SAME = "every recorded bit of every step is that of the clean run"


class Server:
    """One process that forks drivers."""

    def __init__(self, python: Path) -> None:
        env = {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "PATH": "/usr/bin:/bin", "HOME": str(Path.home())}
        phase = phases_of(0, Path("/nowhere"), python)[0]
        self.process = subprocess.Popen(
            [str(python), "-m", "bench.mutants.server"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**env, **phase.env},
            text=True,
            cwd=tempfile.gettempdir(),
        )
        self.imports = float(self._read()["cpu"])
        """CPU seconds of all imports."""

    def _read(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError("the server of mutants ended")
        return json.loads(line)

    def ask(self, **request: Any) -> Any:
        """One request, one answer."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return self._read()

    def close(self) -> None:
        """End it."""
        self.process.kill()
        self.process.wait()


def phases_of(
    number: int,
    directory: Path,
    python: Path,
    words: Sequence[str] = (),
    options: Sequence[str] = (),
    model: str = "tiny-dense",
    run_dir: Path | None = None,
) -> tuple[Phase, ...]:
    """The phases of a level, with loop arguments and with options of the driver; `run_dir` holds the models that are made."""
    level = next(level for level in LOOP.levels() if level.number == number)
    phases = LOOP.phases(level, Context(run_dir=run_dir or directory.parent, python=python, model=model, arguments=tuple(words)), directory)
    made = []
    for phase in phases:
        split = phase.argv.index("--")
        made.append(dataclasses.replace(phase, argv=(*phase.argv[:split], *options, *phase.argv[split:])))
    return tuple(made)


def run(server: Server, number: int, directory: Path, python: Path, short: bool = False, **more: Any) -> Outcome:
    """Run the recorded part of a level: the first missed check, how it crashed, or None for a Pass; `short` leaves the variants out."""
    directory.mkdir(parents=True, exist_ok=True)
    how = {name: more.pop(name) for name in ("words", "options", "model", "run_dir") if name in more}
    phases = [phase for phase in phases_of(number, directory, python, **how) if phase.name != "resumed"]
    for phase in phases:
        log = directory / f"{phase.name}.log"
        if phase.argv[2] == "torch.distributed.run":  # several ranks are processes of their own
            code = _start(phase, log)
            if code != 0:
                return "crash"
            continue
        module = phase.argv[2].rpartition(".")[2]
        given = more if not phase.beside else {}
        words = [word for word in phase.argv[3:] if not short or word != "--variants"]
        answer = server.ask(module=module, argv=words, log=str(log), timeout=TIMEOUT, **given)
        if answer["exit"] is None:
            return "hang"
        if answer["exit"] != 0:
            return "shadow crashed" if phase.beside else "crash"
    verdict, missed = judged(number, directory, phases[0].steps)
    if verdict.verdict is Verdict.BLOCKED:
        return f"{BLOCKED}: {verdict.reason}"
    if missed:
        return missed[0]
    return None if verdict.verdict is Verdict.PASS else verdict.reason


def judged(number: int, directory: Path, steps: int | None) -> tuple[Judgement, list[CheckResult]]:
    """The verdict on what a level left, without its resume, and the checks that it missed."""
    level = next(level for level in LOOP.levels() if level.number == number)
    metrics = read_level_metrics(LOOP, directory)
    kept = [check for check in prove(level, directory, metrics) if number == 0 or not _of_resume(check)]
    kept += [evaluate(spec.expr, metrics, spec.boundary) for spec in level.checks if "resumed/" not in spec.expr]
    missed = [check for check in kept if not check.passed]
    ended = (PhaseOutcome(name="run", exit_code=0, ended="exited", seconds=0.0),)
    evidence = Evidence(metrics=metrics, checks=tuple(kept), phases=ended, steps_expected=steps, steps_reached=LOOP.steps_reached(metrics))
    return judge(evidence, LOOP.milestones()), missed


def _start(phase: Phase, log: Path) -> int:
    env = {"PYTHONPATH": str(ROOT / "src"), "PATH": "/usr/bin:/bin", "HOME": str(Path.home()), **phase.env}
    with log.open("wb") as stream:
        return subprocess.run(list(phase.argv), env=env, stdout=stream, stderr=subprocess.STDOUT, timeout=TIMEOUT, check=False).returncode


def same_record(one: Path, two: Path) -> bool:
    """Whether two runs recorded the same bits in every step: nothing of what a step does differs."""
    names = sorted(path.relative_to(one) for path in one.rglob("record.jsonl"))
    if names != sorted(path.relative_to(two) for path in two.rglob("record.jsonl")):
        return False
    return bool(names) and all((one / name).read_bytes() == (two / name).read_bytes() for name in names)


def _of_resume(check: CheckResult) -> bool:
    return "resume" in check.name or check.name.startswith(("restored", "final", "checkpoint is", "new adapters", "random state"))


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
    lock = LOOP.environments()["trl"]
    built = Environments().find("trl", lock)
    if built is None:
        sys.exit("the environment trl is not built; run: seatrial env build trl")
    work = arguments.out or Path(tempfile.mkdtemp(prefix="mutants-"))
    servers = [Server(built.python) for _ in range(arguments.jobs)]
    known = reasons()
    rows: list[dict[str, Any]] = []
    try:
        clean = next(
            filter(None, (run(servers[0], level, work / "clean" / str(level), built.python, run_dir=work) for level in (0, 1))), None
        )
        if clean is not None:
            sys.exit(f"the clean run does not pass: {clean}")
        mutants = choose(servers[0], built.python, work, arguments.count, arguments.seed)
        mutants = [mutant for mutant in mutants if not arguments.only or arguments.only in mutant["short"]]
        waiting, lock_rows = list(enumerate(mutants)), threading.Lock()
        started = time.monotonic()

        def worker(server: Server) -> None:
            while True:
                with lock_rows:
                    if not waiting:
                        return
                    index, mutant = waiting.pop(0)
                number, place = mutant["level"], work / f"{index:04d}"
                found = run(server, number, place / str(number), built.python, short=True, mutant=mutant, run_dir=work)
                if found is None and number == 0:
                    place = work / f"{index:04d}-whole"
                    found = run(server, number, place / str(number), built.python, mutant=mutant, run_dir=work)
                same = found is None and same_record(place / str(number), work / "clean" / str(number))
                shutil.rmtree(work / f"{index:04d}", ignore_errors=True)
                shutil.rmtree(work / f"{index:04d}-whole", ignore_errors=True)
                row = {**mutant, "index": index, "reason": known.get((mutant["short"], mutant["line"], mutant["after"]), "")}
                del row["lines"]
                if isinstance(found, CheckResult):
                    row |= {"outcome": "killed", "by": found.stage or found.name, "message": found.message}
                elif found is not None and found.startswith((BLOCKED, "shadow")):
                    row |= {"outcome": BLOCKED, "by": "", "message": found, "reason": found}
                elif found is not None:
                    row |= {"outcome": "killed", "by": found if found in ("crash", "hang") else "judge", "message": found}
                else:
                    row["reason"] = row["reason"] or (SAME if same else "")
                    row |= {"outcome": "equivalent" if row["reason"] else "survived", "by": "", "message": ""}
                with lock_rows:
                    rows.append(row)
                    spent = time.monotonic() - started
                    where = f"{mutant['short']}:{mutant['line']}"
                    change = f"{mutant['before'][:60]!r} -> {mutant['after'][:60]!r}"
                    print(f"[{len(rows)}/{len(mutants)}, {spent:.0f} s] {row['outcome']} {row['by']}: {where} {change}", flush=True)

        threads = [threading.Thread(target=worker, args=(server,)) for server in servers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
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
