"""`seatrial probe refit`: what is refused before anything starts, and a driver followed from its start to probe.json."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import jsonschema  # type: ignore[import-untyped]
import pytest

from seatrial.checks.refit_judge import TRANSPORTS, RefitRequest
from seatrial.core.verdict import Verdict
from seatrial.probes import refit_run
from seatrial.probes.refit_run import RefitSetup, faults, probe_refit
from tests.checks.run_facts import NAMES, clean, of
from tests.cli.command import SEATRIAL, environ, inside
from tests.probes.tiny_weights import weights

pytestmark = pytest.mark.slow

INTERPRETER = """#!{python}
import json, os, pathlib, sys, time
words = sys.argv[1:]
if words[1].endswith("tiny_models"):
    pathlib.Path(words[3]).mkdir()
    sys.exit("no torch here" if os.environ.get("FAKE") == "no-model" else 0)
given = dict(zip(words[2::2], words[3::2]))
print("secret is", os.environ.get("SOME_API_KEY"), words, flush=True)
rows = json.loads(pathlib.Path(os.environ["ROWS"]).read_text())
with open(pathlib.Path(given["--out"], "facts.jsonl"), "a") as out:
    for row in rows:
        out.write(json.dumps(row) + "\\n")
if os.environ.get("FAKE") == "hang":
    time.sleep(60)
if os.environ.get("FAKE") == "die":
    sys.exit("RuntimeError: boom")
"""


@pytest.fixture
def engine(tmp_path: Path) -> Path:
    """An interpreter that runs no driver, but leaves the facts of a clean run."""
    place = tmp_path / "python"
    place.write_text(INTERPRETER.format(python=sys.executable))
    place.chmod(0o755)
    (tmp_path / "rows.json").write_text(json.dumps(clean()))
    return place


@pytest.fixture
def unstaged(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stand-in imports none of the instruments: copying them once, in one test, is enough."""
    monkeypatch.setattr("seatrial.probes.refit_run.stage", lambda out: out)


def words(engine: Path, *more: str) -> tuple[str, ...]:
    return ("probe", "refit", "--python", str(engine), "--steps", "3", "--out", str(engine.parent / "out"), *more)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--model", "nowhere"), "--model nowhere: no such directory"),
        (("--model", "empty"), "config.json is missing"),
        (("--model", "bare"), "no weights (*.safetensors)"),
        (("--attach", "http://x", "--model", "tiny-llama", "--weights", "bare"), "--model has no meaning there"),
        (("--attach", "http://x", "--weights", "bare", "--transport", "full"), "--transport has no meaning there"),
        (("--attach", "http://x", "--facts", "f"), "both given"),
        (("--attach", "http://x"), "--attach is given without --weights"),
        (("--weights", "bare"), "--weights is given without --attach"),
        (("--attach", "http://x", "--weights", "bare"), "no weights (*.safetensors)"),
        (("--attach", "localhost:1", "--weights", "whole"), "not a URL"),
        (("--facts", "f", "--steps", "3"), "--steps has no meaning there"),
        (("--facts", "f"), "f: no such file or directory"),
        (("--facts", "empty"), "no file of facts below it"),
        (("--steps", "2"), "each of 3 transports needs a step"),
        (("--fault", "flip-bits"), "unknown fault 'flip-bits'"),
        (("--engine", "vllm", "--fault", "zzz"), "known: skip-refit"),
        (("--", "--dtype", "float16"), "--dtype: options for a server have no meaning without one"),
        (("--facts", "f", "--", "--dtype", "float16"), "SERVER OPTIONS has no meaning there"),
    ],
)
def test_what_cannot_be_meant_is_refused(arguments: tuple[str, ...], said: str, tmp_path: Path) -> None:
    for name in ("empty", "bare", "whole"):
        (tmp_path / name).mkdir()
    (tmp_path / "bare" / "config.json").write_text("{}")
    weights(tmp_path / "whole" / "model.safetensors")
    answer = inside("probe", "refit", *arguments, cwd=tmp_path)
    assert (answer.code, answer.out) == (2, "")
    assert said in answer.err
    assert "  fix: " in answer.err
    assert not (tmp_path / "trials").exists()


