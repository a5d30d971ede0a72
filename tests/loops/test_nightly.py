"""What is known of a nightly script without running it, and whether one ran to its end.

With SEATRIAL_NEMO_RL_CHECKOUT=DIR every script of a real checkout is read too, and compared with what bash makes of it.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from rich.console import Console
from rich.table import Table

from seatrial.core.errors import UserError
from seatrial.loops.nightly_scripts import Nightly, describe_nightly
from tests.loops.nemo_rl_checkout import REAL, SOURCE

SCRIPT = "tests/test_suites/llm/grpo-small.v2.sh"
BLOCK = """#!/bin/bash
SCRIPT_DIR=$( cd -- "$( dirname -- "${BASH_SOURCE[0]}" )" &> /dev/null && pwd)
# ===== BEGIN CONFIG =====
# Two jobs in a row: 4=2+2 steps.
NUM_NODES="${NUM_NODES:-2}"
GPUS_PER_NODE=4
STEPS_PER_RUN=3  # step_time ~ 29sec
MAX_STEPS=4
NUM_RUNS=$(( (MAX_STEPS + STEPS_PER_RUN - 1) / STEPS_PER_RUN ))  # Round up
NUM_MINUTES=60 # usually 15 minutes
STUDENT_MODEL=$(exit 3)
# ===== END CONFIG =====
MAX_STEPS=900
"""


def described(text: str = BLOCK, script: str = SCRIPT) -> Nightly:
    found = describe_nightly(script, text)
    assert found is not None
    return found


def test_the_block_is_read_and_not_evaluated() -> None:
    found = described()
    assert (found.nodes, found.gpus_per_node, found.minutes, found.steps) == (2, 4, 120, 4)
    assert found.metrics == "tests/test_suites/llm/grpo-small.v2/metrics.json"
    assert found.variables["NRL_MEGATRON_CHECKPOINT_DIR"] == "{checkpoints}"
    assert found.variables["NRL_FORCE_REBUILD_VENVS"] == "true"


def test_the_script_of_the_checkout_is_one() -> None:
    script = "tests/test_suites/llm/grpo-llama3.2-1b-instruct-1n8g-megatron.sh"
    found = described((SOURCE / script).read_text(), script)
    assert (found.nodes, found.gpus_per_node, found.minutes, found.steps) == (1, 8, 180, 500)


def test_a_script_without_runs_has_one() -> None:
    lines = [line for line in BLOCK.splitlines() if not line.startswith(("NUM_RUNS", "STEPS_PER_RUN", "GPUS"))]
    assert (described("\n".join(lines)).minutes, described("\n".join(lines)).gpus_per_node) == (60, 8)


def test_what_is_no_such_script_is_nobodys() -> None:
    assert describe_nightly("tests/functional/grpo.sh", "#!/bin/bash\nMAX_STEPS=3\n") is None
    assert describe_nightly("README.md", BLOCK) is None


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ("MAX_STEPS=4\nNUM_RUNS", "NUM_RUNS", "NUM_RUNS"),
        ("MAX_STEPS=4", "MAX_STEPS=$(cat steps)", "MAX_STEPS"),
        ("NUM_MINUTES=60", "NUM_MINUTES=0", "NUM_MINUTES"),
        ("NUM_MINUTES=60 #", "MINUTES=60 #", "NUM_MINUTES"),
        ('NUM_NODES="${NUM_NODES:-2}"', "NUM_NODES=$MANY", "NUM_NODES"),
        ("- 1) / STEPS_PER_RUN", "- 1) / 0", "NUM_RUNS"),
        ("- 1) / STEPS_PER_RUN", "- 1) ** 2", "NUM_RUNS"),
        ("- 1) / STEPS_PER_RUN", "- 1) / __import__('os')", "NUM_RUNS"),
    ],
)
def test_a_damaged_block_is_named_with_its_key(old: str, new: str, named: str) -> None:
    with pytest.raises(UserError, match=f"{SCRIPT}: {named}"):
        describe_nightly(SCRIPT, BLOCK.replace(old, new))


# --- an exit code of 0


class Tree:
    """A tree in which the script ran, with the log of that run."""

    def __init__(self, root: Path, steps: int = 4, checks: tuple[str, ...] = ("PASS", "PASS")) -> None:
        self.root, self.log = root, root / "run.log"
        self.metrics = root / described().metrics
        self.metrics.parent.mkdir(parents=True)
        (root / SCRIPT).write_text(BLOCK)
        self.metrics.write_text(json.dumps({"train/loss": {str(step): 1.0 for step in range(1, steps + 1)}}))
        with self.log.open("w") as stream:
            stream.write("=== Step 1/4 ===\n")
            if checks:
                table = Table("Status", "Check", "Value", "Message", title="Metric Checks", min_width=220)
                for status in checks:
                    table.add_row(
                        status, 'median(data["train/x"]) < 1.1', "1.0", "" if status == "PASS" else "(condition evaluated to False)"
                    )
                Console(file=stream, width=300).print(table)
            stream.write("NCCL warning: something FAILED during teardown\n")

    def incomplete(self) -> str | None:
        return described().incomplete(self.root, self.log)


def test_a_run_to_the_end_counts(tmp_path: Path) -> None:
    assert Tree(tmp_path).incomplete() is None


def test_stamps_and_colours_of_a_log_do_not_hide_the_table(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    lines = tree.log.read_text().splitlines()
    tree.log.write_text("".join(f"2026-11-15T03:41:59.123Z \x1b[3m{line}\x1b[0m\n" for line in lines))
    assert tree.incomplete() is None


def test_without_a_table_it_does_not(tmp_path: Path) -> None:
    tree = Tree(tmp_path, checks=())
    tree.log.write_text(tree.log.read_text() + "running Metric Checks is skipped\n")
    assert "no table of checks" in str(tree.incomplete())


def test_with_a_missed_check_it_does_not(tmp_path: Path) -> None:
    assert "was missed" in str(Tree(tmp_path, checks=("PASS", "FAIL")).incomplete())


def test_before_the_last_step_it_does_not(tmp_path: Path) -> None:
    assert "at step 3 of 4" in str(Tree(tmp_path, steps=3).incomplete())


@pytest.mark.parametrize("text", ["", '{"train/loss": {"1": 1.0', "[]", '{"train/reward": {"4": 1.0}}', '{"train/loss": 4}'])
def test_with_damaged_metrics_it_does_not(tmp_path: Path, text: str) -> None:
    tree = Tree(tmp_path)
    tree.metrics.write_text(text)
    assert tree.incomplete() is not None
    tree.metrics.unlink()
    assert "cannot be read" in str(tree.incomplete())


def test_the_number_of_steps_is_that_of_the_tree(tmp_path: Path) -> None:
    tree = Tree(tmp_path, steps=2)
    (tree.root / SCRIPT).write_text(BLOCK.replace("MAX_STEPS=4", "MAX_STEPS=2"))
    assert tree.incomplete() is None


# --- a real checkout

_BASH = 'echo "$NUM_NODES ${GPUS_PER_NODE:-8} $((NUM_MINUTES * ${NUM_RUNS:-1})) $MAX_STEPS"'


@pytest.mark.skipif(not REAL, reason="no real checkout: SEATRIAL_NEMO_RL_CHECKOUT=DIR")
def test_every_script_of_a_real_checkout_is_read_as_bash_reads_it() -> None:
    scripts = sorted(Path(str(REAL)).glob("tests/test_suites/**/*.sh"))
    assert scripts
    for script in scripts:
        text = script.read_text()
        found = described(text, str(script.relative_to(str(REAL))))
        block = text.partition("BEGIN CONFIG =====")[2].partition("# ===== END CONFIG")[0]
        done = subprocess.run(["bash", "-c", f"{block}\n{_BASH}"], env={}, capture_output=True, text=True, timeout=10, check=True)
        assert [found.nodes, found.gpus_per_node, found.minutes, found.steps] == [int(word) for word in done.stdout.split()], script
