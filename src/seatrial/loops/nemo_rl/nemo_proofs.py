"""What a finished NeMo-RL run proves beside its metrics: pure functions from the files of a level directory to checks.

A missing file is a missed proof, never an absent one.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from seatrial.checks.probe_facts import ABSENT, Facts, about_run, lookup, proof, read_facts, trained_with
from seatrial.core.errors import UserError
from seatrial.core.files import read_as, read_table, read_text
from seatrial.core.guarded import parse_count
from seatrial.core.records import CheckResult
from seatrial.core.series import Metrics, Series
from seatrial.core.specs import Level
from seatrial.core.verdict import Boundary
from seatrial.loops.console_lines import read_lines
from seatrial.loops.hydra import KEYS
from seatrial.loops.nemo_rl import nemo_metrics
from seatrial.loops.nemo_rl.nemo_outputs import ONLY, RESULTS, completed_steps, dumps, in_force, read_configs
from seatrial.loops.nemo_rl.nemo_runs import CHECKPOINTS, CONVERTED_FOLDER, SAVING, converted_models
from seatrial.loops.nemo_rl.script_reader import FACTS, own_checks, unexpanded
from seatrial.loops.nemo_rl.weight_transfer import read_transfer, transported

EXACT = ("lr", "global_valid_seqs", "global_valid_toks", "num_unmasked_tokens", "num_valid_samples")
CLOSE = ("grad_norm", "loss")
TOLERANCES = {**dict.fromkeys(EXACT, 1e-5), **dict.fromkeys(CLOSE, 0.05)}
"""Relative, those of NeMo-RL's own comparison."""
LEAST = 1e-8
"""Absolute, the same: a learning rate of 1e-6 may differ by a hundredth."""
ENGINES = ("dtensor", "dtensor", "dtensor", "megatron", "megatron")
"""Of the five runs of the resume comparison, in order."""
RESUMED = re.compile(r"\[mcore 2step\] .*?={25} Step ([0-9]+)/[0-9]+ ={25}")
CUT = re.compile(r"\[mcore 1step\] .*?Saving checkpoint for step 1\.\.\.")
LOADED = re.compile(r"\[mcore 2step\] .*?successfully loaded checkpoint from (\S+)")
"""Printed by the Bridge. Where it finds no checkpoint to resume from, NeMo-RL takes the pretrained weights and counts on."""
QUANTIZERS = (
    re.compile(r"VllmQuantInternalWorkerExtension"),
    re.compile(r"VllmQuantGenerationWorker.*Inserted [1-9][0-9]* quantizers"),
    re.compile(r"Detected ModelOpt NVFP4 checkpoint"),
)
DRAFT = re.compile(r"Draft Loss:")
UNSYNCED = re.compile(r"Speculative decoding is enabled without draft refit sync|Received draft weights but vLLM drafter is unavailable")
MEGATRON = "policy.megatron_cfg"
FEATURES = {
    "moe": (f"{MEGATRON}.expert_model_parallel_size",),
    "eagle": ("policy.draft.enabled",),
    "mtp": (f"{MEGATRON}.mtp_num_layers",),
    "fp8": (f"{MEGATRON}.fp8_cfg.enabled",),
    "qat": ("policy.quant_cfg", "policy.quant_calib_size"),
}
"""Settings that turn an architecture's own path on."""
CONFIG_FILE = re.compile(r"Loaded configuration from: (\S+)$")
MODAL = re.compile(r"vlm|audio|omni|avqa")
LEAST_T = 2.9
"""One-sided, 1 %, for five steps against five."""
WORST_DROP = 0.1


def of_level(level: str, phase: str, directory: Path, metrics: Metrics, claims: Mapping[str, Any]) -> Iterator[CheckResult]:
    log = directory / phase / "run.log"
    text = read_text(log) if log.is_file() else ""
    if phase == "resume":
        yield from resumed(log, text, metrics)
    if level == "refit":
        yield from transported(phase, directory, text, metrics)
    elif (found := read_transfer(directory / phase, metrics, "" if phase == ONLY else f"{phase}/")) is not None:
        yield proof(f"weight transfer ({phase})", True, str(found), Boundary.REFIT, run=phase)
    if level == "parallelism":
        yield parallel(log)
    if level == "architecture":
        yield turned_on(log)
    if claims.get("policy.draft.enabled") is True:
        yield drafted(text)
    if "policy.quant_calib_size" in claims:
        yield quantized(text)
    if level == "learning":
        yield from learned(metrics)


