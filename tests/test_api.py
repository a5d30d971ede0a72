"""The public Python API: every example of docs/api.md runs, and what cannot work is an error with its fix."""

from __future__ import annotations

import ast
import importlib
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import seatrial
from seatrial import api, loops
from seatrial.core.loop import Loop
from seatrial.core.records import CheckResult, LevelResult, replace
from seatrial.core.verdict import Boundary
from seatrial.probes.probe_process import ProbeInterrupted
from seatrial.runtime.interrupt import Interrupted
from seatrial.trial import run_dir, runner
from seatrial.trial.progress import Ended, Event, Running
from tests.checks.run_facts import clean
from tests.rollouts.served import halves, run_in_process, serving, write_rows
from tests.trial.conftest import asked_once, commit, git
from tests.trial.fake import FakeLoop

PAGE = Path(__file__).parents[1] / "docs" / "api.md"
DATA = Path(__file__).parent / "data" / "trl"
EXAMPLES = [text.split("```")[0] for text in PAGE.read_text(encoding="utf-8").split("```python\n")[1:]]
real_loop = loops.get_loop


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeLoop:
    """A working directory whose trials are of the fake loop, which needs no environment of its own."""
    found = FakeLoop()
    monkeypatch.setattr(loops, "get_loop", lambda _: found)
    monkeypatch.setattr(runner, "environment_record", asked_once)
    monkeypatch.setattr("seatrial.runtime.process._TICK_S", 0.05)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "seatrial.toml").write_text(f"[environment]\npython = {json.dumps(sys.executable)}\n")
    return found


def checkout(path: Path) -> Path:
    path.mkdir()
    git(path, "init", "-q")
    commit(path, {"pkg/__init__.py": "", "pkg/smoke.py": "a = 1\n"})
    return path


def broken(path: Path) -> str:
    """Four commits, of which the last but one breaks the check."""
    path.mkdir()
    git(path, "init", "-q")
    commits = [commit(path, {"check.sh": f"exit {code}\n", "number": str(number)}) for number, code in enumerate((0, 0, 1, 1))]
    return commits[2]


