"""Blocks: what changes which digest."""

from __future__ import annotations

import pytest

from pytest_seatrial.select.source_digests import facts
from pytest_seatrial.select.trace import instrument

BASE = '''
import functools
LIMIT = 3
class A:
    """Doc."""
    def method(self, x=1):
        """What it does."""
        def inner():
            return x
        return inner() + LIMIT
    @property
    def p(self): return 1
    @p.setter
    def p(self, v): self.v = v
async def co():
    return [lambda: 1, (i for i in range(3))]
'''


def changed(old: str, new: str) -> set[str]:
    assert old in BASE
    before, after = facts(BASE.encode()).blocks, facts(BASE.replace(old, new).encode()).blocks
    return {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}


@pytest.mark.parametrize(
    ("old", "new", "blocks_changed"),
    [
        ("return x", "return x + 1", {"A.method.<locals>.inner"}),
        ("inner() + LIMIT", "inner() - LIMIT", {"A.method"}),
        ("LIMIT = 3", "LIMIT = 4", {""}),
        ("x=1", "x=2", {""}),
        ("What it does.", "Something else.", {""}),
        ("def inner():", "def inner(y=1):", {"A.method"}),
        ("self.v = v", "self.w = v", {"A.p#2"}),
        ("lambda: 1", "lambda: 2", {"co"}),
        ("range(3)", "range(4)", {"co"}),
        ("def p(self): return 1", "def p(self): return 2", {"A.p"}),
        ("async def co", "def co", {""}),
        ("LIMIT = 3", "LIMIT  =  3  # a comment\n\n", set()),
    ],
)
def test_an_edit_changes_its_own_block_only(old: str, new: str, blocks_changed: set[str]) -> None:
    assert changed(old, new) == blocks_changed


def test_what_cannot_be_parsed_is_one_block() -> None:
    assert set(facts(b"def f(:").blocks) == {"*"}
    assert facts(b"def f(:").blocks != facts(b"def f(: ").blocks


def test_the_encoding_is_the_files_own() -> None:
    latin = "# -*- coding: latin-1 -*-\nX = 'ä'\n".encode("latin-1")
    assert facts(latin).blocks[""] == facts("X = 'ä'\n".encode()).blocks[""]
    assert facts(b"\xef\xbb\xbfX = 1").blocks[""] == facts(b"X = 1").blocks[""]


def test_numbers_do_not_change_between_versions() -> None:
    assert instrument.block_number("pkg/a.py", "A.f") == 0x1339004ED48EF5C
    assert instrument.block_number("pkg/a.py", "f") != instrument.block_number("pkg/a.pyf", "")


def test_mentions_are_names_attributes_imports_and_dotted_strings() -> None:
    source = b"def f():\n    from a.b import c as d\n    e.g('h.i', 'not a name')\n    def inner(): hidden()\n"
    assert instrument.look(instrument.parse_source(source)).mentions["f"] >= {"a", "b", "c", "d", "e", "g", "h", "i"}
    assert "hidden" not in instrument.look(instrument.parse_source(source)).mentions["f"]


@pytest.mark.parametrize(
    "body",
    [
        "@functools.lru_cache(maxsize=None)\ndef f(): return 1",
        "@cached_property\ndef f(self): return 1",
        "def f():\n    global X\n    X = 1",
    ],
)
def test_functions_that_nobody_runs_again_are_sticky(body: str) -> None:
    assert instrument.look(instrument.parse_source(body.encode())).sticky == {"f"}


@pytest.mark.parametrize(
    "body",
    [
        "def f(k):\n    if k not in CACHE:\n        CACHE[k] = make()\n    return CACHE[k]",
        "def f(self):\n    if self._x is None:\n        self._x = make()\n    return self._x",
        "def f(self):\n    if not hasattr(self, '_x'):\n        self._x = make()\n    return self._x",
        "def f(cls):\n    try:\n        return cls._x\n    except AttributeError:\n        cls._x = make()",
        "def f(k):\n    found = CACHE.get(k)\n    if found is None:\n        found = CACHE[k] = make()\n    return found",
        "def f(k):\n    return CACHE.setdefault(k, make())",
    ],
)
def test_functions_that_keep_their_result_leave_out_what_made_it(body: str) -> None:
    looked = instrument.look(instrument.parse_source(body.encode()))
    line = next(number for number, text in enumerate(body.splitlines(), 1) if "make()" in text)
    assert not looked.sticky
    assert any("make" in one.mentions and line in one.lines for one in looked.keepers["f"])


@pytest.mark.parametrize(
    "body", ["def f(k):\n    d = {}\n    if k not in d:\n        d[k] = 1\n    return d", "def f(self, v):\n    self.v = v"]
)
def test_functions_that_keep_nothing_are_neither(body: str) -> None:
    looked = instrument.look(instrument.parse_source(body.encode()))
    assert not looked.sticky
    assert not looked.keepers


def test_remote_calls_are_found_in_their_block() -> None:
    source = b"def f():\n    return [a.run.remote(x) for x in y]\ndef g():\n    return a.remote\n"
    assert instrument.look(instrument.parse_source(source)).remote == {"f"}