def resumed(log: Path, text: str, metrics: Metrics) -> Iterator[CheckResult]:
    """The comparison of NeMo-RL, made again: the cut and resumed run is the run that was not cut, and it really was cut."""
    yield engines(log)
    first = RESUMED.search(text)
    value = f"its first step is {first[1]}" if first else "no line says so"
    yield proof("the resumed Megatron run begins with step 2", bool(first and first[1] == "2"), value, Boundary.CHECKPOINT, "2")
    cut = CUT.search(text) is not None
    yield proof("the first Megatron run saved step 1", cut, "yes" if cut else "no line says so", Boundary.CHECKPOINT)
    places = LOADED.findall(text)
    loaded = any("/step_1/" in f"{place}/" for place in places)
    value = f"from {', '.join(places)}" if places else "no line says so"
    yield proof("the resumed Megatron run loaded what step 1 saved", loaded, value, Boundary.CHECKPOINT, "step_1")
    for run in ("mcore", "dtensor"):
        yield compared(run, metrics)


def engines(log: Path) -> CheckResult:
    """Two of the five runs trained with Megatron, the others with DTensor: else equal numbers would prove nothing."""
    printed = read_configs(log) if log.is_file() else []
    used = [_engine(config or {}) for config in printed]
    right = len(used) == len(ENGINES) and tuple(used) == ENGINES
    return proof(
        "the resumed runs trained with Megatron", right, ", ".join(used) or "no configuration", Boundary.CONFIG, ", ".join(ENGINES)
    )


def _engine(config: Mapping[str, Any]) -> str:
    on = [name for name in ("megatron", "dtensor") if lookup(config, f"policy.{name}_cfg.enabled") is True]
    return on[0] if len(on) == 1 else "unknown"


def compared(run: str, metrics: Metrics) -> CheckResult:
    """Seven metrics at both steps, against the run that was not cut."""
    wrong = []
    for name, relative in TOLERANCES.items():
        one, two = (metrics.series.get(f"resume/{side}/train/{name}") for side in ("baseline", run))
        for step in (1, 2):
            left, right = (series.get(step) if series else None for series in (one, two))
            if left is None or right is None or not abs(right - left) <= LEAST + relative * abs(left):
                wrong.append(f"{name} at step {step}: {right} instead of {left}")
    value = f"{2 * len(TOLERANCES) - len(wrong)} of {2 * len(TOLERANCES)} values"
    return proof(f"resumed {run} run equals the uncut one", not wrong, value, Boundary.CHECKPOINT, "all close", "; ".join(wrong[:3]))


def parallel(log: Path) -> CheckResult:
    """Some parallel size is above 1 in each training: with all of them 1 the level is level 0."""
    found = [_sizes(config or {}) for config in (read_configs(log) if log.is_file() else [])]
    value = "; ".join(", ".join(f"{name} {size}" for name, size in sizes.items()) or "all sizes 1" for sizes in found)
    return proof("the model was split", bool(found) and all(found), value or "no configuration", Boundary.CONFIG, "a size above 1")


def _sizes(config: Mapping[str, Any]) -> dict[str, int]:
    found = {name: lookup(config, f"{MEGATRON}.{key}") for name, key in KEYS.items()}
    return {name: size for name, size in found.items() if type(size) is int and size > 1}


def turned_on(log: Path) -> CheckResult:
    """The training turned on something that a dense text model without extras does not have: a recipe may be anything."""
    found = [_features(config or {}) for config in (read_configs(log) if log.is_file() else [])]
    loaded = [match[1] for _, _, text in read_lines(log) if (match := CONFIG_FILE.match(text))] if log.is_file() else []
    modal = sorted({name for path in loaded for name in MODAL.findall("/".join(PurePosixPath(path).parts[-2:]))})
    value = ", ".join(dict.fromkeys((*modal, *(name for names in found for name in names))))
    name = "the architecture's own path was turned on"
    return proof(
        name, bool(modal) or (bool(found) and all(found)), value or "nothing", Boundary.CONFIG, f"one of {', '.join(FEATURES)}, vlm"
    )


