"""verl on GPUs as the loop sees it: checks before a GPU is touched, the ladder with options in force, proofs of a finished run.

`record_script` runs the real script with stand-ins for `python3` and `uv` that write down how they were called and do nothing;
Hydra then composes the configuration, which is read back after the run.
"""

from __future__ import annotations

import math
import os
import re
import shlex
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from seatrial.checks.probe_facts import proof, read_facts, trained_with
from seatrial.core.errors import FindingCode
from seatrial.core.files import read_text
from seatrial.core.guarded import BadValue, as_float, parse_count, parse_json
from seatrial.core.loop import Context, finding, gather
from seatrial.core.records import CheckResult, Finding
from seatrial.core.series import Metrics
from seatrial.core.specs import Level
from seatrial.core.verdict import Boundary
from seatrial.loops.console_lines import read_lines
from seatrial.loops.host_findings import ask, gpus_here
from seatrial.loops.hydra import configured_wrong, rejected, unlike_claims, with_options, word_findings
from seatrial.loops.verl import gpu_runs, verl_checkout
from seatrial.loops.verl.gpu_runs import GPUS, LEARNING_STEPS, Variant, gpus, phases, training, variants
from seatrial.loops.verl.verl_checkout import CONFIG
from seatrial.loops.verl.verl_log import in_force, skipped_steps
from seatrial.runtime.command import NoAnswerError, run_command

SCRIPT_SECONDS = 60
COMPOSE_SECONDS = 300
MAIN = "verl.trainer.main_ppo"
COMPOSER = Path(__file__).parents[2] / "instruments" / "compose_config.py"
STAND_IN = """\
import json, os, sys
if sys.argv[-1] == "-":
    sys.stdin.read()
    print("cuda")
else:
    with open(sys.argv[1], "a") as stream:
        stream.write(json.dumps({"argv": sys.argv[2:], "environment": dict(os.environ)}) + "\\n")
"""


class ScriptError(Exception):
    """The script did not come to the point where it starts training."""


@dataclass(frozen=True, slots=True)
class ScriptRecording:
    argv: tuple[str, ...]
    environment: Mapping[str, str]

    def launch(self) -> tuple[str, ...]:
        return self.argv[: self.argv.index(MAIN) - 1]

    def config_name(self) -> str:
        named = [word.partition("=")[2] for word in self._words() if word.startswith("--config-name=")]
        return named[-1] if named else "ppo_trainer"

    def overrides(self) -> list[str]:
        """What is passed on to Hydra, without its flags and its own settings."""
        return [word for word in self._words() if not word.startswith(("--", "hydra."))]

    def _words(self) -> tuple[str, ...]:
        return self.argv[self.argv.index(MAIN) + 1 :]


def record_script(script: Path, checkout: Path, arguments: Sequence[str], environment: Mapping[str, str]) -> ScriptRecording:
    """Run the script with stand-ins; ScriptError with its last lines when it does not start training."""
    with tempfile.TemporaryDirectory(prefix="seatrial-record-") as folder:
        place = Path(folder)
        calls = place / "calls.jsonl"
        (place / "stand_in.py").write_text(STAND_IN, encoding="utf-8")
        for name in ("python3", "uv"):
            words = shlex.join([sys.executable, "-I", str(place / "stand_in.py"), str(calls), name])
            (place / name).write_text(f'#!/bin/sh\nexec {words} "$@"\n', encoding="utf-8")
            (place / name).chmod(0o755)
        path = os.pathsep.join((folder, environment.get("PATH") or os.defpath))
        try:
            own = {**environment, "PATH": path}
            done = run_command(["bash", script, *arguments], SCRIPT_SECONDS, cwd=checkout, env=own, own_session=True)
        except NoAnswerError as error:
            raise ScriptError(f"{script}: {error}") from error
        try:  # a last line without its end is of a call that was killed before it began
            rows = [parse_json(line) for line in read_text(calls).split("\n")[:-1]] if calls.exists() else []
        except BadValue as error:
            raise ScriptError(f"{script}: its calls were not recorded whole: {error}") from error
    for row in rows:
        if MAIN in row["argv"]:
            return ScriptRecording(tuple(row["argv"]), row["environment"])
    said = [line for line in done.error.splitlines() if line and not line.startswith("+")] or done.error.splitlines()
    raise ScriptError(f"{script}: ended with code {done.code} before training: {(said or ['(nothing said)'])[-1]}")


@dataclass(frozen=True, slots=True)
class HydraRequest:
    """One run to compose: how it is recorded, and what is claimed of it."""

    title: str
    recording: ScriptRecording
    claims: Mapping[str, Any]


