"""A script in the shape of upstream's, run by `seatrial functional run` with a stand-in for its trainer: what passes, and what must not."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.functional.gone import ended
from tests.functional.tree import MEGATRON, NIGHTLY, Tree, make_tree, missed

pytestmark = pytest.mark.slow

TMPE = 'max(data["train/token_mult_prob_error"]) < 1.05'


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return make_tree(tmp_path)


def test_a_script_that_did_all_it_asserts_passes(tree: Tree) -> None:
    done = tree.call(tree.checkout / MEGATRON)
    assert done.returncode == 0, done.stdout + done.stderr
    result = tree.result("grpo_megatron")
    assert (result["verdict"], result["steps"], result["reached"]) == ("Pass", 2, 2)
    assert TMPE in [check["name"] for check in result["checks"]]
    assert (tree.out / "grpo_megatron" / "metrics.json").is_file()
    assert (tree.out / "grpo_megatron" / "script" / "run.log").is_file()
    assert TMPE in done.stdout, "the metric table"


@pytest.mark.parametrize(
    ("sim", "said"),
    [
        ("short", "last step 2"),
        ("nan", TMPE),
        ("no-metrics", "exit 1"),
        ("torn", "exit 1"),
        ("miss", "exit 1"),
        ("teardown", "exit 134"),
        ("raise", "the provider does not fit"),
    ],
)
def test_what_a_script_may_not_pass_with(tree: Tree, sim: str, said: str) -> None:
    done = tree.call(tree.checkout / MEGATRON, sim=sim)
    result = tree.result("grpo_megatron")
    assert (done.returncode, result["verdict"]) == (1, "Fail"), done.stdout + done.stderr
    assert said in result["reason"] or said in missed(result)


@pytest.mark.parametrize("sim", ["short", "nan"])
def test_the_script_itself_lets_these_pass(tree: Tree, sim: str) -> None:
    tree.call(tree.checkout / MEGATRON, sim=sim)
    assert tree.result("grpo_megatron")["exit_code"] == 0


def test_seconds_of_the_machine_are_no_steps(tree: Tree) -> None:
    tree.call(tree.checkout / MEGATRON, sim="short")
    assert tree.result("grpo_megatron")["reached"] == 1


def test_metrics_that_are_older_than_the_run_are_none(tree: Tree) -> None:
    tree.call(tree.checkout / MEGATRON, sim="old")
    result = tree.result("grpo_megatron")
    assert (result["exit_code"], result["verdict"]) == (0, "Fail")
    assert "older than this run" in result["reason"]
    assert TMPE in missed(result), "what was not evaluated is not met"


def test_a_full_disk_is_blocked(tree: Tree) -> None:
    done = tree.call(tree.checkout / MEGATRON, sim="full")
    assert (done.returncode, tree.result("grpo_megatron")["verdict"]) == (99, "Blocked"), done.stdout


def test_arguments_after_the_dashes_reach_the_script_and_its_steps(tree: Tree) -> None:
    done = tree.call(tree.checkout / MEGATRON, "--", "grpo.max_num_steps=3")
    result = tree.result("grpo_megatron")
    assert (done.returncode, result["steps"], result["reached"]) == (0, 3, 3), done.stdout + done.stderr


def test_a_check_of_the_user_counts_beside_the_scripts_own(tree: Tree) -> None:
    done = tree.call(tree.checkout / MEGATRON, "--check", 'min(data["train/reward"]) > 0.9')
    assert done.returncode == 1
    assert missed(tree.result("grpo_megatron")) == ['min(data["train/reward"]) > 0.9']


def test_results_of_an_earlier_run_are_kept_before_the_script_deletes_them(tree: Tree) -> None:
    earlier = tree.checkout / "tests/functional/grpo_megatron"
    earlier.mkdir()
    (earlier / "run.log").write_text("of yesterday\n")
    tree.call(tree.checkout / MEGATRON)
    assert (tree.out / "grpo_megatron" / "before" / "run.log").read_text() == "of yesterday\n"
    assert "of yesterday" not in (tree.out / "grpo_megatron" / "script" / "run.log").read_text()


def test_no_secret_is_in_what_is_kept(tree: Tree) -> None:
    secret = "hf_" + "a1B2" * 9
    tree.call(tree.checkout / MEGATRON, HF_TOKEN=secret)
    texts = [file.read_text(errors="replace") for file in tree.out.rglob("*") if file.is_file() and "tfevents" not in file.name]
    assert any("[redacted" in text for text in texts)
    assert not any(secret in text for text in texts)


def test_the_deadline_ends_the_whole_process_tree(tree: Tree) -> None:
    child = tree.root / "child"
    done = tree.call(tree.checkout / MEGATRON, "--deadline", "0.03", sim="hang", CHILD=str(child))
    result = tree.result("grpo_megatron")
    assert (done.returncode, result["ended"]) == (1, "deadline"), done.stdout + done.stderr
    assert ended(int(child.read_text()))


def test_a_script_that_says_nothing_is_ended(tree: Tree) -> None:
    script = tree.write("quiet.sh", "sleep 600")
    done = tree.call(script, "--stall", "0.02", "--exit-code-only")
    assert (done.returncode, tree.result("quiet")["ended"]) == (1, "stalled")


def test_a_nightly_that_ended_early_is_no_pass_though_it_exits_with_0(tree: Tree) -> None:
    done = tree.call(tree.checkout / NIGHTLY, sim="three")
    (result,) = [tree.result(place.name) for place in tree.out.iterdir() if place.is_dir()]
    assert (done.returncode, result["exit_code"], result["verdict"]) == (1, 0, "Fail"), done.stdout + done.stderr
    assert "last step 500" in missed(result)
    assert "the script looked at its own metrics" in missed(result)


def test_a_nightly_that_finds_its_last_step_done_already_is_skipped(tree: Tree) -> None:
    assert tree.call(tree.checkout / NIGHTLY).returncode == 0
    done = tree.call(tree.checkout / NIGHTLY, "--out", tree.root / "again")
    assert done.returncode == 77, done.stdout + done.stderr
    assert "skipping run" in done.stdout