def _features(config: Mapping[str, Any]) -> list[str]:
    values = {name: [lookup(config, key) for key in keys] for name, keys in FEATURES.items()}
    least = {"moe": 1}
    return [name for name, each in values.items() if any(_on(value, least.get(name, 0)) for value in each)]


def _on(value: Any, least: int) -> bool:
    """Whether a setting turns its feature on: a number above the least, a text, or true."""
    if type(value) is int:
        return value > least
    return value is True or (isinstance(value, str) and value not in (ABSENT, "", "auto", "bfloat16", "float16"))


def drafted(text: str) -> CheckResult:
    """The draft model was trained, and its weights follow the policy's."""
    there, stale = DRAFT.search(text) is not None, UNSYNCED.search(text)
    value, message = "yes" if there else "no Draft Loss", stale[0] if stale else ""
    return proof("the draft model was trained and synchronised", there and not stale, value, Boundary.REFIT, "", message)


def quantized(text: str) -> CheckResult:
    """The generator was quantized, in the case with inserted quantizers and in the one with a quantized checkpoint."""
    absent = [pattern.pattern for pattern in QUANTIZERS if not pattern.search(text)]
    value = f"{len(QUANTIZERS) - len(absent)} of {len(QUANTIZERS)} lines"
    return proof("the generator was quantized", not absent, value, Boundary.ROLLOUT, "all", "; ".join(absent))


def learned(metrics: Metrics) -> Iterator[CheckResult]:
    """The learning signal: rewards of the last quarter against the first, and the validation where there is one."""
    name, series = "learning signal: the reward did not fall", metrics.series.get("train/reward")
    quarter = len(series) // 4 if series else 0
    if series is None or quarter < 2:
        yield proof(name, False, f"{len(series) if series else 0} steps with a reward", Boundary.REWARD, ">= 8 steps")
    else:
        first, last = series.values[:quarter], series.values[-quarter:]
        t = _t(first, last)
        value = f"{statistics.fmean(first):.4g} to {statistics.fmean(last):.4g} (quarters of {quarter} steps), t = {t:.2f}"
        yield proof(name, t > -LEAST_T, value, Boundary.REWARD, f"t > -{LEAST_T}")
        more = "" if t > 0 else "nothing was learned in so few steps, or it cannot be seen: more steps (options.steps), or a baseline"
        yield proof("learning signal: the reward rose", t > 0, value, Boundary.REWARD, "last quarter above the first", more)
    accuracy = metrics.series.get("validation/accuracy")
    if accuracy is not None and len(accuracy) > 1:
        value = f"{accuracy.values[0]:.4g} at step {accuracy.steps[0]} to {accuracy.values[-1]:.4g} at step {accuracy.steps[-1]}"
        kept = accuracy.values[-1] >= accuracy.values[0] - WORST_DROP
        yield proof("learning signal: validation did not fall", kept, value, Boundary.REWARD, f"drop <= {WORST_DROP}")


def _t(first: tuple[float, ...], last: tuple[float, ...]) -> float:
    """Welch's t of the difference; without any spread the difference is certain."""
    gain = statistics.fmean(last) - statistics.fmean(first)
    error = math.sqrt(statistics.variance(first) / len(first) + statistics.variance(last) / len(last))
    return gain / error if error else (0.0 if gain == 0 else math.copysign(math.inf, gain))


TAKEN = re.compile(r"Checkpoint already exists at (\S+)\. Skipping import")
USED = re.compile(r"Using default megatron checkpoint dir: (\S+)")
"""Each worker says it. A trial may be judged where the user's own place for converted models is not known."""
MADE = "**/iter_0000000/*"
"""Where NeMo-RL puts a model that it converted, below its place and the model's name."""
UNUSED = "the import of the Bridge under test was not exercised"