def pandas(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stands in where pandas is not installed: a frame is its rows and columns."""
    made = SimpleNamespace(DataFrame=lambda rows, columns: SimpleNamespace(rows=rows, columns=columns))
    monkeypatch.setitem(sys.modules, "pandas", made)


def test_a_check_of_nothing_is_no_pass(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "train/loss": 1.0}\n')
    with pytest.raises(seatrial.UserError, match="no expression"):
        seatrial.check(tmp_path)
    with pytest.raises(seatrial.UserError, match="at least one step"):
        seatrial.judge("trl", log=tmp_path / "metrics.jsonl", expect_steps=0)


def test_every_example_of_the_page_runs(
    fake: FakeLoop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    checkout(tmp_path / "my-change")
    shutil.copy(DATA / "grpo_full" / "console.log", tmp_path)
    shutil.copytree(DATA / "grpo_full" / "runs", tmp_path / "runs")
    (tmp_path / "refit_facts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in clean()))
    bad = broken(tmp_path / "my-repo")
    pandas(monkeypatch)
    write_rows(tmp_path / "rows.jsonl", halves(2))
    run_in_process(monkeypatch)
    assert len(EXAMPLES) == 8
    with serving() as stub:
        names: dict[str, Any] = {"POLICY_URL": stub.url}
        for number, text in enumerate(EXAMPLES):
            loop: Callable[[str], Loop] = real_loop if "judge(" in text else lambda _: fake
            monkeypatch.setattr(loops, "get_loop", loop)
            exec(compile(text, f"{PAGE}:{number}", "exec"), names)  # noqa: S102 - the page is ours
    assert [level.number for level in names["trial"].levels] == [0, 1]
    assert {(row[0], row[1]) for row in names["frame"].rows} >= {(0, "train/loss"), (1, "train/loss")}
    assert names["found"].commit == bad
    assert names["campaign"].complete
    assert names["campaign"].status.ok == 4
    assert {"rollouts.jsonl", "merge.json"} <= {path.name for path in (tmp_path / "my-campaign" / "merged").iterdir()}
    assert (tmp_path / "my-campaign" / "profile" / "profile.html").is_file()
    assert (names["found"].directory / "report.html").is_file()
    assert [check.passed for check in names["checked"].checks] == [True, False]
    assert (names["probe"].verdict, names["probe"].directory) == (seatrial.Verdict.PASS, None)
    assert "no-such.log: no such log file" in capsys.readouterr().out


def test_the_page_shows_every_public_name() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert [name for name in seatrial.__all__ if name not in text] == []


def test_public_names_are_what_editors_see() -> None:
    tree = ast.parse(Path(seatrial.__file__).read_text(encoding="utf-8"))
    seen = {alias.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert set(seatrial.__all__) <= seen
    assert set(seatrial.__all__) <= set(dir(seatrial))
    assert seatrial.UserError is importlib.import_module("seatrial.core.errors").UserError
    assert seatrial.Trial is api.Trial
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = seatrial.nothing


def test_a_public_name_loads_no_room_before_it_is_called() -> None:
    code = "import sys, seatrial; seatrial.run, seatrial.Trial; print([n for n in sys.modules if n.startswith('seatrial.')])"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert sorted(ast.literal_eval(shown)) == [
        "seatrial.api",
        "seatrial.bisect",
        "seatrial.core",
        "seatrial.core.errors",
        "seatrial.core.verdict",
    ]


def test_a_failed_trial_is_returned_and_says_nothing(fake: FakeLoop, capfd: pytest.CaptureFixture[str]) -> None:
    fake.words[0] = "stuck"
    events: list[Event] = []
    trial = seatrial.run("fake", level=0, listener=events.append)
    assert trial.verdict is seatrial.Verdict.FAIL
    assert [check.name for check in trial.checks() if not check.passed] == ["weights changed"]
    assert trial.directory.parent.name == "trials"
    assert isinstance(events[-1], Ended)
    assert capfd.readouterr() == ("", "")


def test_levels_are_words_numbers_or_both(fake: FakeLoop) -> None:
    chosen = [seatrial.plan("fake", level=level).levels for level in ("0-1", (0, 1), 1, None)]
    assert [[level.number for level in levels] for levels in chosen] == [[0, 1], [0, 1], [1], [0, 1]]
    planned = seatrial.plan("fake", arguments=["--lr", "1"], settings=["limits.stall_minutes=2"])
    assert planned.plan.arguments == ("--lr", "1")
    assert planned.loaded.config.limits.stall_minutes == 2


def test_a_trial_that_was_interrupted_says_where_it_is(fake: FakeLoop, monkeypatch: pytest.MonkeyPatch) -> None:
    fake.words[0] = "hang"

    def stop(event: Event) -> None:
        if isinstance(event, Running):
            import os
            import signal

            monkeypatch.setattr(fake, "words", {})
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(api.TrialInterrupted, match="seatrial resume") as caught:
        seatrial.run("fake", level=0, listener=stop)
    assert caught.value.trial.record.status == "running"
    assert isinstance(caught.value, KeyboardInterrupt)


@pytest.mark.parametrize(
    ("call", "said", "fix"),
    [
        (lambda: seatrial.plan("nowhere"), "unknown loop 'nowhere'; known:", "use a known one"),
        (lambda: seatrial.judge("nowhere", log=DATA / "grpo_full" / "console.log"), "unknown loop 'nowhere'; known:", "use a known one"),
        (lambda: seatrial.judge("trl", log="absent.log"), "absent.log: no such log file", "the output of the run"),
        (lambda: seatrial.judge("trl", log=DATA), "a directory, not a log file", "the output of the run"),
        (lambda: seatrial.judge("trl", log=DATA / "grpo_full" / "console.log", level=99), "unknown level 99", "choose from"),
        (lambda: seatrial.plan("trl", level="x"), "'x' is not a level", "0-2"),
        (lambda: seatrial.plan("trl", auto=True), "--auto needs a change", "--change"),
        (lambda: seatrial.plan("trl", change=["a=one", "a=two"]), "two changes are called a", "NAME=PATH"),
        (lambda: seatrial.plan("trl", settings=["run.levls=1"]), "unknown key 'run.levls'", "run.levels"),
        (lambda: seatrial.plan("trl", config="absent.toml"), "no such configuration file", "--config"),
        (lambda: seatrial.run("trl", fault="nothing"), "unknown fault 'nothing'", "--fault list"),
        (lambda: seatrial.run("trl", expect="identical", no_base=True), "--expect needs something", "leave one"),
        (lambda: seatrial.run(seatrial.plan("trl"), level=1), "level is given beside a plan", "plan(…, level=…)"),
        (lambda: seatrial.Trial.load("."), "no trial.json here", "run directory"),
        (lambda: seatrial.check(DATA / "grpo_full" / "runs", "max(data["), "", ""),
        (lambda: seatrial.check("absent", 'data["x"]["1"] > 0'), "absent: no such file or directory", "check the path"),
        (lambda: seatrial.probe_refit(attach="http://x", facts="y"), "--attach and --facts are both given", "leave one"),
        (lambda: seatrial.probe_refit(facts="absent.jsonl"), "absent.jsonl: no such file", ""),
        (lambda: seatrial.probe_refit(fault="nothing"), "unknown fault 'nothing' of the engine transformers", "--fault list"),
        (lambda: seatrial.probe_refit(steps=1), "--steps 1: each of 3 transports needs a step", "--steps 3"),
        (lambda: seatrial.probe_refit(server=["--dtype"]), "--dtype: options for a server", "--engine vllm"),
        (lambda: seatrial.bisect([], good="HEAD"), "no command to run", "good=REV"),
        (lambda: seatrial.bisect("pytest -x", good="HEAD"), "'pytest -x' is one text", "['pytest', '-x']"),
        (lambda: seatrial.bisect(["true"], good="nope", repo="one"), "--good nope: names no commit", ""),
        (lambda: seatrial.bisect(["true"], good="HEAD", repo="one"), "name the same commit", "an older --good"),
        (lambda: seatrial.bisect(["true"], good="HEAD", repo="one", failure="("), "not a regular expression", "backslash"),
        (lambda: seatrial.bisect(["true"], good="HEAD", any_failure=True, failure="x"), "contradict each other", "one of them"),
        (lambda: seatrial.bisect(["true"], good="HEAD", repo="absent"), "absent", ""),
        (lambda: seatrial.collect(), "nothing to collect", "campaign.toml"),
        (lambda: seatrial.collect("absent.toml"), "absent.toml", ""),
        (lambda: seatrial.collect({}, url="http://h/v1"), "url is given beside a campaign", "leave the campaign out"),
        (lambda: seatrial.collect(input="r.jsonl", repeats=1, seeds="0"), "exclude each other", "leave one"),
        (lambda: seatrial.collect({"datasetz": []}), "datasetz: unknown key", "docs/rollouts.md"),
        (lambda: seatrial.collect(input="absent.jsonl", url="http://h/v1", verifier="exact"), "absent.jsonl", ""),
        (lambda: seatrial.collect(input="r.jsonl", url="http://h/v1"), "who scores it?", "docs/rollouts.md"),
        (lambda: seatrial.collect(input=["a/r.jsonl", "b/r.jsonl"], url="http://h/v1", verifier="exact"), "two datasets are called r", ""),
        (lambda: seatrial.probe_bridge(model="nowhere"), "--model nowhere: no such family", "qwen2"),
        (lambda: seatrial.probe_bridge(model="qwen2", all=True), "--all and --model are both given", "leave one out"),
        (lambda: seatrial.probe_bridge(rungs=["build", "party"]), "unknown rung 'party'", "build"),
        (lambda: seatrial.probe_bridge(fault="gate-up-swaped"), "unknown fault", "use gate-up-swapped"),
        (lambda: seatrial.probe_bridge(device="cuda"), "--device cuda needs an interpreter", "--python"),
        (lambda: seatrial.probe_bridge(change="one"), "one: provides pkg, and the ladder runs none of that", "Megatron-Bridge"),
    ],
)
def test_what_cannot_be_meant_is_an_error_with_its_fix(
    call: Callable[[], object], said: str, fix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("one", "two"):
        checkout(tmp_path / name)
    with pytest.raises(seatrial.UserError) as caught:
        call()
    assert said in caught.value.message
    assert fix in caught.value.fix
    assert [path for name in ("trials", "bisects", "campaigns") for path in (tmp_path / name).glob("*")] == [], "nothing was begun"


def test_an_environment_that_is_missing_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SEATRIAL_CACHE", str(tmp_path / "cache"))
    with pytest.raises(seatrial.BlockedError) as caught:
        seatrial.probe_refit(engine="vllm")
    assert caught.value.boundary is Boundary.ENVIRONMENT
    assert caught.value.fix.startswith("seatrial env build vllm-cpu")
    with pytest.raises(seatrial.BlockedError, match="no such interpreter"):
        seatrial.probe_bridge(python="absent")


def test_a_secret_is_not_stored_with_a_bisect(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_API_KEY", "velvetmountain12345")
    monkeypatch.chdir(tmp_path)
    broken(tmp_path / "repo")
    with pytest.raises(seatrial.UserError) as caught:
        seatrial.bisect(["tool", "--key", "velvetmountain12345"], good="HEAD~3", repo="repo")
    assert "holds a secret" in caught.value.message
    assert "velvetmountain" not in str(caught.value)
    assert not (tmp_path / "bisects").exists()


def test_paths_in_a_campaign_file_start_at_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "there").mkdir()
    write_rows(tmp_path / "there" / "rows.jsonl", halves(1))
    file = tmp_path / "there" / "campaign.toml"
    run_in_process(monkeypatch)
    with serving() as stub:
        table = '[[datasets]]\nname = "rows"\npath = "rows.jsonl"\n'
        file.write_text(f'name = "filed"\nverifier = "choice"\n{table}[policy]\nurl = "{stub.url}"\n[work]\nshards = 1\n')
        monkeypatch.chdir(tmp_path)
        found = seatrial.collect(file)
    assert found.complete
    assert found.directory.parent == tmp_path / "campaigns"


def test_the_name_of_a_room_is_a_function_too() -> None:
    code = "import seatrial.bisect.bisect_dir, seatrial.api; from seatrial import bisect; assert callable(bisect) and bisect.bisect_dir"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_run_directory_is_not_used_twice(fake: FakeLoop) -> None:
    seatrial.run("fake", level=0, out="here")
    with pytest.raises(seatrial.UserError, match="here"):
        seatrial.run("fake", level=0, out="here")
    with pytest.raises(seatrial.UserError, match="level 1 has no result here") as caught:
        seatrial.Trial.load("here").checks(level=1)
    assert caught.value.fix == "levels with one: 0"


def test_a_trial_whose_files_were_altered_is_no_pass(fake: FakeLoop) -> None:
    trial = seatrial.run("fake", level=0)
    assert trial.verdict is seatrial.Verdict.PASS
    metrics = next(trial.directory.glob("levels/0-smoke/run/metrics.jsonl"))
    metrics.write_text(metrics.read_text().replace("1", "2"))
    assert seatrial.Trial.load(trial.directory).verdict is not seatrial.Verdict.PASS


def test_without_pandas_the_fix_is_named(fake: FakeLoop, monkeypatch: pytest.MonkeyPatch) -> None:
    trial = seatrial.run("fake", level=0)
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(seatrial.UserError) as caught:
        trial.to_pandas()
    assert caught.value.fix == "pip install pandas"


def test_a_notebook_shows_recorded_text_as_text(fake: FakeLoop, tmp_path: Path) -> None:
    trial = seatrial.run("fake", level=0)
    evil = "<script>alert(1)</script>\x1b[31m & \"'"
    missed = CheckResult(name=evil, passed=False)
    level: LevelResult = replace(trial.levels[0], title=evil, reason=evil, checks=(missed,))
    record = replace(trial.record, reason=evil, levels=(level,))
    shown = api.Trial(tmp_path / "<b>", record)._repr_html_()
    assert "&lt;script&gt;" in shown
    assert not {"<script", "<b>", "\x1b"} & {part for part in ("<script", "<b>", "\x1b") if part in shown}
    assert "Fail" in shown


def test_a_probe_writes_where_it_is_told(tmp_path: Path) -> None:
    facts = tmp_path / "facts.jsonl"
    facts.write_text("".join(json.dumps(row) + "\n" for row in clean()))
    found = seatrial.probe_refit(facts=facts, out=tmp_path / "out", command=["notebook"])
    assert found.directory == tmp_path / "out"
    stored = json.loads((tmp_path / "out" / "probe.json").read_text())
    assert stored == found.record.model_dump(mode="json")
    assert stored["command"] == ["notebook"]
    facts.write_text("")
    assert seatrial.probe_refit(facts=facts).verdict is seatrial.Verdict.BLOCKED


def test_a_probe_that_was_interrupted_says_where_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(*_: object) -> None:
        raise Interrupted(2)

    (tmp_path / "python").touch()
    for name, call in (("refit", seatrial.probe_refit), ("bridge", seatrial.probe_bridge)):
        monkeypatch.setattr(f"seatrial.probes.{name}_run.probe_{name}", stopped)
        with pytest.raises(ProbeInterrupted) as caught:
            call(python=sys.executable, out=tmp_path / name)
        assert caught.value.directory == tmp_path / name


def test_a_bridge_probe_is_stored_with_its_verdict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ladder itself is not climbed here: an interpreter that does nothing leaves no facts."""
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\n")
    python.chmod(0o755)
    found = seatrial.probe_bridge(python=python, out=tmp_path / "out", rungs="build", tests=False, command=["notebook"])
    assert found.verdict is not seatrial.Verdict.PASS
    assert json.loads((tmp_path / "out" / "probe.json").read_text())["judged"]["verdict"] == found.verdict
    assert (tmp_path / "out" / "summary.md").is_file()


def test_run_directories_are_those_of_the_command_line(fake: FakeLoop) -> None:
    trial = seatrial.run("fake", level=0)
    assert run_dir.read(trial.directory).id == trial.directory.name
    assert {"summary.md", "report.json", "junit.xml", "report.html"} <= {path.name for path in trial.directory.iterdir()}
