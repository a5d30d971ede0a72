"""Writes the demo: two datasets, the program that serves the model, and campaign.toml over them.

`write_demo` makes the same files each time, but for the paths that it is given. The server's program is copied: it runs in an
environment of its own, and must find there what it imports of Seatrial, and nothing else that is installed beside it.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

import seatrial
from seatrial.core import files
from seatrial.rollouts import demo_server

_SEED = 20261115
_ROWS = {"sums": 8, "largest": 12}
"""Of each difficulty."""
_PROGRAM = ("__init__.py", "rollouts/__init__.py", "rollouts/demo_server.py")
_CAMPAIGN = """\
# What `seatrial rollouts demo` collects. Change it, and start it yourself: seatrial rollouts start campaign.toml
name = "demo"

[[datasets]]
name = "sums"
path = "sums.jsonl"
verifier = "exact"
tag_columns = ["difficulty"]

[[datasets]]
name = "largest"
path = "largest.jsonl"
verifier = "choice"
tag_columns = ["difficulty"]

[work]
repeats = 8
shards = 2
parallel = 1

[sampling]
temperature = 1.0
max_output_tokens = 8

[requests]
concurrency = 32
timeout_s = 60
dead_s = 30

[policy]
model = "seatrial-demo"

[policy.server]
kind = "command"
command = {command}
environment = {{ PYTHONPATH = {program}, OMP_NUM_THREADS = "1" }}
deadline_s = 300
"""


def write_demo(directory: Path, python: Path, cache: Path) -> Path:
    """Write the demo into `directory`, for an interpreter that has torch and transformers; returns campaign.toml.

    The trained model is kept in `cache`: a second demo starts at once.
    """
    program = directory.absolute() / "program"
    for name in _PROGRAM:
        source = Path(seatrial.__file__).parent / name
        files.write_bytes(program / "seatrial" / name, source.read_bytes())
    for dataset, makers in demo_server.MAKERS.items():
        draw = random.Random(f"{_SEED} {dataset}")
        rows = [question for make in makers for question in demo_server.different(make, _ROWS[dataset], draw)]
        lines = [json.dumps({"prompt": row.prompt, "answer": row.answer, "difficulty": row.difficulty}) for row in rows]
        files.write_text(directory / f"{dataset}.jsonl", "\n".join(lines) + "\n")
    command = [str(python.absolute()), "-m", "seatrial.rollouts.demo_server", "--host", "{bind}", "--port", "{port}"]
    command += ["--cache", str(cache.absolute())]
    # A JSON string is a TOML string.
    text = _CAMPAIGN.format(command=json.dumps(command), program=json.dumps(str(program)))
    campaign = directory / "campaign.toml"
    files.write_text(campaign, text)
    return campaign
