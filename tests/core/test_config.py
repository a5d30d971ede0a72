"""seatrial.toml, --set and flags: who wins, who is named in an error, and what `config show` prints."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from seatrial.cli.config import app
from seatrial.cli.request import profile_named
from seatrial.core import config
from seatrial.core.errors import UserError
from seatrial.core.jobs import Profile


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / config.FILE
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("text", "message", "fix"),
    [
        ("[rnu]\nlevels = '0'", r"seatrial\.toml: unknown section \[rnu\]", r"did you mean \[run\]\?"),
        ("[rnu]", r"seatrial\.toml: unknown section \[rnu\]", r"did you mean \[run\]\?"),
        ("[qqqq]", "unknown section", "known sections: run, change, environment, limits"),
        ("[run]\nlevel = '0'", r"seatrial\.toml: unknown key 'run\.level'", r"did you mean run\.levels\?"),
        ("[limits]\ndeadline = 3", "unknown key", r"did you mean limits\.deadline_minutes\?"),
        ("[run]\nqqqqqqqqqqqq = 1", "unknown key", r"known keys: run\.loop, "),
        ("loop = 'x'", "values stand in sections", r"write \[run\]"),
        ("[run]\nlevels = 0", r"seatrial\.toml: run\.levels: Input should be a valid string \(got 0\)", r"correct run\.levels"),
        ("[change]\npaths = 'a'", r"change\.paths: Input should be a valid list", r"correct change\.paths"),
        ("[change]\npaths = ['a', 1]", r"change\.paths: Input should be a valid string", "correct"),
        ("[limits]\nstall_minutes = 'soon'", r"limits\.stall_minutes: .*valid number.*\(got 'soon'\)", "correct"),
        ("[limits]\nstall_minutes = 0", r"limits\.stall_minutes: .*greater than 0", "correct"),
        ("[limits]\nstall_minutes = nan", r"limits\.stall_minutes: ", "correct"),
        ("[slrum.test]", r"unknown section \[slrum\]", r"did you mean \[slurm\]\?"),
        ("[slurm]\npartition = 'x'", r"seatrial\.toml: slurm\.partition: a profile has a name", r"write \[slurm\.NAME\]"),
        ("[slurm.'a b']", r"slurm\.a b: no name for a profile", "letters"),
        ("[slurm.a]\npartitoin = 'x'", r"seatrial\.toml: unknown key 'slurm\.a\.partitoin'", r"did you mean slurm\.a\.partition\?"),
        ("[slurm.a]\nqqqqqqqqqqqq = 'x'", r"unknown key 'slurm\.a\.qqqqqqqqqqqq'", r"known keys: slurm\.a\.account, "),
        ("[slurm.a]\ntime = 'soon'", r"seatrial\.toml: slurm\.a\.time: .*pattern.*\(got 'soon'\)", r"correct slurm\.a\.time"),
        ("[slurm.a]\nmounts = ['/a']", r"seatrial\.toml: slurm\.a\.mounts: .*\(got '/a'\)", r"correct slurm\.a\.mounts"),
        ("[slurm.a]\nnodes = 0", r"slurm\.a\.nodes: .*greater than or equal to 1", "correct"),
        ("[slurm.a]\npartition = 'x; rm'", r"slurm\.a\.partition: ", "correct"),
        ("[slurm.a]\ncontainers = 'x'", r"slurm\.a\.containers: .*dictionary \(got 'x'\)", "correct"),
        ("[slurm.a.containers]\nvllm = 1", r"slurm\.a\.containers\.vllm: .*valid string \(got 1\)", "correct"),
        ("[slurm.a]\ncontainer = 'b'\n[slurm.a.containers]\nc = 'x'", r"toml: slurm\.a: container: .*'b'; known: c; .*image", "correct"),
        ("[slurm.a]\ncontainer = 'b'", r"slurm\.a: container: .*known: none", "correct"),
        ("[slurm.a]\ncontainer = 'c'\nimage = 'i'\ncontainers.c = 'x'", r"slurm\.a: .*exclude each other", "correct"),
        ("[slurm.a.environment]\nHF_TOKEN = 'hf_x'", r"toml: slurm\.a\.environment: HF_TOKEN looks like a secret[^(]*$", "correct"),
        ("[slurm.a.environment]\n'a b' = 'x'", r"slurm\.a\.environment: 'a b' is not the name of a variable", "correct"),
        ("[run\nloop = 1", r"seatrial\.toml: .*line 1", "correct the file"),
    ],
)
def test_a_mistake_in_the_file_is_named(tmp_path: Path, text: str, message: str, fix: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        config.load(write(tmp_path, text))
    assert re.search(fix, caught.value.fix)


def test_a_file_that_is_no_text_is_named(tmp_path: Path) -> None:
    path = tmp_path / config.FILE
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, match=r"seatrial\.toml"):
        config.load(path)


def test_later_sources_win_and_each_value_knows_its_origin(tmp_path: Path) -> None:
    file = write(tmp_path, "[run]\nlevels = '1'\nmodel = 'from file'\ntrials = 'x'\n")
    loaded = config.load(file, ["run.levels=2", "run.model=from set"], {"run.levels": "3", "run.loop": None})
    assert loaded.config.run.levels == "3"
    assert loaded.config.run.model == "from set"
    assert loaded.config.run.trials == "x"
    origins = {key: origin for key, _, origin, _ in loaded.rows()}
    assert origins["run.levels"] == "command line"
    assert origins["run.model"] == "--set"
    assert origins["run.trials"] == str(file)
    assert origins["run.loop"] == origins["limits.stall_minutes"] == "default"


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ("run.arguments=--lr 1", ["--lr", "1"]),
        ('run.arguments=["--lr", "a b"]', ["--lr", "a b"]),
        ("run.arguments=[]", []),
        ("run.arguments=", []),
    ],
)
def test_a_list_is_set_as_words_or_as_toml(setting: str, expected: list[str]) -> None:
    assert config.load(None, [setting]).config.run.arguments == expected


def test_a_scalar_is_set_as_it_stands() -> None:
    loaded = config.load(None, ["limits.deadline_minutes=2.5", "run.levels=0,1=x", " run.model =a b"])
    assert loaded.config.limits.deadline_minutes == 2.5
    assert loaded.config.run.levels == "0,1=x"
    assert loaded.config.run.model == "a b"


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("run.levels", r"no '=' in it"),
        ("run.lvels=1", r"--set: unknown key 'run\.lvels'"),
        ("levels=1", "unknown key 'levels'"),
        ("run=1", "unknown key 'run'"),
        ("run.arguments=[1", r"--set run\.arguments: "),
        ("limits.stall_minutes=x", r"--set: limits\.stall_minutes: "),
        ("limits.stall_minutes=-1", r"--set: limits\.stall_minutes: .*greater than 0"),
    ],
)
def test_a_mistake_in_a_setting_is_named(setting: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        config.load(None, [setting])


def test_the_nearest_file_above_counts(tmp_path: Path) -> None:
    deep = tmp_path / "a" / "b"
    deep.mkdir(parents=True)
    assert config.find_file(deep) in (None, Path("/seatrial.toml"))
    outer = write(tmp_path, "")
    assert config.find_file(deep) == outer
    inner = write(tmp_path / "a", "")
    assert config.find_file(deep) == inner


def test_every_key_has_a_meaning() -> None:
    assert all(config.known_keys().values())
    assert "run.loop" in config.known_keys()


def test_show_prints_every_key_with_value_and_origin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path, "[run]\nlevels = '0-2'\n")
    printed = CliRunner().invoke(app, ["show", "--set", "limits.stall_minutes=3"])
    assert printed.exit_code == 0, printed.output
    rows = {line.split()[0]: line for line in printed.output.splitlines()}
    assert set(rows) == set(config.known_keys())
    assert "'0-2'" in rows["run.levels"]
    assert str(tmp_path / "seatrial.toml") in rows["run.levels"]
    assert "3.0" in rows["limits.stall_minutes"]
    assert "--set" in rows["limits.stall_minutes"]
    assert "default" in rows["run.loop"]


def test_show_prints_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    printed = CliRunner().invoke(app, ["show", "--json", "--set", 'change.paths=["/a b"]'])
    shown = json.loads(printed.output)
    assert shown["change.paths"] == {"value": ["/a b"], "origin": "--set"}
    assert set(shown) == set(config.known_keys())


PROFILES = """
[slurm.test]
partition = "batch"
time = "0:10:00"
gpus_per_node = 4
prolog = ["module load cuda"]
container = "loop"
mounts = ["/data:/data:ro"]
[slurm.test.containers]
loop = "registry/loop:1"
"vllm.0.9" = "registry/vllm"
[slurm.test.environment]
NCCL_DEBUG = "INFO"
[slurm.empty]
"""


def test_profiles_are_read_with_their_defaults(tmp_path: Path) -> None:
    profiles = config.load(write(tmp_path, PROFILES)).config.slurm
    assert list(profiles) == ["test", "empty"]
    assert profiles["empty"] == Profile()
    test = profiles["test"]
    assert (test.partition, test.time, test.gpus_per_node, test.cpus) == ("batch", "0:10:00", 4, 4)
    assert test.containers == {"loop": "registry/loop:1", "vllm.0.9": "registry/vllm"}
    assert test.environment == {"NCCL_DEBUG": "INFO"}
    assert (test.mounts, test.prolog) == (("/data:/data:ro",), ("module load cuda",))


def test_settings_change_one_entry_of_a_profile(tmp_path: Path) -> None:
    file = write(tmp_path, PROFILES)
    settings = ["slurm.test.nodes=2", "slurm.test.containers.loop=/x.sqsh", "slurm.test.environment.A=b=c", "slurm.test.exclusive=true"]
    settings += ["slurm.test.prolog=module load a b", 'slurm.test.sbatch=["--reservation=x", "--nice"]', "slurm.test.containers.v.1=i"]
    loaded = config.load(file, settings)
    test = loaded.config.slurm["test"]
    assert test.containers == {"loop": "/x.sqsh", "vllm.0.9": "registry/vllm", "v.1": "i"}
    assert test.environment == {"NCCL_DEBUG": "INFO", "A": "b=c"}
    assert (test.nodes, test.exclusive) == (2, True)
    assert (test.prolog, test.sbatch) == (("module load a b",), ("--reservation=x", "--nice"))
    rows = {key: (value, origin, meaning) for key, value, origin, meaning in loaded.rows()}
    assert rows["slurm.test.nodes"] == (2, "--set", "nodes of a trial")
    assert rows["slurm.test.containers.loop"] == ("/x.sqsh", "--set", "images by name")
    assert rows["slurm.test.containers.vllm.0.9"][1] == rows["slurm.test.partition"][1] == str(file)
    assert rows["slurm.test.qos"][:2] == (None, "default")
    assert rows["slurm.empty.containers"][:2] == ({}, "default")
    assert all(meaning for *_, meaning in rows.values())


def test_without_a_file_settings_make_a_profile() -> None:
    loaded = config.load(None, ["slurm.new.partition=p", "slurm.new.cpus=2"])
    assert loaded.config.slurm == {"new": Profile(partition="p", cpus=2)}


@pytest.mark.parametrize(
    ("setting", "message", "fix"),
    [
        ("slurm.tset.nodes=2", r"--set: unknown key 'slurm\.tset\.nodes'", r"did you mean slurm\.test\.nodes\?"),
        ("slurm.test.node=2", "unknown key", r"did you mean slurm\.test\.nodes\?"),
        ("slurm.test=2", "unknown key", ""),
        ("slurm=2", "unknown key", ""),
        ("slurm.test.nodes.x=2", r"unknown key 'slurm\.test\.nodes\.x'", "did you mean"),
        ("slurm.test.containers={a='b'}", "is a table", r"--set slurm\.test\.containers\.NAME=value"),
        ("slurm.test.nodes=two", r"--set: slurm\.test\.nodes: .*valid integer.*\(got 'two'\)", "correct"),
        ("slurm.test.mounts=[1", r"--set slurm\.test\.mounts: ", "write --set"),
        ("slurm.a b.nodes=1", "no name for a profile", "letters"),
    ],
)
def test_a_mistake_in_a_setting_of_a_profile_is_named(tmp_path: Path, setting: str, message: str, fix: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        config.load(write(tmp_path, PROFILES), [setting])
    assert re.search(fix, caught.value.fix)


def test_show_prints_profiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path, PROFILES)
    printed = CliRunner().invoke(app, ["show"])
    rows = {line.split()[0]: line for line in printed.output.splitlines()}
    assert "'registry/loop:1'" in rows["slurm.test.containers.loop"]
    shown = json.loads(CliRunner().invoke(app, ["show", "--json"]).output)
    assert shown["slurm.test.mounts"] == {"value": ["/data:/data:ro"], "origin": str(tmp_path / config.FILE)}


def test_a_profile_is_found_by_its_name(tmp_path: Path) -> None:
    loaded = config.load(write(tmp_path, PROFILES))
    assert profile_named(loaded, "slurm:test") == ("test", loaded.config.slurm["test"])
    only = config.load(None, ["slurm.one.cpus=1"])
    assert profile_named(only, "slurm")[0] == "one"


@pytest.mark.parametrize(
    ("text", "message", "fix"),
    [
        ("slurm:tset", "no profile is called 'tset'; known: test, empty", r"\[slurm\.tset\]"),
        ("slurm", "there are 2 profiles: test, empty", "slurm:test"),
        ("slurm:", "names no place", "slurm:PROFILE"),
        ("test", "names no place", "slurm:PROFILE"),
        ("k8s:test", "names no place", "slurm:PROFILE"),
    ],
)
def test_an_unknown_profile_is_named_with_the_known_ones(tmp_path: Path, text: str, message: str, fix: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        profile_named(config.load(write(tmp_path, PROFILES)), text)
    assert re.search(fix, caught.value.fix)


@pytest.mark.parametrize("text", ["slurm", "slurm:x"])
def test_without_a_profile_the_fix_shows_one(text: str) -> None:
    with pytest.raises(UserError, match="no profile") as caught:
        profile_named(config.load(None), text)
    assert re.search(r"\[slurm\.\w+\] with partition", caught.value.fix)


def test_options_of_the_loop_are_text_with_an_origin(tmp_path: Path) -> None:
    file = tmp_path / "seatrial.toml"
    file.write_text('[options]\ndevice = "cpu"\ngpus = 4\nfast = true\n')
    loaded = config.load(file, ["options.gpus=2", "options.path=/a.b/c=d"], {"options.device": "gpu", "options.none": None})
    assert loaded.config.options == {"device": "gpu", "gpus": "2", "fast": "true", "path": "/a.b/c=d"}
    rows = {key: (value, origin) for key, value, origin, _ in loaded.rows()}
    assert rows["options.gpus"] == ("2", "--set")
    assert rows["options.fast"] == ("true", str(file))


@pytest.mark.parametrize("text", ["[options]\nfiles = [1]\n", "[options.deep]\nx = 1\n"])
def test_an_option_that_is_no_text_is_named(tmp_path: Path, text: str) -> None:
    file = tmp_path / "seatrial.toml"
    file.write_text(text)
    with pytest.raises(UserError, match=rf"{file}: options\.(files|deep): "):
        config.load(file)


def test_known_issues_are_text_by_the_id_of_a_failure(tmp_path: Path) -> None:
    file = write(tmp_path, """[known_issues]\nno-space = "https://example.org/7"\n'max(data["a.b"]) < 1' = "flaky upstream"\n""")
    loaded = config.load(file, ["known_issues.no-space=https://example.org/8=x"])
    assert loaded.config.known_issues == {"no-space": "https://example.org/8=x", 'max(data["a.b"]) < 1': "flaky upstream"}
    rows = {key: (value, origin) for key, value, origin, _ in loaded.rows()}
    assert rows["known_issues.no-space"] == ("https://example.org/8=x", "--set")
    with pytest.raises(UserError, match=r"seatrial\.toml: known_issues\.no-space: Input should be a valid string \(got 7\)"):
        config.load(write(tmp_path, "[known_issues]\nno-space = 7\n"))


def test_sections_of_the_pytest_plugin_may_stand_in_the_file_and_are_shown(tmp_path: Path) -> None:
    file = write(tmp_path, "[groups.hf_gated]\nreason = 'r'\nneeds = { env = ['X'] }\n[groups.empty]\n[tests]\ngpu_hours = 8\n")
    rows = {key: (value, origin) for key, value, origin, _ in config.load(file).rows()}
    assert rows["groups.hf_gated.reason"] == ("r", str(file))
    assert rows["groups.hf_gated.needs"] == ({"env": ["X"]}, str(file))
    assert rows["tests.gpu_hours"] == (8, str(file))


@pytest.mark.parametrize("setting", ["tests.gpu_hours=1", "groups.hf_gated.reason=x"])
def test_they_cannot_be_set_where_pytest_would_not_see_it(setting: str) -> None:
    with pytest.raises(UserError, match=r"--set: .*: read by the pytest plugin, from the file alone"):
        config.load(None, [setting])
