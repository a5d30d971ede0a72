"""The configuration of groups: defaults, where it is looked for, and each mistake with file, key and fix."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from pytest_seatrial import suite_groups
from pytest_seatrial.suite_groups import Mode, Needs, Out, SuiteGroup, read_groups
from seatrial.core.config import Config


def written(folder: Path, own: str | None = None, project: str | None = None) -> Path:
    for name, text in ((suite_groups.FILE, own), (suite_groups.PROJECT, project)):
        if text is not None:
            (folder / name).write_text(text)
    return folder


def test_a_group_needs_no_more_than_a_name(tmp_path: Path) -> None:
    include, only = read_groups(written(tmp_path, "[groups.hf_gated]\n[groups.mcore]\nmode = 'only'\n")).groups
    assert (include.option, include.mode, include.marker, include.reason) == ("--hf-gated", Mode.INCLUDE, "hf_gated", "")
    assert (only.option, only.mode, only.marker, only.needs) == ("--mcore-only", Mode.ONLY, "mcore", Needs())


def test_every_key_is_read(tmp_path: Path) -> None:
    text = """[groups.x]
option = "--with-x"
mode = "only"
marker = "y"
reason = "r"
needs = { env = ["A"], modules = ["b.c"], programs = ["d"], files = ["e"], gpus = 1 }
[tests]
gpu_hours = 4139
"""
    settings = read_groups(written(tmp_path, text))
    (group,) = settings.groups
    assert (group.option, group.mode, group.marker, group.reason) == ("--with-x", Mode.ONLY, "y", "r")
    assert group.needs == Needs(env=("A",), modules=("b.c",), programs=("d",), files=("e",), gpus=1)
    assert (settings.gpu_hours, settings.gpu_hours_origin) == (4139.0, f"{tmp_path}/seatrial.toml: tests.gpu_hours")


def test_pyproject_holds_the_same(tmp_path: Path) -> None:
    settings = read_groups(written(tmp_path, project="[tool.seatrial.groups.a]\n[tool.seatrial.tests]\ngpu_hours = 0.5\n"))
    assert ([group.option for group in settings.groups], settings.gpu_hours) == (["--a"], 0.5)


def test_both_files_may_hold_different_groups(tmp_path: Path) -> None:
    settings = read_groups(written(tmp_path, "[groups.a]\n[run]\nlevels = '0'\n", "[tool.seatrial.groups.b]\n[tool.other]\nx = 1\n"))
    assert [group.name for group in settings.groups] == ["a", "b"]


@pytest.mark.parametrize("table", ["groups.a", "tests"])
def test_the_same_thing_in_both_files_is_an_error(tmp_path: Path, table: str) -> None:
    written(tmp_path, f"[{table}]\n", f"[tool.seatrial.{table}]\n")
    with pytest.raises(
        pytest.UsageError, match=rf"pyproject\.toml: tool\.seatrial\.{table}: is in .*seatrial\.toml: {table} already; keep"
    ):
        read_groups(tmp_path)


def test_the_nearest_folder_at_or_above_counts_but_none_above_the_checkout(tmp_path: Path) -> None:
    inner = tmp_path / "checkout" / "sub"
    inner.mkdir(parents=True)
    written(tmp_path, "[groups.outer]\n")
    assert [group.name for group in read_groups(inner).groups] == ["outer"]
    written(tmp_path / "checkout", project="[tool.seatrial.groups.nearer]\n")
    assert [group.name for group in read_groups(inner).groups] == ["nearer"]
    (inner / ".git").mkdir()
    assert read_groups(inner).groups == ()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[groups.a]\noptoin = '--x'", r"groups\.a\.optoin: unknown key; did you mean option\?"),
        ("[groups.a]\nqqqqq = 1", r"groups\.a\.qqqqq: unknown key; known: option, mode, marker, reason, needs"),
        ("[groups]\na = 1", r"groups\.a: must be a table \(got 1\); a group has a name"),
        ("[groups.'a b']", r"groups\.a b: no name for a group"),
        ("groups = 1", r"groups: must be a table; write \[groups\.NAME\]"),
        ("[groups.a]\nmode = 'onyl'", r"groups\.a\.mode: must be include or only \(got 'onyl'\)"),
        ("[groups.a]\nmode = 1", r"groups\.a\.mode: must be include or only \(got 1\)"),
        ("[groups.a]\noption = 'x'", r"groups\.a\.option: no option \(got 'x'\); write option = \"--a\""),
        ("[groups.a]\noption = '-x'", r"groups\.a\.option: no option"),
        ("[groups.a]\noption = 1", r"groups\.a\.option: must be a text \(got 1\)"),
        ("[groups.a]\nreason = ' '", r"groups\.a\.reason: must be a text"),
        ("[groups.a-b]", r"groups\.a-b\.marker: no name for a marker \(got 'a-b'\); write marker = \"a_b\""),
        ("[groups.a]\nneeds = 1", r"groups\.a\.needs: must be a table \(got 1\)"),
        ("[groups.a]\nneeds = { module = ['x'] }", r"groups\.a\.needs: unknown key 'module'; did you mean modules\?"),
        ("[groups.a]\nneeds = { env = 'X' }", r"groups\.a\.needs: env: must be a list of texts, .*\(got 'X'\)"),
        ("[groups.a]\nneeds = { env = [1] }", r"groups\.a\.needs: env: must be a list of texts \(got 1 in it\)"),
        ("[groups.a]\nneeds = { gpus = true }", r"groups\.a\.needs: gpus: must be a whole number .*\(got True\)"),
        ("[groups.a]\nneeds = { gpus = 0 }", r"groups\.a\.needs: gpus: .*\(got 0\)"),
        ("[groups.a]\n[groups.b]\noption = '--a'", r"groups\.b\.option: --a is that of .*groups\.a too; give it its own option"),
        ("[groups.a]\n[groups.b]\nmarker = 'a'", r"groups\.b\.marker: a is that of .*groups\.a too"),
        ("[tests]\ngpu_hour = 1", r"tests\.gpu_hour: unknown key; did you mean gpu_hours\?"),
        ("[tests]\ngpu_hours = nan", r"tests\.gpu_hours: must be a number of hours, not below 0 \(got nan\)"),
        ("[tests]\ngpu_hours = inf", r"tests\.gpu_hours: must be a number"),
        ("[tests]\ngpu_hours = true", r"tests\.gpu_hours: must be a number"),
        ("[tests]\ngpu_hours = -1", r"tests\.gpu_hours: must be a number"),
        ("tests = 1", r"tests: must be a table; write \[tests\]"),
        ("[gruops.a]", r"\[gruops\]: unknown section; did you mean groups\?"),
        ("[test]", r"\[test\]: unknown section; did you mean tests\?"),
        ("[groups", r".*; correct the file"),
    ],
)
def test_a_mistake_is_named(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(pytest.UsageError, match=rf"^{re.escape(str(tmp_path))}/seatrial\.toml: {message}"):
        read_groups(written(tmp_path, text))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[tool]\nseatrial = 1", r"tool\.seatrial: must be a table"),
        ("[tool.seatrial.group.a]", r"tool\.seatrial\.group: unknown key; did you mean groups\?"),
        ("[tool.seatrial.groups.a]\nx = 1", r"tool\.seatrial\.groups\.a\.x: unknown key"),
    ],
)
def test_a_mistake_in_pyproject_is_named(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(pytest.UsageError, match=rf"pyproject\.toml: {message}"):
        read_groups(written(tmp_path, project=text))


def test_every_section_of_the_file_is_known_here(tmp_path: Path) -> None:
    assert set(Config.model_fields) - set(suite_groups.SECTIONS) == set()
    read_groups(written(tmp_path, "".join(f"[{section}]\n" for section in Config.model_fields)))


def test_a_test_in_two_groups_runs_when_both_were_asked_for(tmp_path: Path) -> None:
    a, b, only = read_groups(written(tmp_path, "[groups.a]\n[groups.b]\n[groups.o]\nmode = 'only'\n")).groups

    def runs(belongs: list[SuiteGroup], asked: list[SuiteGroup]) -> bool:
        return suite_groups.place(belongs, asked) is None

    assert runs([], [])
    assert runs([], [a])
    assert not runs([a, b], [a])
    assert runs([a, b], [b, a])
    assert runs([only, a], [a, only])
    assert not runs([only, a], [only])
    assert isinstance(suite_groups.place([a], [only, a]), Out)


def test_the_plugin_is_light_to_import() -> None:
    code = "import sys, pytest_seatrial.guards; print(sorted({'pydantic', 'typer', 'torch', 'numpy'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "[]\n"
