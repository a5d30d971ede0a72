"""The judge of the ladder: what counts, what is Skipped, and that nothing passes without having been shown."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from seatrial.checks.bridge_rungs import RungJudgement
from seatrial.checks.probe_facts import Facts, Row, proof
from seatrial.core.records import RepoState
from seatrial.core.series import Damage
from seatrial.core.verdict import Boundary, Verdict
from seatrial.probes import bridge_verdict as judging
from seatrial.probes.bridge_verdict import BridgeRequest, Function, JudgedBridgeProbe, judge_ladder, lacking, last_line, touched

IMPORTED: Row = {
    "fact": "imported",
    "python": "3.11.7",
    **{name: {"version": "1", "file": f"/env/{name.replace('.', '/')}/__init__.py"} for name in judging.PACKAGES},
}
CUDA = 'Traceback (most recent call last):\n  File "x.py", line 1\nAssertionError: Torch not compiled with CUDA enabled'
BROKEN = 'Traceback (most recent call last):\n  File "x.py", line 1\nValueError: shapes differ\nmore of it'


def stub(rows: Sequence[Row], device: str) -> RungJudgement:
    """Passes when the rung wrote a value of 1."""
    assert device == "cpu"
    met = [row.get("value") == 1 for row in rows]
    return RungJudgement(tuple(proof("value", good, "x", Boundary.PROVIDER, "1", "at layer 3") for good in met), "1.0", ("small",))


@pytest.fixture(autouse=True)
def stubs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judging, "JUDGES", dict.fromkeys(("build", "parity", "cp", "ep"), stub))


def end(rung: str, state: str = "ran", error: str = "", model: str = "qwen2", **more: Any) -> Row:
    return {"fact": "rung", "model": model, "rung": rung, "fault": None, "state": state, "error": error, "seconds": 1.0, **more}


def value(rung: str, found: float, model: str = "qwen2") -> Row:
    return {"fact": "x", "model": model, "rung": rung, "fault": None, "value": found}


def told(*rows: Row, rungs: Sequence[str] = ("build", "parity"), changes: Sequence[RepoState] = (), **asked: Any) -> JudgedBridgeProbe:
    wanted = BridgeRequest(models=asked.pop("models", ("qwen2",)), rungs=tuple(rungs), **asked)
    return judge_ladder(Facts((IMPORTED, *rows)), wanted, changes)


def repo(**fields: Any) -> RepoState:
    given = {"name": "bridge", "path": "/b", "commit": "c" * 40, "branch": "main", "packages": ("megatron.bridge",), **fields}
    return RepoState.model_validate(given)


GOOD = (value("build", 1), end("build"), value("parity", 1), end("parity"))


def test_a_pass_needs_every_rung() -> None:
    judged = told(*GOOD)
    assert (judged.verdict, judged.boundary) == (Verdict.PASS, None)
    assert judged.families[0].rungs[1].figure == "1.0"
    assert any("everything ran on a CPU" in text for text in judged.limitations)
    assert "qwen2: small" in judged.limitations
    assert told(*GOOD[:2]).verdict is Verdict.BLOCKED
    assert told(*GOOD, end("parity")).verdict is Verdict.BLOCKED


def test_a_missed_check_fails_and_is_named() -> None:
    judged = told(*GOOD[:2], value("parity", 2), end("parity"))
    assert (judged.verdict, judged.boundary) == (Verdict.FAIL, Boundary.PROVIDER)
    assert judged.reason == "qwen2: parity: value (x): at layer 3"


def test_a_rung_that_wrote_nothing_is_vacuous() -> None:
    judged = told(*GOOD[:2], end("parity"))
    assert (judged.verdict, judged.families[0].rungs[1].reason) == (Verdict.BLOCKED, "vacuous: nothing was checked")


@pytest.mark.parametrize(
    ("state", "error", "verdict", "reason"),
    [
        ("raised", BROKEN, Verdict.FAIL, "raised: ValueError: shapes differ more of it"),
        ("raised", CUDA, Verdict.SKIPPED, "cannot run here: CUDA: Torch not compiled with CUDA enabled"),
        ("killed by signal 11", "", Verdict.FAIL, "killed by signal 11: "),
        ("killed by signal 9", "", Verdict.BLOCKED, "killed by signal 9: the machine ran out of memory, it seems"),
        ("deadline", "no end within 300 s", Verdict.FAIL, "deadline: no end within 300 s"),
        ("missing", "two GPUs", Verdict.SKIPPED, "cannot run here: two GPUs"),
    ],
)
def test_how_a_rung_ended_decides(state: str, error: str, verdict: Verdict, reason: str) -> None:
    judged = told(*GOOD[:2], end("parity", state, error))
    assert judged.verdict is verdict
    assert judged.families[0].rungs[1].reason == reason


def test_what_does_not_apply_does_not_count_but_alone_it_is_no_pass() -> None:
    absent = end("ep", "not applicable", "it has no experts")
    assert told(*GOOD, absent, rungs=("build", "parity", "ep")).verdict is Verdict.PASS
    assert told(absent, rungs=("ep",)).verdict is Verdict.SKIPPED


def test_a_rung_that_is_known_not_to_run_counts_when_it_was_named() -> None:
    absent = end("cp", "missing", "Transformer Engine")
    rungs = ("build", "parity", "cp")
    judged = told(*GOOD, absent, rungs=rungs)
    assert judged.verdict is Verdict.PASS
    assert any("cp did not run: cannot run here: Transformer Engine" in text for text in judged.limitations)
    assert told(*GOOD, absent, rungs=rungs, rungs_named=True).verdict is Verdict.SKIPPED


def test_a_family_that_cannot_be_made_is_skipped_with_the_part() -> None:
    made = {"fact": "made", "model": "mamba", "state": "missing", "error": "mamba-ssm"}
    judged = told(*GOOD, made, models=("qwen2", "mamba"), models_named=False)
    assert (judged.verdict, judged.reason) == (
        Verdict.PASS,
        "1 family, 2 rungs, every check was met; 1 families cannot run here",
    )
    assert judged.families[1].reason == "cannot run here: mamba-ssm"
    assert told(*GOOD, made, models=("qwen2", "mamba")).verdict is Verdict.SKIPPED
    assert told(made, models=("mamba",), models_named=False).verdict is Verdict.SKIPPED
    assert told(*GOOD, {**made, "state": "raised"}, models=("qwen2", "mamba")).verdict is Verdict.BLOCKED


def test_facts_of_another_fault_are_not_taken() -> None:
    assert told(*GOOD, fault="rope").verdict is Verdict.BLOCKED


def test_what_was_imported_must_be_the_checkout() -> None:
    judged = told(*GOOD, changes=(repo(import_root="/b/src"),))
    assert (judged.verdict, judged.boundary) == (Verdict.BLOCKED, Boundary.ENVIRONMENT)
    assert "wrong import: megatron.bridge came from /env/megatron/bridge/__init__.py, not from /b/src" in judged.reason
    assert told(*GOOD, changes=(repo(import_root="/env"),)).verdict is Verdict.PASS


def test_a_change_that_no_rung_calls_is_no_pass() -> None:
    functions = (Function("src/a.py", 3, "export"), Function("src/a.py", 9, "load"))
    called: Row = {"fact": "called", "model": "qwen2", "rung": "build", "fault": None, "functions": [["src/a.py", 1]]}
    asked = BridgeRequest(models=("qwen2",), rungs=("build", "parity"))
    judged = judge_ladder(Facts((IMPORTED, *GOOD, called)), asked, functions=functions)
    assert (judged.verdict, judged.reason.split(":")[0]) == (Verdict.BLOCKED, "vacuous")
    one = judge_ladder(Facts((IMPORTED, *GOOD, {**called, "functions": [["src/a.py", 3]]})), asked, functions=functions)
    assert one.verdict is Verdict.PASS
    assert "no rung called these changed functions: src/a.py: load" in one.limitations
    module = (Function("src/a.py", 0, ""), Function("src/b.py", 0, ""))
    file = judge_ladder(Facts((IMPORTED, *GOOD, called)), asked, functions=module)
    assert file.verdict is Verdict.PASS
    assert "no rung called these changed functions: src/b.py" in file.limitations
    absent = end("ep", "not applicable", "no experts")
    elsewhere = {**called, "rung": "ep", "functions": [["src/a.py", 3]]}
    assert judge_ladder(Facts((IMPORTED, *GOOD, absent, elsewhere)), asked, functions=functions).verdict is Verdict.BLOCKED


def test_a_gpu_that_is_not_there_and_another_core_are_blocked() -> None:
    asked = BridgeRequest(models=("qwen2",), rungs=("build", "parity"), device="cuda")
    judged = judge_ladder(Facts((IMPORTED, *GOOD)), asked)
    assert (judged.verdict, "no CUDA device" in judged.reason) == (Verdict.BLOCKED, True)
    cpu = asked.model_copy(update={"device": "cpu"})
    assert judge_ladder(Facts((IMPORTED, *GOOD)), cpu, core="/b/3rdparty/Megatron-LM").verdict is Verdict.BLOCKED
    assert judge_ladder(Facts((IMPORTED, *GOOD)), cpu, core="/env").verdict is Verdict.PASS


@pytest.mark.parametrize(
    ("error", "changes", "verdict", "boundary"),
    [
        ("ImportError: cannot import name 'x' from 'megatron.bridge'", (repo(),), Verdict.FAIL, Boundary.PROVIDER),
        ("SyntaxError: invalid syntax", (repo(),), Verdict.FAIL, Boundary.PROVIDER),
        ("SyntaxError: invalid syntax", (), Verdict.BLOCKED, Boundary.ENVIRONMENT),
        ("ModuleNotFoundError: No module named 'omegaconf'", (repo(),), Verdict.BLOCKED, Boundary.ENVIRONMENT),
    ],
)
def test_a_bridge_that_cannot_be_imported(error: str, changes: tuple[RepoState, ...], verdict: Verdict, boundary: Boundary) -> None:
    facts = Facts(({"fact": "unimportable", "error": f"Traceback (most recent call last):\n  File x\n{error}"},))
    judged = judge_ladder(facts, BridgeRequest(models=("qwen2",), rungs=("build",)), changes)
    assert (judged.verdict, judged.boundary) == (verdict, boundary)


def test_nothing_at_all_and_torn_facts_are_blocked() -> None:
    asked = BridgeRequest(models=("qwen2",), rungs=("build",))
    assert judge_ladder(Facts(()), asked, (), "exit code 9").reason == "the ladder never began: exit code 9"
    assert judge_ladder(Facts((IMPORTED, *GOOD), (Damage("f", "line 1", 1, "torn"),)), asked).verdict is Verdict.BLOCKED


def test_shims_are_limitations_and_dropped_ones_say_why() -> None:
    shims = [
        {"id": "triton", "stands_for": "a.py", "reason": "no Triton", "state": "used", "note": ""},
        {"id": "te-names", "stands_for": "b.py", "reason": "no TE", "state": "dropped", "note": "it is guarded now"},
    ]
    judged = told(*GOOD, {"fact": "shims", "model": "qwen2", "rung": "build", "fault": None, "shims": shims})
    assert [use.id for use in judged.shims] == ["triton", "te-names"]
    assert "shim triton: no Triton (a.py)" in judged.limitations
    assert "shim te-names was dropped: it is guarded now" in judged.limitations


@pytest.mark.parametrize(
    ("error", "part"),
    [
        ("ModuleNotFoundError: No module named 'mamba_ssm.ops'", "the package mamba_ssm.ops is missing"),
        ("ModuleNotFoundError: No module named 'torch'", "the package torch is missing"),
        ("ModuleNotFoundError: No module named 'transformers.models.qwen2.foo'", None),
        ("ModuleNotFoundError: No module named 'confg'", None),
        ("TypeError: transformer_engine_layer_spec() missing 1 required positional argument: 'config'", None),
        ("KeyError: 'transformer_engine' not found", None),
        ("ModuleNotFoundError: No module named 'megatron.bridge.models.new'", None),
        ("ImportError: cannot import name 'TENorm' from 'transformer_engine'", None),
        (
            "RuntimeError: Transformer Engine is not installed on this machine",
            "Transformer Engine: Transformer Engine is not installed on this machine",
        ),
        ("ValueError: hidden size needs to be 64", None),
        ("AssertionError: the transformer engine differs", None),
    ],
)
def test_only_what_a_machine_can_lack_is_called_missing(error: str, part: str | None) -> None:
    assert lacking(f'Traceback (most recent call last):\n  File "transformer_engine.py"\n    needed\n{error}') == part


def test_the_last_line_of_a_traceback_is_its_exception() -> None:
    assert last_line(BROKEN) == "ValueError: shapes differ more of it"
    assert last_line("") == ""
    syntax = 'Traceback:\n  File "run.py", line 3\n  File "/b/x.py", line 9\n    def f(:\n          ^\nSyntaxError: invalid syntax'
    assert last_line(syntax) == 'SyntaxError: invalid syntax (File "/b/x.py", line 9)'
    assert last_line("two GPUs: run it on a CPU") == "two GPUs: run it on a CPU"


def test_the_functions_around_changed_lines_are_those_that_a_change_touches(tmp_path: Path) -> None:
    source = tmp_path / "src" / "pkg" / "a.py"
    source.parent.mkdir(parents=True)

    def git(*words: str) -> None:
        subprocess.run(["git", "-C", str(tmp_path), "-c", "user.name=x", "-c", "user.email=x@y", *words], check=True, capture_output=True)

    source.write_text("X = 1\n\n\ndef one():\n    return 1\n\n\nclass A:\n    @property\n    def two(self):\n        return 2\n")
    git("init", "-q")
    git("add", "-A")
    git("commit", "-qm", "one")
    source.write_text("X = 2\n\n\ndef one():\n    return 1\n\n\nclass A:\n    @property\n    def two(self):\n        return 3\n")
    (tmp_path / "README.md").write_text("def three(): ...\n")
    change = repo(path=str(tmp_path), base="HEAD")
    assert touched((change,)) == (Function("src/pkg/a.py", 9, "two"),)
    source.write_text("X = 3\n\n\ndef one():\n    return 1\n")
    assert touched((change,)) == (Function("src/pkg/a.py", 0, ""),), "outside of functions, and lines that are gone"
    assert touched((change.model_copy(update={"base": None}),)) == ()
