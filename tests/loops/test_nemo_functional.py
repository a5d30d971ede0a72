"""One call of a functional: what the script would delete is kept, what it leaves is moved, whatever happens to it."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import time
from pathlib import Path

import pytest

from seatrial.instruments.nemo_rl import run_functional, vendored_bridge
from seatrial.instruments.nemo_rl.nemo_process import DriverChild
from tests.loops.nemo_driver import FOLDER, Stage, put

WAITS = 'echo waiting > $EXP_DIR/run.log; echo "in the script"; sleep 60'


def test_results_are_moved_and_the_code_is_the_scripts(tmp_path: Path) -> None:
    stage = Stage(tmp_path, 'printf "%s\\n" "$@" > $EXP_DIR/words; exit 7')
    code, log = stage.run("--", "a.b=1", "++c=[x,y]", "--flag")
    assert code == 7
    assert (stage.out / "results" / "words").read_text() == "a.b=1\n++c=[x,y]\n--flag\n"
    assert (stage.out / "results" / "logs").is_dir()
    assert not stage.folder.exists()
    assert log == f"seatrial: results are in {stage.out / 'results'}\n"


def test_what_an_earlier_run_left_is_kept(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    put(stage.folder, {"metrics.json": "{}"})
    put(stage.out / "earlier", {"of": "somebody"})
    code, log = stage.run()
    assert code == 0
    assert (stage.out / "earlier-2" / "metrics.json").read_text() == "{}"
    assert (stage.out / "earlier" / "of").read_text() == "somebody"
    assert [path.name for path in (stage.out / "results").iterdir() if path.is_file()] == ["run.log"]
    assert f"{stage.folder} is now {stage.out / 'earlier-2'}" in log


def test_results_that_exist_are_evidence_of_another_run(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    put(stage.out / "results", {"metrics.json": "{}"})
    put(stage.folder, {"run.log": "earlier"})
    code, log = stage.run()
    assert code == 2
    assert "it is the evidence of another run" in log
    assert (stage.folder / "run.log").read_text() == "earlier", "nothing was run"


def test_a_script_without_results_is_told(tmp_path: Path) -> None:
    stage = Stage(tmp_path, "rm -rf $EXP_DIR")
    assert stage.run() == (0, f"seatrial: the script left no {stage.folder}\n")
    assert not (stage.out / "results").exists()


def test_a_name_from_outside_does_not_move_the_results(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    put(stage.checkout / "tests" / "functional" / "other", {"run.log": "keep me"})
    assert stage.run(EXP_NAME="other")[0] == 0
    assert (stage.checkout / "tests" / "functional" / "other" / "run.log").read_text() == "keep me"
    assert (stage.out / "results" / "run.log").is_file()


@pytest.mark.parametrize("named", [False, True])
def test_the_users_git_configuration_is_read_and_not_written(tmp_path: Path, named: bool) -> None:
    body = "git config --global --add safe.directory /x; git config user.name > $EXP_DIR/name"
    stage = Stage(tmp_path, body)
    own = tmp_path / ('of "me"' if named else "home/.gitconfig")
    own.write_text("[user]\n\tname = me\n")
    code, log = stage.run(**({"GIT_CONFIG_GLOBAL": str(own)} if named else {}))
    assert code == 0, log
    assert own.read_text() == "[user]\n\tname = me\n"
    assert (stage.out / "results" / "name").read_text() == "me\n"
    assert "directory = /x" in (stage.out / "gitconfig").read_text()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_script_and_loses_nothing(tmp_path: Path, number: signal.Signals) -> None:
    body = f"trap 'echo told >> $EXP_DIR/run.log; exit 1' TERM INT; {WAITS} & wait"
    stage = Stage(tmp_path, body)
    process = stage.start()
    assert process.stdout is not None
    assert process.stdout.readline() == "in the script\n"
    process.send_signal(number)
    assert process.wait(45) == 128 + number, "the script itself would wait for a minute"
    assert (stage.out / "results" / "run.log").read_text() == "waiting\ntold\n"


def test_a_script_that_does_not_listen_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Stage(tmp_path, "")
    started = tmp_path / "started"
    ignores = f"trap '' TERM; touch {started}; for n in $(seq 600); do sleep 0.1; done"
    monkeypatch.setattr("seatrial.instruments.nemo_rl.nemo_process.GRACE_S", 0.2)
    child = DriverChild()
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGALRM)]
    child.listen()
    try:
        pid = os.getpid()
        if (sender := os.fork()) == 0:  # a process that sends the signal once the child is there
            while not started.exists():
                time.sleep(0.01)
            os.kill(pid, signal.SIGTERM)
            os._exit(0)
        assert child.run(["bash", "-c", ignores], os.environ, stage.checkout) == 128 + signal.SIGKILL
        os.waitpid(sender, 0)
        assert child.asked() == signal.SIGTERM
        assert child.run(["false"], os.environ, stage.checkout) == 128 + signal.SIGTERM, "nothing starts after it"
    finally:
        for number, handler in zip((signal.SIGTERM, signal.SIGINT, signal.SIGALRM), before, strict=True):
            signal.signal(number, handler)


def test_a_child_has_a_deadline(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGALRM)
    child = DriverChild()
    signal.signal(signal.SIGALRM, child._late)
    try:
        assert child.run(["sleep", "60"], os.environ, tmp_path, seconds=0.1) == 128 + signal.SIGKILL
    finally:
        signal.signal(signal.SIGALRM, before)


def test_two_drivers_do_not_meet(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    put(stage.folder, {"run.log": "of the other"})
    with (stage.checkout / ".git" / vendored_bridge.LOCK).open("ab") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        code, log = stage.run()
    assert code == 2
    assert f"seatrial: driver stopped: another trial drives {stage.checkout}" in log
    assert (stage.folder / "run.log").read_text() == "of the other"


@pytest.mark.parametrize(
    ("words", "said"), [(("--sync", "/only-one"), "is not FROM=TO"), (("--script", "tests/functional/gone.sh"), "no such script")]
)
def test_what_cannot_be_run_is_a_usage_error(tmp_path: Path, words: tuple[str, ...], said: str) -> None:
    code, log = Stage(tmp_path).run(*words)
    assert code == 2
    assert said in log


def test_no_uv_and_no_git_are_told(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    (tmp_path / "bin" / "uv").unlink()
    code, log = stage.run(PATH="/usr/bin:/bin")
    assert (code, "seatrial: driver stopped: cannot start the script: " in log) == (2, True)
    bare = Stage(tmp_path / "bare", git_too=False)
    code, log = bare.run()
    assert (code, "not a git checkout that can be written" in log) == (2, True)


def test_across_file_systems_files_are_copied_then_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tmp_path / "from", {"a/b": "kept"})

    def refused(*_: object) -> None:
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    monkeypatch.setattr(os, "rename", refused)
    assert run_functional.move(tmp_path / "from", tmp_path / "to") == tmp_path / "to"
    assert (tmp_path / "to" / "a" / "b").read_text() == "kept"
    assert not (tmp_path / "from").exists()


def test_evidence_that_cannot_be_moved_is_told_and_stays(tmp_path: Path) -> None:
    stage = Stage(tmp_path, "echo x > $EXP_DIR/run.log; rm -rf $PHASE; echo file > $PHASE")
    code, log = stage.run(PHASE=str(stage.out))
    assert code == run_functional.NOT_KEPT
    assert "seatrial: driver stopped: evidence not kept: " in log
    assert (stage.checkout / FOLDER / "run.log").read_text() == "x\n"


def test_the_witness_goes_first_on_the_path_when_it_is_asked_for(tmp_path: Path) -> None:
    stage = Stage(tmp_path, "echo $PYTHONPATH > $EXP_DIR/path")
    assert stage.run(SEATRIAL_IMPORTS=str(tmp_path))[0] == 0
    root, start = (stage.out / "results" / "path").read_text().split(":")[:2]
    assert (root, start) == (str(stage.checkout), str(run_functional.START))
    assert [path.name for path in run_functional.START.glob("*.py")].count("sitecustomize.py") == 1
