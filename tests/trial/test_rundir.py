"""The run directory: made, locked, loaded, refused."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from seatrial.core.errors import UserError
from seatrial.core.files import read_json, write_json
from seatrial.core.records import Cost, LevelResult, Plan, PlannedLevel, Trial
from seatrial.core.verdict import Verdict
from seatrial.trial import run_dir

TRIAL = Trial(id="a", seatrial="0", created=run_dir.now(), plan=Plan(loop="x", levels=(), model="m"), command=(), status="planned")


def test_a_new_directory_is_named_by_time_and_loop_and_ignored_by_git(tmp_path: Path) -> None:
    one, two = run_dir.new_directory(tmp_path / "trials", "x"), run_dir.new_directory(tmp_path / "trials", "x")
    assert one != two
    assert re.fullmatch(r"\d{8}T\d{6}Z-x-[0-9a-f]{4}", one.name)
    assert (one / ".gitignore").read_text() == "*\n"
    assert one.is_absolute()


def test_a_relative_place_becomes_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_dir.named_directory(Path("a b/ü")) == tmp_path / "a b" / "ü"


@pytest.mark.parametrize("make", [lambda path: run_dir.new_directory(path, "x"), run_dir.named_directory])
def test_a_place_that_cannot_be_written_is_named(tmp_path: Path, make: object) -> None:
    (tmp_path / "file").touch()
    assert callable(make)
    with pytest.raises(UserError, match=r"file/below.*: cannot make the run directory: Not a directory") as caught:
        make(tmp_path / "file" / "below")
    assert "--out" in caught.value.fix


def test_a_directory_that_holds_a_trial_is_not_taken_for_another(tmp_path: Path) -> None:
    run_dir.save(tmp_path, TRIAL)
    with pytest.raises(UserError, match="holds a trial already") as caught:
        run_dir.named_directory(tmp_path)
    assert f"seatrial resume {tmp_path}" in caught.value.fix


def test_a_directory_that_holds_anything_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine").touch()
    with pytest.raises(UserError, match="is not empty"):
        run_dir.named_directory(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def hold_elsewhere(path: Path, then: str) -> str:
    """Take the lock in another process and do something; what it says on standard error."""
    code = f"import os, pathlib; from seatrial.trial import run_dir\nwith run_dir.locked(pathlib.Path({str(path)!r})): {then}"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False).stderr


def test_a_second_holder_is_refused_with_the_process_of_the_first(tmp_path: Path) -> None:
    with run_dir.locked(tmp_path):
        with (
            pytest.raises(UserError, match=rf"another seatrial \(process {os.getpid()}\) works in this directory"),
            run_dir.locked(tmp_path),
        ):
            pass
        code = "from pathlib import Path; from seatrial.trial import run_dir\n" + f"with run_dir.locked(Path({str(tmp_path)!r})): pass"
        other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        assert f"process {os.getpid()}" in other.stderr
    with run_dir.locked(tmp_path):
        pass


def test_a_lock_whose_holder_died_is_free(tmp_path: Path) -> None:
    code = "import os; from pathlib import Path; from seatrial.trial import run_dir\n"
    code += f"with run_dir.locked(Path({str(tmp_path)!r})): os._exit(1)"
    subprocess.run([sys.executable, "-c", code], check=False)
    assert (tmp_path / ".lock").read_text().strip().isdigit()
    with run_dir.locked(tmp_path):
        assert (tmp_path / ".lock").read_text() == f"{os.getpid()}\n"


def test_a_lock_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot write there"), run_dir.locked(tmp_path / "file"):
        pass


def test_a_trial_survives_its_file(tmp_path: Path) -> None:
    run_dir.save(tmp_path, TRIAL)
    assert run_dir.load(tmp_path) == TRIAL


def test_a_trial_of_another_schema_names_the_key(tmp_path: Path) -> None:
    run_dir.save(tmp_path, TRIAL)
    data = read_json(tmp_path / "trial.json")
    write_json(tmp_path / "trial.json", {**data, "colour": "red"})
    with pytest.raises(UserError, match=r"trial\.json: colour: "):
        run_dir.load(tmp_path)
    write_json(tmp_path / "trial.json", {key: value for key, value in data.items() if key != "plan"})
    with pytest.raises(UserError, match=r"trial\.json: plan: Field required"):
        run_dir.load(tmp_path)
    write_json(tmp_path / "trial.json", {**data, "status": "finished"})
    with pytest.raises(UserError, match=r"trial\.json: status: "):
        run_dir.load(tmp_path)


@pytest.mark.parametrize("edited", ["trial.json", "levels/0-smoke/result.json"])
def test_a_verdict_that_was_edited_is_not_believed(tmp_path: Path, edited: str) -> None:
    level = LevelResult(number=0, name="smoke", title="t", verdict=Verdict.FAIL, reason="r", directory="levels/0-smoke")
    run_dir.save(tmp_path, TRIAL.model_copy(update={"levels": (level,)}))
    write_json(tmp_path / "levels" / "0-smoke" / "result.json", level)
    assert run_dir.load(tmp_path).levels == (level,)
    (tmp_path / edited).write_text((tmp_path / edited).read_text().replace('"Fail"', '"Pass"'))
    with pytest.raises(UserError, match=r"level 0, result\.json of that level says otherwise"):
        run_dir.load(tmp_path)


def test_a_directory_without_a_trial_is_none(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no trial\.json there"):
        run_dir.load(tmp_path)


def test_a_level_has_its_own_directory(tmp_path: Path) -> None:
    planned = PlannedLevel(number=4, name="ranks", title="t", reasons=(), cost=Cost(minutes=1))
    assert run_dir.level_directory(tmp_path, planned) == tmp_path / "levels" / "4-ranks"
