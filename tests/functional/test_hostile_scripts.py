"""What a hostile but fair user tries: names that collide, secrets in metrics, old metrics with a new time, a kill."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from seatrial.evidence.redact import Redactor
from seatrial.functional.judge_script import clear_metrics
from seatrial.functional.plan_scripts import FunctionalRequest, plan_scripts
from tests.functional.gone import ended
from tests.functional.tree import MEGATRON, Tree, make_tree, missed

pytestmark = pytest.mark.slow

METRICS = """echo '{"loss": {"1": 2.0, "2": 1.0}}' > metrics.json"""
CHECKED = ("--metrics", "metrics.json", "--check", 'data["loss"]["2"] < 1.5')
SECRET = "hf_" + "a1B2" * 9


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return make_tree(tmp_path)


def test_a_name_that_a_number_would_give_is_not_given_twice(tree: Tree) -> None:
    script, other = tree.write("a.sh", METRICS), tree.write("a-2.sh", METRICS)
    assert tree.call(script, script, other, *CHECKED).returncode == 0
    assert {place.name for place in tree.out.iterdir() if place.is_dir()} == {"a", "a-2", "a-2-2"}


@pytest.mark.parametrize("name", ["functional.json.sh", "junit.xml.sh", "..sh", "two words.sh"])
def test_odd_names_of_scripts_do_not_meet_our_files(tree: Tree, name: str) -> None:
    done = tree.call(tree.write(name, METRICS), *CHECKED)
    assert done.returncode == 0, done.stderr
    assert (tree.out / "functional.json").is_file()
    assert len(list(tree.out.glob("*/result.json"))) == 1


def test_a_secret_in_metrics_is_in_nothing_that_is_kept(tree: Tree) -> None:
    body = """echo "{\\"loss\\": {\\"1\\": 2.0, \\"2\\": 1.0}, \\"note\\": {\\"1\\": \\"$HF_TOKEN\\"}}" > metrics.json"""
    done = tree.call(tree.write("leaky.sh", body), *CHECKED, HF_TOKEN=SECRET)
    assert tree.result("leaky")["verdict"] == "Fail", "a value that is no number"
    assert SECRET not in done.stdout + done.stderr
    assert not [file for file in tree.out.rglob("*") if file.is_file() and SECRET in file.read_text()]


def test_redaction_leaves_numbers_and_the_shape_of_json(tmp_path: Path) -> None:
    text = '{"a\\"b": {"1": 123456.5, "1": NaN}, "api_key": "zZ9yY8xX7wW6vV5u", "torn'
    (tmp_path / "metrics.json").write_text(text)
    clear_metrics(tmp_path, Redactor({"DB_PASSWORD": "123456"}))
    cleared = (tmp_path / "metrics.json").read_text()
    assert cleared.startswith('{"a\\"b": {"1": 123456.5, "1": NaN}')
    assert "zZ9yY8" not in cleared


def test_the_command_file_stays_a_shell_script_when_secrets_are_left_out(tree: Tree) -> None:
    tree.call(tree.write("plain.sh", METRICS), *CHECKED, "--", "--api-key", """it's "9Zq8 x" """, "a b")
    command = tree.out / "plain" / "command.sh"
    assert "9Zq8" not in command.read_text()
    assert "Secrets are left out" in command.read_text()
    assert subprocess.run(["bash", "-n", command], check=False, timeout=30).returncode == 0


def test_old_metrics_with_a_new_time_are_told(tree: Tree) -> None:
    (tree.root / "metrics.json").write_text('{"loss": {"1": 2.0, "2": 1.0}}')
    done = tree.call(tree.write("plain.sh", "touch metrics.json"), *CHECKED)
    assert "the same bytes as before this run" in done.stdout
    assert any("the same bytes" in note for note in tree.result("plain")["notes"])


def test_a_run_without_valid_tokens_does_not_pass_by_an_upper_bound(tree: Tree) -> None:
    (found,) = plan_scripts(FunctionalRequest(scripts=(tree.checkout / MEGATRON,)))
    assert found.asserted[0].checks[-1] == 'min(data["train/token_mult_prob_error"]) >= 0.999'
    script = tree.write("masked.sh", """echo '{"train/token_mult_prob_error": {"1": 0.0}}' > metrics.json""")
    tree.call(script, "--metrics", "metrics.json", "--check", found.asserted[0].checks[-1])
    assert missed(tree.result("masked")) == [found.asserted[0].checks[-1]]


@pytest.mark.parametrize("tag", ['"train/token_mult_prob_error"', "'train/token_mult_prob_error'"])
def test_the_floor_holds_for_a_check_of_the_user_too(tree: Tree, tag: str) -> None:
    script = tree.write("masked.sh", """echo '{"train/token_mult_prob_error": {"1": 0.0}}' > metrics.json""")
    done = tree.call(script, "--metrics", "metrics.json", "--check", f"max(data[{tag}]) < 1.05")
    assert done.returncode == 1
    assert missed(tree.result("masked")) == ['min(data["train/token_mult_prob_error"]) >= 0.999']


