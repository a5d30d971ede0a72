"""A metric with a signal to noise ratio of 1.5 over 500 points: how often is the first bad commit found, and with how many runs?

Peers: bisect with a single run per step, and bisect with the mean of m runs per step, where m gives it at least as many runs as ours took.
Both know the best threshold, the middle between the two means.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable

from seatrial.bisect.bisect_records import BisectRun, History, Mark, Pin, Point
from seatrial.bisect.posterior import SearchSettings, Threshold, answer, assess, choose_points

POINTS, SEEDS, RATIO, CONFIDENCE, REPEAT = 500, 20, 1.5, 0.99, 30
STEPS = math.ceil(math.log2(POINTS - 1))


def line(count: int) -> History:
    """A history without branches."""
    points = []
    for index in range(count):
        pins = (Pin(repo="r", commit=f"{index:040x}"),)
        parents = (index - 1,) if index else ()
        points.append(Point(repo="r", commit=pins[0].commit, subject="", time=index, parents=parents, pins=pins, contents=str(index)))
    return History(tuple(points))


def ours(history: History, measure: Callable[[int], float]) -> tuple[str, int | None, int]:
    """State, the commit if one was found, runs."""
    settings = SearchSettings(REPEAT, CONFIDENCE, Threshold(0.5, good_below=True))
    rows: list[BisectRun] = []
    todo = [0, history.last]
    while todo:
        for index in todo:
            value, point = measure(index), history.points[index]
            mark = Mark.BAD if value >= 0.5 else Mark.GOOD
            number = len(rows) + 1
            rows.append(BisectRun(number=number, stage="search", round=number, point=point.id, commit=point.commit, mark=mark, value=value))
        todo = choose_points(assess(history, rows, settings), 1)
    found = answer(assess(history, rows, settings))
    return found.state, history.by_id[found.suspects[0].point] if found.state == "found" else None, len(rows)


def plain(measure: Callable[[int], float], repeats: int) -> int:
    """Bisect that takes the mean of so many runs per step for the truth."""
    good, bad = 0, POINTS - 1
    while bad - good > 1:
        middle = (good + bad) // 2
        if statistics.fmean(measure(middle) for _ in range(repeats)) >= 0.5:
            bad = middle
        else:
            good = middle
    return bad


def main() -> None:
    """Print the figures."""
    history, begun = line(POINTS), time.monotonic()
    right, ranges, runs, single, averaged, averaged_runs = 0, 0, [], 0, 0, 0
    for seed in range(SEEDS):
        rng = random.Random(f"bench {seed}")
        first_bad = rng.randrange(1, POINTS)

        def measure(index: int, rng: random.Random = rng, first_bad: int = first_bad) -> float:
            return (index >= first_bad) + rng.gauss(0, 1 / RATIO)

        state, found, used = ours(history, measure)
        right += found == first_bad
        ranges += state != "found"
        runs.append(used)
        repeats = math.ceil(used / STEPS)
        single += plain(measure, 1) == first_bad
        averaged += plain(measure, repeats) == first_bad
        averaged_runs += repeats * STEPS
    print(f"{POINTS} points, signal to noise {RATIO}, {SEEDS} seeds, confidence {CONFIDENCE}, at most {REPEAT} runs of one point")
    print(f"seatrial bisect          right {right}/{SEEDS}  ranges {ranges}  runs {sum(runs)} ({min(runs)} to {max(runs)} each)")
    print(f"single run per step      right {single}/{SEEDS}  runs about {SEEDS * STEPS}")
    print(f"mean of m runs per step  right {averaged}/{SEEDS}  runs about {averaged_runs}")
    print(f"seconds {time.monotonic() - begun:.1f}")


if __name__ == "__main__":
    main()
