"""Steps of 1.5 deviations in generated series: precision, recall and time of ours, beside asv's detector on the same series.

A step counts as found within 3 points of a true one, each true one once. Series without steps count false steps only; of drifts and
outliers also whether ours gives them their names. Then false-alarm rates: of the detector on pure noise, of proposed thresholds.
The peer is installed into a private environment: ~/.cache/seatrial/bench/asv.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pytest_seatrial.gpus import machine_here
from seatrial.history.change_points import find_changes
from seatrial.history.thresholds import band, propose

NEAR, SIGMAS, ALARM = 3, 1.5, 0.01
PEER = Path.home() / ".cache/seatrial/bench/asv"
BETAS = (2.0,)
"""Prices tried for the peer, in log(n) / n; its own is 4, and `detect_steps` has no option for it. At 1 it finds steps in all noise."""
PEER_CODE = """
import json, math, sys, time
from asv.step_detect import detect_steps, solve_potts_autogamma
for line in sys.stdin:
    values, betas = json.loads(line)
    begun = time.process_time()
    steps = detect_steps(values)
    took = time.process_time() - begun
    found = [[step[0] for step in steps[1:]]]
    for beta in betas:
        found.append(solve_potts_autogamma(values, w=[1] * len(values), beta=beta * math.log(len(values)) / len(values))[0][:-1])
    print(json.dumps([took, found]), flush=True)
"""


@dataclass(frozen=True)
class Series:
    """Values, and what is true of them."""

    values: list[float]
    steps: tuple[int, ...] = ()
    drifts: tuple[tuple[int, int], ...] = ()
    outliers: tuple[int, ...] = ()


def student(source: random.Random) -> float:
    """Heavy tails: Student's distribution of freedom 3, scaled to deviation 1."""
    return source.gauss(0, 1) / math.sqrt(sum(source.gauss(0, 1) ** 2 for _ in range(3)))


def normal(source: random.Random) -> float:
    """Normal noise."""
    return source.gauss(0, 1)


def skewed(source: random.Random) -> float:
    """Exponential noise, as of times."""
    return source.expovariate(1)


def levels(source: random.Random, segments: int, noise: Callable[[random.Random], float] = normal, low: int = 20, high: int = 60) -> Series:
    """Segments of one level each, SIGMAS apart, up or down."""
    values: list[float] = []
    steps, level = [], 100.0
    for number in range(segments):
        if number:
            steps.append(len(values))
            level += SIGMAS * source.choice((-1, 1))
        values += [level + noise(source) for _ in range(source.randint(low, high))]
    return Series(values, tuple(steps))


def doubled(source: random.Random) -> Series:
    """Steps of twice SIGMAS."""
    bare = levels(source, 4, lambda _: 0.0)
    return Series([100 + 2 * (value - 100) + source.gauss(0, 1) for value in bare.values], bare.steps)


def spotted(source: random.Random, series: Series) -> Series:
    """5 % of the points are moved by 6 to 20 deviations, single ones."""
    values, places = list(series.values), list[int]()
    for index in range(len(values)):
        if source.random() < 0.05 and (not places or index - places[-1] > 1):
            values[index] += source.choice((-1, 1)) * source.uniform(6, 20)
            places.append(index)
    return Series(values, series.steps, outliers=tuple(places))


def drifting(source: random.Random, before: Series | None) -> Series:
    """A slow drift of 3 to 6 deviations over 100 to 200 points, alone or after other segments."""
    values = list(before.values) if before else []
    start, count, height = len(values), source.randint(100, 200), source.uniform(3, 6) * source.choice((-1, 1))
    level = sum(values[-15:]) / 15 if values else 100.0
    values += [level + height * index / count + source.gauss(0, 1) for index in range(count)]
    return Series(values, before.steps if before else (), drifts=((start, start + count),))


def uneven(source: random.Random) -> Series:
    """Each segment scatters differently, by up to four times; steps of SIGMAS of the wider neighbour."""
    values: list[float] = []
    steps, level, scale = [], 100.0, 1.0
    for number in range(4):
        last, scale = scale, 2 ** source.uniform(-1, 1)
        if number:
            steps.append(len(values))
            level += SIGMAS * max(last, scale) * source.choice((-1, 1))
        values += [source.gauss(level, scale) for _ in range(source.randint(20, 60))]
    return Series(values, tuple(steps))


