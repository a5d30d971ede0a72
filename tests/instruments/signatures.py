"""Signatures of upstream, read from its source without running it."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any


def signature(text: str, owner: str, name: str) -> dict[str, Any] | None:
    """The parameters of a function, or of a method of the class `owner`; None if it is not there."""
    body: list[ast.stmt] = ast.parse(text).body
    if owner:
        found = [node for node in body if isinstance(node, ast.ClassDef) and node.name == owner]
        body = found[-1].body if found else []
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name:
            given = node.args
            names = [part.arg for part in [*given.posonlyargs, *given.args, *given.kwonlyargs]]
            return {"parameters": names, "async": isinstance(node, ast.AsyncFunctionDef)}
    return None


def file_of(checkout: Path, module: str) -> Path:
    """The source of a module in a checkout."""
    return checkout.joinpath(*module.split(".")).with_suffix(".py")
