"""The refit probe in the processes of a loop: how it starts, what it finds, and that it changes nothing else."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from seatrial.instruments.engines import attach
from seatrial.instruments.engines.recorder import RefitRecorder
from seatrial.instruments.nemo_rl.run_functional import START
from seatrial.instruments.refit import agreement
from tests.instruments.world import SOURCE

STANDINS = Path(__file__).parent / "standins"
VERL = "import verl.workers.rollout.vllm_rollout.utils as utils, verl.workers.rollout.vllm_rollout.bucketed_weight_transfer\n"
NEMO = "import nemo_rl.models.generation.vllm.vllm_backend as utils, nemo_rl.models.policy.utils\n"
SAY = "import sys\nprint(utils.__name__, any('seatrial' in type(finder).__module__ for finder in sys.meta_path))"


def run(code: str, path: list[Path], **variables: str) -> subprocess.CompletedProcess[str]:
    """A process of a loop."""
    told = {"PYTHONPATH": os.pathsep.join(map(str, [*path, SOURCE])), "PYTHONDONTWRITEBYTECODE": "1", **variables}
    return subprocess.run([sys.executable, "-c", code], env=told, capture_output=True, text=True, timeout=30, check=False)


def rows(file: Path, fact: str) -> list[dict[str, Any]]:
    """Facts of one kind."""
    found = [json.loads(line) for line in file.read_text().splitlines()]
    return [row for row in found if row["fact"] == fact]


def test_verl_starts_it_with_the_import_witness(tmp_path: Path) -> None:
    told = {"VERL_USE_EXTERNAL_MODULES": "seatrial.instruments.verl.import_witness", "SEATRIAL_IMPORTS": str(tmp_path)}
    facts = tmp_path / "facts.jsonl"
    done = run(VERL + SAY, [STANDINS], **told, SEATRIAL_UNDER_TEST=f"verl={STANDINS}", SEATRIAL_REFIT_FACTS=str(facts))
    assert (done.returncode, done.stderr) == (0, "")
    assert [(row["module"].rpartition(".")[2], row["found"], row["missing"]) for row in rows(facts, "attached")] == [
        ("utils", ["update_weights_from_ipc"], []),
        ("bucketed_weight_transfer", ["async_send_weights"], []),
    ]
    assert len(rows(facts, "waiting")) == 1
    loaded = (tmp_path / "loaded.jsonl").read_text()
    assert "vllm_rollout/utils.py" in loaded, "the witness still sees what the probe wraps"


def test_nemo_rl_starts_it_as_an_interpreter_starts(tmp_path: Path) -> None:
    facts = tmp_path / "facts.jsonl"
    done = run(NEMO + SAY, [START, STANDINS], SEATRIAL_REFIT_FACTS=str(facts))
    assert (done.returncode, done.stderr) == (0, "")
    generator, policy = rows(facts, "attached")
    assert (generator["owner"], generator["stream"], generator["missing"]) == ("VllmInternalWorkerExtension", "_load_weights", [])
    assert generator["methods"] == sorted(attach.METHODS)
    assert (policy["found"], policy["missing"]) == (["stream_weights_via_ipc_zmq_impl"], ["stream_weights_via_http_impl"])


def test_without_the_variable_nothing_happens(tmp_path: Path) -> None:
    done = run(NEMO + SAY, [START, STANDINS])
    assert (done.stdout, done.stderr) == ("nemo_rl.models.generation.vllm.vllm_backend False\n", "")
    assert list(tmp_path.iterdir()) == []
    assert attach.start({}, "verl") is None


@pytest.fixture
def upstream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A place for modules named like upstream's, which are gone again after the test."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    yield tmp_path
    for name in set(sys.modules) - before:
        if name.partition(".")[0] == "nemo_rl":
            del sys.modules[name]


def write(root: Path, module: str, text: str) -> None:
    """A module with its packages."""
    file = root.joinpath(*module.split(".")).with_suffix(".py")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def test_an_upstream_without_the_class_is_said(upstream: Path) -> None:
    write(upstream, "nemo_rl.models.generation.vllm.vllm_backend", "class Renamed:\n    pass\n")
    attach.start({"SEATRIAL_REFIT_FACTS": str(upstream / "facts")}, "nemo_rl")
    importlib.import_module("nemo_rl.models.generation.vllm.vllm_backend")
    (row,) = rows(upstream / "facts", "attached")
    assert (row["owner_found"], row["found"]) == (False, [])
    said = agreement.problems([row])
    assert "nemo_rl.models.generation.vllm.vllm_backend: VllmInternalWorkerExtension is not there in this version" in said
    assert "no process has a generator whose entry points are known here" in said


def test_older_entry_points_are_found_and_newer_ones_named_as_missing(upstream: Path) -> None:
    text = "class VllmInternalWorkerExtension:\n    def update_weights_via_ipc_zmq(self):\n        return True\n"
    write(upstream, "nemo_rl.models.generation.vllm.vllm_backend", text)
    attach.start({"SEATRIAL_REFIT_FACTS": str(upstream / "facts")}, "nemo_rl")
    importlib.import_module("nemo_rl.models.generation.vllm.vllm_backend")
    (row,) = rows(upstream / "facts", "attached")
    assert (row["found"], row["stream"]) == (["update_weights_via_ipc_zmq"], "")
    assert row["missing"] == ["update_weights_from_collective", "nccl_reshard_refit", "finish_sparse_delta_refit"]


def test_a_module_that_was_imported_before_is_wrapped_and_said_to_be_late(upstream: Path) -> None:
    write(upstream, "nemo_rl.utils.packed_tensor", "def packed_broadcast_producer(iterator, group, src, post_iter_func):\n    pass\n")
    module = importlib.import_module("nemo_rl.utils.packed_tensor")
    attach.start({"SEATRIAL_REFIT_FACTS": str(upstream / "facts")}, "nemo_rl")
    assert rows(upstream / "facts", "waiting")[0]["late"] == ["nemo_rl.utils.packed_tensor"]
    assert module.packed_broadcast_producer.__wrapped__ is not None


def test_a_module_that_cannot_be_imported_raises_what_it_raises(upstream: Path) -> None:
    write(upstream, "nemo_rl.models.policy.utils", "raise ImportError('no vLLM here')\n")
    attach.start({"SEATRIAL_REFIT_FACTS": str(upstream / "facts")}, "nemo_rl")
    with pytest.raises(ImportError, match="no vLLM here"):
        importlib.import_module("nemo_rl.models.policy.utils")
    assert rows(upstream / "facts", "attached") == []


def test_started_twice_it_is_there_once(upstream: Path) -> None:
    told = {"SEATRIAL_REFIT_FACTS": str(upstream / "facts")}
    assert attach.start(told, "nemo_rl") is attach.start(told, "nemo_rl")
    assert len(rows(upstream / "facts", "waiting")) == 1


def test_what_the_probe_itself_meets_never_reaches_the_loop(upstream: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise MemoryError("no room for the row")

    monkeypatch.setattr("seatrial.instruments.facts.append", full)
    monkeypatch.setattr("sys.stdout", (upstream / "out").open("w"))
    sys.stdout.close()
    recorder = RefitRecorder(str(upstream / "facts"), "nemo_rl")
    with recorder.guard("here"):
        raise KeyError("ours")


def test_facts_that_cannot_be_written_break_nothing(upstream: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert attach.start({"SEATRIAL_REFIT_FACTS": str(upstream / "nowhere" / "facts")}, "nemo_rl") is not None
    assert "seatrial: refit: cannot write the fact 'waiting'" in capsys.readouterr().out