def compose(
    wanted: Sequence[HydraRequest], checkout: Path, start: Sequence[str], environment: Mapping[str, str], own: Sequence[str]
) -> list[Finding]:
    """Findings over all runs; `own` are the user's overrides, which are named as such."""
    runs = [{"config": w.recording.config_name(), "overrides": w.recording.overrides(), "keys": list(w.claims)} for w in wanted]
    try:
        answers = ask(start, COMPOSER, checkout, environment, COMPOSE_SECONDS, {"config_dir": str(checkout / CONFIG), "runs": runs})
    except NoAnswerError as error:
        message = f"the configuration could not be composed in {error}"
        return [finding("configuration", False, message, "install verl's dependencies (hydra-core) into the loop's Python")]
    made = [finding for run, answer in zip(wanted, answers, strict=True) for finding in _judge(run, answer, own)]
    return made or [configured_wrong(True, f"{len(wanted)} runs composed, {sum(len(run['keys']) for run in runs)} values as claimed")]


def _judge(run: HydraRequest, answer: Mapping[str, Any], own: Sequence[str]) -> list[Finding]:
    if answer["error"]:
        message = f"{run.title}: verl's own configuration does not compose: {answer['error']}"
        return [configured_wrong(False, message, "use a clean verl checkout")]
    found = rejected(run.title, answer, own, "verl", lambda _: "wrapper and configuration are of different versions: use a clean checkout")
    return [*found, *unlike_claims(run.title, run.claims, answer, own, "verl's own wrapper")]


MACHINE = (FindingCode.GPUS, FindingCode.CPUS)
"""Findings about this machine: the configuration can be composed all the same."""
QUEUE_CPUS = 9
"""verl's transfer queue: eight storage actors and a controller take one each; with fewer it waits for ever."""
CPUS_PER_GPU = 3
"""What verl reserves beside each GPU for the workers that share it; with fewer their placement group waits for ever."""
STORAGE_UNITS = "transfer_queue.backend.SimpleStorage.num_data_storage_units"


def findings(context: Context) -> tuple[Finding, ...]:
    """What must be right before a GPU is touched; the configuration is composed only when the rest is."""
    place = verl_checkout.checkout_of(context)
    found = verl_checkout.layout(place)
    places = [*context.arguments, str(context.run_dir), verl_checkout.python_path(context), *gpu_runs.data_files(context)]
    of_the_machine = (
        lambda: gpu_runs.gpu_model_findings(context),
        lambda: gpu_runs.architecture_findings(context),
        lambda: gpus_here(gpus(context), "--device cpu, or run it on a cluster with --on"),
        lambda: _cpus(context),
        lambda: word_findings(context.arguments, places, "wrapper"),
    )
    if not found.ok or place is None:
        return gather(lambda: found, *of_the_machine)
    calls = {name: variants(name, context, context.run_dir / "levels" / name) for name in context.levels}
    checkout = (lambda: found, lambda: verl_checkout.launching(context), lambda: verl_checkout.shadowing(context))
    made = list(gather(*checkout, *of_the_machine, lambda: _sizes(calls, gpus(context))))
    if all(finding.ok or finding.code in MACHINE for finding in made):
        made += gather(lambda: _configuration(calls, context, place))
    else:
        first = ", ".join(dict.fromkeys(finding.name for finding in made if not finding.ok and finding.code not in MACHINE))
        message = f"not composed, because this must be right before: {first}"
        made.append(Finding(name="configuration", ok=True, boundary=Boundary.CONFIG, message=message))
    return tuple(made)


def _cpus(context: Context) -> tuple[Finding, ...]:
    if os.environ.get("RAY_ADDRESS") or any(STORAGE_UNITS in word or "ray_init.num_cpus" in word for word in context.arguments):
        return ()
    count, least = os.cpu_count() or 1, QUEUE_CPUS + CPUS_PER_GPU * gpus(context)
    message = f"{count} CPUs here, {least} needed by Ray's actors"
    return (finding("CPUs", count >= least, message, f"use a larger host, or -- {STORAGE_UNITS}=1", Boundary.CLUSTER),)


def _sizes(calls: Mapping[str, Sequence[Variant]], count: int) -> list[Finding]:
    made = []
    for level, call in ((level, call) for level, each in calls.items() for call in each):
        wrong = call.sizes.problem(count)
        if wrong:
            fix = "choose --set options.tp=, pp=, cp=, ep=, etp= so that their products divide the GPUs"
            made.append(Finding(name="sizes", ok=False, boundary=Boundary.CONFIG, message=f"{level}: {wrong}", fix=fix))
    return made


