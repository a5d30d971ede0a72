"""Which functions a change alters, by comparing the syntax of each changed Python file with that of its base.

- A function is altered when its own code differs: signature, decorators and body, without docstrings, comments and layout. Code of a
  function inside it is that function's own. A function that only moved within its file is not altered.
- Lambdas are functions, too; code outside of functions (imports, constants, class bodies, fields) runs as the file is imported.
- In a new file everything is new. A function of the same name that stands in several places (overloads, branches) is compared with
  all of the same name at the base.
- Functions that a decorator hands to another compiler (Triton, Numba, torch.jit) are never run by Python: nothing shows that they ran.
- What is deleted cannot run; it is named. A file that this Python cannot parse has no known functions, and says so.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from pydantic import Field

from seatrial.evidence.changes import ChangedPath, base_contents, read_changes
from seatrial.files import read_model
from seatrial.model.errors import UserError
from seatrial.model.guarded import parse_python
from seatrial.model.record import Record, RepoState

CHANGED_FILE = "changed.json"
MODULE, LAMBDA = "<module>", "<lambda>"
COMPILERS = ("jit", "njit", "autotune", "heuristics", "torch.jit.script", "torch.jit.script_if_tracing", "jit.script", "script")
_UNPARSABLE = (ValueError, RecursionError)
_NOT_CODE = ("lineno", "col_offset", "end_lineno", "end_col_offset", "ctx", "type_comment", "kind")


class ChangedFunction(Record):
    """One altered piece of code that runs as a whole."""

    name: str
    """Qualified; `<module>` for code outside of functions and classes."""
    line: int
    """Its first, decorators included."""
    column: int = 0
    """Of the body of a lambda, when several begin on its line."""
    at_import: bool = False
    """Outside of functions: it runs as its file is imported."""
    compiled: bool = False
    """Handed to another compiler: Python never runs it."""


class ChangedFile(Record):
    """One changed Python file that exists."""

    repo: str
    path: str
    sha256: str
    functions: tuple[ChangedFunction, ...] = ()
    """Altered or new; none when only comments, docstrings or layout changed, or something was deleted."""
    deleted: tuple[str, ...] = ()
    """Functions and classes that the base has and this file has not."""
    in_package: bool = True
    """Part of a package that the checkout provides; tests and scripts are not."""
    readable: bool = True
    """False when this Python cannot parse it, or its base: which functions changed is not known."""


class ChangedCode(Record):
    """What of the repositories under test is altered, as far as it can be seen to run."""

    files: tuple[ChangedFile, ...] = ()
    deleted: dict[str, tuple[str, ...]] = Field(default_factory=dict)
    """Deleted Python files, by repository."""
    unseen: dict[str, tuple[str, ...]] = Field(default_factory=dict)
    """Changed files that are not Python, by repository: nothing shows whether they are used."""
    unknown: dict[str, str] = Field(default_factory=dict)
    """Repositories whose difference from the base git could not give, and why."""

    def of(self, repo: str) -> tuple[ChangedFile, ...]:
        """The files of one repository."""
        return tuple(file for file in self.files if file.repo == repo)


def changed_code(changes: Sequence[RepoState]) -> ChangedCode:
    """Of all repositories under test whose base is known."""
    files: list[ChangedFile] = []
    deleted: dict[str, tuple[str, ...]] = {}
    unseen: dict[str, tuple[str, ...]] = {}
    unknown: dict[str, str] = {}
    for repo in changes:
        if repo.companion or repo.base is None:
            continue
        try:
            before, paths = base_contents(Path(repo.path), repo.base), read_changes(Path(repo.path), repo.base).paths
        except UserError as error:
            unknown[repo.name] = error.message
            continue
        files += [made for path in sorted(before) if (made := _file(repo, path, before[path]))]
        deleted[repo.name] = tuple(item.path for item in paths if item.status == "D" and item.path.endswith(".py"))
        unseen[repo.name] = tuple(item.path for item in paths if _is_unseen(repo, item))
    return ChangedCode(files=tuple(files), deleted=deleted, unseen=unseen, unknown=unknown)


def read_changed(evidence: Path) -> ChangedCode:
    """What was stored of a trial; nothing where there was nothing to store."""
    path = evidence / CHANGED_FILE
    return read_model(path, ChangedCode) if path.is_file() else ChangedCode()


def _file(repo: RepoState, path: str, before: bytes | None) -> ChangedFile | None:
    place = Path(repo.path, path)
    if not place.is_file():
        return None
    data = place.read_bytes()
    functions, deleted, readable = _compared(before, data)
    return ChangedFile(
        repo=repo.name,
        path=path,
        sha256=hashlib.sha256(data).hexdigest(),
        functions=functions,
        deleted=deleted,
        in_package=_in_package(repo, place),
        readable=readable,
    )


def _is_unseen(repo: RepoState, item: ChangedPath) -> bool:
    place = Path(repo.path, item.path)
    return item.status != "D" and not item.path.endswith(".py") and place.is_file() and _in_package(repo, place)


def _in_package(repo: RepoState, place: Path) -> bool:
    """Whether a file belongs to a package of the checkout; what lies in a submodule may be one that the loop imports."""
    if any(item.path and place.is_relative_to(Path(repo.path, item.path)) for item in repo.submodules):
        return "tests" not in place.relative_to(repo.path).parts
    roots = [Path(repo.import_root, *package.split(".")) for package in repo.packages] if repo.import_root else []
    return any(place.is_relative_to(root) for root in roots)


def _compared(before: bytes | None, after: bytes) -> tuple[tuple[ChangedFunction, ...], tuple[str, ...], bool]:
    """The altered functions of a file, what it lost, and whether it could be parsed."""
    try:
        new = list(_Pieces(parse_python(after)))
        old = list(_Pieces(parse_python(before))) if before is not None else []
    except _UNPARSABLE:
        return (), (), False
    known: dict[tuple[str, bool], set[str]] = {}
    for piece, code in old:
        known.setdefault((piece.name, piece.at_import), set()).add(code)
    altered = tuple(piece for piece, code in new if code not in known.get((piece.name, piece.at_import), ()))
    if before is None:
        altered = tuple(piece for piece in altered if piece.name != MODULE or _does_something(after))
    names = {piece.name for piece, _ in new}
    return altered, tuple(dict.fromkeys(name for (name, _) in known if name not in names and not name.endswith(LAMBDA))), True


def _does_something(source: bytes) -> bool:
    """Whether a new module holds more than its docstring."""
    return bool(_body(parse_python(source).body))


def _body(body: list[ast.stmt]) -> list[ast.stmt]:
    """Statements without the docstring."""
    first = body[0] if body else None
    documented = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str)
    return body[1:] if documented else body


class _Pieces:
    """The pieces of a module that run as a whole, each with its own code as text."""

    def __init__(self, tree: ast.Module) -> None:
        self.found: list[tuple[ChangedFunction, str]] = []
        lines = [node.lineno for node in ast.walk(tree) if isinstance(node, ast.Lambda)]
        self.shared = {line for line in lines if lines.count(line) > 1} if len(lines) > 1 else set()
        code = self._statements(tree.body, "", True)
        self.found.append((ChangedFunction(name=MODULE, line=1, at_import=True), code))

    def __iter__(self) -> Iterator[tuple[ChangedFunction, str]]:
        return iter(self.found)

    def _statements(self, body: list[ast.stmt], around: str, at_import: bool) -> str:
        return "\n".join(filter(None, (self._text(item, around, at_import) for item in _body(body))))

    def _text(self, node: object, around: str, at_import: bool) -> str:
        """A node as text; functions and classes are pieces of their own, and leave nothing here."""
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            self._function(node, around, at_import)
            return ""
        if isinstance(node, ast.ClassDef):
            self._class(node, around, at_import)
            return ""
        if isinstance(node, ast.Lambda):
            return self._lambda(node, around, at_import)
        if isinstance(node, ast.AST):
            parts = (f"{name}={self._text(value, around, at_import)}" for name, value in ast.iter_fields(node) if name not in _NOT_CODE)
            return f"{type(node).__name__}({', '.join(parts)})"
        if isinstance(node, list):
            return f"[{', '.join(self._text(item, around, at_import) for item in node)}]"
        return f"{type(node).__name__}:{node!r}"

    def _function(self, node: ast.FunctionDef | ast.AsyncFunctionDef, around: str, at_import: bool) -> None:
        name = around + node.name
        # Defaults, decorators and annotations run where the function is defined; they are no less part of it.
        head = [self._text(part, around, at_import) for part in (node.args, node.decorator_list, node.returns, _parameters(node))]
        code = self._statements(node.body, f"{name}.<locals>.", False)
        self._add(name, _first(node), f"{type(node).__name__} {head} {code}", compiled=any(map(_compiles, node.decorator_list)))

    def _class(self, node: ast.ClassDef, around: str, at_import: bool) -> None:
        name = around + node.name
        head = [self._text(part, around, at_import) for part in (node.bases, node.keywords, node.decorator_list, _parameters(node))]
        code = self._statements(node.body, f"{name}.", at_import)
        self._add(name, _first(node), f"{head} {code}", at_import=at_import)

    def _lambda(self, node: ast.Lambda, around: str, at_import: bool) -> str:
        name = around + LAMBDA
        head = self._text(node.args, around, at_import)
        body = self._text(node.body, f"{name}.<locals>.", False)
        column = node.body.col_offset if node.lineno in self.shared else 0
        self._add(name, node.lineno, f"{head} {body}", column)
        return f"lambda {head}: {body}"

    def _add(self, name: str, line: int, code: str, column: int = 0, at_import: bool = False, compiled: bool = False) -> None:
        self.found.append((ChangedFunction(name=name, line=line, column=column, at_import=at_import, compiled=compiled), code))


def _compiles(decorator: ast.expr) -> bool:
    """Whether a decorator hands the function to a compiler that is not Python's; Dynamo (`torch.compile`) tells what it runs."""
    named = ast.unparse(decorator.func if isinstance(decorator, ast.Call) else decorator)
    return named in COMPILERS or named.startswith(("triton.", "numba.", "tilelang.", "cute.")) or named.endswith((".jit", ".njit"))


def _first(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> int:
    return min([node.lineno, *(item.lineno for item in node.decorator_list)])


def _parameters(node: ast.AST) -> object:
    """Type parameters, which Python 3.12 knows first."""
    return getattr(node, "type_params", [])