def converted(phase: str, directory: Path, log: Path) -> CheckResult:
    """The level's own place holds a converted model, and none was taken from where another run, with another Bridge, may have
    put it."""
    texts = [text for _, _, text in read_lines(log)] if log.is_file() else []
    taken = [match[1] for text in texts if (match := TAKEN.search(text))]
    foreign = [path for path in taken if not _own(path, directory)]
    named = {match[1] for text in texts if (match := USED.search(text)) and _own(match[1], directory)}
    own = converted_models(directory, directory.parents[1].name)
    there = any(path.is_file() for where in (own, *map(Path, sorted(named))) for path in where.glob(MADE))
    value = f"{len(taken)} taken as converted, {len(foreign)} of them from elsewhere; {'one' if there else 'none'} in the level's own place"
    message = f"{foreign[0]} was made by an earlier run: {UNUSED}" if foreign else "" if there else f"{own} holds none: {UNUSED}"
    name = f"the Bridge under test converted the model ({phase})"
    return proof(name, there and not foreign, value, Boundary.CONFIG, "one of its own, 0 from elsewhere", message)


def _own(path: str, directory: Path) -> bool:
    """Whether a path is in the place of this level."""
    return f"/{directory.name}/{CONVERTED_FOLDER}/" in f"{path}/"


IMPORTS = "imports"
RESUME = "resume"
PEFT = "policy.megatron_cfg.peft.enabled"
THRESHOLD = "grpo.seq_logprob_error_threshold"
LEAST_ERROR = 0.999
"""The mean of exp(|difference|) is 1 at least; less by more than rounding means that tokens were left out."""
TOTAL = re.compile(r"\bTotal parameters: +([0-9,]*[0-9])")
TRAINABLE = re.compile(r"\bTrainable parameters: +([0-9,]*[0-9])")
SAVED = re.compile(r"\bSaving checkpoint for step ([0-9]+)\.\.\.")
DIAMOND = {"baseline": "baseline.json", "dtensor": "dtensor_2step.json", "mcore": "mcore_2step.json"}
"""Dumps of the resume comparison: the folder of the run, and the last dump of it."""


@dataclass(frozen=True, slots=True)
class Trained:
    name: str
    directory: Path
    """Of the level."""
    metrics: Metrics
    claims: Mapping[str, Any]
    asserted: tuple[str, ...] = ()
    """What script and level assert of the metrics."""

    @property
    def printed(self) -> list[dict[str, Any] | None]:
        return read_configs(self.log) if self.log.is_file() else []

    @property
    def log(self) -> Path:
        return self.directory / self.name / "run.log"

    @property
    def runs(self) -> list[str]:
        prefix = "" if self.name == ONLY else f"{self.name}/"
        return [run for run in nemo_metrics.training_runs(self.metrics) if run.startswith(prefix)]


def proofs(level: Level, directory: Path, metrics: Metrics) -> tuple[CheckResult, ...]:
    facts = read_facts(directory / FACTS)
    claims = {str(row["phase"]): row["values"] for row in facts.of("claims")}
    made = [proof("facts are whole", False, str(item), Boundary.METRICS) for item in facts.damage]
    absent = sorted(_phases(directory) - set(claims))
    if absent or not claims:
        made.append(proof("what the level claims was recorded", False, f"no facts of {', '.join(absent) or 'any run'}", Boundary.CONFIG))
    asserted = tuple(check.expr for check in (*level.checks, *own_checks(level, directory)))
    for name, values in claims.items():
        phase = Trained(name, directory, metrics, values, asserted)
        made += [*about_run(name, _of_phase(phase)), *of_level(level.name, name, directory, metrics, values)]
    return (*made, trained_with(directory / "imports.jsonl"), *_expanded(facts))


def _phases(directory: Path) -> set[str]:
    try:
        stored = read_as(directory / "phases.json", list[dict[str, Any]])
    except UserError:
        return set()
    return {str(entry.get("name")) for entry in stored} - {IMPORTS}


def _expanded(facts: Facts) -> Iterator[CheckResult]:
    for row in facts.of("assertions"):
        left, count = unexpanded(row["expressions"]), len(row["expressions"])
        name, value = f"assertions of {Path(row['script']).name} were read", f"{count - len(left)} of {count}"
        yield proof(name, not left, value, Boundary.METRICS, "all", "; ".join(left[:2]))


