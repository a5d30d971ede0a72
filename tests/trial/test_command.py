"""command.sh: valid bash, every word intact, and never a write into the evidence."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from seatrial.core.loop import Phase
from seatrial.trial.staging import command_script, quoted

NASTY = ["a b", "größe", "it's", 'say "x"', "$HOME", "`id`", "back\\slash", "--x=1 2", "*", "", "-n", "new\nline", "!x", "#c", "~"]
PRINT = "import json, os, sys; print(json.dumps([sys.argv[1:], os.environ.get('VALUE'), os.getcwd()]))"


def run_script(script: str, path: Path, out: Path) -> list[list[object]]:
    path.write_text(script, encoding="utf-8")
    assert subprocess.run(["bash", "-n", path], check=False).returncode == 0
    environment = {"PATH": "/usr/bin:/bin", "OUT": str(out), "PYTHONPATH": "/must/go"}
    done = subprocess.run(["bash", path], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("name", ["plain", "with space", "größe", "it's", 'a"b', "$x"])
def test_every_word_survives_and_the_level_directory_is_replaced(tmp_path: Path, name: str) -> None:
    directory = tmp_path / name / "levels" / "0-smoke"
    words = [*NASTY, str(directory / "run"), f"--out={directory}/x y", f"{directory}:{directory}", str(directory)]
    phases = [Phase(name=f"p{index}", argv=(sys.executable, "-c", PRINT, *words), env={"VALUE": "a'b ü"}) for index in range(2)]
    script = command_script("level 0: it's $(nasty)", phases, directory, {"PYTHONDONTWRITEBYTECODE": "1"}, ("PYTHONPATH", "RANK"))
    out = tmp_path / "new out ü"
    answers = run_script(script, tmp_path / "command.sh", out)
    moved = [word.replace(str(directory), str(out)) for word in words]
    assert answers == [[moved, "a'b ü", str(out)]] * 2
    assert str(directory) not in script
    assert not directory.exists()


def test_a_failing_process_ends_the_script(tmp_path: Path) -> None:
    phases = [Phase(name="a", argv=("false",)), Phase(name="b", argv=("touch", "never"))]
    (tmp_path / "c.sh").write_text(command_script("t", phases, tmp_path / "d", {}, ("X",)))
    done = subprocess.run(["bash", tmp_path / "c.sh"], env={"PATH": "/usr/bin:/bin", "OUT": str(tmp_path / "o")}, check=False)
    assert done.returncode == 1
    assert not (tmp_path / "o" / "never").exists()


def test_without_a_place_it_takes_a_new_one(tmp_path: Path) -> None:
    (tmp_path / "c.sh").write_text(command_script("t", [Phase(name="a", argv=("pwd",))], tmp_path / "d", {}, ("X",)))
    environment = {"PATH": "/usr/bin:/bin", "TMPDIR": str(tmp_path)}
    done = subprocess.run(["bash", tmp_path / "c.sh"], env=environment, capture_output=True, text=True, check=True)
    assert Path(done.stdout.strip()).parent == tmp_path


def test_steps_and_options_are_readable() -> None:
    phase = Phase(name="run", argv=("python", "-m", "x", "--a", "1", "--b"), steps=8)
    assert "# run: 8 steps\npython \\\n  -m x \\\n  --a 1 \\\n  --b\n" in command_script("t", [phase], Path("/d"), {}, ("X",))


def test_a_word_without_the_directory_is_only_quoted() -> None:
    assert quoted("/d/e", Path("/d/e/f")) == "/d/e"
    assert quoted("/d/e f", Path("/x")) == "'/d/e f'"
    assert quoted("/x", Path("/x")) == '"$OUT"'


def test_a_neighbour_of_the_level_directory_is_left_alone() -> None:
    assert quoted("/r/levels/1-lora-2/x", Path("/r/levels/1-lora")) == "/r/levels/1-lora-2/x"


def test_a_process_has_its_own_directory_and_variables(tmp_path: Path) -> None:
    (tmp_path / "work dir").mkdir()
    there = Phase(name="there", argv=(sys.executable, "-c", PRINT), env={"VALUE": "1"}, cwd=tmp_path / "work dir")
    here = Phase(name="here", argv=(sys.executable, "-c", PRINT))
    script = command_script("t", [there, here], tmp_path / "d", {}, ("X",))
    out = tmp_path / "out"
    assert run_script(script, tmp_path / "command.sh", out) == [[[], "1", str(tmp_path / "work dir")], [[], None, str(out)]]
    assert (out / "there").is_dir(), "as in a trial, a process finds its own directory"
