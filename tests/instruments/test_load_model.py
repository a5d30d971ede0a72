"""What the loop's interpreter says of a model, with a stand-in for transformers."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from seatrial.instruments import load_model


class Tokenizer:
    """Words of one letter each."""

    chat_template: str | None = "x"
    bos_token_id, eos_token_id, pad_token_id = None, 1, 1
    vocab_size = 10
    length = 10

    def __len__(self) -> int:
        return self.length

    def __call__(self, text: str, *, add_special_tokens: bool) -> dict[str, list[int]]:
        assert not add_special_tokens
        return {"input_ids": [len(text) % 10] if self.vocab_size else []}

    def apply_chat_template(self, *_: object, **__: object) -> list[int]:
        return [3]


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> SimpleNamespace:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "known"}))
    state = SimpleNamespace(path=tmp_path, config=SimpleNamespace(vocab_size=10), tokenizer=Tokenizer(), asked=[])

    def load(what: str) -> Any:
        def from_pretrained(path: str, **how: object) -> Any:
            state.asked.append((what, how))
            made = getattr(state, what)
            if isinstance(made, Exception):
                raise made
            return made

        return SimpleNamespace(from_pretrained=from_pretrained)

    module = ModuleType("transformers")
    vars(module).update(__version__="5", CONFIG_MAPPING={"known": 1}, AutoConfig=load("config"), AutoTokenizer=load("tokenizer"))
    monkeypatch.setitem(sys.modules, "transformers", module)
    return state


def look(library: SimpleNamespace) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = load_model.look({"path": str(library.path), "tokenizer": True})["problems"]
    return found


def test_a_whole_model_has_no_problem_and_nothing_is_trusted_or_fetched(library: SimpleNamespace) -> None:
    assert look(library) == []
    assert [what for what, _ in library.asked] == ["config", "tokenizer"]
    assert all(how == {"local_files_only": True, "trust_remote_code": False} for _, how in library.asked)


def test_errors_are_told_apart(library: SimpleNamespace) -> None:
    library.config = ValueError("bad value\nmore")
    assert look(library) == [{"code": "model-config", "said": "ValueError: bad value", "model_type": "known"}]
    (library.path / "config.json").write_text('{"model_type": "new"}')
    assert look(library)[0]["code"] == "model-type-unknown"
    library.config = ValueError("set the option `trust_remote_code=True`")
    library.tokenizer = OSError("")
    assert [problem["code"] for problem in look(library)] == ["model-remote-code", "tokenizer"]


@pytest.mark.parametrize(
    ("rows", "length", "words", "eos", "used"),
    [(10, 10, 10, 1, None), (64, 10, 10, 1, None), (9, 10, 10, 1, True), (10, 11, 10, 1, False), (10, 11, 10, 10, True)],
)
def test_a_tokenizer_that_is_larger_than_the_embedding(
    library: SimpleNamespace, rows: int, length: int, words: int, eos: int, used: bool | None
) -> None:
    library.config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(vocab_size=rows))
    tokenizer = library.tokenizer
    tokenizer.length, tokenizer.vocab_size, tokenizer.eos_token_id = length, words, eos
    found = look(library)
    assert [problem["used"] for problem in found] == ([] if used is None else [used])


def test_a_tokenizer_that_lost_its_vocabulary(library: SimpleNamespace) -> None:
    library.tokenizer.vocab_size = 0
    assert look(library) == [{"code": "tokenizer-empty", "said": ""}]


def test_a_chat_template_that_fails(library: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> list[int]:
        raise TypeError("no roles")

    monkeypatch.setattr(Tokenizer, "apply_chat_template", fail)
    assert look(library) == [{"code": "chat-template", "said": "TypeError: no roles"}]
    library.tokenizer.chat_template = None
    assert look(library) == []
