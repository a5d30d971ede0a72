"""Where the driver and a real Ray worker would import packages from, before anything is trained. Exit code 90: a mismatch.

    python -m seatrial.loops.verl.drive.ray_imports --out DIR --phase-dir DIR --packages a,b --claims JSON [--py-executable TEXT]

- The worker runs in the runtime environment that training gives to its workers: PYTHONPATH, and the uv command if
  workers are started by it. With RAY_ADDRESS it is a worker of that cluster, else of one that starts and ends here.
- Packages are located, not imported: a worker without a GPU cannot import them all, and only training may count as use.
- Driver and worker must find every package at the same place, and one under test in its checkout.
- What the level claims of its configuration is written down as a fact: the proofs compare it with what was in force.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

from seatrial.loops.verl.drive.witness import WRONG_IMPORT, under_test
from seatrial.probes import facts, provenance

START_SECONDS = 300
"""uv may have to unpack an environment for the first worker."""


def locate(packages: list[str]) -> dict[str, str | None]:
    """Where this process would import each package from."""
    return {row["package"]: row["file"] for row in provenance.found(packages, "")}


def runtime_environment(py_executable: str | None) -> dict[str, Any]:
    """That of training, as far as it decides what is imported."""
    made: dict[str, Any] = {"env_vars": {"PYTHONPATH": os.environ.get("PYTHONPATH", "")}}
    if py_executable:
        made["py_executable"] = py_executable
    return made


def ask_worker(packages: list[str], py_executable: str | None) -> dict[str, str | None]:
    """Where a Ray worker would import each package from."""
    os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")  # as verl does: workers get their uv command from us
    import ray

    ray.init(runtime_env=runtime_environment(py_executable), **({} if os.environ.get("RAY_ADDRESS") else {"include_dashboard": False}))
    try:
        task = ray.remote(num_cpus=1)(locate)
        found: dict[str, str | None] = ray.get(task.remote(packages), timeout=START_SECONDS)
        return found
    finally:
        ray.shutdown()


def problems(driver: dict[str, str | None], worker: dict[str, str | None], expected: dict[str, str]) -> list[str]:
    """What is wrong, one sentence each, beginning with the process."""
    made = []
    for package, file in driver.items():
        if file != worker[package]:
            made.append(f"imports-worker: {package} would come from {worker[package]}, in the driver from {file}")
        elif file is None:
            made.append(f"imports-driver: {package} is not installed, neither for the driver nor for Ray workers")
        elif package in expected and not provenance.comes_from(file, package, expected[package]):
            made.append(f"imports-driver: {package} would come from {file}, expected from {expected[package]}")
    return made


def main() -> int:
    """Ask both, write down what they say, compare."""
    parser = argparse.ArgumentParser(description="Where driver and Ray workers import from.")
    parser.add_argument("--out", required=True, type=Path, help="the level directory")
    parser.add_argument("--phase-dir", required=True, type=Path, help="the directory of this phase")
    parser.add_argument("--packages", required=True, type=lambda text: text.split(","), help="separated by commas")
    parser.add_argument("--claims", required=True, type=json.loads, help="configuration values by phase")
    parser.add_argument("--py-executable", help="how Ray starts its workers")
    arguments = parser.parse_args()
    expected = under_test(os.environ.get("SEATRIAL_UNDER_TEST", ""))
    for phase, values in arguments.claims.items():
        facts.append(arguments.phase_dir / "facts.jsonl", {"fact": "claims", "phase": phase, "values": values})
    packages = list(dict.fromkeys([*expected, *arguments.packages]))
    print("seatrial: waiting for a Ray worker to say where it imports from", flush=True)
    answers = {"imports-driver": locate(packages), "imports-worker": ask_worker(packages, arguments.py_executable)}
    for process, answer in answers.items():
        for package, file in answer.items():
            print(f"seatrial: {process}: {package} from {file}", flush=True)
            ok = file is not None and (package not in expected or provenance.comes_from(file, package, expected[package]))
            row = {"process": process, "package": package, "file": file, "expected": expected.get(package), "ok": ok, "method": "found"}
            facts.append(arguments.out / "imports.jsonl", row)
    wrong = problems(answers["imports-driver"], answers["imports-worker"], expected)
    for problem in wrong:
        process, _, what = problem.partition(": ")
        print(f"seatrial: wrong import in {process}: {what}", flush=True)
    return WRONG_IMPORT if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