def _configuration(calls: Mapping[str, Sequence[Variant]], context: Context, place: Path) -> list[Finding]:
    """Run the scripts with stand-ins, compare how they start Python with what the import check does, and compose."""
    environment = {**os.environ, "PYTHONPATH": verl_checkout.python_path(context)}
    wanted, made = [], []
    for level, call in ((level, call) for level, each in calls.items() for call in each):
        phase = training(call, context, context.run_dir / "levels" / level)
        title = f"{level} ({call.name})"
        try:
            recording = record_script(place / call.script, place, phase.argv[2:], {**environment, **phase.env})
        except ScriptError as error:
            made.append(
                Finding(name="configuration", ok=False, boundary=Boundary.CONFIG, message=f"{title}: {error}", fix="use a clean checkout")
            )
            continue
        expected = ("uv", *verl_checkout.uv_words(call.extras), "python3") if verl_checkout.launcher(context) == "uv" else ("python3",)
        if recording.launch() != expected:
            message = (
                f"{title}: {call.script} starts `{' '.join(recording.launch())}`, and imports would be checked with `{' '.join(expected)}`"
            )
            fix = "this wrapper is of a generation that Seatrial does not know: --set options.launcher=python"
            made.append(Finding(name="launcher", ok=False, boundary=Boundary.CONFIG, message=message, fix=fix))
        wanted.append(HydraRequest(title, recording, call.claims))
    if wanted and verl_checkout.launcher(context) == "python" and not context.has_python:
        made.append(configured_wrong(True, "not composed: there is no interpreter for it yet (see environment)"))
    elif wanted:
        extras = next(call.extras for each in calls.values() for call in each)
        made += compose(wanted, place, verl_checkout.start_words(context, extras), environment, context.arguments)
    return made


RESUMING = re.compile(r"Resuming from (\S+), setting global step to (\d+)")
ADAPTER = re.compile(r"\bAdapter parameters: +([\d,]*\d)")
SCRATCH = "Training from scratch"
TRACKER = "latest_checkpointed_iteration.txt"
PHASES = {"save-resume": ("save", "resume")}
"""Calls of a level that has more than the one called `run`."""
LEAST_PROMPTS = 30
LEAST_T = 2.33
"""One-sided, 1 %, for as many prompts as are required."""


def proofs(level: Level, directory: Path, metrics: Metrics) -> tuple[CheckResult, ...]:
    facts = read_facts(directory / "imports" / "facts.jsonl")
    claims = {str(row["phase"]): row["values"] for row in facts.of("claims")}
    made = [proof("facts are whole", False, str(item), Boundary.METRICS) for item in facts.damage]
    absent = sorted(set(PHASES.get(level.name, ("run",))) - set(claims))
    if absent:
        made.append(proof("what the level claims was recorded", False, f"no facts of {', '.join(absent)}", Boundary.CONFIG))
    for phase, values in claims.items():
        made.append(in_force(phase, values, directory / phase / "run.log"))
        if any(key.endswith("model.lora.rank") for key in values):
            made.append(adapters(phase, directory / phase / "run.log"))
    made += [trained_with(directory / "imports.jsonl"), every_step(metrics)]
    if level.name == "save-resume":
        made += resumed(directory, metrics)
    if level.name == "learning":
        made.append(validation_rose(directory / "run" / "validation"))
    return tuple(made)


def adapters(phase: str, log: Path) -> CheckResult:
    """The engine counted trainable parameters of an adapter. A rank in the configuration wraps nothing by itself, and
    Megatron-Bridge keeps silent where no module matches."""
    counts = [parse_count(match[1]) for _, _, text in read_lines(log) if (match := ADAPTER.search(text))] if log.is_file() else []
    value = ", ".join(f"{count:,}" for count in counts) or "no line says so"
    return proof(f"adapters were built ({phase})", min(counts, default=0) > 0, value, Boundary.PEFT, "> 0 parameters", run=phase)


def every_step(metrics: Metrics) -> CheckResult:
    skipped = skipped_steps(metrics)
    return proof("every step was logged", skipped is None, "no" if skipped else "yes", Boundary.METRICS, "", skipped or "")


def resumed(directory: Path, metrics: Metrics) -> list[CheckResult]:
    """The second process began where the first one saved, and saved again."""
    place, log = directory / "save" / "checkpoints", directory / "resume" / "run.log"
    said = [text for _, _, text in read_lines(log)] if log.is_file() else []
    found = [match for text in said if (match := RESUMING.search(text))]
    right = bool(found) and all(Path(match[1]) == place / "global_step_1" and match[2] == "1" for match in found)
    scratch = any(SCRATCH in text for text in said)
    series = metrics.series.get("resume/training/global_step")
    steps = list(series.steps) if series else []
    tracker = read_text(place / TRACKER).strip() if (place / TRACKER).is_file() else "absent"
    return [
        proof("resumed from the checkpoint of this level", right and not scratch, _where(found, scratch), Boundary.CHECKPOINT, "step 1"),
        proof("the resumed run trains step 2 only", steps == [2], f"steps {steps}", Boundary.CHECKPOINT, "[2]"),
        proof("the last checkpoint is that of step 2", tracker == "2", tracker, Boundary.CHECKPOINT, "2"),
        *(complete(place / f"global_step_{step}") for step in (1, 2)),
    ]