def _of_phase(phase: Trained) -> Iterator[CheckResult]:
    yield in_force(phase.name, phase.claims, phase.log)
    yield converted(phase.name, phase.directory, phase.log)
    if not phase.runs:
        yield proof(f"the run left metrics ({phase.name})", False, "none", Boundary.METRICS, "", "no event file shows a training step")
        return
    yield steps_agree(phase)
    yield from dumps_agree(phase)
    if phase.claims.get(PEFT) is True:
        yield adapters(phase)
    if phase.claims.get(SAVING) is True:
        yield saved(phase)
    printed = phase.printed
    if phase.name != RESUME:  # which trains five times for three runs; what each of them was is a proof of its own
        yield nemo_metrics.trained_once(phase.name, printed, phase.runs)
        yield nemo_metrics.finite(phase.name, (text for _, _, text in read_lines(phase.log)) if phase.log.is_file() else (), printed)
    for run in phase.runs:
        yield nemo_metrics.every_step(run, phase.metrics, printed)
        yield nemo_metrics.steps_differ(run, phase.metrics)
        yield nemo_metrics.moved(run, phase.metrics)
        if not nemo_metrics.supervised(phase.metrics, run):
            yield from _compared(run, phase, printed)


def _compared(run: str, phase: Trained, printed: list[dict[str, Any] | None]) -> Iterator[CheckResult]:
    yield tokens_counted(run, phase.metrics)
    yield unmasked(run, phase, printed)
    made = (nemo_metrics.two_computations(run, phase.metrics, printed), nemo_metrics.agreed(run, phase.metrics, phase.asserted))
    yield from (check for check in made if check)


def steps_agree(phase: Trained) -> CheckResult:
    """As many steps ended by the log as have a loss in the metrics."""
    ended = completed_steps(phase.log) if phase.log.is_file() else 0
    logged = sum(len(series) for run in phase.runs if (series := phase.metrics.series.get(f"{run}train/loss")))
    value = f"{ended} steps ended by the log, {logged} have a loss"
    return proof(f"log and metrics show the same steps ({phase.name})", ended == logged > 0, value, Boundary.METRICS, "equal")


def dumps_agree(phase: Trained) -> Iterator[CheckResult]:
    """The metrics that the script asserted are those of the event files, point by point."""
    place = phase.directory / phase.name
    found = {run: path for run, path in dumps(phase.directory).items() if path.is_relative_to(place)}
    found |= {f"{phase.name}/{run}/": place / RESULTS / name for run, name in DIAMOND.items() if (place / RESULTS / name).is_file()}
    events = any("tfevents" in source and Path(source).is_relative_to(place) for source in phase.metrics.sources)
    for run in phase.runs:
        name = f"metrics.json agrees with the event files{nemo_metrics.of_run(run)}"
        if not events:
            yield proof(name, False, "no event files", Boundary.METRICS, "", "the script's own dump alone cannot be compared with anything")
        elif run not in found:
            lost = (
                "metrics lost by a teardown crash or an early exit: the script ended before it dumped them; those here were "
                "recovered from the event files"
            )
            yield proof(name, False, "no dump", Boundary.METRICS, "", lost)
        else:
            yield _agrees(name, run, found[run], phase.metrics)


def _agrees(name: str, run: str, path: Path, metrics: Metrics) -> CheckResult:
    try:
        stored = read_table(path)
    except UserError as error:
        return proof(name, False, "cannot be read", Boundary.METRICS, "", error.message)
    ours = {tag.removeprefix(run): series for tag, series in metrics.series.items() if tag.startswith(run)}
    wrong = [text for tag in sorted({*ours, *stored}) if (text := _difference(tag, ours.get(tag), stored.get(tag)))]
    points = sum(len(series) for series in ours.values())
    return proof(
        name, bool(ours) and not wrong, f"{len(ours)} series, {points} points", Boundary.METRICS, "all equal", "; ".join(wrong[:3])
    )


