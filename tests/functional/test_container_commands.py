"""Command lines of containers, and what is refused before one is started."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from seatrial.core.errors import BlockedError, UserError
from seatrial.functional.hermetic import (
    ENGINES,
    Box,
    Container,
    Engine,
    Fresh,
    Mount,
    before_words,
    check_requirement,
    choose_engine,
    environment_names,
    own_mounts,
    parse_mount,
    run_words,
)

STANDIN = """#!{python}
# A stand-in for {name}: it records its words and variables, and runs nothing.
import json, os, sys
with open({record!r}, "a") as stream:
    stream.write(json.dumps([{name!r}, *sys.argv[1:]]) + "\\n")
if "version" in sys.argv or "info" in sys.argv:
    sys.exit({answers})
"""


def box(engine: Engine, user: tuple[int, int] = (0, 0), gpus: bool = False, image: str = "img:1") -> Box:
    mounts = (Mount(source=Path("/w"), target="/w"), Mount(source=Path("/d"), target="/data", read_only=True))
    return Box(engine=engine, image=image, mounts=mounts, env=("HF_TOKEN",), gpus=gpus, user=user)


def stand_in(folder: Path, name: str, answers: int = 0) -> Path:
    folder.mkdir(exist_ok=True)
    record = folder / "record.jsonl"
    program = folder / name
    program.write_text(STANDIN.format(python=sys.executable, name=name, record=str(record), answers=answers))
    program.chmod(0o755)
    return record


def call(folder: Path, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
    """`seatrial hermetic …`, with the stand-ins alone on PATH."""
    argv = [sys.executable, "-m", "seatrial.cli.main", "hermetic", *words]
    variables = {**os.environ, "PATH": str(folder / "bin"), **env}
    return subprocess.run(argv, cwd=folder, env=variables, capture_output=True, text=True, timeout=120, check=False)


def test_docker() -> None:
    assert run_words(box("docker", (5, 6), gpus=True), "n", ("echo", "a b"), Path("/w")) == (
        *("docker", "run", "--rm", "--init", "--name", "n", "--user", "5:6", "--workdir", "/w", "--gpus", "all"),
        *("--volume", "/w:/w", "--volume", "/d:/data:ro", "--env", "HF_TOKEN", "--env", "SEATRIAL_HISTORY=off", "img:1", "echo", "a b"),
    )


@pytest.mark.parametrize("engine", ENGINES)
def test_the_history_is_off_in_a_container_unless_its_variable_is_named(engine: Engine) -> None:
    assert "SEATRIAL_HISTORY=off" in run_words(box(engine), "n", ("true",), Path("/w"))
    named = replace(box(engine), env=("SEATRIAL_HISTORY",))
    words = run_words(named, "n", ("true",), Path("/w"))
    assert [word for word in words if "HISTORY" in word] == ["SEATRIAL_HISTORY"]


def test_podman_keeps_the_callers_id() -> None:
    words = run_words(box("podman", (5, 6), gpus=True), "n", ("true",), Path("/w"))
    assert words[words.index("--userns") :][:2] == ("--userns", "keep-id")
    assert "nvidia.com/gpu=all" in words
    assert "--userns" not in run_words(box("podman"), "n", ("true",), Path("/w"))


def test_enroot_fetches_unpacks_starts_and_removes() -> None:
    lines = Container(box("enroot")).shown(("true",), Path("/w"))
    assert [line.split()[:2] for line in lines] == [["enroot", verb] for verb in ("import", "create", "start", "remove")]
    assert "docker://img:1" in lines[0]
    assert len(before_words(box("enroot", image="/i.sqsh"), "n", Path("/tmp"))) == 1


def test_a_value_of_a_variable_never_stands_in_a_command_line(tmp_path: Path) -> None:
    stand_in(tmp_path / "bin", "docker")
    done = call(tmp_path, "--image", "img", "--env", "HF_TOKEN", "--show", "--", "true", HF_TOKEN="hf_secret_value")
    assert done.returncode == 0, done.stderr
    assert "--env HF_TOKEN --env SEATRIAL_HISTORY=off img true" in done.stderr
    assert "hf_secret_value" not in done.stderr + done.stdout


def test_the_rendered_command_is_the_one_that_runs_and_its_container_is_removed(tmp_path: Path) -> None:
    record = stand_in(tmp_path / "bin", "docker")
    done = call(tmp_path, "--image", "img", "--", "pytest", "a b")
    assert done.returncode == 0, done.stderr
    ran = [json.loads(line) for line in record.read_text().splitlines()]
    run = next(words for words in ran if words[1] == "run")
    assert run[-3:] == ["img", "pytest", "a b"]
    assert f"{tmp_path}:{tmp_path}" in run
    assert ["docker", "rm", "--force", run[run.index("--name") + 1]] in ran


def test_a_client_without_its_daemon_is_blocked_with_the_fix(tmp_path: Path) -> None:
    stand_in(tmp_path / "bin", "docker", answers=1)
    done = call(tmp_path, "--image", "img", "--engine", "docker", "--", "true")
    assert done.returncode == 99
    assert "Blocked (environment)" in done.stderr
    assert "fix: start its daemon" in done.stderr


def test_the_first_engine_that_answers_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(tmp_path / "bin", "docker", answers=1)
    stand_in(tmp_path / "bin", "podman")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    assert choose_engine(None) == "podman"
    monkeypatch.setenv("PATH", str(tmp_path / "none"))
    with pytest.raises(BlockedError, match="not on PATH"):
        choose_engine(None)


def test_what_is_wrong_with_an_option_is_told(tmp_path: Path) -> None:
    for text in ("HF_TOKEN=x", "no-name", "NOT_SET_ANYWHERE"):
        with pytest.raises(UserError, match="--env") as told:
            environment_names([text])
        assert "=x" not in told.value.message
    for text in ("a", "a:b:c:d", "/nowhere/at/all:/x", f"{tmp_path}:relative", f"{tmp_path}:/x:wo"):
        with pytest.raises(UserError, match="--mount"):
            parse_mount(text)
    with pytest.raises(UserError, match="unknown"):
        choose_engine("lxc")
    assert call(tmp_path, "--show").returncode == 2
    assert call(tmp_path, "--engine", "docker", "--", "true").returncode == 2


def test_a_directory_in_another_is_mounted_once(tmp_path: Path) -> None:
    assert [mount.source for mount in own_mounts(tmp_path / "a", tmp_path)] == [tmp_path]


@pytest.mark.parametrize(
    "text",
    [
        *("pytest", "pytest<9", "pytest >=8, <9", "pytest==8.*", "a.b-c_d[x,y-z]~=1.0", "a[]", "a (>=1)", "a===any+thing", "a!=1!2.0rc1"),
        *("a; python_version<'4'", "a>=1 ; extra == 'x'", "a @ https://h/a.whl", "a[x]@git+https://h/a@main ; os_name=='posix'"),
        *("git+https://h/a.git#egg=a", "https://h/a-1.whl", "a-1-py3-none-any.whl", "./here", "./here[x]", " pytest "),
    ],
)
def test_what_an_installer_reads_is_a_requirement(tmp_path: Path, text: str) -> None:
    (tmp_path / "here").mkdir()
    check_requirement(text, tmp_path)
    check_requirement(str(tmp_path / "here"), tmp_path)


@pytest.mark.parametrize(
    "text",
    ["", " ", "!!bad", "-r x", "--pre", "pytest=9", "pytest 9", "pytest==", "pytest==!!", "a[x", "a;", "a\nb", "a>=1 b", "./nowhere", "@x"],
)
def test_what_no_installer_reads_is_refused_with_the_option(tmp_path: Path, text: str) -> None:
    with pytest.raises(UserError, match=re.escape(f"--with {text}: ")) as refused:
        Fresh(tmp_path, packages=("pytest", text))
    assert "such as pytest" in refused.value.fix
