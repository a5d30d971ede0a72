"""`seatrial probe refit` with a real policy and a real generator process: a clean run passes, a seeded fault is caught and named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.real.drive import call

pytestmark = pytest.mark.real


def probe(out: Path, *words: str | Path) -> tuple[int, dict[str, Any]]:
    """The exit code and probe.json of one run."""
    done = call(out.parent, "probe", "refit", "--out", out, *words)
    assert (out / "probe.json").is_file(), done.stdout
    found: dict[str, Any] = json.loads((out / "probe.json").read_text())["judged"]
    return done.returncode, found


def test_a_clean_run_passes_and_a_shifted_layer_is_caught(tmp_path: Path) -> None:
    """In one test, since the second run takes the model that the first has made. Its embeddings are tied."""
    code, judged = probe(tmp_path / "clean", "--model", "tiny-qwen2", "--steps", "3")
    assert (code, judged["verdict"]) == (0, "Pass"), judged["reason"]
    assert [row["transport"] for row in judged["refits"]] == ["full", "packed", "sparse", "full"]
    assert judged["refits"][0]["stale"] == 0, "the base is equal before any update"
    assert all(row["stale"] == row["names"] for row in judged["refits"][1:]), "every tensor moves in fp32 training"
    (classes,) = [check["value"] for check in judged["checks"] if check["name"] == "every runtime tensor is classified"]
    assert "1 shared" in classes, "the tied head is found"

    own = ("--model", tmp_path / "clean" / "model", "--steps", "1", "--transport", "full")
    code, judged = probe(tmp_path / "fault", *own, "--fault", "shift-layer")
    assert (code, judged["verdict"], judged["boundary"]) == (1, "Fail", "refit")
    (wrong,) = judged["wrong"]
    assert (wrong["name"], wrong["step"]) == ("model.layers.1.self_attn.q_proj.weight", 1)
    assert wrong["looks"] == "shifted layer (holds model.layers.0.self_attn.q_proj.weight)"

    code, judged = probe(tmp_path / "buffer", *own, "--fault", "unsynced-buffer")
    assert (code, judged["verdict"], judged["boundary"], judged["wrong"]) == (1, "Fail", "refit", [])
    (missed,) = [check for check in judged["checks"] if not check["passed"]]
    assert missed["name"] == "nothing of the policy changes that is not exported"
    assert missed["message"] == "model.rotary_emb.inv_freq"
