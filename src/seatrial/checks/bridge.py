"""`JUDGES`: the judge of every rung; and the judge of the closed loop: learning reached the generator, bit for bit, and nothing else
explains the reward.

- The refits are judged by the judge of the refit probe. Between policy and export no hash can be compared: the last export, imported
  again, must be the policy; and at every step that moved every parameter, every exported tensor must have moved.
- `token_mult_prob_error` has a limit of its own run: a multiple of what was measured at step 0, where both sides hold the same bits. A
  floor that is itself too high fails, and the limit must see every step of the run that was never refitted. For experts the median over
  sequences counts: near-ties of the router give single outliers (facts/h200.md).
- Reward: an exact rank test over the means of steps. A step counts once, not each of its samples: a server may draw all samples of a step
  from one seed (measured with vLLM: 8 to 13 times the variance of independent samples).
"""

from __future__ import annotations

import math
import statistics
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import ValidationError

from seatrial.checks import bridge_rungs, bridge_training
from seatrial.checks.bridge_rungs import RungJudge, RungJudgement
from seatrial.checks.probe_facts import Facts, proof
from seatrial.checks.probe_facts import Row as Fact
from seatrial.checks.refit_facts import Count, Mismatch, Number, Rows, TypedRow, Word, sent_versions, typed
from seatrial.checks.refit_judge import TRANSPORTS, RefitRequest, judge_refit_probe
from seatrial.core.records import CheckResult
from seatrial.core.verdict import Boundary, Verdict


class LoopSetup(TypedRow):
    """What ran."""

    engine: Word
    steps: Count
    dtype: Word
    experts: Count


class Unmoved(TypedRow):
    """Parameters that a step left as they were."""

    count: Count
    names: list[str]


class Learn(TypedRow):
    """The real run."""

    rewards: list[list[Number]]
    unmoved: list[Unmoved]
    rows: list[dict[str, Any]]


class Gap(TypedRow):
    """token_mult_prob_error of one step of a control."""

    value: Number
    p50: Number


class NoRefit(TypedRow):
    """The control whose generator keeps the base."""

    rewards: list[list[Number]]
    still: list[Count]
    mismatch: list[Gap]
    touched: list[str]


class Refit(TypedRow):
    """One refit of the control that does not learn."""

    changed: Count
    wrong_names: list[str]
    refused: str | None


class NoLearning(TypedRow):
    """The control whose learning rate is zero."""

    rewards: list[list[Number]]
    still: list[Count]
    refits: list[Refit]


class Reimport(TypedRow):
    """The last export, imported again."""

    parameters: Count
    unequal: list[str]
    unequal_count: Count


@dataclass(frozen=True)
class LoopFacts:
    """All facts of one closed loop."""

    setup: LoopSetup
    learn: Learn
    no_refit: NoRefit
    no_learning: NoLearning
    reimport: Reimport
    rows: Rows
    device: str


R = TypeVar("R", bound=TypedRow)


