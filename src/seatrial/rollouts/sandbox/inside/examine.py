"""Runs a solution for a test, in the sandbox; what is right is not known here, but for asserts.

`request.json` says how:
- {"kind": "program"}: solution.py is a program; its standard input and output are the test's.
- {"kind": "call", "name", "arguments"}: a function of solution.py, or a method of its class Solution; the result goes to standard
  output as JSON, what the solution prints goes nowhere.
- {"kind": "asserts", "token"}: tests.py runs with the names of solution.py; the token goes to standard output when all of it ran.
The solution finds the usual modules imported, as LiveCodeBench does it.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import runpy
import sys
from pathlib import Path
from typing import Any

SOLUTION = "solution.py"
MODULES = ("string", "re", "datetime", "collections", "heapq", "bisect", "copy", "math", "random", "statistics", "itertools", "functools")
STARRED = (*MODULES, "operator", "io", "sys", "json", "builtins", "typing")
"""In this order: later names win, as `pow` of builtins over that of math."""
RECURSION = 50_000


def usual() -> dict[str, Any]:
    """The names that a solution may use without importing them."""
    found: dict[str, Any] = {}
    for name in STARRED:
        module = importlib.import_module(name)
        names = getattr(module, "__all__", None) or [public for public in vars(module) if not public.startswith("_")]
        found.update({public: getattr(module, public) for public in names if hasattr(module, public)})
    return found | {name: importlib.import_module(name) for name in STARRED if name not in ("builtins", "typing")}


def loaded() -> dict[str, Any]:
    """The names of the solution, which is not the main program here."""
    spec = importlib.util.spec_from_file_location("solution", SOLUTION)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    vars(module).update(usual())
    sys.modules["solution"] = module
    spec.loader.exec_module(module)
    return vars(module)


def set_aside() -> int:
    """Standard output, for us alone; whatever is printed from now on goes nowhere."""
    private = os.dup(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    return private


def call(name: str, arguments: list[Any]) -> Any:
    names = loaded()
    owner = names["Solution"]() if isinstance(names.get("Solution"), type) else None
    function = getattr(owner, name) if hasattr(owner, name) else names[name]
    return function(*arguments)


def main() -> None:
    request = json.loads(Path("request.json").read_text(encoding="utf-8"))
    Path("request.json").unlink()
    sys.setrecursionlimit(RECURSION)
    sys.argv = [SOLUTION]
    if request["kind"] == "program":
        runpy.run_path(SOLUTION, init_globals=usual(), run_name="__main__")
        return
    private = set_aside()
    if request["kind"] == "call":
        os.write(private, json.dumps(call(request["name"], request["arguments"]), default=repr).encode())
        return
    runpy.run_path("tests.py", init_globals=loaded(), run_name="tests")
    os.write(private, request["token"].encode())


if __name__ == "__main__":
    main()
