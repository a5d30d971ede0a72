"""Which functions a change alters."""

from __future__ import annotations

from pathlib import Path

import pytest

from seatrial.core.records import RepoState
from seatrial.evidence.changes import ChangedCode, ChangedFile, ChangedFunction, changed_code
from seatrial.evidence.imports import Executed, idle, limitations, required
from seatrial.evidence.repos import repo_state
from tests.trial.conftest import commit, git

BASE = '''
"""Doc."""
import os

LIMIT = 3

class Box:
    """Doc."""
    size: int = 1

    def method(self, x):
        """Doc."""
        return x + 1

    @property
    def prop(self):
        return 1

def plain(a, b=2):
    # a comment
    def inner():
        return a
    return inner()

def sorter(xs):
    return sorted(xs, key=lambda x: x)

async def waits():
    return 1
'''


@pytest.fixture
def root(tmp_path: Path) -> Path:
    place = tmp_path / "lib"
    place.mkdir()
    git(place, "init", "-q")
    commit(
        place, {"pkg/__init__.py": "", "pkg/mod.py": BASE, "tests/test_mod.py": "def test_it():\n    assert True\n", "pkg/data.json": "{}"}
    )
    return place


def state(root: Path, base: str = "HEAD") -> RepoState:
    return repo_state(root).model_copy(update={"base": git(root, "rev-parse", base)})


def altered(root: Path, **replaced: str) -> list[tuple[str, bool]]:
    """What replacing text in the module alters: names, and whether it runs at import."""
    text = BASE
    for old, new in (value.split(" => ") for value in replaced.values()):
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    (root / "pkg" / "mod.py").write_text(text)
    (file,) = changed_code([state(root)]).files
    return [(function.name, function.at_import) for function in file.functions]


@pytest.mark.parametrize(
    ("edit", "names"),
    [
        ("return x + 1 => return x + 2", ["Box.method"]),
        ("def method(self, x): => def method(self, x, *, y=1):", ["Box.method"]),
        ("    @property => \n    @os.fspath", ["Box.prop"]),
        ("        return a => \n        return b", ["plain.<locals>.inner"]),
        ("    return inner() => \n    return inner() + 1", ["plain"]),
        ("a, b=2 => a, b=3", ["plain"]),
        ("key=lambda x: x => key=lambda x: -x", ["sorter.<locals>.<lambda>", "sorter"]),
        ("sorted(xs => sorted(list(xs)", ["sorter"]),
        ("async def waits => def waits", ["waits"]),
        ("LIMIT = 3 => LIMIT = 4", ["<module>"]),
        ("import os => import os, sys", ["<module>"]),
        ("size: int = 1 => size: int = 2", ["Box"]),
        ("class Box: => class Box(dict):", ["Box"]),
        ("# a comment => # another", []),
        ("        return x + 1 => \n        return (x\n            + 1)  # layout", []),
        ('class Box:\n    """Doc.""" => class Box:\n    """Other."""', []),
        ('def method(self, x):\n        """Doc.""" => def method(self, x):\n        """Other."""', []),
    ],
)
def test_what_an_edit_alters(root: Path, edit: str, names: list[str]) -> None:
    found = altered(root, edit=edit)
    assert [name for name, _ in found] == names
    assert all(at_import == (name in ("<module>", "Box")) for name, at_import in found)


def test_a_function_that_moves_is_not_altered(root: Path) -> None:
    text = BASE.replace("async def waits():\n    return 1\n", "").replace("LIMIT = 3\n", "LIMIT = 3\n\nasync def waits():\n    return 1\n")
    (root / "pkg" / "mod.py").write_text(text)
    (file,) = changed_code([state(root)]).files
    assert (file.functions, file.deleted) == ((), ())


def test_first_lines_are_those_of_code_objects(root: Path) -> None:
    text = BASE.replace("return x + 1", "return [y for y in (lambda: [x])()]").replace("return 1", "return 2")
    (root / "pkg" / "mod.py").write_text(text)
    (file,) = changed_code([state(root)]).files

    def codes(code: object) -> set[tuple[str, int]]:
        inner = getattr(code, "co_consts", None)
        return set() if inner is None else {(code.co_qualname, code.co_firstlineno)}.union(*map(codes, inner))  # type: ignore[attr-defined]

    known = codes(compile(text, "mod.py", "exec"))
    assert {(function.name, function.line) for function in file.functions} == {
        row for row in known if row[0] in ("Box.method", "Box.method.<locals>.<lambda>", "Box.prop", "waits")
    }


