"""Preflight of a model that the user gave: a local directory whose tokenizer loads without a network."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from seatrial.model.record import Finding
from seatrial.model.verdict import Boundary

SECONDS = 120
LOAD = (
    "import sys; from transformers import AutoConfig, AutoTokenizer; p = sys.argv[1]; "
    "c = AutoConfig.from_pretrained(p, local_files_only=True); t = AutoTokenizer.from_pretrained(p, local_files_only=True); "
    "print(type(c).__name__, type(t).__name__, len(t), t.eos_token_id is not None)"
)


def _finding(ok: bool, message: str, fix: str = "") -> Finding:
    return Finding(name="model", ok=ok, boundary=Boundary.DATA, message=message, fix=fix)


def model_findings(path: Path, python: Path) -> tuple[Finding, ...]:
    """Files first, since they cost nothing; then the tokenizer, loaded offline by the loop's own interpreter."""
    if not path.is_dir():
        return (
            _finding(
                False, f"{path}: no such model directory", "--model DIRECTORY with config.json, weights and tokenizer, or leave --model out"
            ),
        )
    if not (path / "config.json").is_file():
        return (_finding(False, f"{path}: config.json is missing", f"copy the model's config.json into {path}"),)
    if not any(path.glob("*.safetensors")) and not any(path.glob("pytorch_model*.bin")):
        return (_finding(False, f"{path}: no weights (*.safetensors)", f"copy the model's weights into {path}"),)
    if not any((path / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")):
        return (_finding(False, f"{path}: no tokenizer files", f"copy tokenizer.json and tokenizer_config.json into {path}"),)
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    try:
        done = subprocess.run(
            [python, "-c", LOAD, str(path)], capture_output=True, text=True, timeout=SECONDS, env=environment, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return (_finding(False, f"{path}: the tokenizer could not be loaded: {error}", "seatrial env check trl"),)
    if done.returncode:
        last = done.stderr.strip().rsplit("\n", 1)[-1]
        return (
            _finding(
                False,
                f"{path}: config or tokenizer does not load offline: {last}",
                "load it once with local_files_only=True and repair the files",
            ),
        )
    config, tokenizer, size, _ = done.stdout.split()[-4:]
    return (_finding(True, f"{path}: {config}, {tokenizer} with {size} tokens, loaded offline"),)
