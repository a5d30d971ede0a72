"""Functions that run once per process, under whatever name: every user depends on them, not only the first."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.pytest_seatrial.select.projects import Small

pytestmark = pytest.mark.slow

CODE = """
    import functools

    def deep():
        return 1

    def costly():
        return deep()

    def remember(function):
        store = {}

        def wrapper():
            if "x" not in store:
                store["x"] = function()
            return store["x"]

        return wrapper

    class Remember:
        def __init__(self, function):
            self.function = function
            self.store = None

        def __call__(self):
            if self.store is None:
                self.store = self.function()
            return self.store

    @functools.lru_cache
    def decorated():
        return deep()

    @remember
    def by_hand():
        return deep()

    @Remember
    def by_class():
        return deep()

    class Box:
        def __init__(self):
            self.data = None

        def get(self):
            if self.data is None:
                self.load()
            return self.data

        def load(self):
            self.data = deep()

    class Table(dict):
        def __missing__(self, key):
            self[key] = deep()
            return self[key]

    class Lazily:
        def __init__(self, function):
            self.function = function

        def __get__(self, owner, kind=None):
            owner.__dict__["z"] = found = self.function(owner)
            return found

    class Owner:
        @Lazily
        def z(self):
            return deep()

    OWNER = Owner()
    BOX = Box()
    FILLED = Table()
    cheap = functools.lru_cache(maxsize=None)(costly)
    again = cheap
    TABLE = {"a": decorated}
    """
WAYS = {
    "a decorator": ("import code_o", "code_o.decorated()"),
    "a decorator of the project": ("import code_o", "code_o.by_hand()"),
    "a class that decorates": ("import code_o", "code_o.by_class()"),
    "a call that makes a cache": ("import code_o", "code_o.cheap()"),
    "a method that fills": ("import code_o", "code_o.BOX.get()"),
    "a table that fills itself": ("import code_o", "code_o.FILLED[1]"),
    "a descriptor that fills": ("import code_o", "code_o.OWNER.z"),
    "another name": ("import code_o", "code_o.again()"),
    "a table": ("import code_o", "code_o.TABLE['a']()"),
    "an import under another name": ("from code_o import decorated as renamed", "renamed()"),
}


@pytest.mark.parametrize("way", WAYS)
def test_what_runs_once_belongs_to_every_user(tmp_path: Path, way: str) -> None:
    first, call = WAYS[way]
    tests = f"{first}\n\ndef test_one():\n    assert {call} == 1\n\ndef test_two():\n    assert {call} == 1\n"
    small = Small(tmp_path / "p", {"code_o.py": CODE, "test_o.py": tests, "test_far.py": "def test_far():\n    pass\n"})
    small.settled()
    small.edit("code_o.py", "    return 1\n", "    return 2\n")
    session = small.run()
    assert session.ran == {"test_one", "test_two"}, session.out


def test_a_file_that_was_read_for_a_cache_is_needed_by_all_who_use_it(tmp_path: Path) -> None:
    project = Small(tmp_path / "p", {})
    project.write("prices.json", '{"bread": 5}')
    project.write("config.py", "import json\n\ndef price_list():\n    return json.loads(open('prices.json').read())\n")
    project.write(
        "prices.py",
        "import functools\nimport config\n\n@functools.lru_cache\ndef table():\n    return config.price_list()\n\n"
        "def price(name):\n    return table()[name]\n",
    )
    project.write("test_a.py", "import prices\n\ndef test_first():\n    assert prices.price('bread') == 5\n")
    project.write("test_b.py", "import prices\n\ndef test_second():\n    assert prices.price('bread') == 5\n")
    assert project.run().ran == {"test_first", "test_second"}
    project.edit("prices.json", "5", "6")
    assert project.run().ran == {"test_first", "test_second"}
