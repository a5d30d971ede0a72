"""Models that users give: what is wrong with their files, and with what the loop's interpreter makes of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from seatrial.core.errors import FindingCode, Severity
from seatrial.core.files import LFS_POINTER
from seatrial.core.loop import Context
from seatrial.core.records import Finding, RepoState
from seatrial.loops import host_findings
from seatrial.loops.host_findings import ModelUse, model_findings
from seatrial.runtime.command import NoAnswerError
from tests.loops.tiny_model import make_model, safetensors

USE = ModelUse(build="seatrial env build x", own=True)
TOKENIZER = {"kind": "Fast", "size": 16, "template": True, "rows": 16}
WHOLE: dict[str, Any] = {"transformers": "5.0", "config": "Qwen2Config", "tokenizer": TOKENIZER, "problems": []}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_model(tmp_path / "model")


def look(
    model: Path, monkeypatch: pytest.MonkeyPatch, answer: dict[str, Any] | NoAnswerError = WHOLE, use: ModelUse = USE, **more: Any
) -> tuple[Finding, ...]:
    """The findings with this answer of the loop's interpreter."""

    def ask(*_: object) -> dict[str, Any]:
        if isinstance(answer, NoAnswerError):
            raise answer
        return answer

    monkeypatch.setattr(host_findings, "ask", ask)
    return model_findings(model, Context(run_dir=model.parent, python=Path("/bin/sh"), model=str(model), **more), use)


def codes(found: tuple[Finding, ...]) -> list[FindingCode]:
    assert all(item.ok or (item.fix and item.path) for item in found)
    return [item.code for item in found if item.severity is not Severity.OK]


def test_a_whole_model_is_one_finding_that_is_ok(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (found,) = look(model, monkeypatch)
    assert (found.severity, found.code) == (Severity.OK, FindingCode.MODEL)
    assert "Qwen2Config, Fast with 16 tokens, loaded offline by /bin/sh" in found.message


def shard(model: Path, *names: str) -> None:
    """Two shards with an index that names `names`."""
    (model / "model.safetensors").unlink()
    (model / "a.safetensors").write_bytes(safetensors({"x": (2,)}))
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": dict(zip(("x", "y"), names, strict=False))}))


def cut(path: Path, count: int) -> None:
    path.write_bytes(path.read_bytes()[:-count])


def describe(model: Path, **entry: object) -> None:
    """Weights of which the header says something else about the last tensor."""
    whole = safetensors({"model.embed_tokens.weight": (16, 2), "model.norm.weight": (2,)})
    length = int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8 : 8 + length])
    header["model.norm.weight"] |= entry
    text = json.dumps(header).encode()
    (model / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + whole[8 + length :])


