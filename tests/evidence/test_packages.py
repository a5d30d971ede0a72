"""Packages that a checkout provides."""

from __future__ import annotations

from pathlib import Path

import pytest

from seatrial.evidence.repos import provided
from tests.evidence.conftest import put


@pytest.mark.parametrize(
    ("files", "import_root", "packages"),
    [
        (["src/peft/__init__.py", "tests/__init__.py"], "src", ("peft",)),
        (["src/megatron/bridge/__init__.py", "src/megatron/bridge/peft/__init__.py"], "src", ("megatron.bridge",)),
        (["src/a/__init__.py", "src/ns/b/__init__.py", "top/__init__.py"], "src", ("a", "ns.b")),
        (["vllm/__init__.py", "tests/__init__.py", "examples/x/__init__.py", "benchmarks/__init__.py"], ".", ("vllm",)),
        (
            ["megatron/core/__init__.py", "megatron/training/__init__.py", "tools/x/__init__.py"],
            ".",
            ("megatron.core", "megatron.training"),
        ),
        (["product/__init__.py", "recipe/dapo/__init__.py"], ".", ("product",)),
        (["src/__init__.py", "src/inner/__init__.py"], ".", ("src",)),
        (["src/main.c", "pkg/__init__.py"], ".", ("pkg",)),
        (
            ["not-a-name/__init__.py", ".hidden/__init__.py", "_private/__init__.py", "docs/__init__.py", "build/lib/p/__init__.py"],
            None,
            (),
        ),
        (["README.md"], None, ()),
        (["größe/__init__.py"], ".", ("größe",)),
    ],
)
def test_layouts(tmp_path: Path, files: list[str], import_root: str | None, packages: tuple[str, ...]) -> None:
    put(tmp_path, dict.fromkeys(files, ""))
    assert provided(tmp_path) == (None if import_root is None else str(tmp_path / import_root), packages)
