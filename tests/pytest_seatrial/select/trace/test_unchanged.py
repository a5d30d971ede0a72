"""Instrumented code behaves as it did: lines, sources, signatures, pickles, asserts; also in other versions of Python."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path
from types import CodeType

import pytest

from pytest_seatrial.select.trace.instrument import instrument, numbers
from tests.pytest_seatrial.select.trace.traced import SOURCE, trace, unfolded, write

OTHERS = [path for version in ("3.12", "3.13", "3.14") for path in sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))[:1]]
ODD = '''
"""Doc."""
from __future__ import annotations
import functools

def deco(f):
    @functools.wraps(f)
    def wrapped(*args):
        return f(*args)
    return wrapped

@deco
def multi(
    a,
    b=(lambda q: q)(2),
):
    """Doc."""
    return (
        a +
        b
    )

def with_global():
    global COUNT
    COUNT = 1
    return COUNT

def nested():
    @deco
    def inner(): return 1
    for i in iter([1, 2].pop, 1): pass
    while True:
        break
    return inner()

def gen():
    got = yield 1
    yield from [got, 3]

class A:
    x: int = 1
    def __init__(self): self.__private = 2
    def get(self): return self.__private

def fail():
    x = 1
    return x / 0
'''


def lines(code: CodeType) -> dict[str, set[int]]:
    found: dict[str, set[int]] = {}
    for part in [code]:
        found.setdefault(part.co_qualname, set()).update(line for _, _, line in part.co_lines() if line)
        for const in part.co_consts:
            if isinstance(const, CodeType):
                for name, told in lines(const).items():
                    found.setdefault(name, set()).update(told)
    return found


@pytest.mark.parametrize("path", [None, *sorted((SOURCE / "seatrial" / "regress").rglob("*.py"))[:40]], ids=str)
def test_every_function_has_the_same_lines(path: Path | None) -> None:
    source = path.read_bytes() if path else ODD.encode()
    tree = ast.parse(source)
    instrument(tree, numbers(tree, "x.py"), 0)
    assert lines(compile(tree, "x.py", "exec", dont_inherit=True)) == lines(compile(source, "x.py", "exec", dont_inherit=True))


USE = """
import copy, inspect, odd, pickle, traceback
recorder.switch(1)
assert odd.multi(1, 2) == 3 and odd.with_global() == 1 and odd.nested() == 1
running = odd.gen(); assert next(running) == 1 and running.send(5) == 5 and next(running) == 3
assert odd.A().get() == 2
assert str(inspect.signature(odd.multi)).startswith("(a, b=2")
assert inspect.getsource(odd.fail).startswith("def fail")
assert odd.multi.__doc__ == "Doc." and odd.__doc__ == "Doc."
assert pickle.loads(pickle.dumps(odd.A())).x == 1 and pickle.loads(pickle.dumps(odd.fail)) is odd.fail
assert copy.deepcopy(odd.__seatrial_hit__) is odd.__seatrial_hit__
try: odd.fail()
except ZeroDivisionError as error:
    assert traceback.extract_tb(error.__traceback__)[-1].line == "return x / 0"
"""


@pytest.mark.parametrize("python", [Path(sys.executable), *OTHERS], ids=str)
def test_it_runs_as_ever_in_every_python(tmp_path: Path, python: Path) -> None:
    told = trace(tmp_path, {"odd.py": ODD}, USE, python=str(python))
    assert told.hits(1) >= {"odd.py:multi", "odd.py:deco.<locals>.wrapped", "odd.py:gen", "odd.py:A.get", "odd.py:fail"}


@pytest.mark.parametrize("python", OTHERS, ids=str)
def test_new_syntax(tmp_path: Path, python: Path) -> None:
    text = """
    type Alias[T] = list[T]
    def first[T](items: list[T]) -> T:
        match items:
            case [x, *_]: return (lambda: f"{x}{(lambda: 1)()}")()
    class Box[T]:
        def get(self) -> T: return 1
    """
    told = trace(
        tmp_path, {"new.py": text}, "import new\nrecorder.switch(1)\nassert new.first([2]) == '21'\nnew.Box().get()", python=str(python)
    )
    assert len([event for event in told.own if event.kind == "hit" and event.epoch == 1]) == 2


CONFTEST = """
import json, sys
from pathlib import Path
from pytest_seatrial.select.trace.startup import start

def pytest_configure(config):
    config.told = start(Path("../session"), Path("."), Path("../cache"), [], config)

def pytest_runtest_setup(item):
    item.config.told.switch(int(item.name[-1]))

def pytest_unconfigure(config):
    Path("../told.json").write_text(json.dumps(config.told.drain()))
    config.told.stop()
"""
TESTS = """
import lib
def helper(x): return x
def test_1():
    assert lib.f(helper(1)) == 3
def test_2():
    assert all([helper(2)])
"""


@pytest.mark.parametrize("mode", ["prepend", "importlib"])
def test_asserts_explain_themselves_and_test_modules_are_instrumented(tmp_path: Path, mode: str) -> None:
    project = tmp_path / "project"
    write(project, {"conftest.py": CONFTEST, "test_it.py": TESTS, "lib.py": "def f(x):\n    return x + 1\n", "pytest.ini": "[pytest]"})
    env = {**os.environ, "PYTHONPATH": f"{SOURCE}{os.pathsep}{project}"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--import-mode={mode}"]
    ran = subprocess.run(command, cwd=project, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert "assert 2 == 3" in ran.stdout, ran.stdout + ran.stderr
    assert "where 2 = <function f" in ran.stdout
    assert "1 failed, 1 passed" in ran.stdout
    told = list(unfolded(json.loads((tmp_path / "told.json").read_text())))
    assert {event.epoch for event in told if event.kind == "hit"} == {1, 2}
    assert len({event.a for event in told if event[:2] == ("hit", 1)}) == 3
    assert len({event.a for event in told if event[:2] == ("hit", 2)}) == 2
    assert not any(event[0] == "list" for event in told)
    assert [event[2] for event in told if event[0] == "whole" and event[3] == ""] == ["conftest.py"]
