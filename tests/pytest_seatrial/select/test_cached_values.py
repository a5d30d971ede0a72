"""Values that are made once and kept: whoever uses the value depends on what made it, not only who came first."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.pytest_seatrial.select.projects import Small

pytestmark = pytest.mark.slow

TWICE = """
import m

def test_first(): assert m.use() == 1

def test_second(): assert m.use() == 1
"""


def _both(tmp_path: Path, module: str) -> None:
    project = Small(tmp_path, {"m.py": module, "test_a.py": TWICE})
    project.settled()
    project.edit("m.py", "return 1", "return 2")
    after = project.run()
    assert after.ran == {"test_first", "test_second"}, after.out


def test_a_cache_made_by_a_call(tmp_path: Path) -> None:
    _both(
        tmp_path,
        """
        import functools

        def make(): return other()

        def other():
            return 1

        use = functools.lru_cache(maxsize=None)(make)
        """,
    )


def test_a_decorator_of_the_project_that_remembers(tmp_path: Path) -> None:
    _both(
        tmp_path,
        """
        def remember(function):
            box = {}
            def inner(*args):
                if args not in box:
                    box[args] = function(*args)
                return box[args]
            return inner

        @remember
        def use(): return other()

        def other():
            return 1
        """,
    )


def test_a_method_that_fills_another_methods_field(tmp_path: Path) -> None:
    _both(
        tmp_path,
        """
        class Table:
            def __init__(self): self.data = None

            def load(self): self.data = other()

            def get(self):
                if self.data is None:
                    self.load()
                return self.data

        def other():
            return 1

        TABLE = Table()

        def use(): return TABLE.get()
        """,
    )


def test_a_dictionary_that_fills_itself(tmp_path: Path) -> None:
    _both(
        tmp_path,
        """
        class Table(dict):
            def __missing__(self, key):
                self[key] = other()
                return self[key]

        def other():
            return 1

        TABLE = Table()

        def use(): return TABLE["a"]
        """,
    )


def test_a_descriptor_that_puts_its_value_into_the_object(tmp_path: Path) -> None:
    _both(
        tmp_path,
        """
        class Kept:
            def __init__(self, function): self.function = function

            def __get__(self, owner, kind=None):
                value = self.function(owner)
                owner.__dict__["value"] = value
                return value

        class Thing:
            @Kept
            def value(self): return other()

        def other():
            return 1

        THING = Thing()

        def use(): return THING.value
        """,
    )


def test_a_pool_of_things_made_when_there_is_none(tmp_path: Path) -> None:
    _both(
        tmp_path,
        """
        POOL = []

        def taken(): return POOL.pop() if POOL else other()

        def other():
            return 1

        def use():
            thing = taken()
            try:
                return thing
            finally:
                POOL.append(thing)
        """,
    )
