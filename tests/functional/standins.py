"""Stand-ins, named as such: a trainer and the tool that turns its logs into metrics.json, run by a stand-in for uv.

SIM says what goes wrong.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parents[1]), str(HERE.parents[1] / "src")]

from tests.metrics.writer import event, simple, version  # noqa: E402

SIM = os.environ.get("SIM", "")
TAGS = {
    **{"train/loss": 0.1, "train/reward": 0.5, "train/token_mult_prob_error": 1.01, "timing/train/total_step_time": 3.0},
    **{"train/probs_ratio_clamped_min": 1.0, "train/probs_ratio_clamped_max": 1.0},
}


def value(tag: str, step: int) -> float:
    if SIM == "nan" and tag == "train/token_mult_prob_error" and step == 2:
        return math.nan
    if SIM == "miss" and tag == "train/token_mult_prob_error":
        return 1.5
    return TAGS[tag] + (step / 1e4 if tag in ("train/loss", "train/reward") else 0)  # no two steps of a training are alike


def train(words: list[str]) -> int:
    """A trainer that writes what upstream's writes, and prints little."""
    given = dict(word.lstrip("+").split("=", 1) for word in words if "=" in word)
    steps = next(int(text) for name, text in given.items() if name.endswith(".max_num_steps"))
    last = {"short": 1, "three": 3}.get(SIM, steps)
    sys.stdout.write(f"training with {os.environ.get('HF_TOKEN', 'no token')}\n")
    sys.stdout.flush()
    if SIM == "hang":
        Path(os.environ["CHILD"]).write_text(str(subprocess.Popen(["sleep", "600"]).pid))  # a worker that outlives its parent
        time.sleep(600)
    if SIM == "raise":
        raise RuntimeError("the provider does not fit")
    if SIM == "full":
        raise OSError(28, "No space left on device")
    place = Path(given["logger.log_dir"]) / "exp_001" / "tensorboard"
    place.mkdir(parents=True, exist_ok=True)
    with (place / "events.out.tfevents.1.host").open("wb") as stream:
        stream.write(version())
        for step in range(1, last + 1):
            stream.write(event(step, *(simple(tag, value(tag, step)) for tag in TAGS)))
        # Of the machine, by seconds: a step of it is no step of training.
        stream.write(event(900, simple("ray/node.0.gpu.0.util", 7.0)))
    return 134 if SIM == "teardown" else 0


def dump(logs: Path, out: Path) -> int:
    """As upstream's tool writes it: NaN stands there as it is."""
    from seatrial.metrics.read import read_metrics

    if SIM == "no-metrics":
        return 0
    found = read_metrics(tuple(sorted(logs.rglob("*tfevents*"))))
    rows = {tag: dict(zip(map(str, series.steps), series.values, strict=True)) for tag, series in found.series.items()}
    out.write_text(json.dumps(rows)[:-40] if SIM == "torn" else json.dumps(rows))
    if SIM == "old":
        os.utime(out, (1, 1))
    return 0


if __name__ == "__main__":
    words = sys.argv[1:]
    program = next(Path(word).name for word in words if word.endswith(".py"))
    rest = words[next(index for index, word in enumerate(words) if word.endswith(".py")) + 1 :]
    sys.exit(dump(Path(rest[0]), Path(rest[2])) if program.startswith("json_dump") else train(rest))
