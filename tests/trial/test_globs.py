"""Globs over repository paths."""

from __future__ import annotations

import pytest

from seatrial.trial.globs import matches


@pytest.mark.parametrize(
    ("glob", "path"),
    [
        ("**/modeling_*.py", "modeling_x.py"),
        ("**/modeling_*.py", "src/a/modeling_qwen2.py"),
        ("**/models/**", "models/a.py"),
        ("**/models/**", "src/models/a/b/c.py"),
        ("**/*peft*/**", "src/my_peft_lib/x.py"),
        ("**/*lora*", "a/b/lora.py"),
        ("src/*.py", "src/a.py"),
        ("a?c", "abc"),
        ("**", "any/thing at/ä ll"),
        ("**/*.py", "größe/a b.py"),
        ("a.b", "a.b"),
        ("[x]/(y)+", "[x]/(y)+"),
    ],
)
def test_it_matches(glob: str, path: str) -> None:
    assert matches(path, glob)


@pytest.mark.parametrize(
    ("glob", "path"),
    [
        ("src/*.py", "src/a/b.py"),
        ("*.py", "src/a.py"),
        ("**/models/**", "models.py"),
        ("**/models/**", "mymodels/a.py"),
        ("**/modeling_*.py", "modeling_x.pyc"),
        ("a.b", "axb"),
        ("a?c", "a/c"),
        ("**/*lora*", "src/LoRA.py"),
        ("", "a"),
    ],
)
def test_it_does_not_match(glob: str, path: str) -> None:
    assert not matches(path, glob)
