"""Where the driver and a real Ray worker would import packages from, before anything is trained. Exit code 90: a mismatch.

- The worker runs in the runtime environment that training gives to its workers. With RAY_ADDRESS it is a worker of that cluster.
- Packages are located, not imported: a worker without a GPU cannot import them all, and only training may count as use.
- Driver and worker must find every package at the same place, and one under test in its checkout. Where each has an
  environment of its own, one of them may lack a package: then what the other says counts.
- What the level claims of its configuration, and what its scripts assert, is written down as facts for the proofs.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from seatrial.instruments import facts, provenance
from seatrial.instruments.witness import WRONG_IMPORT, under_test

START_SECONDS = 300  # uv may have to unpack an environment for the first worker
DRIVER, WORKER = "imports-driver", "imports-worker"

Places = dict[str, "str | None"]


def locate(packages: list[str]) -> Places:
    return {row["package"]: row["file"] for row in provenance.found(packages, "")}


def ask_worker(packages: list[str], py_executable: str | None) -> Places:
    os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")  # as the loops do: how workers start is said by us
    import ray

    # That of training, as far as it decides what is imported.
    environment: dict[str, Any] = {"env_vars": {"PYTHONPATH": os.environ.get("PYTHONPATH", "")}}
    if py_executable:
        environment["py_executable"] = py_executable
    ray.init(runtime_env=environment, **({} if os.environ.get("RAY_ADDRESS") else {"include_dashboard": False}))
    try:
        task = ray.remote(num_cpus=1)(locate)
        found: Places = ray.get(task.remote(packages), timeout=START_SECONDS)
        return found
    finally:
        ray.shutdown()


def problems(driver: Places, worker: Places, expected: dict[str, str], may_lack: Sequence[str] = ()) -> list[str]:
    """What is wrong, one sentence each, beginning with the process."""
    made = []
    for package, found in driver.items():
        here = worker[package] if found is None and DRIVER in may_lack else found
        there = here if worker[package] is None and WORKER in may_lack else worker[package]
        if here != there:
            made.append(f"{WORKER}: {package} would come from {there}, in the driver from {here}")
        elif here is None:
            if not {DRIVER, WORKER} <= set(may_lack):
                made.append(f"{DRIVER}: {package} is not installed, neither for the driver nor for Ray workers")
        elif package in expected and not provenance.comes_from(here, package, expected[package]):
            made.append(f"{DRIVER if found else WORKER}: {package} would come from {here}, expected from {expected[package]}")
    return made


def stated(claims: dict[str, Any], assertions: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for phase, values in claims.items():
        yield {"fact": "claims", "phase": phase, "values": values}
    for phase, values in assertions.items():
        yield {"fact": "assertions", "phase": phase, **values}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Where driver and Ray workers import from.", allow_abbrev=False)
    parser.add_argument("--out", required=True, type=Path, help="the level directory")
    parser.add_argument("--phase-dir", required=True, type=Path, help="the directory of this phase")
    parser.add_argument("--packages", required=True, type=lambda text: text.split(","), help="separated by commas")
    parser.add_argument("--claims", required=True, type=json.loads, help="configuration values by phase")
    parser.add_argument("--assertions", default={}, type=json.loads, help="script and expressions by phase")
    parser.add_argument("--py-executable", help="how Ray starts its workers")
    parser.add_argument("--may-lack", default=[], type=lambda text: text.split(","), help="processes that need not have every package")
    arguments = parser.parse_args(argv)
    expected = under_test(os.environ.get("SEATRIAL_UNDER_TEST", ""))
    for fact in stated(arguments.claims, arguments.assertions):
        facts.append(arguments.phase_dir / "facts.jsonl", fact)
    packages = list(dict.fromkeys([*expected, *arguments.packages]))
    print("seatrial: waiting for a Ray worker to say where it imports from", flush=True)
    answers = {DRIVER: locate(packages), WORKER: ask_worker(packages, arguments.py_executable)}
    for process, answer in answers.items():
        for package, file in answer.items():
            print(f"seatrial: {process}: {package} from {file}", flush=True)
            ok = file is not None and (package not in expected or provenance.comes_from(file, package, expected[package]))
            row = {"process": process, "package": package, "file": file, "expected": expected.get(package), "ok": ok, "method": "found"}
            facts.append(arguments.out / "imports.jsonl", row)
    wrong = problems(answers[DRIVER], answers[WORKER], expected, arguments.may_lack)
    for problem in wrong:
        process, _, what = problem.partition(": ")
        print(f"seatrial: wrong import in {process}: {what}", flush=True)
    return WRONG_IMPORT if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