@pytest.mark.parametrize("arguments", [("--engine", "sglang"), ("--transport", "zip"), ("--steps", "0")])
def test_values_that_do_not_exist_are_refused(arguments: tuple[str, ...]) -> None:
    assert inside("probe", "refit", *arguments).code == 2


def test_vllm_is_opt_in(tmp_path: Path) -> None:
    answer = inside("probe", "refit", "--engine", "vllm", cwd=tmp_path, SEATRIAL_CACHE=str(tmp_path / "cache"))
    assert answer.code == 99
    assert "Blocked (environment): the environment vllm-cpu is not built" in answer.err
    assert "seatrial env build vllm-cpu" in answer.err
    assert not (tmp_path / "trials").exists()


@pytest.mark.parametrize("engine_name", ["vllm", "transformers"])
def test_faults_are_listed(engine_name: str) -> None:
    answer = inside("probe", "refit", "--engine", engine_name, "--fault", "list")
    assert answer.code == 0
    known = faults(engine_name)
    assert [line.split()[0] for line in answer.out.splitlines()] == list(known)
    assert {"skip-refit", "flip-bit", "truncated-payload", "frozen-policy"} <= set(known)


def test_a_clean_run_passes_and_leaves_its_evidence(engine: Path, tmp_path: Path) -> None:
    secret = "s3cr3t-Value-91827364"
    answer = inside(*words(engine), cwd=tmp_path, ROWS=str(tmp_path / "rows.json"), SOME_API_KEY=secret)
    assert answer.code == 0, answer.err
    assert "seatrial: refit 2 (step 2, sparse, 0.00 MB): 4 stale before, 0 of 5 tensors wrong" in answer.out
    assert "\nResult: Pass - 5 tensors are bit-equal" in answer.out
    assert "sparse (difference)" in answer.out
    out = tmp_path / "out"
    assert {path.name for path in out.iterdir()} >= {"facts.jsonl", "run.log", "probe.json", "summary.md", "instruments", "model"}
    assert (out / "summary.md").read_text().startswith("Result: Pass - ")
    probe = json.loads((out / "probe.json").read_text())
    assert (probe["judged"]["verdict"], probe["wanted"]["steps"]) == ("Pass", 3)
    shipped = json.loads((refit_run.DIRECTORY / "probe-refit.schema.json").read_text())
    jsonschema.validate(probe, shipped, cls=jsonschema.Draft202012Validator)
    log = (out / "run.log").read_text()
    assert "[redacted" in log
    assert secret not in log
    assert "'--transport', 'all'" in log


@pytest.mark.usefixtures("unstaged")
def test_a_wrong_tensor_fails_and_is_named(engine: Path, tmp_path: Path) -> None:
    rows = clean()
    of(rows, "hashes", side="live", replica="1", version=3)[0]["hashes"][NAMES[1]] = f"{NAMES[1]}@2"
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    arguments = words(engine, "--engine", "vllm", "--fault", "skip-refit", "--transport", "all", "--json")
    answer = inside(*arguments, cwd=tmp_path, ROWS=str(tmp_path / "rows.json"))
    assert answer.code == 1
    probe = json.loads(answer.out)
    assert probe["judged"]["wrong"][0]["looks"] == "stale (equals version 2)"
    assert probe["wanted"]["fault"] == "skip-refit"
    summary = (tmp_path / "out" / "summary.md").read_text()
    assert f"- {NAMES[1]} (layer model.layers.0) on replica 1 at step 2, version 3: stale (equals version 2)" in summary
    assert "--transport full separates" in summary


@pytest.mark.usefixtures("unstaged")
def test_an_error_of_the_probe_is_a_missed_proof_and_tells_no_secret(engine: Path, tmp_path: Path) -> None:
    secret = "s3cr3t-Value-91827364"
    (tmp_path / "rows.json").write_text(json.dumps([*clean(), {"fact": "probe_error", "where": "load", "error": f"refused {secret}"}]))
    answer = inside(*words(engine), cwd=tmp_path, ROWS=str(tmp_path / "rows.json"), SOME_API_KEY=secret)
    assert answer.code == 1
    assert "the probe met an error in load: refused [redacted" in answer.out
    kept = [path.read_text() for path in (tmp_path / "out").glob("*.*") if path.is_file()]
    assert len(kept) >= 4
    assert not any(secret in text for text in kept)


