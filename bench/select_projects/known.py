"""The three projects, and what of them is run.

- What is left out is left out once, for every tool and every run, and `said` says it.
"""

from __future__ import annotations

from pathlib import Path

from select_projects.projects import Project


def _ray() -> Path:
    """site-packages of the environment with Ray that our own tests use; built here if it is not there."""
    from seatrial.runtime.environments import Environments

    lock = Path(__file__).resolve().parents[2] / "tests" / "data" / "ray" / "environment.lock"
    found = Environments().find("ray", lock) or Environments().build("ray", lock, print)
    return next((found.python.parents[1] / "lib").glob("python3*")) / "site-packages"


TUTORIALS = (
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
    "multiple_values",
)
# Most of what is left of the time is in these, which start a program in nearly every test; others of their kind stay.
PROGRAMS = (
    "test_atomic_file.py",
    "test_cli/test_app_other_name.py",
    "test_cli/test_doc.py",
    "test_cli/test_extending_app.py",
    "test_cli/test_extending_empty_app.py",
    "test_cli/test_multi_app.py",
    "test_cli/test_multi_app_cli.py",
    "test_cli/test_multi_app_sub.py",
    "test_cli/test_multi_func.py",
    "test_cli/test_parser.py",
    "test_cli/test_sub.py",
    "test_cli/test_sub_help.py",
    "test_completion/test_completion.py",
    "test_completion/test_completion_choice.py",
    "test_completion/test_completion_choice_no_case.py",
    "test_completion/test_completion_complete.py",
    "test_completion/test_completion_complete_no_help.py",
    "test_completion/test_completion_complete_rich.py",
    "test_completion/test_completion_file.py",
    "test_completion/test_completion_option_colon.py",
    "test_completion/test_completion_path.py",
    "test_completion/test_completion_show.py",
    "test_rich_markup_mode.py",
    "test_tracebacks.py",
)
TYPER = Project(
    name="typer",
    sdist="typer==0.29.0",
    requirements=("coverage[toml]", "pydantic>=2.5.3", "shellingham>=1.3", "rich>=13.8", "annotated-doc>=0.0.2"),
    sources=("typer",),
    tests=("tests",),
    left_out=(*(f"tests/test_tutorial/test_{name}" for name in TUTORIALS), *(f"tests/{name}" for name in PROGRAMS)),
    test_s=60,
    said=f"{len(TUTORIALS)} folders of tutorials and {len(PROGRAMS)} files of tests that start many programs are left out"
    " (most of its time); mutations in typer/",
)
VERIFIERS = Project(
    name="verifiers",
    sdist="verifiers==0.4.0",
    requirements=("pytest-asyncio", "verifiers==0.4.0"),
    sources=("verifiers/v1",),
    tests=("tests",),
    data=("tests", "verifiers/v1"),
    left_out=("tests/v1/test_color_codeword_tasks.py",),
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
