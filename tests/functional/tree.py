"""A checkout with scripts in the exact shape of upstream's, stand-ins for uv and check_metrics.py, and calls of the command line.

With SEATRIAL_NEMO_RL_CHECKOUT=DIR the scripts and check_metrics.py are those of a real checkout; the trainer stays a stand-in.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.cli.command import inside

HERE = Path(__file__).parent
REAL = os.environ.get("SEATRIAL_NEMO_RL_CHECKOUT")
UV = """#!/bin/bash
# A stand-in for uv: check_metrics.py as it is, everything else by the stand-ins.
shift
while [[ $1 == --* ]]; do shift; done
case "$*" in
  *check_metrics.py*) exec {python} "$@" ;;
  *) exec {python} {standins} "$@" ;;
esac
"""
MEGATRON = "tests/functional/grpo_megatron.sh"
NIGHTLY = "tests/test_suites/llm/grpo-llama3.2-1b-instruct-1n8g-megatron.sh"
COMMON = "tests/test_suites/llm/common.env"
CHECKER = "tests/check_metrics.py"
PLACES = """EXP_DIR=$SCRIPT_DIR/$EXP_NAME
LOG_DIR=$EXP_DIR/logs
JSON_METRICS=$EXP_DIR/metrics.json
RUN_LOG=$EXP_DIR/run.log
export PYTHONPATH=${PROJECT_ROOT}:${PYTHONPATH:-}
"""
SHAPES = {
    MEGATRON: f"""#!/bin/bash

SCRIPT_DIR=$( cd -- "$( dirname -- "${{BASH_SOURCE[0]}}" )" &> /dev/null && pwd)
PROJECT_ROOT=$(realpath $SCRIPT_DIR/../..)
set -eou pipefail

EXP_NAME=$(basename $0 .sh)
{PLACES}
rm -rf $EXP_DIR $LOG_DIR
mkdir -p $EXP_DIR $LOG_DIR

cd $PROJECT_ROOT
uv run coverage run -a --data-file=$PROJECT_ROOT/tests/.coverage --source=$PROJECT_ROOT/package \\
    $PROJECT_ROOT/examples/run_grpo.py \\
    --config $PROJECT_ROOT/examples/configs/small.yaml \\
    cluster.gpus_per_node=2 \\
    grpo.max_num_steps=2 \\
    logger.log_dir=$LOG_DIR \\
    $@ \\
    2>&1 | tee $RUN_LOG

uv run tests/json_dump_tb_logs.py $LOG_DIR --output_path $JSON_METRICS

uv run tests/check_metrics.py $JSON_METRICS \\
    'max(data["train/token_mult_prob_error"]) < 1.05' \\
    'min(data["train/probs_ratio_clamped_min"]) > 0.79' \\
    'max(data["train/probs_ratio_clamped_max"]) < 1.21'
""",
    COMMON: f"""set -eou pipefail
SCRIPT_DIR=$( cd -- "$( dirname -- "${{BASH_SOURCE[0]}}" )" &> /dev/null && pwd)
PROJECT_ROOT=$(realpath $SCRIPT_DIR/../../..)
EXP_NAME=${{EXP_NAME:-$(basename $0 .sh)}}
{PLACES}
exit_if_max_steps_reached() {{
  if grep -q '"500"' $JSON_METRICS 2> /dev/null; then
      echo "[INFO] Target step $MAX_STEPS reached, skipping run"
      exit 0
  fi
}}
mkdir -p $EXP_DIR $LOG_DIR
""",
    NIGHTLY: """#!/bin/bash
SCRIPT_DIR=$( cd -- "$( dirname -- "${BASH_SOURCE[0]}" )" &> /dev/null && pwd)
source $SCRIPT_DIR/common.env

# ===== BEGIN CONFIG =====
NUM_NODES=1
STEPS_PER_RUN=500
MAX_STEPS=500
NUM_RUNS=$(( (MAX_STEPS + STEPS_PER_RUN - 1) / STEPS_PER_RUN ))  # Round up
NUM_MINUTES=180
# ===== END CONFIG =====

exit_if_max_steps_reached

cd $PROJECT_ROOT
uv run examples/run_grpo.py \\
    grpo.max_num_steps=$MAX_STEPS \\
    logger.log_dir=$LOG_DIR \\
    $@ \\
    2>&1 | tee $RUN_LOG

uv run tests/json_dump_tb_logs.py $LOG_DIR --output_path $JSON_METRICS

# Only run metrics if the target step is reached
if grep -q '"500"' $JSON_METRICS; then
    uv run tests/check_metrics.py $JSON_METRICS \\
        'median(data["train/token_mult_prob_error"]) < 1.1' \\
        'data["train/token_mult_prob_error"]["500"] < 1.1' \\
        'data["train/reward"]["500"] > 0.1' \\
        'mean(data["timing/train/total_step_time"], -6, -1) < 10.5'
fi
""",
}


@dataclass(frozen=True)
class Tree:
    """A checkout below a temporary directory."""

    root: Path

    @property
    def checkout(self) -> Path:
        return self.root / "checkout"

    @property
    def out(self) -> Path:
        return self.root / "out"

    def write(self, name: str, text: str) -> Path:
        """A script of our own; outside of the checkout."""
        file = self.root / name
        file.write_text(f"#!/bin/bash\n{text}\n")
        return file

    def call(self, *words: str | Path, sim: str = "", **env: str) -> subprocess.CompletedProcess[str]:
        """`seatrial functional run …` in the temporary directory."""
        variables = {"PATH": f"{self.root / 'bin'}:{os.environ['PATH']}", "SIM": sim, "HOME": str(self.root), **env}
        words = ("functional", "run", *words, *(() if "--dry-run" in words or "--out" in words else ("--out", self.out)))
        if "--" in words:
            place = words.index("--")
            behind = words[-2:] if "--out" in words[place:] else ()
            words = (*words[:place], *behind, *words[place : len(words) - len(behind)])
        answer = inside(*words, cwd=self.root, **variables)
        return subprocess.CompletedProcess(words, answer.code, answer.out, answer.err)

    def result(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.out / name / "result.json").read_text())
        return found


def make_tree(root: Path) -> Tree:
    """The files, and uv's stand-in."""
    tree = Tree(root)
    for name, text in SHAPES.items():
        place = tree.checkout / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text((Path(REAL) / name).read_text() if REAL else text)
    shutil.copy(Path(REAL) / CHECKER if REAL else HERE / "checker.py", tree.checkout / CHECKER)
    recipe = tree.checkout / NIGHTLY.replace("tests/test_suites", "examples/configs/recipes").replace(".sh", ".yaml")
    recipe.parent.mkdir(parents=True)
    recipe.touch()
    uv = root / "bin" / "uv"
    uv.parent.mkdir()
    uv.write_text(UV.format(python=sys.executable, standins=HERE / "standins.py"))
    uv.chmod(0o755)
    return tree


def missed(result: dict[str, Any]) -> list[str]:
    """Names of the checks that were missed."""
    return [check["name"] for check in result["checks"] if not check["passed"]]