def correlated(source: random.Random) -> Series:
    """Each run keeps 0.3 of the last one's deviation; steps of twice SIGMAS."""
    bare, last, values = levels(source, 3, lambda _: 0.0, low=30), 0.0, []
    for value in bare.values:
        last = 0.3 * last + source.gauss(0, 1)
        values.append(100 + 2 * (value - 100) + last)
    return Series(values, bare.steps)


def steady(source: random.Random) -> Series:
    """No spread at all, as of counts; one step or none."""
    return levels(source, source.choice((1, 2)), noise=lambda _: 0.0)


KINDS: dict[str, Callable[[random.Random], Series]] = {
    "noise": lambda source: levels(source, 1, low=60, high=240),
    "one step": lambda source: levels(source, 2),
    "several steps": lambda source: levels(source, source.randint(3, 6)),
    "short series": lambda source: levels(source, 2, low=8, high=15),
    "steps of 3": doubled,
    "heavy tails": lambda source: levels(source, 4, noise=student),
    "skewed": lambda source: levels(source, 4, noise=skewed),
    "uneven noise": uneven,
    "outliers, steps": lambda source: spotted(source, levels(source, 4)),
    "outliers alone": lambda source: spotted(source, levels(source, 1, low=60, high=240)),
    "drift alone": lambda source: drifting(source, None),
    "step, then drift": lambda source: drifting(source, levels(source, 2, low=40)),
    "correlated": correlated,
    "no spread": steady,
}


@dataclass(frozen=True)
class Score:
    """Sums over the series of a kind."""

    hits: int
    false: int
    missed: int
    alarmed: int
    """Series with a false step."""

    @property
    def precision(self) -> float:
        """1 where nothing was said."""
        return self.hits / (self.hits + self.false) if self.hits + self.false else 1.0

    @property
    def recall(self) -> float:
        """1 where nothing was to be found."""
        return self.hits / (self.hits + self.missed) if self.hits + self.missed else 1.0

    @property
    def f1(self) -> float:
        """Of both."""
        return 2 * self.hits / (2 * self.hits + self.false + self.missed) if self.hits + self.false + self.missed else 1.0


def score(series: list[Series], found: list[list[int]]) -> Score:
    """Each found step takes the nearest true one that is free, within NEAR points."""
    hits = false = missed = alarmed = 0
    for truth, steps in zip(series, found, strict=True):
        left, wrong = list(truth.steps), 0
        for step in steps:
            near = [true for true in left if abs(true - step) <= NEAR]
            if near:
                left.remove(min(near, key=lambda true: abs(true - step)))
            wrong += not near
        hits, false, missed, alarmed = hits + len(steps) - wrong, false + wrong, missed + len(left), alarmed + bool(wrong)
    return Score(hits, false, missed, alarmed)


def _f1(found: Score) -> str:
    """Where there is no step to be found, only false ones count."""
    return f"{found.f1:5.3f}" if found.hits + found.missed else "  -  "


def peer() -> Path:
    """The peer's interpreter, installed at first use."""
    python = PEER / "bin/python"
    ready = python.exists() and subprocess.run([python, "-c", "import asv.step_detect"], capture_output=True, timeout=60).returncode == 0
    if not ready:
        subprocess.run([sys.executable, "-m", "venv", PEER], check=True, timeout=300)
        subprocess.run([python, "-m", "pip", "install", "--quiet", "asv"], check=True, timeout=600)
    return python


def asked(python: Path, series: list[Series]) -> tuple[float, list[list[list[int]]]]:
    """Seconds of the peer's own call, and its steps: as it is, then with each of BETAS."""
    lines = "".join(json.dumps([truth.values, BETAS]) + "\n" for truth in series)
    answer = subprocess.run([python, "-c", PEER_CODE], input=lines, capture_output=True, text=True, check=True, timeout=1800)
    rows = [json.loads(line) for line in answer.stdout.splitlines()]
    return sum(row[0] for row in rows), [[row[1][place] for row in rows] for place in range(len(BETAS) + 1)]