def _where(found: list[re.Match[str]], scratch: bool) -> str:
    if scratch:
        return "trained from scratch"
    return f"{found[-1][1]}, step {found[-1][2]}" if found else "no line says so"


def complete(folder: Path) -> CheckResult:
    """A checkpoint has an actor, a critic and the position in the data."""
    parts = {name: any((folder / name).rglob("*")) for name in ("actor", "critic")} | {"data.pt": (folder / "data.pt").is_file()}
    absent = [name for name, there in parts.items() if not there]
    name = f"checkpoint {folder.name} is complete"
    return proof(name, not absent, f"{len(parts) - len(absent)} of {len(parts)} parts", Boundary.CHECKPOINT, "all", ", ".join(absent))


def validation_rose(folder: Path) -> CheckResult:
    """Scores of the same validation prompts, before the first step and after the last."""
    name = "validation scores rose from the start to the end"
    steps = sorted(int(path.stem) for path in folder.glob("*.jsonl") if path.stem.isdecimal())
    if len(steps) < 2 or steps[0] != 0:
        return proof(name, False, f"validated at steps {steps}", Boundary.METRICS, "at step 0 and at the end")
    first, last = (_scores(folder / f"{step}.jsonl") for step in (steps[0], steps[-1]))
    if first is None or last is None or first.keys() != last.keys() or len(first) < LEAST_PROMPTS:
        message = f"the same {LEAST_PROMPTS} prompts or more must be scored both times"
        return proof(name, False, f"{len(first or ())} and {len(last or ())} prompts", Boundary.METRICS, "", message)
    gains = [last[prompt] - first[prompt] for prompt in first]
    mean, spread = statistics.fmean(gains), statistics.stdev(gains)
    t = mean / (spread / math.sqrt(len(gains))) if spread else 0.0
    value = f"{statistics.fmean(first.values()):.4g} to {statistics.fmean(last.values()):.4g}, t = {t:.2f} over {len(gains)} prompts"
    return proof(name, mean > 0 and t >= LEAST_T, value, Boundary.METRICS, f"t >= {LEAST_T}")


def _scores(path: Path) -> dict[str, float] | None:
    """The mean score of each prompt; None when a row is not whole or a score is not a finite number."""
    found: dict[str, list[float]] = {}
    for row in read_text(path).split("\n"):
        if not row:
            continue
        try:
            entry = parse_json(row)
            found.setdefault(str(entry["input"]), []).append(as_float(entry["score"]))
        except (ValueError, KeyError, TypeError):
            return None
    means = {prompt: statistics.fmean(scores) for prompt, scores in found.items()}
    return means if all(math.isfinite(mean) for mean in means.values()) else None


__all__ = ["DEFAULT_MODEL", "findings", "levels", "limitations", "phases", "proofs"]

DEFAULT_MODEL = "Qwen/Qwen2.5-0.5B"


def levels(ladder: Sequence[Level], options: Mapping[str, str]) -> tuple[Level, ...]:
    """The ladder with these options: what cannot be run says why."""
    return with_options(ladder, options, GPUS, _changed)


def _changed(level: Level, options: Mapping[str, str]) -> dict[str, object]:
    if level.name == "learning":
        return {"steps": int(options.get("steps", LEARNING_STEPS[0]))}
    if level.name == "parallelism" and int(options.get("gpus", GPUS)) < 2:
        return {"skip": "one GPU has nothing to be parallel with: name more with --set options.gpus=N"}
    if level.name == "architecture":
        return {"skip": gpu_runs.why_no_architecture(options)}
    return {}


def limitations(level: Level, context: Context) -> tuple[str, ...]:
    made = []
    if not context.options.get("reward_model"):
        made.append("rewards came from a rule: no reward model was served")
    if context.options.get("model_config"):
        made.append("a dummy model with random weights: pretrained weights were not loaded")
    if gpu_runs.is_kind(context, "vlm") and level.name != "architecture":
        made.append("text-only data for a vision model: pictures and the vision encoder were not exercised")
    if gpu_runs.is_kind(context, "moe") and level.name not in ("parallelism", "architecture"):
        made.append("expert parallel size 1 for a model with experts: routing across ranks was not exercised")
    if any("enforce_eager=True" in word for word in context.arguments):
        made.append("enforce_eager was set: the capture of CUDA graphs was not exercised")
    return tuple(made)
