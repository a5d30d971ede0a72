"""Cases that need a loop's libraries: one child of its environment's interpreter runs all of a file, and the test reads what came out.

CASES = ("case_a", …)  # so that each is shown; one that is missing or extra fails

@pytest.fixture(scope="module")
def outcomes() -> dict[str, str | None]:
    return run_cases("tests/real/x_cases.py", CASES)

@pytest.mark.parametrize("name", CASES)
def test_case(name: str, outcomes: dict[str, str | None]) -> None:
    assert outcomes[name] is None, outcomes[name]
"""

from __future__ import annotations

import importlib.util
import inspect
import json
import os
import shlex
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

MARK = "seatrial-cases: "
ROOT = Path(__file__).parents[2]
SECONDS = 1800


def write_shadows(path: Path, phases: Sequence[Any]) -> dict[str, str]:
    """Writes the commands of the shadows among these phases, a line each; the variable that names the file to cases."""
    shadows = [shlex.join(phase.argv[3:]) for phase in phases if phase.name.startswith("shadow")]
    path.write_text("\n".join(shadows), encoding="utf-8")
    return {"SEATRIAL_SHADOWS": str(path)}


def run_cases(
    file: str,
    cases: Sequence[str] | None = None,
    environment: str = "trl",
    extra: Mapping[str, str] | None = None,
    python: str | None = None,
) -> dict[str, str | None]:
    """Of each function `case_*` of the file: None if it ended well, or its traceback. Everything else fails the test.

    They run in the interpreter of the environment, or in `python` if that is named.
    """
    import pytest

    from seatrial.loops import environments
    from seatrial.runtime.command import run_command
    from seatrial.runtime.environments import Environments

    if python is None:
        cache = Environments()
        found = cache.find(environment, environments()[environment])
        if found is None:
            pytest.fail(
                f"the environment {environment} is not built in {cache.root}: run `seatrial env build {environment}`", pytrace=False
            )
        python = str(found.python)
    path = os.pathsep.join(str(ROOT / part) for part in ("src", "packages/pytest-seatrial/src", ""))
    own = {"PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **(extra or {})}
    with tempfile.TemporaryDirectory(prefix="seatrial-cases-") as place:
        done = run_command([python, Path(__file__), ROOT / file, place], SECONDS, cwd=ROOT, env={**os.environ, **own}, own_session=True)
    answers = [line.removeprefix(MARK) for line in done.out.splitlines() if line.startswith(MARK)]
    if done.code or len(answers) != 1:
        pytest.fail(f"{file} ended with code {done.code}:\n{done.out[-3000:]}\n{done.error[-3000:]}", pytrace=False)
    outcomes: dict[str, str | None] = json.loads(answers[0])
    if cases is not None and set(cases) != set(outcomes):
        pytest.fail(f"{file}: has {sorted(outcomes)}, the test lists {sorted(cases)}", pytrace=False)
    return outcomes


def main(file: str, place: str) -> None:
    """In the child: run every case, each in a directory of its own if it asks for one."""
    from seatrial.instruments import provenance

    spec = importlib.util.spec_from_file_location("cases", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["cases"] = module  # dataclasses look their module up
    with provenance.uncollected():
        spec.loader.exec_module(module)
    outcomes: dict[str, str | None] = {}
    for name, case in inspect.getmembers(module, inspect.isfunction):
        if not name.startswith("case_"):
            continue
        directory = Path(place, name)
        directory.mkdir()
        try:
            case(**({"tmp": directory} if "tmp" in inspect.signature(case).parameters else {}))
            outcomes[name] = None
        except Exception:  # noqa: BLE001  # whatever a case raises is its outcome
            outcomes[name] = traceback.format_exc()
    print(MARK + json.dumps(outcomes), flush=True)  # noqa: T201  # the parent reads it


if __name__ == "__main__":
    main(*sys.argv[1:])