def compare(count: int) -> dict[str, float]:
    """The table; the figures of ours and of the peer for the summary."""
    python, figures = peer(), dict[str, float]()
    print(f"{count} series of each kind, steps of {SIGMAS} sigma but where said; alarm rate {ALARM}")
    prices = ", ".join(f"{beta:g}" for beta in BETAS)
    print(f"{'':18}| ours: P     R    F1  false   ms | asv: P     R    F1  false   ms | asv at price {prices}: F1 (false)")
    for kind, make in KINDS.items():
        series = [make(random.Random(f"{kind} {number}")) for number in range(count)]
        begun = time.process_time()
        changes = [find_changes(truth.values, alarm=ALARM) for truth in series]
        took = time.process_time() - begun
        ours = score(series, [[change.index for change in found if change.kind == "step"] for found in changes])
        spent, found = asked(python, series)
        theirs, *tuned = [score(series, steps) for steps in found]
        for who, one in (("ours", ours), ("asv", theirs), ("asv_cheaper", tuned[0])):
            figures |= {f"{kind}/{who}/precision": one.precision, f"{kind}/{who}/recall": one.recall, f"{kind}/{who}/f1": one.f1}
            figures[f"{kind}/{who}/false"] = one.alarmed / count
        cells = [
            f"{mine.precision:7.3f} {mine.recall:5.3f} {_f1(mine)} {mine.alarmed / count:6.3f} {seconds / count * 1000:4.1f}"
            for mine, seconds in ((ours, took), (theirs, spent))
        ]
        others = ", ".join(f"{_f1(one)} ({one.alarmed / count:.3f})" for one in tuned)
        print(f"{kind:18}| {cells[0]} | {cells[1]} | {others}")
        if any(truth.drifts or truth.outliers for truth in series):
            named = sum(any(change.kind == "drift" for change in one) for one in changes)
            spots = sum(len(truth.outliers) for truth in series)
            right = sum(
                change.kind == "outlier" and change.index in truth.outliers
                for truth, one in zip(series, changes, strict=True)
                for change in one
            )
            print(f"{'':18}|   named: {named} series with a drift, {right} of {spots} outliers")
    print("false: share of series with a false step, also one found more than 3 points off. No F1 (-) where no series has a step.")
    print("ms: CPU. asv: as it is shipped; at price 2: its own solver told to pay half as much for a step, which a user of it cannot say.")
    return figures


def alarms(count: int) -> dict[str, float]:
    """False alarms on pure noise: of the detector, of proposed thresholds, of the gate's band; beside the stated rates."""
    figures = dict[str, float]()
    for name, noise in (("normal", normal), ("skewed (exponential)", skewed), ("heavy tails (t, 3)", student)):
        source = random.Random(name)
        told = sum(
            any(change.kind != "outlier" for change in find_changes([noise(source) for _ in range(size)], alarm=ALARM))
            for size in (12, 40, 150)
            for _ in range(count)
        )
        print(f"{name:22} steps or drifts on noise: {told / 3 / count:.4f} of series (stated: at most {ALARM})")
        for runs, rate in ((39, 0.05), (199, 0.01), (400, 0.01)):
            missed = normally = 0
            for _ in range(count * 2):
                made, value = propose([noise(source) for _ in range(runs)], false_alarms=rate), noise(source)
                missed += made.lower is None or made.upper is None or not made.lower <= value <= made.upper
                normally += not made.if_normal[0] <= value <= made.if_normal[1]
            print(
                f"{'':22} thresholds from {runs} runs: {missed / count / 2:.4f} (stated: {rate}), by Student's t {normally / count / 2:.4f}"
            )
        rates = []
        for runs in (5, 7, 10, 15, 20):
            bands = [band([noise(source) for _ in range(runs)]) for _ in range(count * 5)]
            beyond = sum(one.side(noise(source)) != "inside" for one in bands) / count / 5
            rates.append(f"{runs} runs {beyond:.4f} (stated {bands[0].rate:.4f})")
            figures[f"gate/{name}/{runs}"] = beyond
        print(f"{'':22} gate: {', '.join(rates)}{'' if noise is normal else '; stated for normal values only'}")
    return figures


def main() -> None:
    """All tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--series", type=int, default=300)
    parser.add_argument("--noise", type=int, default=400)
    options = parser.parse_args()
    figures = compare(options.series) | alarms(options.noise)
    source = random.Random(0)
    long = [source.gauss(0, 1) + 1.5 * (index // 500 % 2) for index in range(10_000)]
    begun = time.process_time()
    steps = len(find_changes(long))
    took = time.process_time() - begun
    spent, found = asked(peer(), [Series(long)])
    print(f"10,000 points with 19 steps: ours {steps} changes in {took:.2f} s, asv {len(found[0][0])} in {spent:.2f} s")
    figures |= {"10,000 points/ours/seconds": took, "10,000 points/asv/seconds": spent}
    # A line that `seatrial history import` reads.
    print(json.dumps({"benchmark": "history_steps", "metrics": figures, "time": time.time(), "machine": machine_here()}))


if __name__ == "__main__":
    main()
