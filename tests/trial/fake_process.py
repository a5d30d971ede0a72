"""The process of the fake loop: `fake_process.py OUT WORD PACKAGE=ROOT [ARGUMENT …]`. The word says what goes wrong."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

STEPS = 3


def say(text: str) -> None:
    print(text, flush=True)  # noqa: T201 - it is the log of the loop


def append(path: Path, text: str) -> None:
    with path.open("a") as stream:
        stream.write(text)


def prove_imports(path: Path, word: str, package: str, root: str) -> None:
    """What the probe of a real loop writes."""
    row = {"process": "driver", "package": "json", "file": json.__file__, "version": None, "expected": None, "ok": True}
    rows = [row | {"method": "imported"}]
    if package:
        place = "/somewhere/else" if word == "wrong-import" else root
        rows.append(rows[0] | {"package": package, "file": f"{place}/{package}/__init__.py", "expected": root})
    append(path, "".join(json.dumps(item) + ("" if word == "torn-imports" else "\n") for item in rows))


def wait(out: Path, seconds: float) -> None:
    """Do nothing until a test says go."""
    (out / "waiting").touch()
    ends = time.monotonic() + seconds
    while time.monotonic() < ends and not (out / "go").exists():
        time.sleep(0.02)


def train(out: Path, word: str, root: str) -> None:
    for step in range(1, STEPS + 1):
        reward = 0.0 if word == "flat" else step
        loss = 1 / (step + (word == "other" and step == STEPS))
        row = {"step": step, "train/loss": "NaN" if word == "nan" and step == 2 else loss, "train/reward": reward}
        append(out / "metrics.jsonl", json.dumps(row) + "\n")
        say(f"fake: step {step}")
        if word == "nan-printed" and step == 2:
            say("{'train/loss': nan, 'train/reward': 2.0}")
        if word == "short" and step == 2:
            sys.exit(0)
        if word == "edit" and root:
            Path(root, "edited.py").write_text("x = 1\n")
        if word == "hang" and step == 2:
            wait(out, 60)
    if word == "twice":
        append(out / "metrics.jsonl", json.dumps({"step": 2, "train/loss": 0.7}) + "\n")
    if word == "torn":
        append(out / "metrics.jsonl", '{"step": 4, "train/lo')


def call(name: str, directory: Path) -> None:
    """Import what changed with the recorder of a real loop, and call one function of it."""
    import importlib

    from seatrial.instruments import executed

    executed.start(str(directory), "driver")
    getattr(importlib.import_module("pkg.smoke"), name, list)()


def main() -> None:
    out, word = Path(sys.argv[1]), sys.argv[2]
    out.mkdir(parents=True, exist_ok=True)
    package, _, root = sys.argv[3].partition("=")
    if word == "ask":  # the change decides
        word = Path(root, "pkg", "WORD").read_text(encoding="utf-8").strip()
    say(f"fake: imports, called with {sys.argv[4:]}")
    if word != "no-imports":
        prove_imports(out.parent / "imports.jsonl", word, package, root)
    say("fake: model")
    if word == "secret":
        say(f"the token is {os.environ['HF_TOKEN']} and https://user:{os.environ['PLANTED_PASSWORD']}@example.org")
        say(os.environ.get("PLANTED_LOG", ""))
        append(out / "metrics.jsonl", json.dumps({"step": 1, "train/loss": 1.0, f"train/{os.environ['HF_TOKEN']}": 1.0}) + "\n")
        append(out / "facts.jsonl", json.dumps({"fact": "state", "moved": True, "note": os.environ["PLANTED_PASSWORD"]}) + "\n")
    if word in ("crash", "secret"):
        raise RuntimeError(f"the model is broken {os.environ.get('HF_TOKEN', '')}")
    if word.startswith("call-"):
        call(word.removeprefix("call-"), out.parent)
    train(out, word, root)
    if word != "no-facts":
        append(out / "facts.jsonl", json.dumps({"fact": "state", "moved": word != "stuck"}) + "\n")
    if root and word != "unloaded":
        files = ["pkg/__init__.py", "pkg/smoke.py"] if word != "half" else ["pkg/__init__.py"]
        row = json.dumps({"process": "driver", "root": root, "files": files})
        append(out.parent / "loaded.jsonl", row[: -9 if word == "torn-loaded" else None] + "\n")
    say("fake: done")
    sys.exit(3 if word == "late" else 0)


if __name__ == "__main__":
    main()
