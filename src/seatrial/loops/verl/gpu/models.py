"""The model and the data of a run: where they are, and what is wrong with them. No network is ever used.

A model is a local directory; or a name such as `Qwen/Qwen2.5-0.5B`, found where the wrapper keeps models
(`~/models/<name>`) or in the Hugging Face cache (HF_HUB_CACHE, HF_HOME). Of a cached one the snapshot directory is passed on,
so that it is known which revision ran.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

from seatrial.loops import model_kinds
from seatrial.loops.child import run_child
from seatrial.loops.hub import cache_room, snapshot
from seatrial.loops.model_files import Use
from seatrial.loops.model_files import model_findings as file_findings
from seatrial.loops.verl.gpu.checkout import checkout_of
from seatrial.model.finding_codes import FindingCode, code_of
from seatrial.model.guarded import parse_count, parse_json, parse_step
from seatrial.model.loop import Context
from seatrial.model.record import Finding
from seatrial.model.verdict import Boundary

MAGIC = b"PAR1"
BATCH = "data.train_batch_size"
BATCH_ROWS = 16
"""Rows of a training batch, in the wrapper and in the scripts of level 4."""
COUNT_ROWS = "import sys, pyarrow.parquet as p; print(p.read_metadata(sys.argv[1]).num_rows)"
COUNT_SECONDS = 60
BUILD = "make the environment of the verl checkout (uv sync), or --python PATH"


def _places(model: str) -> list[Path]:
    """Where a model may be, in order. A path is no name: it is looked up nowhere else."""
    if model.startswith(("/", ".", "~")):
        return [Path(model).expanduser()]
    return [Path(model).expanduser(), Path.home() / "models" / model, snapshot(model)]


def model_directory(model: str) -> Path | None:
    """The local directory of a model, or None."""
    return next((place.absolute() for place in _places(model) if (place / "config.json").is_file()), None)


def model_path(context: Context) -> str:
    """What is passed on as the model: its directory, or the name as given when there is none."""
    return str(model_directory(context.model) or context.model)


def model_settings(context: Context) -> dict[str, Any]:
    """config.json of the model that is trained; empty when it cannot be read."""
    named = context.options.get("model_config")
    directory = model_directory(context.model)
    path = Path(named) if named else directory / "config.json" if directory else None
    try:
        read = parse_json(path.read_text(encoding="utf-8")) if path else {}
    except (OSError, ValueError):
        return {}
    return read if isinstance(read, dict) else {}


def is_kind(context: Context, kind: str) -> bool:
    """Whether the model is of an architecture, by its own config.json."""
    return model_kinds.is_kind(model_settings(context), kind)


def data_files(context: Context, dataset: str = "gsm8k") -> tuple[str, str]:
    """Training and validation files: as named, or where verl's own scripts put them."""
    home = Path.home() / "data" / dataset
    given = context.options
    train, val = (given.get("train_files") or home / "train.parquet"), (given.get("val_files") or home / "test.parquet")
    return str(Path(train).expanduser().absolute()), str(Path(val).expanduser().absolute())


def model_findings(context: Context) -> tuple[Finding, ...]:
    """The model is here, complete, and the cache has room."""
    made = list(_model(context))
    if context.options.get("model_config"):
        made.append(_dummy(Path(str(context.options["model_config"]))))
    if context.options.get("reward_model"):
        there = (Path(str(context.options["reward_model"])) / "config.json").is_file()
        message = f"{context.options['reward_model']}: {'found' if there else 'no reward model: config.json is missing'}"
        fix = "" if there else "name a local directory, or leave reward_model out for the rule reward"
        made.append(Finding(name="reward model", ok=there, boundary=Boundary.REWARD, message=message, fix=fix))
    made.append(cache_room())
    return tuple(made)


def _model(context: Context) -> tuple[Finding, ...]:
    directory = model_directory(context.model)
    if directory is None:
        given = Path(context.model).expanduser()
        if given.is_absolute() or given.is_dir():
            why = "no config.json" if given.is_dir() else "no such directory"
            fix = "--model with a directory that holds config.json, tokenizer and weights"
            return (_data("model", False, f"{given}: {why}", fix, FindingCode.MODEL_MISSING),)
        looked = ", ".join(str(place) for place in _places(context.model))
        fix = (
            f"hf download {context.model} --local-dir ~/models/{context.model}" if "/" in context.model.strip("/") else "--model DIRECTORY"
        )
        return (_data("model", False, f"{context.model}: no config.json at {looked}", fix, FindingCode.MODEL_MISSING),)
    # A dummy model has the tokenizer of this directory, and nothing else.
    written = any("custom_chat_template" in word for word in context.arguments)
    use = Use(build=BUILD, weights="model_config" not in context.options, template=not written)
    return file_findings(directory, context, use)


def _dummy(config: Path) -> Finding:
    if not config.is_file():
        return _data("dummy model", False, f"{config}: no such config.json", "--set options.model_config=FILE of the same architecture")
    return _data("dummy model", True, f"random weights after {config}, made anew for each level")


def data_findings(context: Context, dataset: str, column: str = "") -> tuple[Finding, ...]:
    """Both files are parquet, with this column if one is named, and there is a whole batch to train on."""
    script = f"examples/data_preprocess/{dataset}.py"
    made = []
    train, val = data_files(context, dataset)
    for file in (train, val):
        wrong = _wrong_parquet(Path(file), column)
        few = _too_few(file, context) if file == train and wrong is None else None
        make = (
            "--set options.train_files=FILE with a whole batch"
            if few
            else f"cd {checkout_of(context) or 'VERL-CHECKOUT'} && python3 {script} --local_save_dir {Path(file).parent}"
        )
        made.append(_data("data", not (wrong or few), f"{file}: {wrong or few or 'parquet'}", make if wrong or few else ""))
    return tuple(made)


def _wrong_parquet(path: Path, column: str) -> str | None:
    """What is wrong with a file. It names its columns in its footer, whose length stands before the last magic word."""
    if not path.is_file():
        return "no such file"
    try:
        size = path.stat().st_size
        with path.open("rb") as stream:
            start = stream.read(len(MAGIC))
            stream.seek(max(0, size - 8))
            length, end = int.from_bytes(stream.read(4), "little"), stream.read(len(MAGIC))
            stream.seek(max(0, size - 8 - length))
            footer = stream.read(length)
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    if not start == end == MAGIC or size < 12:
        return "not a whole parquet file (PAR1 at both ends)"
    return None if column.encode() in footer else f"has no column {column!r}"


def _too_few(file: str, context: Context) -> str | None:
    """Fewer rows than a batch, with which verl's loader is empty; None also where the loop's interpreter cannot count them."""
    given = [word.partition("=")[2] for word in context.arguments if word.lstrip("+").startswith(f"{BATCH}=")]
    least = parse_count(given[-1]) if given and given[-1].isascii() and given[-1].isdecimal() else BATCH_ROWS
    try:
        done = run_child([str(context.python), "-I", "-c", COUNT_ROWS, file], Path(file).parent, os.environ, COUNT_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return None
    rows = least if done.returncode else parse_step(done.stdout.strip())
    if rows is None:
        return None
    return f"has {rows} rows, fewer than one batch of {least}" if rows < least else None


def _data(name: str, ok: bool, message: str, fix: str = "", code: FindingCode | None = None) -> Finding:
    return Finding(name=name, ok=ok, boundary=Boundary.DATA, message=message, fix=fix, code=code or code_of(name))