ASSERTED = 'max(data["loss"]) < 0.5'


@pytest.mark.parametrize(
    ("body", "options"),
    [
        (f"python3 check_metrics.py metrics.json '{ASSERTED}'", ("--metrics", "metrics.json", "--steps", "2")),
        (f"python3 tools/check_metrics.py metrics.json '{ASSERTED}' || true", ()),
        (f"python3 check_metrics.py metrics.json '{ASSERTED}' || true", ("--exit-code-only",)),
        (f"python3 check_metrics.py $PWD/metrics.json '{ASSERTED}'", ("--metrics", "metrics.json")),
        (
            f"mkdir sub; mv metrics.json sub; cd sub; python3 ../check_metrics.py metrics.json '{ASSERTED}'",
            ("--metrics", "sub/metrics.json"),
        ),
    ],
)
def test_what_a_script_asserts_counts_wherever_its_checker_lies(tree: Tree, body: str, options: tuple[str, ...]) -> None:
    (tree.root / "check_metrics.py").write_text("")  # always exits with 0
    done = tree.call(tree.write("v.sh", f"{METRICS}\n{body}"), *options)
    result = tree.result("v")
    assert (done.returncode, result["exit_code"], missed(result)) == (1, 0, [ASSERTED]), done.stdout + done.stderr


def test_what_a_script_asserts_and_meets_is_a_pass_without_options(tree: Tree) -> None:
    (tree.root / "check_metrics.py").write_text("")
    done = tree.call(tree.write("v.sh", f"{METRICS}\npython3 check_metrics.py metrics.json 'max(data[\"loss\"]) < 5'"))
    assert done.returncode == 0, done.stdout + done.stderr


def test_assertions_about_two_files_are_not_held_against_one(tree: Tree) -> None:
    (tree.root / "check_metrics.py").write_text("")
    other = """echo '{"loss": {"1": 9.0}}' > other.json"""
    calls = [f"python3 check_metrics.py {name}.json 'max(data[\"loss\"]) < 5'" for name in ("metrics", "other")]
    done = tree.call(tree.write("v.sh", "\n".join((METRICS, other, *calls))), "--metrics", "metrics.json")
    assert done.returncode == 1
    assert missed(tree.result("v")) == ['other.json: max(data["loss"]) < 5']


def test_what_stands_behind_a_command_in_the_call_is_not_lost(tree: Tree) -> None:
    (tree.root / "check_metrics.py").write_text("")
    script = tree.write("v.sh", f"{METRICS}\npython3 check_metrics.py $(pwd)/metrics.json '{ASSERTED}'")
    done = tree.call(script, "--metrics", "metrics.json", "--steps", "2")
    assert done.returncode == 1
    assert missed(tree.result("v")) == [ASSERTED]


@pytest.mark.parametrize("place", ["m.json", "$(pwd)/m.json", '"$(pwd)/m.json"', '"$PWD/m.json"', "${PWD}/m.json", "`pwd`/m.json"])
@pytest.mark.parametrize("call", ["{}", "out=$({})", 'out="$({} 2>&1)"', "if ! {}; then true; fi"])
def test_a_checkouts_script_is_held_to_what_it_asserts_however_it_names_the_directory(tree: Tree, place: str, call: str) -> None:
    script = tree.checkout / "tests/functional/own.sh"
    whole = call.format(f"uv run tests/check_metrics.py {place} '{ASSERTED}'")
    script.write_text(f"#!/bin/bash\n{whole}\n")
    (found,) = plan_scripts(FunctionalRequest(scripts=(script,)))
    (one,) = found.asserted
    assert (one.metrics, one.checks, found.unread) == (tree.checkout / "m.json", (ASSERTED,), ())


def test_a_checkouts_script_that_swallows_the_failure_of_its_checker_is_no_pass(tree: Tree) -> None:
    script = tree.checkout / "tests/functional/own.sh"
    call = f"uv run tests/check_metrics.py $(pwd)/metrics.json '{ASSERTED}' || true"
    script.write_text(f"#!/bin/bash\n{METRICS}\n{call}\n")
    done = tree.call(script, "--steps-by", "loss")
    result = tree.result("own")
    assert (done.returncode, result["exit_code"], missed(result)) == (1, 0, [ASSERTED]), done.stdout


MET = 'max(data["loss"]) < 5'
READ = f"python3 check_metrics.py metrics.json '{MET}'"