def read_loop_facts(facts: Facts, device: str) -> LoopFacts:
    """The facts, each there once and of the right form; a ValueError says what is not."""

    def one(model: type[R], kind: str, **match: str) -> R:
        found = facts.of(kind, **match)
        if len(found) != 1:
            raise ValueError(f"fact {kind} {match or ''}: there are {len(found)}, not one")
        try:
            return model.model_validate(found[0])
        except ValidationError as error:
            first = error.errors()[0]
            raise ValueError(f"fact {kind} {match or ''}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from error

    setup, learn = one(LoopSetup, "setup"), one(Learn, "loop", run="learn")
    no_refit, no_learning = one(NoRefit, "control", run="no-refit"), one(NoLearning, "control", run="no-learning")
    counted: dict[str, Sequence[object]] = {"unmoved": learn.unmoved, "mismatch": no_refit.mismatch}
    counted |= {"still of no-refit": no_refit.still, "still of no-learning": no_learning.still}
    for name, each in {"learn": learn.rewards, "no-refit": no_refit.rewards, "no-learning": no_learning.rewards}.items():
        counted[f"rewards of {name}"] = each
        if any(len(row) < 2 or not all(0 <= value <= 1 for value in row) for row in each):
            raise ValueError(f"rewards of {name}: a step has fewer than two, or one that is not between 0 and 1")
    off = {name: len(values) for name, values in counted.items() if len(values) != setup.steps}
    if off or not setup.steps:
        raise ValueError(f"{setup.steps} steps, and not as many entries: {off}")
    if not all(isinstance(row.get("fact"), str) for row in learn.rows):
        raise ValueError("a row of the refits is no fact")
    return LoopFacts(setup, learn, no_refit, no_learning, one(Reimport, "reimport"), typed(Facts(tuple(learn.rows))), device)


STEPS = 20
"""What the ladder promises; fewer are a limitation."""
CHANCE = 1e-4
"""What counts as a difference. Ten steps that are all above ten others are 5e-6; below 16 steps nothing can reach it."""
MOST_STEPS = 20
"""Of each side of a test: its cost grows with the fourth power."""
TIMES = {"float32": 10.0, "bfloat16": 3.0}
"""The limit as a multiple of the floor. Measured with proven weights over 20 steps: at most 1.4 and 1.0 times the floor."""
LEAST = {"float32": 2e-6, "bfloat16": 2e-3}
"""What the limit leaves for rounding in any case: a floor of 192 tokens may be low by chance."""
FLOORS = {("cpu", "float32"): 1e-5, ("cpu", "bfloat16"): 0.02, ("cuda", "float32"): 1e-3, ("cuda", "bfloat16"): 0.02}
"""The highest floor that is taken for rounding. Measured: 5e-7 and 0.011 on a CPU, 1e-4 and 0.0095 on an H200 (facts/h200.md)."""
MOST = 0.05
"""No limit is above the field's own."""


def judge_loop(rows: Sequence[Fact], device: str) -> RungJudgement:
    facts = Facts(tuple(rows))
    try:
        run = read_loop_facts(facts, device)
    except ValueError as error:
        return RungJudgement((proof("the facts of the closed loop are whole", False, "no", Boundary.METRICS, "", str(error)),))
    wanted = RefitRequest(source="driver", engine=run.setup.engine, steps=run.setup.steps, transports=TRANSPORTS)
    judged = judge_refit_probe(Facts(tuple(run.learn.rows)), wanted)
    said = "" if judged.verdict is Verdict.PASS else judged.reason
    checks = [
        _moved(run),
        _reimported(run),
        _followed(run),
        proof("every refit is proven", judged.verdict is Verdict.PASS, judged.verdict.value, Boundary.REFIT, "Pass", said),
        *judged.checks,
        *_mismatch(run),
        _control_without_refits(run),
        _control_without_learning(run),
        *_rewards(run),
    ]
    figure = f"{statistics.fmean(run.learn.rewards[0]):.2f}→{statistics.fmean(run.learn.rewards[-1]):.2f}"
    return RungJudgement(tuple(checks), figure, (*_limitations(run), *judged.limitations))


def _moved(run: LoopFacts) -> CheckResult:
    idle = [step for step, left in enumerate(run.learn.unmoved, 1) if left.count >= run.reimport.parameters]
    said = f"step {idle[0]} left every parameter as it was: {', '.join(run.learn.unmoved[idle[0] - 1].names[:3])}" if idle else ""
    value = f"{run.setup.steps - len(idle)} of {run.setup.steps} steps"
    return proof("every step changes the weights of the policy", not idle, value, Boundary.OPTIMIZER, "all", said)


def _reimported(run: LoopFacts) -> CheckResult:
    found = run.reimport
    good = bool(found.parameters) and not found.unequal_count and not found.unequal
    value = f"{found.parameters - found.unequal_count} of {found.parameters} parameters equal"
    return proof("the last export, imported again, is the policy", good, value, Boundary.PROVIDER, "all", ", ".join(found.unequal[:5]))


def _followed(run: LoopFacts) -> CheckResult:
    """A tensor that is exported as it was, although every parameter moved, is not the policy's."""
    sent, decided = sent_versions(run.rows), _decided(run)
    stale, lost = [], []
    for step in decided:
        before, now = sent.get(step, {}), sent.get(step + 1, {})  # the base, step 0, is version 1
        lost += [] if before and now else [step]
        stale += [f"{name} at step {step}" for name, value in now.items() if before.get(name) == value]
    said = ", ".join(stale[:5]) or (f"no export of step {lost[0]}" if lost else "" if decided else "no step moved every parameter")
    value = f"{len(stale)} tensors stayed over {len(decided)} steps"
    return proof("the export follows the policy", bool(decided) and not stale and not lost, value, Boundary.PROVIDER, "0", said)


def _decided(run: LoopFacts) -> list[int]:
    """Steps that moved every parameter; an expert without tokens does not move."""
    return [step for step, left in enumerate(run.learn.unmoved, 1) if not left.count]


def _mismatch(run: LoopFacts) -> list[CheckResult]:
    """The floor, the limit that it gives, and that the limit would see a missing refit."""
    found = {row.step: _excess(run, row) for row in run.rows.mismatches}
    floor, highest = found.get(0, math.nan), FLOORS.get((run.device, run.setup.dtype), math.nan)
    known = 0 <= floor <= highest
    limit = min(MOST, max(TIMES[run.setup.dtype] * floor, LEAST[run.setup.dtype])) if known else math.nan
    # Written so that NaN is above every limit.
    high = {step: value for step, value in found.items() if not value <= limit}
    lacking = [step for step in range(run.setup.steps + 1) if step not in found]
    unseen = [step for step, row in enumerate(run.no_refit.mismatch, 1) if not _excess(run, row) > limit]
    said = [f"step {step}: 1+{value:.3g}" for step, value in high.items()] + [f"no value for step {step}" for step in lacking]
    worst, least = max(found.values(), default=math.nan), min((_excess(run, row) for row in run.no_refit.mismatch), default=math.nan)
    at = f"{run.device}, {run.setup.dtype}"
    apart = "" if known else "with equal weights the policy's model computes other log-probabilities than the generator's"
    within = known and not high and not lacking
    blind = f"not at step {', '.join(map(str, unseen[:5]))}" if unseen else ""
    rounding, limited = (
        "token_mult_prob_error before any step is rounding",
        "token_mult_prob_error within the limit of this device and dtype",
    )
    seen = f"at least 1+{least:.3g} without refits"
    return [
        proof(rounding, known, f"1+{floor:.3g}", Boundary.PROVIDER, f"<= 1+{highest:.3g} ({at})", apart),
        proof(limited, within, f"1+{worst:.3g}", Boundary.PROVIDER, f"<= 1+{limit:.3g}", "; ".join(said[:3])),
        proof("the limit sees a missing refit", known and not unseen, seen, Boundary.METRICS, f"> 1+{limit:.3g} at every step", blind),
    ]


def _excess(run: LoopFacts, row: Mismatch | Gap) -> float:
    return (row.p50 if run.setup.experts else row.value) - 1


def _control_without_refits(run: LoopFacts) -> CheckResult:
    idle = [step for step, count in enumerate(run.no_refit.still, 1) if count >= run.reimport.parameters]
    said = [f"the policy did not move at step {step}" for step in idle]
    said += [f"{name} of the generator moved" for name in run.no_refit.touched]
    name = "control without refits: the policy moved, the generator did not"
    return proof(name, not said, "no" if said else "yes", Boundary.METRICS, "", "; ".join(said[:3]))


def _control_without_learning(run: LoopFacts) -> CheckResult:
    """A control only if the base was put back, and every refit after it brought the same bits."""
    refits = run.no_learning.refits
    said = [f"{len(refits)} refits, not {run.setup.steps + 1}"] if len(refits) != run.setup.steps + 1 else []
    said += ["the base was not put back"] if not refits or not refits[0].changed else []
    said += [f"refit {index} changed {row.changed} elements" for index, row in enumerate(refits) if index and row.changed]
    said += [f"refit {index}: {row.refused or row.wrong_names[0]}" for index, row in enumerate(refits) if row.refused or row.wrong_names]
    moved = [step for step, count in enumerate(run.no_learning.still, 1) if count != run.reimport.parameters]
    said += [f"the policy moved at step {step}" for step in moved]
    return proof(
        "control with learning rate 0: nothing moved", not said, "no" if said else "yes", Boundary.METRICS, "", "; ".join(said[:3])
    )


def _rewards(run: LoopFacts) -> list[CheckResult]:
    early, late = _halves(run.learn.rewards)
    before, after = _halves(run.no_learning.rewards)
    still = min(chance(after, before), chance(before, after))
    means = f"{statistics.fmean(before):.3f}, then {statistics.fmean(after):.3f}, p {still:.2g}"
    return [
        _above("reward rises", late, early),
        _above("reward ends above that without refits", late, _halves(run.no_refit.rewards)[1]),
        _above("reward ends above that without learning", late, after),
        proof("reward stays without learning", still >= CHANCE, means, Boundary.METRICS, f"p >= {CHANCE:g}"),
    ]


def _above(name: str, high: Sequence[float], low: Sequence[float]) -> CheckResult:
    found = chance(high, low)
    value = f"{statistics.fmean(high):.3f} against {statistics.fmean(low):.3f}, p {found:.2g}"
    return proof(name, found < CHANCE, value, Boundary.METRICS, f"p < {CHANCE:g} (exact rank test over {len(high)} steps)")


def _halves(rewards: Sequence[Sequence[float]]) -> tuple[list[float], list[float]]:
    """Mean rewards of the first and of the last steps, equally many."""
    means = [statistics.fmean(row) for row in rewards]
    count = max(1, min(len(means) // 2, MOST_STEPS))
    return means[:count], means[-count:]


def chance(high: Sequence[float], low: Sequence[float]) -> float:
    """How likely values of one kind would be ranked like this, or with `high` further above: exact, ties have their middle rank."""
    pooled = sorted([*high, *low])

    def rank(value: float) -> int:
        """Twice the middle rank, which is whole."""
        return bisect_left(pooled, value) + bisect_right(pooled, value) + 1

    ways = [Counter({0: 1}), *(Counter[int]() for _ in high)]
    for place in map(rank, pooled):
        for taken in range(len(high), 0, -1):
            for total, count in ways[taken - 1].items():
                ways[taken][total + place] += count
    found = sum(map(rank, high))
    return sum(count for total, count in ways[-1].items() if total >= found) / math.comb(len(pooled), len(high))


def _limitations(run: LoopFacts) -> list[str]:
    made = []
    if run.setup.steps < STEPS:
        made.append(f"the closed loop had {run.setup.steps} steps, not {STEPS}")
    if left := run.setup.steps - len(_decided(run)):
        made.append(f"{left} steps left some parameter as it was: whether each exported tensor followed is not shown for them")
    if run.setup.experts:
        made.append("token_mult_prob_error of a model with experts was judged by its median over sequences")
        made.append("biases of routers were not trained: a transformers generator has them as buffers")
    return made


JUDGES: dict[str, RungJudge] = {
    "build": bridge_rungs.judge_build,
    "import": bridge_rungs.judge_import,
    "roundtrip": bridge_rungs.judge_roundtrip,
    "reload": bridge_rungs.judge_reload,
    "mapping": bridge_rungs.judge_mapping,
    "order": bridge_rungs.judge_order,
    "parity": bridge_rungs.judge_parity,
    **dict.fromkeys(("tp", "pp", "ep", "cp", "sp"), bridge_rungs.judge_parallel),
    "optimizer": bridge_training.judge_optimizer,
    "checkpoint": bridge_training.judge_checkpoint,
    "lora": bridge_training.judge_lora,
    "policy": bridge_training.judge_policy,
    "loop": judge_loop,
}