def _difference(tag: str, ours: Series | None, stored: Any) -> str | None:
    """How one series of the dump differs from the event files."""
    points = {str(step): value for step, value in zip(ours.steps, ours.values, strict=True)} if ours else {}
    table = stored if isinstance(stored, dict) else {}
    if set(points) != set(table):
        return f"{tag}: {len(table)} points dumped, {len(points)} in the event files"
    other = [step for step, value in points.items() if not (value == table[step] or (math.isnan(value) and table[step] != table[step]))]
    return f"{tag}: other values at step {', '.join(other[:3])}" if other else None


def tokens_counted(run: str, metrics: Metrics) -> CheckResult:
    """No step in which every token was masked: its errors would look perfect."""
    series = metrics.series.get(f"{run}train/token_mult_prob_error")
    low = [step for step, value in zip(series.steps, series.values, strict=True) if not value >= LEAST_ERROR] if series else []
    value = f"least {min(series.values):.6g}" if series and series.values else "not logged"
    message = f"below 1 at step {', '.join(map(str, low[:5]))}: everything was masked" if low else ""
    return proof(
        f"tokens counted at every step{nemo_metrics.of_run(run)}",
        bool(series) and not low,
        value,
        Boundary.ROLLOUT,
        f">= {LEAST_ERROR}",
        message,
    )


def unmasked(run: str, phase: Trained, printed: list[dict[str, Any] | None]) -> CheckResult:
    """No sequence was left out because generator and trainer disagreed on it: the mean error of the rest says little."""
    name, bound = f"no sequence was masked for its error{nemo_metrics.of_run(run)}", "0 %"
    series = phase.metrics.series.get(f"{run}train/num_masked_seqs_by_logprob_error")
    if series is None:
        off = bool(printed) and all(lookup(config or {"grpo": None}, THRESHOLD) in (None, ABSENT) for config in printed)
        return proof(name, off and None not in printed, "masking is off" if off else "not logged", Boundary.ROLLOUT, bound)
    valid = phase.metrics.series.get(f"{run}train/global_valid_seqs")
    step, count = max(zip(series.steps, series.values, strict=True), key=lambda point: point[1], default=(0, 0.0))
    kept = (valid.get(step) if valid else None) or 0.0
    share = count / (count + kept) if count else 0.0
    value = f"{share:.3g} of the sequences at step {step}" if count else f"none at {len(series)} steps"
    message = "masking hides outlier sequences" if count else ""
    return proof(name, bool(series.values) and not any(series.values), value, Boundary.ROLLOUT, bound, message)


def adapters(phase: Trained) -> CheckResult:
    """Bridge counted trainable parameters, and fewer than all: `peft.enabled` wraps nothing where no module matches."""
    texts = [text for _, _, text in read_lines(phase.log)] if phase.log.is_file() else []
    some, every = ([parse_count(match[1]) for text in texts if (match := pattern.search(text))] for pattern in (TRAINABLE, TOTAL))
    right = min(some, default=0) > 0 and max(some) < max(every, default=0)
    value = ", ".join(f"{count:,}" for count in some) or "no line says so"
    return proof(f"trainable parameters of adapters ({phase.name})", right, value, Boundary.PEFT, "> 0, and not all")


def saved(phase: Trained) -> CheckResult:
    """A checkpoint was begun by the log, its writing was timed to the end, and it lies where it belongs under its final name."""
    texts = (text for _, _, text in read_lines(phase.log)) if phase.log.is_file() else iter(())
    steps = sorted({parse_count(match[1]) for text in texts if (match := SAVED.search(text))})
    timed = [series for run in phase.runs if (series := phase.metrics.series.get(f"{run}timing/train/checkpointing"))]
    done = any(value > 0 for series in timed for value in series.values)
    place = phase.directory / phase.name / CHECKPOINTS
    last = place / f"step_{steps[-1] if steps else 0}"  # earlier ones may be removed
    there = any(path.is_file() for path in last.rglob("*"))
    message = ("" if there else f"{last} holds no file") if done else "its writing was not timed"
    name, value = f"a checkpoint was saved ({phase.name})", f"steps {steps}" if steps else "no line says so"
    return proof(name, bool(steps) and done and there, value, Boundary.CHECKPOINT, "", message)