@pytest.mark.parametrize(
    ("body", "shown"),
    [
        (
            "bash -c \"python3 check_metrics.py metrics.json 'max(loss) < 1'\"",
            "bash -c python3 check_metrics.py metrics.json 'max(loss) < 1'",
        ),
        ("python3 check_metrics.py metrics.json", "python3 check_metrics.py metrics.json"),
        ("bash <<EOF\n  python3 check_metrics.py metrics.json x\nEOF", "python3 check_metrics.py metrics.json x"),
        (
            'again() { "$@"; }\nlook() {\n  python3 check_metrics.py metrics.json x\n}\nagain look',
            "python3 check_metrics.py metrics.json x",
        ),
        ('look() { python3 check_metrics.py "$@"; }\nlook metrics.json x', "python3 check_metrics.py $@"),
        ('CALL="check_metrics.py metrics.json x"\npython3 $CALL', "CALL=check_metrics.py metrics.json x"),
    ],
    ids=["in a word", "no checks", "here-document", "function as an argument", "arguments of a function", "in a variable"],
)
@pytest.mark.parametrize("known", [True, False])
def test_a_call_that_cannot_be_read_is_told_and_no_pass(tree: Tree, body: str, shown: str, known: bool) -> None:
    folder = tree.checkout if known else tree.root
    (folder / "check_metrics.py").write_text("")
    script = folder / "v.sh"
    script.write_text(f"#!/bin/bash\n{METRICS}\necho Metric Checks\n{READ}\n{body}\n")
    done = tree.call(script)
    result = tree.result("v")
    assert (done.returncode, result["exit_code"], shown in missed(result)) == (1, 0, True), done.stdout
    assert "cannot be read from the script" in result["reason"]
    assert f"  cannot be read, which will be a Fail: {shown}\n" in tree.call(script, "--dry-run").stdout


@pytest.mark.parametrize("known", [True, False])
def test_what_only_speaks_of_the_checker_asserts_nothing(tree: Tree, known: bool) -> None:
    folder = tree.checkout if known else tree.root
    (folder / "check_metrics.py").write_text("")
    script = folder / "v.sh"
    speaks = "# check_metrics.py x\nif [ -f check_metrics.py ]; then echo 'runs check_metrics.py now'; fi\nCHECK=$PWD/check_metrics.py"
    script.write_text(f"#!/bin/bash\n{METRICS}\necho Metric Checks\n{speaks}\npython3 $CHECK metrics.json '{MET}'\n")
    done = tree.call(script)
    assert (done.returncode, missed(tree.result("v"))) == (0, []), done.stdout


def test_a_place_that_cannot_be_told_is_no_pass(tree: Tree) -> None:
    (tree.root / "check_metrics.py").write_text("")
    done = tree.call(tree.write("v.sh", f"{METRICS}\npython3 check_metrics.py $PWD/metrics.json 'max(data[\"loss\"]) < 5'"))
    assert done.returncode == 1
    assert "give --metrics FILE" in done.stdout


def test_a_skip_of_something_else_does_not_excuse_missing_metrics(tree: Tree) -> None:
    script = tree.write("skips.sh", "echo 'skipped: batch 3'\nseq 20")
    assert tree.call(script, *CHECKED).returncode == 1


@pytest.mark.parametrize("body", ["set +e; false; true", "false || true", "(exit 3); true"])
def test_a_failure_that_the_script_swallows_is_no_pass(tree: Tree, body: str) -> None:
    assert tree.call(tree.write("plain.sh", body), *CHECKED).returncode == 1


def test_children_that_outlive_the_script_are_ended(tree: Tree) -> None:
    script = tree.write("leaves.sh", f"(setsid env -i sleep 600 > /dev/null 2>&1 & echo $! > pid)\n{METRICS}")
    assert tree.call(script, *CHECKED).returncode == 0
    assert ended(int((tree.root / "pid").read_text()))


def test_output_that_is_no_text_and_has_no_end_is_kept(tree: Tree) -> None:
    assert tree.call(tree.write("bytes.sh", f"{METRICS}\nprintf 'a\\xff\\xfeb'"), *CHECKED).returncode == 0
    assert "a\\xff\\xfeb" in (tree.out / "bytes" / "run.log").read_text()


def start(tree: Tree, script: Path) -> tuple[subprocess.Popen[bytes], int]:
    """Seatrial under way, and a child of its script."""
    argv = [sys.executable, "-m", "seatrial.cli.main", "functional", "run", str(script), "--out", str(tree.out), "--exit-code-only"]
    running = subprocess.Popen(
        argv, cwd=tree.root, env={**os.environ, "HOME": str(tree.root)}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    noted, ends = tree.root / "pid", time.monotonic() + 60
    while not (noted.exists() and noted.read_text().strip()) and time.monotonic() < ends:
        time.sleep(0.05)
    return running, int(noted.read_text())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_leaves_a_report_and_no_process(tree: Tree, number: signal.Signals) -> None:
    running, child = start(tree, tree.write("waits.sh", "sleep 600 & echo $! > pid; wait"))
    running.send_signal(number)
    assert running.wait(timeout=60) == 130
    assert ended(child)
    assert json.loads((tree.out / "functional.json").read_text())["verdict"] == "Blocked"


def test_what_a_killed_seatrial_left_is_ended_by_the_next_run(tree: Tree) -> None:
    running, child = start(tree, tree.write("waits.sh", "sleep 600 & echo $! > pid; wait"))
    running.kill()
    running.wait(timeout=60)
    done = tree.call(tree.write("plain.sh", METRICS), *CHECKED, "--out", tree.root / "next")
    assert "that a killed Seatrial had left running" in done.stderr
    assert ended(child)
