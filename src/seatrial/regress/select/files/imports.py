"""The static import map: which files of the project a file would import.

- Every import statement counts, wherever it stands, except under `if TYPE_CHECKING`; also `import_module("…")`, `__import__("…")`,
  `importorskip("…")` with a literal name, and `pytest_plugins`.
- A package's `__init__` is imported with everything below it, and `from package import name` may import a module.
- A name that several roots have resolves to all of them, and to what lies beside the file: too much rather than too little.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from seatrial.regress.select.files.project import Project

T = TypeVar("T")
# How many dots, the module after them, and the names taken from it.
Import = tuple[int, str, tuple[str, ...]]
CALLS = frozenset({"import_module", "__import__", "importorskip", "reload_module", "run_module"})


def imports(tree: ast.Module) -> list[Import]:
    """Every import of a file, in the order of the text, each once."""
    found: dict[Import, None] = {}
    pending: list[ast.AST] = [tree]
    while pending:
        node = pending.pop()
        for one in _of(node):
            found[one] = None
        if isinstance(node, ast.If) and _type_checking(node.test):
            pending.extend(node.orelse)
        else:
            pending.extend(ast.iter_child_nodes(node))
    return sorted(found)


def _of(node: ast.AST) -> Iterator[Import]:
    if isinstance(node, ast.Import):
        yield from ((0, alias.name, ()) for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        yield node.level, node.module or "", tuple(sorted(alias.name for alias in node.names))
    elif isinstance(node, ast.Call):
        name = node.func.attr if isinstance(node.func, ast.Attribute) else node.func.id if isinstance(node.func, ast.Name) else ""
        if name in CALLS:
            yield from _named(node.args[:1])
    elif isinstance(node, ast.Assign | ast.AnnAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        if node.value is not None and any(isinstance(target, ast.Name) and target.id == "pytest_plugins" for target in targets):
            yield from _named(ast.walk(node.value))


def _named(nodes: Iterable[ast.AST]) -> Iterator[Import]:
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            name = node.value.lstrip(".")
            yield len(node.value) - len(name), name, ()


def _type_checking(test: ast.expr) -> bool:
    return (isinstance(test, ast.Name) and test.id == "TYPE_CHECKING") or (isinstance(test, ast.Attribute) and test.attr == "TYPE_CHECKING")


def resolve(path: str, found: Iterable[Import], project: Project) -> frozenset[str]:
    """The files of the project that these imports of `path` reach directly, with the packages above `path` itself."""
    here = path.rpartition("/")[0]
    targets = set(packages_above(path, project))
    for level, module, names in found:
        parts = [part for part in module.split(".") if part]
        if level:
            base = here
            for _ in range(level - 1):
                base = base.rpartition("/")[0]
            targets.update(_under(base, parts, names, project, relative=True))
        elif parts:
            # The directory of a script is on its path; whether this file is run as one is not known.
            for root in {*project.roots_of.get(parts[0], ()), here}:
                targets.update(_under(root, parts, names, project, relative=False))
    targets.discard(path)
    return frozenset(targets)


def packages_above(path: str, project: Project) -> list[str]:
    """The `__init__` files that run before the module at `path` does."""
    found = []
    directory = path.rpartition("/")[0]
    while directory:
        init = f"{directory}/__init__.py"
        if init in project.stamps:
            found.append(init)
        directory = directory.rpartition("/")[0]
    return found


def _under(base: str, parts: list[str], names: tuple[str, ...], project: Project, *, relative: bool) -> Iterator[str]:
    at = base
    if relative:
        yield from _file(at, project)
    for part in parts:
        at = f"{at}/{part}" if at else part
        yield from _file(at, project)
    for name in names:
        yield from _file(f"{at}/{name}" if at else name, project)


def _file(at: str, project: Project) -> Iterator[str]:
    for candidate in (f"{at}.py", f"{at}/__init__.py" if at else "__init__.py"):
        if candidate in project.stamps:
            yield candidate


def closure(start: Iterable[T], edges: Callable[[T], Iterable[T]]) -> frozenset[T]:
    """Everything that is reached from `start`, itself included."""
    seen: set[T] = set()
    pending = list(start)
    while pending:
        one = pending.pop()
        if one not in seen:
            seen.add(one)
            pending.extend(edges(one))
    return frozenset(seen)