@pytest.mark.usefixtures("unstaged")
def test_a_driver_that_dies_is_told_apart(engine: Path, tmp_path: Path) -> None:
    answer = inside(*words(engine), cwd=tmp_path, ROWS=str(tmp_path / "rows.json"), FAKE="die")
    assert answer.code == 1
    assert "the run came to its end (exit code 1: RuntimeError: boom" in answer.out
    (tmp_path / "rows.json").write_text("[]")
    again = inside(*words(engine)[:-1], str(tmp_path / "two"), cwd=tmp_path, ROWS=str(tmp_path / "rows.json"), FAKE="die")
    assert again.code == 99
    assert "no refit happened: exit code 1: RuntimeError: boom" in again.out
    made = inside(*words(engine)[:-1], str(tmp_path / "three"), cwd=tmp_path, ROWS=str(tmp_path / "rows.json"), FAKE="no-model")
    assert made.code == 99
    assert "the model tiny-llama was not made: exit code 1: no torch here" in made.err


@pytest.mark.usefixtures("unstaged")
def test_a_deadline_ends_a_driver_that_hangs(engine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "rows.json").write_text(json.dumps(clean()))
    monkeypatch.setenv("ROWS", str(tmp_path / "rows.json"))
    monkeypatch.setenv("FAKE", "hang")
    (tmp_path / "out").mkdir()
    wanted = RefitRequest(source="driver", engine="vllm", model="tiny-llama", steps=3, transports=TRANSPORTS)
    judged = probe_refit(RefitSetup(wanted=wanted, python=engine, out=tmp_path / "out", deadline_s=0.6), lambda _: None)
    assert judged.verdict is Verdict.FAIL
    assert "no end within 0.01 minutes" in judged.reason


def test_an_interrupt_ends_the_children(engine: Path, tmp_path: Path) -> None:
    started = subprocess.Popen(
        [SEATRIAL, *words(engine)],
        cwd=tmp_path,
        env=environ(ROWS=str(tmp_path / "rows.json"), FAKE="hang"),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    facts = tmp_path / "out" / "facts.jsonl"
    stops = time.monotonic() + 90
    while not facts.is_file() and time.monotonic() < stops:
        time.sleep(0.02)
    assert facts.is_file()
    started.send_signal(signal.SIGINT)
    said, _ = started.communicate(timeout=120)
    assert started.returncode == 130
    assert "interrupted" in said
    assert not (tmp_path / "out" / "run.log.pids").exists(), "nothing of it is left"


def test_an_earlier_result_is_not_overwritten(engine: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "probe.json").write_text("{}")
    answer = inside(*words(engine), cwd=tmp_path, ROWS=os.devnull)
    assert answer.code == 2
    assert "is not empty" in answer.err


def test_facts_of_another_run_are_judged_where_they_lie(tmp_path: Path) -> None:
    facts = tmp_path / "run" / "worker" / "refit_facts.jsonl"
    facts.parent.mkdir(parents=True)
    facts.write_text("".join(json.dumps(row) + "\n" for row in clean()))
    answer = inside("probe", "refit", "--facts", tmp_path / "run", cwd=tmp_path)
    assert (answer.code, answer.err) == (0, "")
    assert "Result: Pass" in answer.out
    assert [path.name for path in tmp_path.iterdir()] == ["run"], "nothing is written unless a place is named"
    with facts.open("a") as stream:
        stream.write('{"fact": "ref')
    answer = inside("probe", "refit", "--facts", facts, "--out", tmp_path / "out", cwd=tmp_path)
    assert answer.code == 1
    assert "not proven: facts of the refits are whole" in answer.out
    assert (tmp_path / "out" / "facts.jsonl").is_file()
    facts.write_text("")
    assert inside("probe", "refit", "--facts", facts, cwd=tmp_path).code == 99


def test_a_transport_that_was_asked_for_and_never_used_is_blocked(tmp_path: Path) -> None:
    rows = clean()
    for row in of(rows, "refit"):
        row["transport"] = "full"
    facts = tmp_path / "facts.jsonl"
    facts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert inside("probe", "refit", "--facts", facts, cwd=tmp_path).code == 0
    answer = inside("probe", "refit", "--facts", facts, "--transport", "sparse", cwd=tmp_path)
    assert answer.code == 99
    assert "never used: sparse" in answer.out
