"""The import witness: what a process may lack, and what it loads without importing it."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from seatrial.evidence.imports import read_executed, read_loaded
from tests.instruments.world import World

START = "import os, sys\nfrom seatrial.instruments.witness import watch_this_process\n"


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def test_a_package_that_cannot_be_found_ends_the_process(world: World) -> None:
    done = world.run(["-c", START + "watch_this_process(os.environ, 'driver')\nprint('trained')"], [], {"pkg": world.root / "repo"})
    assert done.returncode == 90
    assert done.stdout == f"seatrial: wrong import in driver: driver: could not import pkg, expected from {world.root / 'repo'}\n"


def test_a_process_with_an_environment_of_its_own_may_lack_it(world: World) -> None:
    done = world.run(["-c", START + "watch_this_process(os.environ, 'driver', may_lack=True)"], [], {"pkg": world.root / "repo"})
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert [(row["file"], row["ok"], row["method"]) for row in world.rows() if row["package"] == "pkg"] == [(None, False, "found")]


def test_but_not_find_it_elsewhere_later(world: World) -> None:
    other = world.package("installed", "pkg")
    late = f"watch_this_process(os.environ, 'worker', may_lack=True)\nsys.path.append({str(other)!r})\nimport pkg\nprint('trained')"
    done = world.run(["-c", START + late], [], {"pkg": world.root / "repo"})
    assert done.returncode == 90
    assert f"wrong import in worker: worker: imported pkg from {other}" in done.stdout
    assert "trained" not in done.stdout


def test_the_program_itself_was_loaded_although_nobody_imports_it(world: World) -> None:
    root = world.package("repo", "pkg")
    (root / "main.py").write_text(START + "watch_this_process(os.environ, 'driver', __file__)\nimport pkg\n")
    assert world.run([str(root / "main.py")], [root], {"pkg": root}).returncode == 0
    assert read_loaded([world.out / "loaded.jsonl"]) == {str(root / "main.py"), str(root / "pkg" / "__init__.py")}


def test_a_witness_that_starts_late_still_sees_what_ran(world: World) -> None:
    """A package that starts the witness as it is imported has loaded modules of its own by then."""
    early = START + "from pkg.early import first\nfirst()\nwatch_this_process(os.environ, 'worker')\nimport pkg.late\npkg.late.second()\n"
    root = world.package("repo", "pkg", early)
    (root / "pkg" / "early.py").write_text("def first(): return 1\ndef idle(): return 1\n")
    (root / "pkg" / "late.py").write_text("def second(): return 1\ndef idle(): return 1\n")
    files = []
    for name in ("pkg/early.py", "pkg/late.py"):
        files.append({"repo": "r", "path": name, "sha256": hashlib.sha256((root / name).read_bytes()).hexdigest()})
    (world.out / "changed.json").write_text(json.dumps({"files": files}))
    done = world.run(["-c", "import pkg"], [root], {"pkg": root})
    assert (done.returncode, done.stderr) == (0, "")
    ran = read_executed(world.out / "executed.jsonl").ran
    assert {row[1:3] for row in ran} == {
        *(("pkg/early.py", "<module>"), ("pkg/early.py", "first"), ("pkg/late.py", "<module>"), ("pkg/late.py", "second"))
    }