def test_what_is_deleted_is_named(root: Path) -> None:
    (root / "pkg" / "mod.py").write_text(BASE.replace("async def waits():\n    return 1\n", ""))
    (root / "pkg" / "__init__.py").unlink()
    found = changed_code([state(root)])
    (file,) = found.files
    assert (file.functions, file.deleted) == ((), ("waits",))
    assert found.deleted == {"lib": ("pkg/__init__.py",)}


def test_new_renamed_broken_and_other_files(root: Path) -> None:
    (root / "pkg" / "new.py").write_text("X = 1\n\ndef added():\n    return 1\n")
    (root / "pkg" / "empty.py").write_text('"""Doc."""\n')
    (root / "pkg" / "broken.py").write_text("def f(:\n")
    (root / "pkg" / "data.json").write_text("[]")
    (root / "README.md").write_text("read")
    (root / "tests" / "test_mod.py").write_text("def test_it():\n    assert 1\n")
    git(root, "mv", "pkg/mod.py", "pkg/moved.py")
    (root / "pkg" / "moved.py").write_text(BASE.replace("x + 1", "x + 2"))
    found = changed_code([state(root)])
    names = {file.path: [function.name for function in file.functions] for file in found.files}
    assert names == {
        "pkg/new.py": ["added", "<module>"],
        "pkg/empty.py": [],
        "pkg/broken.py": [],
        "tests/test_mod.py": ["test_it"],
        "pkg/moved.py": ["Box.method"],  # against what it was before it was renamed
    }
    assert [file.path for file in found.files if not file.readable] == ["pkg/broken.py"]
    assert [file.path for file in found.files if not file.in_package] == ["tests/test_mod.py"]
    assert found.unseen == {"lib": ("pkg/data.json",)}


def test_a_change_inside_a_submodule_is_compared_with_its_old_commit(root: Path, tmp_path: Path) -> None:
    inner = tmp_path / "inner"
    inner.mkdir()
    git(inner, "init", "-q")
    commit(inner, {"core/mod.py": BASE})
    git(root, "submodule", "add", "-q", str(inner), "3rdparty/inner")
    git(root, "commit", "-qm", "submodule")
    base = git(root, "rev-parse", "HEAD")
    commit(root / "3rdparty" / "inner", {"core/mod.py": BASE.replace("x + 1", "x + 2")})
    git(root, "commit", "-qam", "moved")
    (file,) = changed_code([state(root, base)]).files
    assert (file.path, [function.name for function in file.functions]) == ("3rdparty/inner/core/mod.py", ["Box.method"])
    assert file.in_package


def test_a_base_that_git_does_not_have_is_said(root: Path) -> None:
    code = changed_code([repo_state(root).model_copy(update={"base": "0" * 40})])
    assert code.files == ()
    assert "lib" in code.unknown


def test_companions_and_unknown_bases_have_no_changed_code(root: Path) -> None:
    (root / "pkg" / "mod.py").write_text("X = 2\n")
    repo = state(root)
    assert changed_code([repo.model_copy(update={"companion": True}), repo.model_copy(update={"base": None})]) == ChangedCode()


def ran(*rows: tuple[str, int], path: str = "pkg/mod.py") -> Executed:
    return Executed(True, "", frozenset(("lib", path, name, line, 0) for name, line in rows))


def code_of(root: Path, **replaced: str) -> tuple[RepoState, ChangedCode]:
    altered(root, **replaced)
    return state(root), changed_code([state(root)])


def test_an_import_and_a_changed_constant_do_not_stand_for_a_function_that_never_ran(root: Path) -> None:
    repo, code = code_of(root, one="return x + 1 => return x + 2", two="LIMIT = 3 => LIMIT = 4")
    assert [function.name for _, function in required(repo, code)] == ["Box.method"]
    line = code.files[0].functions[0].line
    assert idle(repo, code, ran(("<module>", 1))) == f"none of the changed functions of lib ran (Box.method (pkg/mod.py:{line}))"
    assert idle(repo, code, ran(("<module>", 1), ("method", line + 1))) is not None  # another one of that name
    assert idle(repo, code, ran(("method", line), path="pkg/other.py")) is not None
    assert idle(repo, code, ran(("<module>", 1), ("method", line))) is None
    assert list(limitations(repo, code, ran(("<module>", 1), ("method", line)))) == [
        "changed outside of functions, which runs at import; nothing shows that it was used: pkg/mod.py of lib"
    ]


