"""A fresh environment, for real: a venv from the project's lock, in which nothing of the caller's is seen."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

PROBE = """
import importlib.util, json, os, sys
import little
names = ("pydantic", "typer", "seatrial")
print(json.dumps({"env": dict(os.environ), "prefix": sys.prefix, "path": sys.path, "little": little.ANSWER,
                  "seen": [name for name in names if importlib.util.find_spec(name)]}))
"""
PYPROJECT = '[project]\nname = "little"\nversion = "1"\ndependencies = []\n'


@pytest.fixture
def project(tmp_path: Path) -> Path:
    root = tmp_path / "project"
    (root / "src" / "little").mkdir(parents=True)
    (root / "src" / "little" / "__init__.py").write_text("ANSWER = 42\n")
    (root / "pyproject.toml").write_text(PYPROJECT)
    (root / "requirements.lock").write_text("# nothing but Python\n")
    (root / "probe.py").write_text(PROBE)
    return root


def call(project: Path, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "seatrial.cli.main", "hermetic", *words]
    variables = {**os.environ, "TMPDIR": str(project.parent), **env}
    return subprocess.run(argv, cwd=project, env=variables, capture_output=True, text=True, timeout=300, check=False)


def places(project: Path) -> list[Path]:
    return list(project.parent.glob("seatrial-hermetic-*"))


def test_nothing_of_the_callers_is_seen_and_nothing_is_left(project: Path) -> None:
    done = call(project, "--env", "NAMED", "--", "python", "probe.py", NAMED="yes", HIDDEN="no", PYTHONPATH="/hidden", WANDB_API_KEY="k")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert (told["little"], told["seen"]) == (42, []), "the project is there, the caller's packages are not"
    assert told["env"]["NAMED"] == "yes"
    assert not {"HIDDEN", "WANDB_API_KEY"} & told["env"].keys()
    assert "/hidden" not in told["path"]
    for name in ("HOME", "TMPDIR", "XDG_CACHE_HOME", "VIRTUAL_ENV"):
        assert "seatrial-hermetic-" in told["env"][name]
    assert "seatrial-hermetic-" in told["prefix"]
    assert told["env"]["SEATRIAL_HISTORY"] == "off", "its home goes, and a store in it would too"
    assert places(project) == []


def test_the_history_is_kept_where_the_user_says(project: Path) -> None:
    done = call(project, "--env", "SEATRIAL_HISTORY", "--", "python", "probe.py", SEATRIAL_HISTORY="/a/store")
    assert json.loads(done.stdout.splitlines()[-1])["env"]["SEATRIAL_HISTORY"] == "/a/store"


def test_the_exit_code_is_the_commands(project: Path) -> None:
    assert call(project, "--", "python", "-c", "raise SystemExit(7)").returncode == 7


def test_it_can_be_kept(project: Path) -> None:
    done = call(project, "--keep", "--", "true")
    (kept,) = places(project)
    assert f"kept: {kept}" in done.stderr


def test_a_project_without_a_lock_is_told_so(project: Path) -> None:
    (project / "requirements.lock").unlink()
    assert "which no lock pins" in call(project, "--show", "--", "true").stderr
    (project / "pyproject.toml").unlink()
    done = call(project, "--", "true")
    assert done.returncode == 2
    assert "requirements.lock" in done.stderr


def test_a_lock_that_cannot_be_installed_is_blocked_and_leaves_nothing(project: Path) -> None:
    (project / "requirements.lock").write_text("no-such-package-of-seatrial==1\n")
    done = call(project, "--", "true", PIP_NO_INDEX="1")
    assert done.returncode == 99, done.stderr
    assert places(project) == []


def test_a_further_package_that_cannot_be_had_is_told_with_the_end_of_the_log(project: Path) -> None:
    (project / "requirements.lock").unlink()
    done = call(project, "--with", "no-such-package-of-seatrial==9", "--", "true", PIP_NO_INDEX="1")
    assert done.returncode == 99, done.stderr
    blocked, fix = done.stderr.splitlines()[-2:]
    assert fix.startswith("  fix: correct --with no-such-package-of-seatrial==9, or the access")
    assert "pyproject.toml: installing" in blocked
    assert "seatrial-hermetic-" not in blocked, "what is gone is not named"
    ended = done.stderr.partition("seatrial: the build ended with:\n")[2]
    assert "Could not find a version that satisfies the requirement no-such-package-of-seatrial==9" in ended
    assert places(project) == []


def test_a_lock_at_fault_is_told_as_the_lock_also_beside_further_packages(project: Path) -> None:
    (project / "requirements.lock").write_text("no-such-package-of-seatrial==1\n")
    done = call(project, "--with", "pytest", "--", "true", PIP_NO_INDEX="1")
    assert done.stderr.splitlines()[-1].startswith("  fix: correct the lock")


def test_what_is_no_requirement_is_bad_input_and_nothing_is_built(project: Path) -> None:
    done = call(project, "--with", "!!bad", "--", "true")
    assert done.returncode == 2, done.stderr
    assert "--with !!bad: not a requirement" in done.stderr
    assert "creating" not in done.stderr


def test_its_own_home_cannot_be_replaced(project: Path) -> None:
    assert call(project, "--env", "HOME", "--", "true").returncode == 2


def test_a_command_that_does_not_end_is_ended(project: Path) -> None:
    assert call(project, "--deadline", "0.03", "--", "sleep", "600").returncode == 1
    assert places(project) == []


def test_a_functional_script_can_run_in_it(project: Path) -> None:
    (project / "test.sh").write_text(
        """python -c 'import little, json; print(json.dumps({"loss": {"1": little.ANSWER}}))' > metrics.json\n"""
    )
    words = (
        "functional",
        "run",
        "test.sh",
        "--hermetic",
        "--metrics",
        "metrics.json",
        "--check",
        'data["loss"]["1"] == 42',
        "--out",
        "out",
    )
    argv = [sys.executable, "-m", "seatrial.cli.main", *words]
    done = subprocess.run(argv, cwd=project, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "ran in a fresh environment from requirements.lock" in (project / "out" / "summary.md").read_text()
