"""`seatrial doctor`: everything at once, for one loop or all, for people and for machines."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from seatrial.cli import doctor
from seatrial.core.errors import BlockedError, FindingCode, UserError
from seatrial.core.loop import Context
from seatrial.core.records import Finding
from seatrial.core.verdict import Boundary
from seatrial.loops import names
from seatrial.loops.trl.loop import Trl
from seatrial.runtime.filelock import exclusive
from seatrial.trial import staging
from tests.cli.command import Answer, inside
from tests.loops.tiny_model import make_model


@pytest.fixture(autouse=True)
def newcomer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine on which nothing was built yet."""
    monkeypatch.setenv("SEATRIAL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment of every loop is there."""
    found = staging.Interpreter(Path("/bin/sh"), None, (Finding(name="environment", ok=True, message="built"),))
    monkeypatch.setattr(doctor, "_environment", lambda _: (found.python, found.findings))


def rows(answer: Answer) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(answer.out)["findings"]
    return found


def codes(answer: Answer, severity: str = "blocks") -> list[str]:
    return [row["code"] for row in rows(answer) if row["severity"] == severity]


def make_checkout(place: Path, package: str = "mine") -> Path:
    """A repository with one package and one change on top of main."""
    who = ("-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "commit.gpgsign=false")
    (place / package).mkdir(parents=True)
    (place / package / "__init__.py").touch()
    for words in (("init", "-q", "-b", "main"), ("add", "-A"), ("commit", "-q", "-m", "all"), ("checkout", "-q", "-b", "change")):
        subprocess.run(["git", "-C", str(place), *who, *words], check=True, capture_output=True)
    return place


def test_without_a_loop_every_loop_is_gone_through_at_once() -> None:
    answer = inside("doctor", "--json")
    assert (answer.code, answer.err) == (99, "")
    said = json.loads(answer.out)
    assert list(said["about"]) == ["this machine", "trl", "verl --device cpu", "verl --device gpu", "nemo-rl"]
    assert {title.partition(" ")[0] for title in said["about"]} - {"this"} == set(names())
    by_loop = {title: {row["code"] for row in rows(answer) if row["about"] == title} for title in said["about"]}
    assert {"git", "ports", "variables"} <= by_loop["this machine"]
    assert {"environment-exists", "disk", "memory", "model"} <= by_loop["trl"]
    assert {"checkout", "gpus", "model-missing", "data"} <= by_loop["verl --device gpu"]
    assert {"checkout", "environment", "gpus"} <= by_loop["nemo-rl"]
    assert all(row["fix"] for row in rows(answer) if row["severity"] != "ok")
    assert set(rows(answer)[0]) == {"about", "severity", "name", "ok", "boundary", "message", "fix", "code", "warns", "path"}


def test_one_device_leaves_the_other_out() -> None:
    said = json.loads(inside("doctor", "--device", "cpu", "--json").out)
    assert list(said["about"]) == ["this machine", "trl", "verl --device cpu", "nemo-rl"]


def test_text_fits_a_narrow_terminal_and_ends_with_the_next_command() -> None:
    answer = inside("doctor", "trl")
    assert answer.code == 99
    lines = answer.out.splitlines()
    wide = [line for line in lines if len(line) > 80 and "fix:" not in line and len(line.split()) > 2]
    assert wide == []
    assert any(line.startswith("  BLOCKS  environment exists:") for line in lines)
    assert "          fix: seatrial env build trl" in lines
    assert lines[-1] == "next: seatrial doctor trl"


@pytest.mark.usefixtures("built")
def test_a_machine_that_is_ready_is_0_and_the_trial_is_next() -> None:
    answer = inside("doctor", "trl", "--level", "0,1", "--set", "limits.stall_minutes=2", "--", "--learning_rate", "1e-4")
    assert answer.code == 0, answer.out
    assert "trl: ready" in answer.out
    last = answer.out.splitlines()[-1]
    assert last == "next: seatrial run trl --level 0,1 --set limits.stall_minutes=2 -- --learning_rate 1e-4"


@pytest.mark.parametrize(
    "words",
    [
        ("nothing",),
        ("trl", "--level", "99"),
        ("trl", "--set", "options.no_such=1"),
        ("trl", "--change", "/no/such/place"),
        ("--change", "/no/such/place"),
        ("trl", "--auto"),
        ("--auto",),
        ("--config", "/none.toml"),
        ("--set", "no.such=1"),
        ("--set", "options.no_such=1"),
        ("--level", "99"),
    ],
)
def test_wrong_usage_is_2(words: tuple[str, ...]) -> None:
    answer = inside("doctor", *words)
    assert (answer.code, "fix:" in answer.err) == (2, True)


def test_a_checkout_that_cannot_be_read_hides_nothing(tmp_path: Path) -> None:
    (tmp_path / "plain").mkdir()
    answer = inside("doctor", "trl", "--change", tmp_path / "plain", "--json")
    assert answer.code == 99
    assert {"request", "environment-exists"} <= set(codes(answer))
    assert "memory" in codes(answer, "ok")
    (request,) = [row for row in rows(answer) if row["code"] == "request"]
    assert "not a git repository" in request["message"]
    answer = inside("doctor", "nemo-rl", "--nemo-rl", tmp_path / "plain", "--json")
    assert {"request", "checkout", "gpus"} <= set(codes(answer))


@pytest.mark.usefixtures("built")
@pytest.mark.parametrize("error", [BlockedError(Boundary.CLUSTER, "gone", "x"), UserError("gone", "x"), PermissionError(13, "gone")])
def test_an_error_of_one_check_hides_no_other(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def fail(_: Trl, __: Context) -> tuple[Finding, ...]:
        raise error

    monkeypatch.setattr(Trl, "findings", fail)
    answer = inside("doctor", "trl", "--json")
    assert (answer.code, codes(answer)) == (99, ["check-failed"])
    assert {"disk", "memory", "ports"} <= set(codes(answer, "ok"))


@pytest.mark.usefixtures("built")
def test_levels_are_chosen_from_the_diff(tmp_path: Path) -> None:
    checkout = make_checkout(tmp_path / "mine")
    (checkout / "mine" / "lora_adapter.py").touch()
    answer = inside("doctor", "trl", "--auto", "--change", checkout, "--json")
    assert answer.code == 0, answer.out
    (level,) = [row for row in rows(answer) if row["code"] == "level"]
    planned = json.loads(inside("plan", "trl", "--auto", "--change", checkout, "--json").out)
    assert level["message"] == f"the diff asks for level {', '.join(str(item['number']) for item in planned['levels'])}"
    assert set(json.loads(inside("doctor", "--auto", "--change", checkout, "--json").out)["about"]) >= {"trl", "nemo-rl"}


def test_the_models_files_are_read_and_what_builds_the_environment_is_said(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model")
    answer = inside("doctor", "trl", "--model", model, "--json")
    (found,) = [row for row in rows(answer) if row["code"] == "model-not-loaded"]
    assert (found["severity"], found["fix"]) == ("warns", "seatrial env build trl")
    (model / "config.json").write_text("{")
    answer = inside("doctor", "--model", model, "--json")
    torn = [row for row in rows(answer) if row["code"] == "model-file-torn"]
    assert {row["about"] for row in torn} == {"trl", "verl --device cpu", "verl --device gpu", "nemo-rl"}
    assert {row["path"] for row in torn} == {str(model / "config.json")}


def test_an_environment_that_is_being_built_names_the_process(tmp_path: Path) -> None:
    with exclusive(tmp_path / "cache" / "build.lock", "the build of trl", lambda _: None, 1):
        (found,) = [row for row in rows(inside("doctor", "trl", "--json")) if row["code"] == "environment-building"]
    assert "the build of trl (process " in found["message"]
    assert found["fix"].startswith("seatrial env build trl")
    assert "environment-exists" in codes(inside("doctor", "trl", "--json")), "a lock that nobody holds is no build"


def test_configuration_files_hold_for_every_loop(tmp_path: Path) -> None:
    (tmp_path / "seatrial.toml").write_text('[run]\ntrials = "elsewhere"\n[options]\ngpus = "4"\n')
    answer = inside("doctor", "--json")
    assert answer.code == 99
    assert "request" not in codes(answer), "an option of one loop is not wrong for another"


def test_every_code_is_known() -> None:
    known = set(FindingCode)
    assert all(row["code"] in known and row["code"] != "other" for row in rows(inside("doctor", "--json")))


def test_a_missing_checkout_is_said_once() -> None:
    found = rows(inside("doctor", "nemo-rl", "--json"))
    assert [row["code"] for row in found if "no NeMo-RL checkout was named" in row["message"]] == ["checkout"]
    (environment,) = [row for row in found if row["code"] == "environment"]
    assert (environment["severity"], environment["message"]) == ("ok", "not looked for yet: see NeMo-RL")


@pytest.mark.parametrize("program", ["exit 3", "echo '[]'", "echo '{}'", "echo 3.11"])
def test_an_interpreter_that_is_none_is_a_finding(tmp_path: Path, program: str) -> None:
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\n{program}\n")
    python.chmod(0o755)
    answer = inside("doctor", "trl", "--python", python, "--json")
    assert answer.code == 99, answer.err
    assert codes(answer) == ["environment"]
    assert str(python) in next(row["message"] for row in rows(answer) if row["code"] == "environment")


def test_a_checkout_that_git_cannot_read_was_named_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_checkout(tmp_path / "RL", "nemo_rl")
    monkeypatch.setenv("PATH", "/nonexistent")
    answer = inside("doctor", "nemo-rl", "--nemo-rl", tmp_path / "RL", "--json")
    assert answer.code == 99
    assert not any("was named" in row["message"] for row in rows(answer))
    assert "git" in codes(answer, "warns")
    assert {"request", "checkout", "launcher"} <= set(codes(answer))


BROKEN = ("torn.json", "list.json", "deep.json", "long.json", "pipe", "zero", "loop", "directory", "empty")


def break_model(directory: Path, how: str) -> None:
    directory.mkdir()
    file = directory / "config.json"
    texts = {"torn.json": '{"model_type', "list.json": "[]", "deep.json": '{"a":' * 5000, "long.json": '{"vocab_size": ' + "9" * 5000 + "}"}
    if how in texts:
        file.write_text(texts[how])
    elif how == "pipe":
        os.mkfifo(file)
    elif how in ("zero", "loop"):
        file.symlink_to("/dev/zero" if how == "zero" else "config.json")
    elif how == "directory":
        file.mkdir()


@pytest.mark.parametrize("words", [("trl",), ("verl", "--device", "cpu")])
@pytest.mark.parametrize("how", BROKEN)
def test_every_broken_model_is_a_finding_and_never_hangs(tmp_path: Path, how: str, words: tuple[str, ...]) -> None:
    break_model(tmp_path / "model", how)
    answer = inside("doctor", *words, "--model", tmp_path / "model", "--json")
    assert (answer.code, answer.err) == (99, "")
    found = set(codes(answer))
    assert {"model-weights-missing", "tokenizer-missing", "environment-exists"} <= found
    assert found & {"model-config", "model-file-torn"} or how == "long.json"


def test_everything_at_once_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    break_model(tmp_path / "model", "torn.json")
    monkeypatch.setattr("os.statvfs", lambda _: os.statvfs_result((4096, 4096, 10**6, 0, 0, 10**6, 5, 5, 0, 255)))
    (tmp_path / "file").touch()
    variables = {"HIP_VISIBLE_DEVICES": "0", "CUDA_VISIBLE_DEVICES": "1", "RAY_ADDRESS": "10.0.0.1:99999", "TMPDIR": "/nonexistent/x"}
    for key, value in variables.items():
        monkeypatch.setenv(key, value)
    before = sorted(tmp_path.rglob("*"))
    for loop in ("trl", "verl", "nemo-rl"):
        out = f"run.trials={tmp_path / 'file' / 'trials'}"
        answer = inside("doctor", loop, "--model", tmp_path / "model", "--set", out, "--python", "/nonexistent/python", "--json")
        assert (answer.code, answer.err) == (99, ""), loop
        assert {"variables", "disk", "inodes", "not-writable", "environment", "model-file-torn", "tokenizer-missing"} <= set(
            codes(answer)
        ), loop
        assert all(row["fix"] for row in rows(answer) if row["severity"] != "ok")
    assert sorted(tmp_path.rglob("*")) == before


def test_a_checkout_that_is_not_there_is_wrong_usage() -> None:
    for words in (("nemo-rl", "--nemo-rl"), ("verl", "--verl"), ("--nemo-rl",), ("--verl",)):
        answer = inside("doctor", *words, "/no/such/place")
        assert (answer.code, answer.out) == (2, "")
        assert f"/no/such/place: no such directory\n  fix: name an existing checkout with {words[-1]} PATH" in answer.err


@pytest.mark.usefixtures("built")
def test_the_next_command_keeps_what_was_asked_for(tmp_path: Path) -> None:
    checkout = make_checkout(tmp_path / "mine")
    answer = inside("doctor", "--change", checkout, "--auto", "--verl", checkout, f"--nemo-rl={checkout}")
    assert answer.out.splitlines()[-1] == f"next: seatrial run trl --change {checkout} --auto"
    answer = inside("doctor", "--level", "0", "--", "--learning_rate", "1e-4")
    assert answer.out.splitlines()[-1] == "next: seatrial run trl --level 0 -- --learning_rate 1e-4"


def test_a_missing_environment_is_said_once(tmp_path: Path) -> None:
    """Checks that need its interpreter do not fail in its stead."""
    place = tmp_path / "RL"
    shutil.copytree(Path(__file__).parents[1] / "data" / "nemo_rl" / "checkout", place)
    make_checkout(place, "own")
    found = rows(inside("doctor", "nemo-rl", "--nemo-rl", place, "--json"))
    assert not any("no-interpreter" in row["message"] for row in found)
    assert [row["name"] for row in found if row["code"] == "environment" and not row["ok"]] == ["environment"]
    assert "Python" not in {row["name"] for row in found}
    assert all(row["ok"] for row in found if row["name"] == "configuration"), found
