"""What verl prints and logs: metrics, the configuration in force and its claims, what each metric means, and when a run proves nothing."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from seatrial.checks import probe_facts as generic
from seatrial.checks.probe_facts import lookup
from seatrial.checks.training_run import DEAD_RATE
from seatrial.core.guarded import parse_float, parse_step, parse_whole
from seatrial.core.loop import Vacuity
from seatrial.core.records import CheckResult
from seatrial.core.series import Damage, Metrics, Series
from seatrial.core.specs import Bound, Signals
from seatrial.core.verdict import Boundary
from seatrial.loops.console_lines import ConsoleLine, Points, bracket_depth, lines_of, parse_dict, read_blocks, read_lines

OPENING = re.compile(r"\{'(?:actor_rollout_ref|model)': ?")
"""The first key of a task runner's dump, and of a supervised run's."""


def read_config(log: Path) -> dict[str, Any] | None:
    found = read_configs(log)
    return found[-1] if found else None


def read_configs(log: Path) -> list[dict[str, Any] | None]:
    """Every configuration that was printed, in order; None stands for one that is torn."""
    made: list[dict[str, Any] | None] = []
    end = -1
    for index, rows in read_blocks(log, OPENING):
        if index > end:  # else it begins inside of the last one
            found, length = _literal(rows)
            if found is None or "trainer" in found:  # else another dictionary that begins alike
                made.append(found)
                end = index + length if found else end
    return made


def _literal(rows: list[ConsoleLine]) -> tuple[dict[str, Any] | None, int]:
    """The literal that begins at the first row, as written by one process, and the row where it ends."""
    parts, depth = list[str](), 0
    for index, text in lines_of(rows[0][1], rows):
        parts.append(text)
        depth += bracket_depth(text)
        if depth <= 0:
            return parse_dict(parts), index
    return None, 0


SMOKE = {
    "actor_rollout_ref.actor.strategy": "megatron",
    "actor_rollout_ref.actor.megatron.use_mbridge": True,
    "actor_rollout_ref.actor.megatron.vanilla_mbridge": False,
    "actor_rollout_ref.model.lora.rank": "> 0",
}
"""What every level claims, level 3 but for LoRA."""


def in_force(phase: str, claims: Mapping[str, Any], log: Path) -> CheckResult:
    """The configuration that the run printed is the one that the level claims."""
    return generic.check_claims(phase, claims, read_configs(log) if log.is_file() else [])


ENGINES = ("actor_rollout_ref.actor.strategy", "engine.strategy")
"""Who trains: of a policy, and of a supervised run."""


def not_exercised(log: Path) -> tuple[str, ...]:
    """Megatron and Megatron-Bridge, unless every configuration that the log shows trains with Megatron."""
    configs = [config for config in read_configs(log) if config] if log.is_file() else []
    engines = {str(lookup(config, key)) for config in configs for key in ENGINES if lookup(config, key) != generic.ABSENT}
    if engines == {"megatron"}:
        bridged = all(lookup(config, "actor_rollout_ref.actor.megatron.use_mbridge") is True for config in configs)
        return () if bridged else ("the log does not show that Megatron-Bridge was used",)
    if not engines:
        return ("the log does not show which engine trained: nothing here shows that Megatron or Megatron-Bridge ran",)
    return (f"the engine was {', '.join(sorted(engines))}: Megatron and Megatron-Bridge never ran",)


def other_run(log: Path) -> str | None:
    result = in_force("run", SMOKE, log)
    return None if result.passed else f"the log is not of this level: {result.message or result.value}"


SPANNED = ("score", "rewards", "advantages", "returns", "values")
"""Of the critic: logged with min, mean and max."""
SIGNALS = Signals(
    loss=("actor/(?:pg_)?loss", "critic/(?:vf_)?loss", "train/loss"),
    grad_norm=("(?:actor|critic|train)/grad_norm",),
    rate=("(?:actor|critic|train)/lr",),
    reward=("critic/score/mean", "critic/rewards/mean"),
    spreads=(("critic/advantages/max", "critic/advantages/min"), ("critic/score/max", "critic/score/min")),
    lengths=("response_length/(?:mean|max)", "train/global_tokens"),
    entropy=("actor/entropy",),
    moving=("actor/ppo_kl", "actor/kl_loss", "critic/vpred_mean"),
    counters=("training/global_step", "training/epoch", r"train/total_tokens\(B\)"),
    shares=(
        *("actor/pg_clipfrac(?:_lower)?", "critic/vf_clipfrac", "response/aborted_ratio"),
        *("(?:response_length(?:_non_aborted)?|prompt_length)/clip_ratio", "training/rollout_probs_diff_(?:max|mean)"),
    ),
    not_negative=(
        *("rollout_corr/k3_kl", "training/rollout_probs_diff_std", "critic/vf_loss", "train/global_tokens"),
        *("rollout_corr/(?:training|rollout)_ppl", "(?:response_length(?:_non_aborted)?|prompt_length|global_seqlen)/(?:min|mean|max)"),
    ),
    ordered=tuple(
        (f"{name}/{less}", f"{name}/{more}")
        for name in (*(f"critic/{part}" for part in SPANNED), "response_length", "prompt_length")
        for less, more in (("min", "mean"), ("mean", "max"), ("min", "max"))
    ),
    bounds=(
        Bound("(?:actor|critic|train|val)/(?:pg_|vf_)?loss", low=-1e6, high=1e6, floor=100, growth=100),
        Bound("(?:actor|train)/grad_norm", high=1e6, floor=100, growth=300),
        Bound("critic/grad_norm", high=1e6, floor=1e4, growth=300),
        Bound("(?:actor|critic|train)/lr", high=10),
        # Between the policy before and after an update: 5 nats per token are a probability of 0.7 %.
        Bound("actor/ppo_kl", low=-1e3, high=1e3, floor=5, growth=100),
        Bound("actor/kl_loss", low=-1e4, high=1e4, floor=20, growth=100),
        Bound("actor/entropy", high=1e4, floor=20, growth=20),
        Bound("critic/(?:score|rewards|returns|values|advantages)/.+|critic/vpred_mean", low=-1e9, high=1e9, floor=1e4, growth=1e3),
        # Generator and trainer: 6e-4 with stale weights of a tiny model, 5e-3 in the field's large ones.
        Bound("training/rollout_probs_diff_mean", high=0.1),
        Bound("training/rollout_actor_probs_pearson_corr", low=0.9, high=1.0001),
        Bound("rollout_corr/(?:kl|k3_kl|log_ppl_diff|log_ppl_abs_diff)", low=-5, high=5),
        # Of one sequence, and the same as a ratio: exp(5). No word of any vocabulary costs 30 nats on average.
        Bound("rollout_corr/log_ppl_diff_(?:min|max)", low=-20, high=20),
        Bound("rollout_corr/ppl_ratio", low=0.0067, high=150),
        Bound("rollout_corr/(?:rollout|training)_log_ppl", low=0, high=30),
        Bound("rollout_corr/(?:rollout|training)_ppl", low=0, high=1e7),
    ),
    control="control/",
)


REPEATED = re.compile(r"\s*\[repeated \d+x across cluster\].*$")
RECORD = re.compile(r"\bstep:(-?\d+) - (?=\S)")
_NUMBER = r"[-+]?(?:[0-9]+\.?[0-9]*(?:e[-+]?[0-9]+)?|\.[0-9]+|nan|NaN|inf|Infinity)|True|False|None|null"
TRAINED = re.compile(r"(?:^|.*/)(?:training/global_step|actor/(?:pg_)?loss|critic/vf_loss|train/loss)$")
"""Metrics that only a training step writes."""
WORDS = {"True": "1", "False": "0", "None": "nan", "null": "nan"}
NUMBERS = re.compile(rf"(?:[^/]+/)*?(?:{'|'.join(SIGNALS.every)})$")
"""Metrics of which True and False are damage."""
ITEM = re.compile(rf"(?P<key>\S.*):(?:np\.\w+\((?P<wrapped>{_NUMBER})\)|(?P<plain>{_NUMBER}))")
"""A key may hold colons, so the value stands after the last one."""
PLANS = {
    "trainer": re.compile(r"\bTotal training steps: ([0-9]{1,18})\b"),
    "bar": re.compile(r"\bTraining Progress: +\d+%\|[^|]*\| \d+/([0-9]{1,18}) \["),
    "schedule": re.compile(r"\bTotal steps: ([0-9]{1,18}), num_warmup_steps"),
}
"""How many steps were planned. The schedules of learning rates are the only word of supervised runs on their length."""


def read_console(log: Path) -> Metrics:
    points = Points()
    damage: list[Damage] = []
    words: dict[str, Damage] = {}
    end = last = 0
    for number, _, text in read_lines(log):
        end = number
        for step, body in _records(text) if "step:" in text else ():
            last = number
            if step is None:
                damage.append(Damage(str(log), f"line {number}", 1, "a record of metrics whose step is no step"))
                continue
            values, logic, torn = _values(body)
            for key in logic:
                words.setdefault(key, Damage(str(log), f"line {number}", 1, f"the value of {key!r} is not a number"))
            if torn is not None:
                damage.append(Damage(str(log), f"line {number}", 1, f"not a record of metrics: {torn[:80]!r}"))
            for tag, value in values.items():
                points.add(tag, step, value)
    if last and last == end and not damage:  # no line feed after it: the last number may be half of one
        damage.append(Damage(str(log), f"line {end}", 1, "the log ends inside a record of metrics"))
    return points.metrics(log, damage, words)


def _records(text: str) -> Iterator[tuple[int | None, str]]:
    """Step and items of the records in a line, None for a step that is none. What a model wrote about some `step:1 - ` is
    prose, not a record."""
    found = list(RECORD.finditer(text))
    for index, match in enumerate(found):
        body = text[match.end() : found[index + 1].start() if index + 1 < len(found) else None]
        first = body.split(" - ")[0].rstrip()
        if ":" in first[1:-1] or " " not in first:
            yield parse_step(match[1]), REPEATED.sub("", body).strip()


def _values(body: str) -> tuple[dict[str, float], list[str], str | None]:
    """The items of a record up to the first that cannot be read, the keys of metrics that are true or false, and that one."""
    values: dict[str, float] = {}
    logic: list[str] = []
    for item in body.split(" - "):
        match = ITEM.fullmatch(item.strip())
        if match is None:
            return values, logic, item
        key, text = match["key"], match["wrapped"] or match["plain"]
        if text in ("True", "False") and NUMBERS.match(key):
            logic.append(key)
            continue
        if key.endswith("/lr") and text == "0.000":
            continue  # older versions print three digits, and learning rates are smaller than that
        values[key] = parse_float(WORDS.get(text, text))
    return values, logic, None


def steps_reached(metrics: Metrics) -> int | None:
    """The least last step of all training runs in these metrics; None where no training step is shown."""
    runs: dict[str, int] = {}
    for tag, series in metrics.series.items():
        if TRAINED.match(tag) and series.steps:
            run = "/".join(tag.split("/")[:-2])
            runs[run] = max(runs.get(run, 0), series.steps[-1])
    return min(runs.values(), default=None)


def skipped_steps(metrics: Metrics) -> str | None:
    """Training steps that nothing shows between the first and the last one: verl logs every step."""
    for tag, series in metrics.series.items():
        if TRAINED.match(tag) and series.steps:
            missing = next((before + 1 for before, after in pairwise(series.steps) if after - before > 1), None)
            if missing is not None:
                return f"{tag} was not logged at step {missing}, so nothing shows that this step was trained"
    return None


def steps_planned(paths: tuple[Path, ...]) -> int | None:
    """How many steps the run was to take, by the words of the logs among `paths`; the surest words count."""
    said: dict[str, int] = {}
    for path in paths:
        if not path.is_file() or path.suffix not in (".log", ".txt", ".out", ""):
            continue
        for _, _, text in read_lines(path):
            for name, pattern in PLANS.items() if "Total " in text or "Training Progress" in text else ():
                for match in pattern.finditer(text):
                    said[name] = max(said.get(name, 0), parse_whole(match[1]))
    return next((said[name] for name in PLANS if name in said), None)


ACTOR = "actor"
SUPERVISED = "train"
CONTROL = "control/"
"""The run that is to learn nothing: level 5 on a CPU compares with it."""
SPREADS = (("critic/advantages", "all advantages were equal"), ("critic/score", "the reward never varied"))
CRITIC = "critic/vf_loss"
"""With a critic a reward that never varies leaves advantages to learn from; without one they would have to be equal, too."""


def vacuous(metrics: Metrics) -> Vacuity | None:
    for run in _runs(metrics):
        where = f" in {run.rstrip('/')}" if run else ""
        for part in (ACTOR, SUPERVISED):
            rate = metrics.series.get(f"{run}{part}/lr")
            if rate and rate.values and max(map(abs, rate.values)) <= DEAD_RATE and run != CONTROL:
                reason = f"vacuous: the learning rate was 0 at every step{where}, so no weight could change"
                return Vacuity(reason, Boundary.OPTIMIZER)
        for name, what in SPREADS:
            highest, lowest = metrics.series.get(f"{run}{name}/max"), metrics.series.get(f"{run}{name}/min")
            if not (highest and lowest and _trained(highest) and _trained(lowest)):
                continue
            if _trained(highest) == _trained(lowest):
                return Vacuity(f"vacuous: {what} within any step{where}, so there was nothing to learn from")
            if f"{run}{CRITIC}" in metrics.series:
                break
    return None


def unseen(metrics: Metrics) -> str | None:
    """What a Pass would claim of a run and these metrics do not show, or None. A supervised run has no rewards."""
    if skipped := skipped_steps(metrics):
        return skipped
    for run in _runs(metrics):
        supervised = f"{run}{SUPERVISED}/loss" in metrics.series
        part = SUPERVISED if supervised else ACTOR
        if f"{run}{part}/grad_norm" not in metrics.series:
            return f"no {part}/grad_norm was logged, so nothing shows that anything was trained"
        if not supervised and f"{run}critic/score/max" not in metrics.series:
            return "no critic/score was logged, so nothing shows that there was something to learn"
    return None


def _runs(metrics: Metrics) -> list[str]:
    """The prefixes of the runs: a level with several phases has one for each."""
    found = {match[1] for tag in metrics.series if (match := re.fullmatch(r"((?!val)[\w.-]+/)?(?:actor|critic|train)/.+", tag))}
    return sorted(prefix or "" for prefix in found) or [""]


def _trained(series: Series) -> tuple[tuple[int, float], ...]:
    """The points of training steps; step 0 is validation."""
    return tuple((step, value) for step, value in zip(series.steps, series.values, strict=True) if step > 0)
