"""Selection against pytest-testmon: random single-line mutations of three projects; recall, share of tests, time.

    python bench/select_mutations.py [--project NAME]… [--mutations 200] [--seed 10] [--jobs 2] [--report]

For every mutation: the full suite without selection gives the tests whose outcome changes; each selector, with the map that it recorded on
the clean tree, says what it would run (`--collect-only`). missed = changed − selected. A mutation that ours missed is run in full a
second time, and only what differs both times counts; and each test that ours missed is run alone: one that then ends as on the clean tree
was changed by what another test left behind (a file that is collected as garbage while it runs), which no selection can tell. Such tests
are left out for every selector, and named. Everything is kept under ~/.cache/seatrial/bench/select-NAME/results as JSON lines:
a run that was broken off goes on; full suites are not run again when Seatrial changes, only our recording and our selections are.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from select_projects import judging, known, projects
from select_projects.measure import OURS, SELECTORS, Selector, Worker
from select_projects.mutators import Mutation, candidates, data_mutations, draw, holds
from select_projects.projects import Project

SHARES = {"source": 0.7, "tests": 0.15, "data": 0.15}
PLAIN_RUNS = 2
MOST_ALONE = 20
"""More missed tests than that at once are no accident."""
lock = threading.Lock()


class Kept:
    """JSON lines by key; a torn last line is left out and measured again."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows: dict[str, dict[str, Any]] = {}
        path.parent.mkdir(parents=True, exist_ok=True)
        for line in path.read_text().splitlines() if path.exists() else []:
            try:
                row = json.loads(line)
            except ValueError:
                continue
            self.rows[row["key"]] = row

    def get(self, key: str, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        if key not in self.rows:
            made = {"key": key, **make()}
            with lock:
                self.rows[key] = made
                with self.path.open("a") as file:
                    file.write(json.dumps(made) + "\n")
        return self.rows[key]


class Bench:
    """One project."""

    def __init__(self, project: Project, asked: argparse.Namespace) -> None:
        self.project, self.asked = project, asked
        if not asked.report:
            # One benchmark of a project at a time: the trees, the environment and the copy of Seatrial are shared. A report touches none.
            self.lock = projects.claim(project)
            projects.prepare(project)
            projects.join_seatrial(project)
        self.digest = (project.place / "lib" / "digest").read_text()
        results = project.place / "results"
        self.clean, self.full = Kept(results / "clean.jsonl"), Kept(results / "full.jsonl")
        self.selectors = [one for one in SELECTORS if one.name in (asked.selector or [one.name])]
        self.chosen = {one.name: Kept(results / f"{self._version(one)}.jsonl") for one in self.selectors}
        self.drawn = self._draw()

    def _version(self, selector: Selector) -> str:
        return f"ours-{self.digest}" if selector is OURS else selector.name

    def _draw(self) -> list[Mutation]:
        root = self.project.place / "clean"
        shares = []
        for share, names in projects.files(self.project, root).items():
            make = data_mutations if share == "data" else candidates
            shares.append((SHARES[share], {name: make(text(root / name), name) for name in names}))
        return draw(shares, self.asked.mutations, self.asked.seed, lambda one: one.kind == "data" or holds(one, text(root / one.file)))

    def work(self, number: int) -> None:
        """One worker: its baselines, then its mutations."""
        worker = Worker(self.project, number)
        for run in range(PLAIN_RUNS):
            self.clean.get(f"plain-{number}-{run}", worker.plain)
        for selector in self.selectors:
            # The state lies in the worker's folder: it is recorded again when it is not there, or is of another version.
            mark = worker.states / f"{selector.name}.version"
            if not mark.exists() or mark.read_text() != self._version(selector):
                self.clean.rows.pop(f"record-{self._version(selector)}-{number}", None)
                self.clean.get(f"record-{self._version(selector)}-{number}", lambda s=selector: worker.record(s))
                mark.write_text(self._version(selector))
            self.chosen[selector.name].get(f"clean-{number}", lambda s=selector: worker.choose(s, None))
        for mutation in self.drawn[number :: self.asked.jobs]:
            self._one(worker, mutation)

    def _one(self, worker: Worker, mutation: Mutation) -> None:
        began = time.monotonic()
        if not self.asked.select_only:
            limit = 3 * self.clean.rows[f"plain-{worker.number}-0"]["wall"] + 60
            self.full.get(mutation.key, lambda: worker.full(mutation, limit))
        rows = [self.chosen[one.name].get(mutation.key, lambda s=one: worker.choose(s, mutation)) for one in self.selectors]
        ours = [row for one, row in zip(self.selectors, rows, strict=True) if one is OURS]
        if mutation.key in self.full.rows and ours and self._missed(mutation, ours[0]):
            limit = 3 * self.clean.rows[f"plain-{worker.number}-0"]["wall"] + 60
            self.full.get(f"{mutation.key}-again", lambda: worker.full(mutation, limit))
            left = self._missed(mutation, ours[0])
            if left and len(left) <= MOST_ALONE:
                self.full.get(f"{mutation.key}-alone-{self.digest}", lambda: {"outcomes": worker.alone(mutation, left, limit)})
        if time.monotonic() - began > 0.1:
            print(f"  {self.project.name} {len(self.full.rows)} full runs; {told(mutation)}", file=sys.stderr, flush=True)

    def baseline(self) -> judging.Baseline:
        return judging.baseline([row for key, row in self.clean.rows.items() if key.startswith("plain-")])

    def differs(self, mutation: Mutation) -> dict[str, str]:
        """What a mutation changes; of two full runs, what both say."""
        found, polluted = self._found(mutation), self.polluted(mutation)
        return {test: after for test, after in found[0].items() if all(test in other for other in found) and test not in polluted}

    def polluted(self, mutation: Mutation) -> set[str]:
        """Tests that end as on the clean tree when they are alone: what another test left behind changed them."""
        clean = self.baseline()
        rows = [row["outcomes"] for key, row in self.full.rows.items() if key.startswith(f"{mutation.key}-alone-")]
        return {test for row in rows for test, after in row.items() if after == clean.outcomes.get(test)}

    def _found(self, mutation: Mutation) -> list[dict[str, str]]:
        clean = self.baseline()
        runs = [self.full.rows[key] for key in (mutation.key, f"{mutation.key}-again") if key in self.full.rows]
        return [judging.changed(clean, run["outcomes"], run["broken"], run["aborted"]) for run in runs]

    def _missed(self, mutation: Mutation, row: dict[str, Any]) -> list[str]:
        differs, full = self.differs(mutation), self.full.rows[mutation.key]
        both = bool(row["aborted"]) and bool(full["aborted"])
        return sorted(set(differs) - judging.seen(differs, row["selected"], row["broken"], both))

    def report(self) -> bool:
        """Print the project's figures; true when every mutation was measured and ours missed nothing."""
        clean = self.baseline()
        tallies = {one.name: judging.Tally(one.name) for one in self.selectors}
        for mutation in self.drawn:
            rows = {name: kept.rows.get(mutation.key) for name, kept in self.chosen.items()}
            if mutation.key not in self.full.rows or None in rows.values():
                continue
            for name, tally in tallies.items():
                judging.add(tally, clean, told(mutation), self.differs(mutation), self.full.rows[mutation.key], rows[name] or {})
        first = next(iter(tallies.values()))
        whole = sum(clean.seconds[test] for test in clean.outcomes if test not in clean.flaky)
        print(
            f"\n{self.project.name} ({self.project.sdist or 'ours'}): {len(clean.outcomes)} tests, {whole:.1f} s,"
            f" {len(clean.flaky)} flaky; version of select: {self.digest}"
        )
        print(f"  {self.project.said}" if self.project.said else "  the whole suite")
        print(f"  mutations: {first.mutations} of {len(self.drawn)} measured, {first.effective} changed an outcome ({first.changed} tests)")
        twice = [found for found in (self._found(one) for one in self.drawn if one.key in self.full.rows) if len(found) > 1]
        unsure = sum(len(set(found[0]) - set(found[1])) for found in twice)
        print(f"  {len(twice)} mutations were run twice: {unsure} tests changed only the first time and do not count")
        for mutation in self.drawn:
            for test in sorted(self.polluted(mutation)):
                print(f"  left out: {test}: alone it ends as on the clean tree, another test's leavings change it; {told(mutation)}")
        for tally in tallies.values():
            self._line(tally)
        self._recording()
        for tally in tallies.values():
            for what, tests in tally.misses:
                print(f"  missed by {tally.name}: {what}")
                for test in tests[:5] + ([f"… {len(tests) - 5} more"] if len(tests) > 5 else []):
                    print(f"      {test}")
        # What was not measured proves nothing: an unfinished benchmark does not end with 0.
        whole_set = first.mutations == len(self.drawn) == self.asked.mutations and first.effective > 0
        return whole_set and all(not tally.missed and not tally.crashes for tally in tallies.values() if tally.name == OURS.name)

    def _line(self, tally: judging.Tally) -> None:
        count = max(1, tally.mutations)
        print(
            f"  {tally.name:8s} recall {100 * tally.recall:6.2f} % ({tally.missed} tests missed, in {tally.missing_mutations} mutations);"
            f" selects {100 * tally.tests / count:.1f} % of tests,"
            f" {100 * tally.passing / count:.1f} % of those that pass on the clean tree, {100 * tally.seconds / count:.1f} % of the time;"
            f" crashes {len(tally.crashes)}"
        )
        for what in tally.crashes[:5]:
            print(f"      crashed: {what}")

    def _recording(self) -> None:
        """Recording must not change outcomes, and the clean tree should need no test."""
        clean = self.baseline()
        for selector in self.selectors:
            for number in range(self.asked.jobs):
                record = self.clean.rows.get(f"record-{self._version(selector)}-{number}")
                chosen = self.chosen[selector.name].rows.get(f"clean-{number}")
                if record and chosen:
                    other = [
                        test for test, after in record["outcomes"].items() if test not in clean.flaky and clean.outcomes.get(test) != after
                    ]
                    plain = min(row["wall"] for key, row in self.clean.rows.items() if key.startswith("plain-"))
                    print(
                        f"  {selector.name}, worker {number}: recording {record['wall']:.0f} s (plain {plain:.0f} s);"
                        f" selected on the clean tree: {len(chosen['selected'])}; other outcomes while recording: {other[:5]}"
                    )


def text(path: Path) -> str:
    return path.read_bytes().decode()


def told(mutation: Mutation) -> str:
    return f"{mutation.file}:{mutation.line} [{mutation.kind}] {mutation.before.strip()} → {mutation.after.strip()}"


def measure(project: Project, asked: argparse.Namespace) -> bool:
    bench = Bench(project, asked)
    if not asked.report:
        with ThreadPoolExecutor(asked.jobs) as pool:
            for future in [pool.submit(bench.work, number) for number in range(asked.jobs)]:
                future.result()
    return bench.report()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--project", action="append", choices=sorted(known.KNOWN), help="default: all")
    parser.add_argument("--mutations", type=int, default=200)
    parser.add_argument("--seed", type=int, default=10)
    parser.add_argument("--jobs", type=int, default=2, help="mutations at once; each worker has a tree of its own")
    parser.add_argument("--selector", action="append", choices=[one.name for one in SELECTORS], help="default: both")
    parser.add_argument("--report", action="store_true", help="only print what is measured already")
    parser.add_argument("--select-only", action="store_true", help="no new full runs: record and select with the Seatrial of today")
    asked = parser.parse_args()
    fine = [measure(known.KNOWN[name], asked) for name in asked.project or list(known.KNOWN)]
    return 0 if all(fine) else 1


if __name__ == "__main__":
    sys.exit(main())
