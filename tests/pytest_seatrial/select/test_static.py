"""The parts that need no run: imports by text, scripts, choices, digests."""

from __future__ import annotations

import ast
from pathlib import Path

from pytest_seatrial.select import project_files
from pytest_seatrial.select.project_files import Project, closure, imports, resolve
from pytest_seatrial.select.selection_state import SKIPPED, Known, Why, choose_affected
from pytest_seatrial.select.source_digests import ABSENT, EXISTS, LISTING, UNSETTLED, WHOLE, Digests

SOURCE = """
from typing import TYPE_CHECKING
import pkg.deep.leaf
from pkg import mod
from . import beside
from .. import above
if TYPE_CHECKING:
    import pkg.typing_only
else:
    import pkg.otherwise
def f():
    import pkg.late
    importlib.import_module("pkg.named")
    __import__("pkg.old")
    importlib.import_module(name)
pytest_plugins = ["pkg.plugin"]
"""


def tree(root: Path, *names: str) -> Project:
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")
    return Project.walk(root)


def test_every_way_to_import_is_found_but_for_type_checking(tmp_path: Path) -> None:
    names = ["__init__", "deep/__init__", "deep/leaf", "mod", "typing_only", "otherwise", "late", "named", "old", "plugin", "never"]
    project = tree(
        tmp_path,
        *(f"src/pkg/{name}.py" for name in names),
        "tests/sub/test_x.py",
        "tests/sub/beside.py",
        "tests/above.py",
        "tests/__init__.py",
    )
    found = resolve("tests/sub/test_x.py", imports(ast.parse(SOURCE)), project)
    expected = {f"src/pkg/{name}.py" for name in names if name not in ("typing_only", "never")}
    assert found == expected | {"tests/sub/beside.py", "tests/above.py", "tests/__init__.py"}


def test_a_new_module_changes_what_an_import_reaches(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("try:\n    import settings\nexcept ImportError:\n    pass\n")
    before = Digests(Project.walk(tmp_path)).now("a.py", "@imports")
    (tmp_path / "settings.py").write_text("")
    assert Digests(Project.walk(tmp_path)).now("a.py", "@imports") != before


def test_a_closure_ends_on_cycles() -> None:
    edges = {"a": ["b"], "b": ["c", "a"], "c": [], "d": ["a"]}
    assert closure(["a"], edges.__getitem__) == {"a", "b", "c"}


def test_environments_and_caches_are_no_part_of_the_project(tmp_path: Path) -> None:
    project = tree(tmp_path, "a.py", "env/pyvenv.cfg", "env/lib/x.py", ".git/config", "b/__pycache__/a.pyc", "node_modules/m.js")
    assert set(project.stamps) == {"a.py"}
    assert project.foreign("env/lib/x.py")
    assert project.foreign("b/site-packages/y.py")
    assert not project.foreign("a.py")


def test_scripts_name_files_through_variables_and_other_scripts(tmp_path: Path) -> None:
    project = tree(tmp_path, "tools/run.sh", "tools/next.sh", "conf/a.yaml", "conf/b.yaml", "pkg/main.py", "unused.txt")
    (tmp_path / "tools/run.sh").write_text('#!/bin/bash\n# unused.txt\nsource next.sh\ntrain --config="$ROOT/conf/a.yaml"\n')
    (tmp_path / "tools/next.sh").write_text("python -m pkg.main ../conf/b.yaml\n")
    found = project_files.named(["bash", "tools/run.sh"], project)
    assert found == {"tools/run.sh", "tools/next.sh", "conf/a.yaml", "conf/b.yaml", "pkg/main.py"}
    assert project_files.named(["true", "nothing"], project) == frozenset()


def test_a_test_is_left_out_only_if_a_whole_record_holds() -> None:
    known = Known(
        versions={1: ("a.py", "f", "x"), 2: ("a.py", "g", "y"), 3: ("b.txt", WHOLE, UNSETTLED), 4: SKIPPED},
        sets={1: (1,), 2: (1, 2), 3: (3,), 4: (4,)},
        records={
            **{"same": [(1,)], "changed": [(1, 2)], "earlier": [(2,), (1,)], "unsettled": [(3,)], "lost": [(9,)], "bad": [(1,)]},
            **{"skips": [(4,)], "skips after a pass": [(4,), (1,)]},
        },
        failed=frozenset({"bad"}),
    )
    now = {("a.py", "f"): "x", ("a.py", "g"): "z", ("b.txt", WHOLE): UNSETTLED}
    found = {choice.test: choice for choice in choose_affected(known, lambda path, block: now[path, block], [*known.records, "new"])}
    assert {test: choice.why for test, choice in found.items()} == {
        "same": None,
        "changed": Why.AFFECTED,
        "earlier": None,
        "unsettled": Why.AFFECTED,
        "lost": Why.AFFECTED,
        "bad": Why.FAILED,
        "skips": Why.SKIPPED,
        "skips after a pass": None,
        "new": Why.NEW,
    }
    assert found["changed"].line() == "changed: affected: a.py: g"


def test_what_changes_during_a_session_has_no_digest_that_holds(tmp_path: Path) -> None:
    project = tree(tmp_path, "a.py", "d/x.txt")
    digests = Digests(project)
    assert digests.version("d", LISTING)[2] not in (UNSETTLED, ABSENT)
    (tmp_path / "a.py").write_text("A = 1\n")
    (tmp_path / "d/new.txt").write_text("")
    after = Digests(project)
    assert after.version("a.py", "")[2] == UNSETTLED
    assert after.version("a.py", EXISTS)[2] == "file"
    assert after.version("d", LISTING)[2] == UNSETTLED
    assert after.version("none.txt", WHOLE)[2] == ABSENT
