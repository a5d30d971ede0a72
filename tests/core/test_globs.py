"""Globs over repository paths."""

from __future__ import annotations

import pytest

from seatrial.core.specs import matches


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
        ("a/{b,c*}/**", "a/b/x.py"),
        ("a/{b,c*}/**", "a/cd/x.py"),
        ("{,x/}a.py", "a.py"),
        ("{,x/}a.py", "x/a.py"),
        ("a,b}", "a,b}"),
        ("{a,{b,c}d}", "cd"),
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
        ("a/{b,c*}/**", "a/d/x.py"),
        ("{,x/}a.py", "y/a.py"),
        ("{a,b}", "a,b"),
    ],
)
def test_it_does_not_match(glob: str, path: str) -> None:
    assert not matches(path, glob)


def test_an_open_brace_is_an_error() -> None:
    with pytest.raises(ValueError, match="a brace is not closed"):
        matches("a", "{a,b")