SPOILED: dict[str, tuple[Callable[[Path], object], FindingCode]] = {
    "torn config": (lambda m: cut(m / "config.json", 3), FindingCode.MODEL_FILE_TORN),
    "a list": (lambda m: (m / "config.json").write_text("[1]"), FindingCode.MODEL_FILE_TORN),
    "deep config": (lambda m: (m / "config.json").write_text("[" * 100_000), FindingCode.MODEL_FILE_TORN),
    "no config": (lambda m: (m / "config.json").unlink(), FindingCode.MODEL_CONFIG),
    "config is a pointer": (lambda m: (m / "config.json").write_text(f"{LFS_POINTER}\n"), FindingCode.MODEL_LFS_POINTER),
    "torn tokenizer": (lambda m: cut(m / "tokenizer.json", 1), FindingCode.MODEL_FILE_TORN),
    "torn generation config": (lambda m: (m / "generation_config.json").write_text("{"), FindingCode.MODEL_FILE_TORN),
    "no tokenizer": (lambda m: (m / "tokenizer.json").unlink(), FindingCode.TOKENIZER_MISSING),
    "no weights": (lambda m: (m / "model.safetensors").unlink(), FindingCode.MODEL_WEIGHTS_MISSING),
    "weights are a pointer": (lambda m: (m / "model.safetensors").write_text(f"{LFS_POINTER}\n"), FindingCode.MODEL_LFS_POINTER),
    "empty weights": (lambda m: (m / "model.safetensors").write_bytes(b""), FindingCode.MODEL_WEIGHTS_TORN),
    "torn weights": (lambda m: cut(m / "model.safetensors", 1), FindingCode.MODEL_WEIGHTS_TORN),
    "torn header": (lambda m: (m / "model.safetensors").write_bytes(b"\xff" * 8 + b"{}"), FindingCode.MODEL_WEIGHTS_TORN),
    "strange header": (lambda m: (m / "model.safetensors").write_bytes(b"\x07" + bytes(7) + b'{"a":1}'), FindingCode.MODEL_WEIGHTS_TORN),
    "too long": (lambda m: (m / "model.safetensors").open("ab").write(b"x"), FindingCode.MODEL_WEIGHTS_TORN),
    "link to nothing": (lambda m: (m / "b.safetensors").symlink_to(m / "none"), FindingCode.MODEL_WEIGHTS_TORN),
    "overlap": (lambda m: describe(m, data_offsets=[0, 8]), FindingCode.MODEL_WEIGHTS_TORN),
    "backwards": (lambda m: describe(m, data_offsets=[128, 0]), FindingCode.MODEL_WEIGHTS_TORN),
    "other shape": (lambda m: describe(m, shape=[3]), FindingCode.MODEL_WEIGHTS_TORN),
    "less than nothing": (lambda m: describe(m, shape=[-2]), FindingCode.MODEL_WEIGHTS_TORN),
    "no type": (lambda m: describe(m, dtype=None), FindingCode.MODEL_WEIGHTS_TORN),
    "no tensor": (lambda m: (m / "model.safetensors").write_bytes(safetensors({})), FindingCode.MODEL_WEIGHTS_TORN),
    "other width": (lambda m: make_model(m, {"hidden_size": 99}), FindingCode.VOCABULARY),
    "missing shard": (lambda m: shard(m, "a.safetensors", "b.safetensors"), FindingCode.MODEL_SHARDS_MISSING),
    "missing tensor": (lambda m: shard(m, "a.safetensors", "a.safetensors"), FindingCode.MODEL_SHARDS_MISSING),
    "torn index": (lambda m: (m / "model.safetensors.index.json").write_text("{"), FindingCode.MODEL_FILE_TORN),
    "other embedding": (lambda m: make_model(m, {"vocab_size": 99}), FindingCode.VOCABULARY),
}


