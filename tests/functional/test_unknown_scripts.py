"""Scripts that no loop knows, nightly ones, plans and reports."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from seatrial.core.verdict import Verdict
from seatrial.functional.judge_script import ScriptRun, judge_script
from seatrial.functional.plan_scripts import FunctionalRequest, PlannedScript, ScriptResult, plan_scripts
from seatrial.loops.nightly_scripts import Asserted, describe_functional
from tests.functional.tree import MEGATRON, NIGHTLY, Tree, make_tree

pytestmark = pytest.mark.slow

METRICS = """echo '{"loss": {"1": 2.0, "2": 1.0}}' > metrics.json"""
CHECK = 'data["loss"]["2"] < 1.5'


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return make_tree(tmp_path)


def test_an_exit_code_of_0_alone_is_no_pass(tree: Tree) -> None:
    done = tree.call(tree.write("plain.sh", "true"))
    assert done.returncode == 1
    assert tree.result("plain")["reason"].startswith("nothing to check")


def test_who_accepts_the_exit_code_alone_is_told_so_in_the_report(tree: Tree) -> None:
    done = tree.call(tree.write("plain.sh", "true"), "--exit-code-only")
    assert done.returncode == 0
    assert "judged by its exit code alone" in (tree.out / "summary.md").read_text()
    for report in ("summary.md", "junit.xml", "functional.json"):
        assert "nothing else was looked at" in (tree.out / report).read_text()


@pytest.mark.parametrize(("name", "text"), [("metrics.yaml", "a: 1"), ("plain.sh", "#!/usr/bin/env python3"), ("plain", "true")])
def test_what_is_no_shell_script_is_not_given_to_bash(tree: Tree, name: str, text: str) -> None:
    script = tree.root / name
    script.write_text(f"{text}\ntouch ran\n")
    done = tree.call(script, "--exit-code-only")
    assert done.returncode == 2
    assert f"{name}: is no shell script" in done.stderr
    assert not list(tree.root.rglob("ran"))


@pytest.mark.parametrize("first", ["#!/bin/sh -e", "#!/usr/bin/env bash", "#!/usr/bin/env -S bash -e"])
def test_a_script_without_suffix_says_what_it_is(tree: Tree, first: str) -> None:
    script = tree.root / "plain"
    script.write_text(f"{first}\ntrue\n")
    assert tree.call(script, "--exit-code-only").returncode == 0


def test_the_exit_code_alone_is_not_accepted_of_a_script_that_has_checks(tree: Tree) -> None:
    done = tree.call(tree.checkout / MEGATRON, "--exit-code-only", sim="short")
    assert done.returncode == 1


def test_checks_and_steps_of_the_user_judge_a_plain_script(tree: Tree) -> None:
    script = tree.write("plain.sh", METRICS)
    assert tree.call(script, "--metrics", "metrics.json", "--check", CHECK, "--steps", "2").returncode == 0
    assert tree.call(script, "--metrics", "metrics.json", "--steps", "3", "--out", tree.root / "more").returncode == 1


def test_a_metric_that_is_not_there_is_no_pass(tree: Tree) -> None:
    done = tree.call(tree.write("plain.sh", METRICS), "--metrics", "metrics.json", "--check", 'max(data["reward"]) > 0')
    assert done.returncode == 1
    assert "no metric 'reward'" in done.stdout


def test_steps_need_a_metric_to_be_counted_by(tree: Tree) -> None:
    script = tree.write("plain.sh", METRICS.replace("loss", "score"))
    tree.call(script, "--metrics", "metrics.json", "--steps", "2")
    assert "no metric train/loss or loss; give --steps-by METRIC, one of score" in tree.result("plain")["reason"]
    by = ("--steps-by", "score", "--out", tree.root / "more")
    assert tree.call(script, "--metrics", "metrics.json", "--steps", "2", *by).returncode == 0


def test_a_metric_to_count_by_that_is_not_there_is_told_with_those_that_are(tree: Tree) -> None:
    tree.call(tree.write("plain.sh", METRICS), "--metrics", "metrics.json", "--steps", "2", "--steps-by", "nope")
    assert "no metric nope; give --steps-by METRIC, one of loss" in tree.result("plain")["reason"]


def test_a_directory_is_no_script_and_its_scripts_are_named(tree: Tree) -> None:
    done = tree.call(tree.checkout / "tests/functional")
    assert done.returncode == 2
    assert "is a directory" in done.stderr
    assert MEGATRON in done.stderr


def test_a_script_that_skips_itself_is_skipped(tree: Tree) -> None:
    script = tree.write("few.sh", 'echo "[failover] SKIP: needs >= 3 free GPUs (2 generation + 1 trainer), found 2."')
    done = tree.call(script, "--exit-code-only")
    assert (done.returncode, tree.result("few")["verdict"]) == (77, "Skipped")


@pytest.mark.parametrize(
    "line",
    [
        "Skipping: needs 8 GPUs",
        "Skipped (2 GPUs required)",
        "This test requires 8 GPUs, found 0; skipping",
        "[SKIPPED] insufficient GPUs",
        "Not enough GPUs, exiting",
        "2 GPUs are needed.",
        "No CUDA GPUs are available",
        "=== 3 skipped in 0.01s ===",
    ],
)
def test_any_word_for_a_skip_counts_where_the_exit_code_is_all_there_is(tmp_path: Path, line: str) -> None:
    result = judged(tmp_path, f"begin\n{line}\n\n+ exit 0\n", exit_code_only=True)
    assert (result.verdict, result.reason) == (Verdict.SKIPPED, f"the script skipped itself: {line}")
    assert judged(tmp_path, f"begin\n{line}\n", exit_code_only=False).verdict is Verdict.FAIL


@pytest.mark.parametrize(
    "text",
    [
        "Skipping the warm-up\ndone",
        "5 passed, 1 skipped in 0.2s",
        "5 tests, 0 skipped",
        "failures: 0, skipped: 0",
        "skipper is done",
        "peak GPU memory needed: 3 GB",
        "ran on 8 GPUs",
        "",
    ],
)
def test_what_says_something_else_is_judged_by_the_exit_code(tmp_path: Path, text: str) -> None:
    assert judged(tmp_path, text, exit_code_only=True).verdict is Verdict.PASS


def test_where_there_are_checks_only_the_strict_form_is_a_skip(tmp_path: Path) -> None:
    asserted = (Asserted(metrics=tmp_path / "metrics.json", written="metrics.json", checks=(CHECK,)),)
    assert judged(tmp_path, "Not enough GPUs, exiting\n", exit_code_only=True, asserted=asserted).verdict is Verdict.FAIL
    assert judged(tmp_path, "SKIP: not enough GPUs\n", exit_code_only=True, asserted=asserted).verdict is Verdict.SKIPPED


def judged(folder: Path, log: str, *, exit_code_only: bool, asserted: tuple[Asserted, ...] = ()) -> ScriptResult:
    """A script that exited with 0 and left this log."""
    planned = PlannedScript(
        name="s",
        script=folder / "s.sh",
        argv=("bash", "s.sh"),
        cwd=folder,
        asserted=asserted,
        known=None,
        minutes=1,
        stall=1,
        gpus=None,
        step_tags=(),
        exit_code_only=exit_code_only,
    )
    (folder / "run.log").write_text(log)
    return judge_script(planned, ScriptRun(directory=folder, log=folder / "run.log", started=0, ended="exited", exit_code=0, seconds=1))


def test_a_skip_line_does_not_excuse_metrics_that_are_there(tree: Tree) -> None:
    script = tree.write("few.sh", f"echo 'SKIP: one case'\n{METRICS}")
    assert tree.call(script, "--metrics", "metrics.json", "--steps", "9").returncode == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--check", CHECK), "--metrics FILE"),
        (("--check", "max(data)"), "check"),
        (("--gpu-hours", "1"), "--gpus N"),
        (("--gpu-hours", "1", "--gpus", "8"), "GPU hours"),
        (("--image", "x", "--hermetic"), "give one of them"),
        (("--env", "HOME"), "--hermetic or --image"),
    ],
)
def test_what_cannot_be_asked_is_told_before_anything_runs(tree: Tree, words: tuple[str, ...], said: str) -> None:
    done = tree.call(tree.write("plain.sh", "touch ran"), *words)
    assert done.returncode == 2
    assert said in done.stderr
    assert not (tree.root / "ran").exists()


def test_a_plan_is_shown_and_not_run(tree: Tree) -> None:
    done = tree.call(tree.checkout / MEGATRON, tree.checkout / NIGHTLY, "--dry-run")
    assert done.returncode == 0, done.stderr
    assert 'max(data["train/token_mult_prob_error"]) < 1.05' in done.stdout
    assert "deadline 180 min, GPUs 8, GPU hours 24" in done.stdout
    assert "2 scripts, at most 26 GPU hours" in done.stdout
    assert not tree.out.exists()
    plain = tree.write("plain.sh", "true")
    assert "1 script, GPU hours not known (give --gpus N)" in tree.call(plain, "--dry-run").stdout
    both = tree.call(tree.checkout / MEGATRON, plain, "--dry-run").stdout
    assert "2 scripts, at most 2 GPU hours, and those of 1 script not known (give --gpus N)" in both


def test_a_nightly_is_known_by_its_block_and_its_assertions(tree: Tree) -> None:
    found = describe_functional(tree.checkout / NIGHTLY, ())
    assert found is not None
    (one,) = found.asserted
    assert (one.steps, len(one.checks), found.gpus, found.minutes) == (500, 4, 8, 180)
    assert one.metrics == (tree.checkout / NIGHTLY).with_suffix("") / "metrics.json"


def test_a_plan_has_the_floor_once_which_the_scripts_do_not_have(tree: Tree) -> None:
    floor = 'min(data["train/token_mult_prob_error"]) >= 0.999'
    (found,) = plan_scripts(FunctionalRequest(scripts=(tree.checkout / NIGHTLY,)))
    assert [expr == floor for expr in found.asserted[0].checks] == [False] * 4 + [True]
    known = describe_functional(tree.checkout / NIGHTLY, ())
    assert known is not None
    assert floor not in known.asserted[0].checks, "one place adds it, for every check of that metric"


def test_a_script_outside_of_a_checkout_is_nobodys(tree: Tree) -> None:
    assert describe_functional(tree.write("plain.sh", "true"), ()) is None


def test_the_reports_tell_every_script(tree: Tree) -> None:
    good, bad = tree.write("good.sh", METRICS), tree.write("bad.sh", "exit 7")
    done = tree.call(good, bad, "--metrics", "metrics.json", "--check", CHECK)
    assert done.returncode == 1
    suite = ET.parse(tree.out / "junit.xml").getroot()[0]
    cases = {
        case.attrib["name"]: [child.tag for child in case] for case in suite.iter("testcase") if case.attrib["classname"].count(".") == 1
    }
    assert cases == {"good": [], "bad": ["failure"]}
    whole = json.loads((tree.out / "functional.json").read_text())
    assert [result["verdict"] for result in whole["results"]] == ["Pass", "Fail"]
    assert (tree.out / "summary.md").read_text().startswith("# Fail: 2 scripts: 1 Pass, 1 Fail")


def test_two_scripts_of_one_name_have_a_directory_each(tree: Tree) -> None:
    script = tree.write("plain.sh", METRICS)
    tree.call(script, script, "--metrics", "metrics.json", "--check", CHECK)
    assert (tree.out / "plain").is_dir()
    assert (tree.out / "plain-2" / "result.json").is_file()


def test_the_command_runs_as_it_stands(tree: Tree) -> None:
    tree.call(tree.write("plain.sh", METRICS), "--metrics", "metrics.json", "--check", CHECK, "--", "two words")
    assert "'two words'" in (tree.out / "plain" / "command.sh").read_text()
