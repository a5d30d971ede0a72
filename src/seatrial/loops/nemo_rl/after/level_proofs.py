"""Proofs that only one level needs: a resume that was one, sizes and an architecture that were turned on, a signal.

Like all proofs they are functions of the files of a level, and what is missing is missed.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from seatrial.files import read_text
from seatrial.loops.claims import ABSENT, lookup
from seatrial.loops.lines import lines
from seatrial.loops.nemo_rl.after.dump import read_configs
from seatrial.loops.nemo_rl.after.results import ONLY
from seatrial.loops.nemo_rl.after.transfer import read_transfer
from seatrial.loops.nemo_rl.after.transports import transported
from seatrial.loops.proof import proof
from seatrial.loops.sizes import KEYS
from seatrial.model.record import CheckResult
from seatrial.model.series import Metrics
from seatrial.model.verdict import Boundary

EXACT = ("lr", "global_valid_seqs", "global_valid_toks", "num_unmasked_tokens", "num_valid_samples")
CLOSE = ("grad_norm", "loss")
TOLERANCES = {**dict.fromkeys(EXACT, 1e-5), **dict.fromkeys(CLOSE, 0.05)}
"""Relative, those of NeMo-RL's own comparison."""
LEAST = 1e-8
"""Absolute, the same: a learning rate of 1e-6 may differ by a hundredth."""
ENGINES = ("dtensor", "dtensor", "dtensor", "megatron", "megatron")
"""Of the five runs of the resume comparison, in order."""
RESUMED = re.compile(r"\[mcore 2step\] .*?={25} Step (\d+)/\d+ ={25}")
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
    """The proofs of one phase that its level asks for."""
    log = directory / phase / "run.log"
    text = read_text(log) if log.is_file() else ""
    if phase == "resume":
        yield from resumed(log, text, metrics)
    if level == "refit":
        yield from transported(phase, directory, text, metrics)
    elif (found := read_transfer(directory / phase, metrics, "" if phase == ONLY else f"{phase}/")) is not None:
        yield proof(f"weight transfer ({phase})", True, str(found), Boundary.REFIT)
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
    """Parallel sizes above 1."""
    found = {name: lookup(config, f"{MEGATRON}.{key}") for name, key in KEYS.items()}
    return {name: size for name, size in found.items() if type(size) is int and size > 1}


def turned_on(log: Path) -> CheckResult:
    """The training turned on something that a dense text model without extras does not have: a recipe may be anything."""
    found = [_features(config or {}) for config in (read_configs(log) if log.is_file() else [])]
    loaded = [match[1] for _, _, text in lines(log) if (match := CONFIG_FILE.match(text))] if log.is_file() else []
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
    return proof(
        "the draft model was trained and synchronised",
        there and not stale,
        "yes" if there else "no Draft Loss",
        Boundary.REFIT,
        "",
        stale[0] if stale else "",
    )


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