@pytest.mark.parametrize("case", SPOILED)
def test_files_that_are_spoiled_are_found(model: Path, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    spoil, code = SPOILED[case]
    spoil(model)
    found = look(model, monkeypatch)
    assert codes(found) == [code]
    assert not found[0].ok


HEALTHY: dict[str, Callable[[Path], object]] = {
    "shards": lambda m: shard(m, "a.safetensors"),
    "old weights": lambda m: (m / "model.safetensors").rename(m / "pytorch_model.bin"),
    "of a later type": lambda m: describe(m, dtype="F3"),
    "the right width": lambda m: make_model(m, {"hidden_size": 2}),
    "sentencepiece": lambda m: (m / "tokenizer.json").rename(m / "tokenizer.model"),
    "tiktoken": lambda m: (m / "tokenizer.json").rename(m / "qwen.tiktoken"),
    "padded embedding": lambda m: (m / "model.safetensors").write_bytes(safetensors({"wte.weight": (64, 2)})),
    "quantized": lambda m: make_model(m, {"vocab_size": 99, "quantization_config": {}}),
    "of several parts": lambda m: (m / "config.json").write_text('{"text_config": {"vocab_size": 99}}'),
}


@pytest.mark.parametrize("case", HEALTHY)
def test_files_that_are_whole_raise_no_alarm(model: Path, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    HEALTHY[case](model)
    assert codes(look(model, monkeypatch)) == []


def test_no_problem_hides_another(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cut(model / "model.safetensors", 1)
    (model / "generation_config.json").write_text("{")
    (model / "tokenizer.json").unlink()
    answer = {**WHOLE, "tokenizer": None, "problems": [{"code": "model-type-unknown", "said": "", "model_type": "new"}]}
    assert codes(look(model, monkeypatch, answer)) == [
        *(FindingCode.MODEL_FILE_TORN, FindingCode.MODEL_WEIGHTS_TORN),
        *(FindingCode.TOKENIZER_MISSING, FindingCode.MODEL_TYPE_UNKNOWN),
    ]


def problem(code: str, **more: Any) -> dict[str, Any]:
    return {**WHOLE, "problems": [{"code": code, "said": "ValueError: no", **more}]}


@pytest.mark.parametrize(
    ("answer", "severity"),
    [
        (problem("model-type-unknown", model_type="new"), Severity.BLOCKS),
        (problem("model-config", model_type="qwen2"), Severity.BLOCKS),
        (problem("model-remote-code", model_type="own"), Severity.BLOCKS),
        (problem("tokenizer"), Severity.BLOCKS),
        (problem("vocabulary", size=20, rows=16, used=True), Severity.BLOCKS),
        (problem("vocabulary", size=17, rows=16, used=False), Severity.WARNS),
        (problem("chat-template"), Severity.WARNS),
        (problem("tokenizer-empty"), Severity.WARNS),
    ],
)
def test_what_the_interpreter_says_becomes_a_finding(
    model: Path, monkeypatch: pytest.MonkeyPatch, answer: dict[str, Any], severity: Severity
) -> None:
    (found,) = look(model, monkeypatch, answer)
    assert (found.code, found.severity) == (answer["problems"][0]["code"], severity)
    assert found.fix
    library = RepoState(name="t", path="/t", commit="0", branch=None, packages=("transformers",), import_root="/t/src")
    (judged,) = look(model, monkeypatch, answer, changes=(library,))
    assert judged.severity is Severity.WARNS, "transformers is under test: the level judges it"


def test_code_of_the_model_that_the_user_allowed_is_left_to_the_level(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (found,) = look(model, monkeypatch, problem("model-remote-code", model_type="own"), arguments=("--trust_remote_code", "true"))
    assert found.severity is Severity.WARNS


def test_a_chat_template_is_missed_only_where_the_loop_needs_one(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bare = {**WHOLE, "tokenizer": {**TOKENIZER, "template": False}}
    assert codes(look(model, monkeypatch, bare)) == []
    needs = ModelUse(build="x", template=True)
    assert codes(look(model, monkeypatch, bare, needs)) == [FindingCode.CHAT_TEMPLATE]
    assert codes(look(model, monkeypatch, WHOLE, needs)) == []


def test_without_an_interpreter_it_is_said_what_builds_one(model: Path) -> None:
    (found,) = model_findings(model, Context(run_dir=model, python=Path("/no/python"), model="m"), USE)
    assert (found.code, found.severity, found.fix) == (FindingCode.MODEL_NOT_LOADED, Severity.WARNS, "seatrial env build x")


def test_an_interpreter_without_an_answer(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = NoAnswerError("python: ModuleNotFoundError: No module named 'transformers'")
    assert look(model, monkeypatch, gone)[0].severity is Severity.BLOCKS
    assert look(model, monkeypatch, gone, ModelUse(build="x"))[0].severity is Severity.WARNS, "another process of the loop may have it"
    assert look(model, monkeypatch, NoAnswerError("slow", late=True))[0].severity is Severity.WARNS
    strange: tuple[Any, ...] = (15, [], {}, {**WHOLE, "problems": [{"code": "no such code"}]})
    assert all(codes(look(model, monkeypatch, odd)) == [FindingCode.MODEL_NOT_LOADED] for odd in strange)


def test_the_interpreter_is_offline_and_sees_the_change_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PYTHONPATH", "/evil")
    monkeypatch.setenv("PYTHONSTARTUP", "/evil")
    library = RepoState(name="t", path="/t", commit="0", branch=None, packages=("transformers",), import_root="/t/src")
    made = host_findings._environment(Context(run_dir=tmp_path, python=Path("p"), model="m", changes=(library,)))
    assert (made["PYTHONPATH"], made["HF_HUB_OFFLINE"], "PYTHONSTARTUP" in made) == ("/t/src", "1", False)
    assert "PYTHONPATH" not in host_findings._environment(Context(run_dir=tmp_path, python=Path("p"), model="m"))
