"""The three projects, and what of them is run.

- What is left out is left out once, for every tool and every run, and `said` says it.
"""

from __future__ import annotations

from pathlib import Path

from select_projects.projects import Project


def _ray() -> Path:
    """site-packages of the environment with Ray that our own tests use; built here if it is not there."""
    from seatrial.launch.environments import Environments

    lock = Path(__file__).resolve().parents[2] / "tests" / "data" / "ray" / "environment.lock"
    found = Environments().find("ray", lock) or Environments().build("ray", lock, print)
    return next((found.python.parents[1] / "lib").glob("python3*")) / "site-packages"


SLOW = (
    "parameter_types",
    "options_autocompletion",
    "commands",
    "options",
    "arguments",
    "subcommands",
    "exceptions",
    "progressbar",
    "printing",
    "first_steps",
    "testing",
    "prompt",
    "terminating",
)
TYPER = Project(
    name="typer",
    sdist="typer==0.29.0",
    requirements=("coverage[toml]", "pydantic>=2.5.3", "shellingham>=1.3", "rich>=13.8", "annotated-doc>=0.0.2"),
    sources=("typer",),
    tests=("tests",),
    words=tuple(f"--ignore=tests/test_tutorial/test_{name}" for name in SLOW),
    test_s=60,
    said=f"without the slow tutorials ({', '.join(SLOW)}: 310 of 415 s, much of the same); mutations in typer/",
)
VERIFIERS = Project(
    name="verifiers",
    sdist="verifiers==0.4.0",
    requirements=("pytest-asyncio", "verifiers==0.4.0"),
    sources=("verifiers/v1",),
    tests=("tests",),
    data=("tests", "verifiers/v1"),
    words=("--ignore=tests/v1/test_color_codeword_tasks.py", "tests"),
    said="without test_color_codeword_tasks.py (its module is not in the source distribution); mutations in verifiers/v1",
)
RAYS = Project(
    name="rays",
    sdist="",
    requirements=(),
    sources=("fleet", "scripts"),
    tests=("tests",),
    data=("config", "scripts"),
    joined=_ray,
    said="a Ray-actor project of our own",
)
KNOWN = {project.name: project for project in (TYPER, VERIFIERS, RAYS)}