def test_functions_that_did_not_run_beside_one_that_did_are_a_limitation(root: Path) -> None:
    repo, code = code_of(root, one="return x + 1 => return x + 2", two="b=2 => b=3")
    method, plain = code.files[0].functions
    assert list(limitations(repo, code, ran(("<module>", 1), ("method", method.line)))) == [
        f"changed but never ran, so not tested: plain (pkg/mod.py:{plain.line}) of lib"
    ]


def test_code_outside_of_functions_counts_where_nothing_else_changed(root: Path) -> None:
    repo, code = code_of(root, one="size: int = 1 => size: int = 2")
    assert idle(repo, code, ran(("<module>", 1))) is None
    assert idle(repo, code, ran()) == "no process of the loop imported any of the changed files of lib (pkg/mod.py)"


def test_comments_alone_leave_nothing_to_run(root: Path) -> None:
    repo, code = code_of(root, one="# a comment => # another")
    assert idle(repo, code, ran()) is None
    assert list(limitations(repo, code, ran())) == [
        "no code of lib differs from its base, comments, docstrings and layout aside: there is nothing to run"
    ]


def test_a_test_that_changed_beside_the_product_is_not_asked_for(root: Path) -> None:
    (root / "tests" / "test_mod.py").write_text("def test_it():\n    assert 1\n")
    repo = state(root)
    assert [function.name for _, function in required(repo, changed_code([repo]))] == ["test_it"]
    (root / "pkg" / "mod.py").write_text(BASE.replace("x + 1", "x + 2"))
    assert [function.name for _, function in required(state(root), changed_code([state(root)]))] == ["Box.method"]


def test_a_lambda_among_several_on_a_line_is_known_by_its_column() -> None:
    file = ChangedFile(repo="lib", path="pkg/mod.py", sha256="")
    alone, shared = ChangedFunction(name="<lambda>", line=3), ChangedFunction(name="f.<locals>.<lambda>", line=3, column=9)
    found = Executed(True, "", frozenset({("lib", "pkg/mod.py", "<lambda>", 3, 20)}))
    assert found.has(file, alone)
    assert not found.has(file, shared)


KERNELS = """
import triton, numba, torch

@triton.jit
def kernel(x): return x

@numba.njit(cache=True)
def loop(x): return x

@torch.jit.script
def scripted(x): return x

@torch.compile(fullgraph=True)
def compiled(x): return x

@triton.autotune(configs=[], key=[])
@triton.jit
def tuned(x): return x
"""


def test_functions_of_other_compilers_cannot_be_seen_to_run(root: Path) -> None:
    (root / "pkg" / "mod.py").write_text(KERNELS)
    git(root, "commit", "-qam", "kernels")
    (root / "pkg" / "mod.py").write_text(KERNELS.replace("return x", "return x + 1"))
    repo = state(root)
    code = changed_code([repo])
    names = [function.name for function in code.files[0].functions if function.compiled]
    assert names == ["kernel", "loop", "scripted", "tuned"]
    assert [function.name for _, function in required(repo, code)] == ["compiled"]
    (root / "pkg" / "mod.py").write_text(KERNELS.replace("def kernel(x): return x", "def kernel(x): return x + 1"))
    code = changed_code([repo])
    assert required(repo, code) == ()
    assert idle(repo, code, ran(("<module>", 1))) is None
    assert any("handed to another compiler" in text for text in limitations(repo, code, ran(("<module>", 1))))


def test_a_base_that_cannot_be_parsed_leaves_the_functions_unknown(root: Path) -> None:
    (root / "pkg" / "mod.py").write_text("def f(:\n")
    git(root, "commit", "-qam", "broken")
    (root / "pkg" / "mod.py").write_text(BASE)
    repo = state(root)
    code = changed_code([repo])
    assert not code.files[0].readable
    assert idle(repo, code, ran(("<module>", 1))) is None
    assert idle(repo, code, ran()) == "no process of the loop imported pkg/mod.py of lib"
    assert any("could not be parsed" in text for text in limitations(repo, code, ran(("<module>", 1))))
