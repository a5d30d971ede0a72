"""What `seatrial plan --commands` shows of a script is what the script really starts, asserts and writes."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from seatrial.loops import get_loop
from seatrial.loops.nemo_rl import nemo_checkout, nemo_runs
from seatrial.loops.nemo_rl.nemo_runs import variants
from seatrial.loops.nemo_rl.script_dry_run import describe_scripts
from seatrial.loops.nemo_rl.script_reader import assertions_in
from tests.loops.nemo_rl_checkout import Bench, on_gpus

UV = """\
import json, os, sys
with open(os.environ["UV_CALLS"], "a") as stream:
    stream.write(json.dumps([["uv", *sys.argv[1:]], os.environ["PYTHONPATH"]]) + "\\n")
"""


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    return on_gpus(tmp_path, monkeypatch)


def really_started(bench: Bench, script: str, words: tuple[str, ...]) -> list[tuple[list[str], str]]:
    """Run the script in place, with a uv that only writes down how it was called; its trainings and their PYTHONPATH."""
    place, log = bench.root / "real-uv", bench.root / "calls.jsonl"
    place.mkdir()
    (place / "uv.py").write_text(UV)
    (place / "uv").write_text(f'#!/bin/sh\nexec {shlex.join([sys.executable, "-I", str(place / "uv.py")])} "$@"\n')
    (place / "uv").chmod(0o755)
    given = {
        "PATH": f"{place}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": nemo_checkout.python_path(bench.context()),
        "UV_CALLS": str(log),
    }
    command = ["bash", str(bench.nemo_rl / script), *words]
    subprocess.run(command, cwd=bench.nemo_rl, env={**os.environ, **given}, capture_output=True, check=False, timeout=60)
    rows = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    return [(argv, path) for argv, path in rows if any("/examples/run_" in word for word in argv)]


@pytest.mark.parametrize(("number", "trainings"), [(0, 1), (1, 5), (3, 1), (4, 1), (6, 1)])
def test_commands_and_environment_are_those_of_the_script(bench: Bench, number: int, trainings: int) -> None:
    level = get_loop("nemo-rl").configured({"nemo_rl": str(bench.nemo_rl)}).levels()[number]
    context, directory = bench.context("grpo.seed=7", levels=(level.name,)), bench.root / "level"
    call = variants(level.name, context)[-1]
    lines = [line.strip() for line in describe_scripts(level, context, directory)]
    mine = lines[lines.index(f"{call.script} ({call.name}) starts:") + 1 :]
    commands = [shlex.split(line) for line in mine if line.startswith("uv run")]
    really = really_started(bench, call.script, nemo_runs.words(call, context, directory))
    assert commands == [argv for argv, _ in really]
    assert len(commands) == trainings
    paths = {word.partition("=")[2] for line in mine if line.startswith("with ") for word in shlex.split(line) if "PYTHONPATH=" in word}
    assert paths == {path for _, path in really}
    assert [line.removeprefix("asserts ") for line in mine if line.startswith("asserts ")] == list(
        assertions_in(bench.nemo_rl / call.script)
    )
    assert any(line.startswith("writes tests/functional/") and f"$OUT/{call.name}/results" in line for line in mine)


def test_what_is_no_checkout_and_a_script_that_is_not_there_are_said(bench: Bench) -> None:
    level = get_loop("nemo-rl").levels()[0]
    context = bench.context()
    (bench.nemo_rl / "tests/functional/grpo_megatron.sh").write_text("exit 3\n")
    assert any("not known" in line and "before training" in line for line in describe_scripts(level, context, bench.root))
    (bench.nemo_rl / "nemo_rl/package_info.py").unlink()
    (line,) = describe_scripts(level, context, bench.root)
    assert "not a NeMo-RL checkout" in line
