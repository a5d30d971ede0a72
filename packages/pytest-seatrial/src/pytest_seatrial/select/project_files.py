"""The files of a project: which there are, which a file imports, and which a command line or shell script names. Runs nothing."""

from __future__ import annotations

import ast
import itertools
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import NamedTuple, Self, TypeVar

SKIPPED = frozenset({".git", ".hg", "site-packages", "node_modules", "__pycache__", ".tox", ".nox"})
OURS = (".seatrial-select",)
NOISE = frozenset(
    (
        *(".pytest_cache", ".mypy_cache", ".ruff_cache", ".hypothesis", ".testmondata", ".coverage", ".benchmarks"),
        *("unit_results", "unit_results.json"),
    )
)

Stamp = tuple[int, int, int]


class Project(NamedTuple):
    """What stood under the root when the session began."""

    root: Path
    stamps: dict[str, Stamp]
    names: dict[str, tuple[str, ...]]
    environments: tuple[str, ...]
    roots: tuple[str, ...]
    roots_of: dict[str, tuple[str, ...]]
    began: int = 0
    below: str = ""  # where pytest's root lies, as a path in the project

    @classmethod
    def walk(cls, root: Path, path: Sequence[str] = (), below: str = "") -> Self:
        """Look at everything under `root`; `path` is the import path before collection, `below` pytest's own root."""
        began = time.time_ns()
        stamps: dict[str, Stamp] = {}
        names: dict[str, tuple[str, ...]] = {}
        environments = []
        pending = [""]
        while pending:
            here = pending.pop()
            try:
                with os.scandir(root / here) as found_here:
                    entries = list(found_here)
            except OSError:
                entries = []
            names[here] = tuple(entry.name for entry in entries)
            for entry in entries:
                name = f"{here}/{entry.name}" if here else entry.name
                if entry.is_dir(follow_symlinks=False):
                    if Path(entry.path, "pyvenv.cfg").exists():
                        environments.append(f"{name}/")
                    elif not skipped(entry.name):
                        pending.append(name)
                elif not noise(entry.name):
                    found = stamp(Path(entry.path))
                    if found is not None:
                        stamps[name] = found
        starts = [*path, str(root / below), str(root / below / "src")]
        roots = tuple(sorted(_roots(root, stamps, starts)))
        return cls(root, stamps, names, tuple(environments), roots, _tops(stamps, roots), began, below)

    def python(self) -> list[str]:
        return [name for name in self.stamps if name.endswith(".py")]

    def matching(self, patterns: Iterable[str]) -> list[str]:
        return sorted(name for name in self.stamps if any(fnmatch(name, pattern) for pattern in patterns))

    def kind(self, path: str) -> str:
        """What stood at `path`, in the words of `source_digests`."""
        return "directory" if path in self.names else "file" if path in self.stamps else "absent"

    def foreign(self, path: str) -> bool:
        """Whether a path of an event belongs to tools or to an environment rather than to the project."""
        return path.startswith(self.environments) or any(skipped(part) or noise(part) for part in path.split("/"))

    def relative(self, path: str | os.PathLike[str]) -> str | None:
        """The name of `path` in the project, or None for what lies outside."""
        real = os.path.realpath(self.root / path)
        inside = os.path.relpath(real, os.path.realpath(self.root))
        return None if inside == ".." or inside.startswith("../") else ("" if inside == "." else inside)


def stamp(path: Path) -> Stamp | None:
    """What tells that a file was written since; never used to say that two contents are equal."""
    try:
        found = path.stat()
    except (OSError, ValueError):
        return None
    return found.st_mtime_ns, found.st_ctime_ns, found.st_size


def skipped(name: str) -> bool:
    return name in SKIPPED or name in NOISE or name.startswith(OURS)


def noise(name: str) -> bool:
    """Files that test tools keep for themselves: their change says nothing."""
    return name in NOISE or name.startswith((*OURS, ".coverage.", ".testmondata")) or name.endswith((".pyc", ".pyo"))


def counts(name: str) -> bool:
    return not skipped(name) and not noise(name)


def _roots(root: Path, stamps: dict[str, Stamp], path: Sequence[str]) -> set[str]:
    """Directories from which a module may be imported by its full name."""
    inits = {name.rpartition("/")[0] for name in stamps if name.rpartition("/")[2] == "__init__.py"}
    roots = {"", "src"} | {name.rpartition("/")[0] for name in inits if name}
    for name in stamps:
        directory, _, last = name.rpartition("/")
        if last == "conftest.py" or (last.startswith("test_") and last.endswith(".py")) or last.endswith("_test.py"):
            roots.add(directory)
    real = os.path.realpath(root)
    for entry in path:
        inside = os.path.relpath(os.path.realpath(entry or "."), real)
        if not inside.startswith(".."):
            roots.add("" if inside == "." else inside)
    return {name for name in roots if name not in inits}


def _tops(stamps: dict[str, Stamp], roots: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
    """First names that can be imported, each with the roots that have it: most imports are of other people's packages."""
    tops: dict[str, set[str]] = {}
    known = frozenset(roots)
    for name in stamps:
        if not name.endswith(".py"):
            continue
        parts = name[:-3].split("/")
        for depth in range(len(parts)):
            above = "/".join(parts[:depth])
            if above in known:
                tops.setdefault(parts[depth], set()).add(above)
    return {name: tuple(sorted(found)) for name, found in tops.items()}


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
        for one in _imports_of(node):
            found[one] = None
        if isinstance(node, ast.If) and _name(node.test) == "TYPE_CHECKING":
            pending.extend(node.orelse)
        else:
            pending.extend(ast.iter_child_nodes(node))
    return sorted(found)


def _name(node: ast.AST) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _imports_of(node: ast.AST) -> Iterator[Import]:
    if isinstance(node, ast.Import):
        yield from ((0, alias.name, ()) for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        yield node.level, node.module or "", tuple(sorted(alias.name for alias in node.names))
    elif isinstance(node, ast.Call):
        if _name(node.func) in CALLS:
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
    seen: set[T] = set()
    pending = list(start)
    while pending:
        one = pending.pop()
        if one not in seen:
            seen.add(one)
            pending.extend(edges(one))
    return frozenset(seen)


SHELLS = frozenset({"sh", "bash", "dash", "zsh", "ksh", "source", "."})
WORD = re.compile(r"[\w@%+=:,./~*?\[\]-]+")
MAKES = frozenset({"make", "gmake"})
MAKEFILES = ("GNUmakefile", "makefile", "Makefile")
HIDING = re.compile(
    r"\benv\s+(-\S*\s+)*(-i\b|-\s|--ignore-environment|-u\s*(PYTHONPATH|SEATRIAL))|\bunset\b|\bPYTHONPATH=|\s-\w*[IES]\w*\s|\bsudo\b"
)
"""A shell that runs Python so that it cannot report."""
COMMAND = re.compile(r"\$\(([^()]*)\)")
VARIABLE = re.compile(r"\$\{[^}]*\}|\$\w+")
MODULE = re.compile(r"-m\s+([\w.]+)")


def named(argv: Sequence[str], project: Project, here: str = "", *, python: bool = False) -> frozenset[str]:
    """Files of the project that a command line names, with those that the scripts among them name."""
    found: set[str] = set()
    pending = list(_files(argv, project, here))
    told = frozenset(pending) if argv and argv[0].rpartition("/")[2] in SHELLS else frozenset()  # whatever they are called
    pending.extend(_modules(argv, project))
    if not python:
        pending.extend(_many(argv, project, here))
    while pending:
        path = pending.pop()
        if path in found:
            continue
        found.add(path)
        text = _script(path, project, told=path in told)
        if text is not None:
            for base in {path.rpartition("/")[0], here}:
                pending.extend(_files(_words(text), project, base))
                pending.extend(_many(_words(text), project, base))
            for module in MODULE.findall(text):
                pending.extend(_modules(["-m", module], project))
    return frozenset(found)


def hides(argv: Sequence[str], paths: Iterable[str], project: Project) -> bool:
    """Whether a command, or a script among the files that it names, takes our variables from the programs that it runs."""
    texts = [" ".join(argv), *filter(None, (_script(path, project) for path in paths))]
    return any(HIDING.search(text) for text in texts)


def _words(text: str) -> list[str]:
    """Words of a script; a variable or a command in a path leaves the part after it, and a command has words of its own."""
    kept = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))
    found: list[str] = []
    while inner := COMMAND.findall(kept):
        found += [word for command in inner for word in WORD.findall(VARIABLE.sub(" ", command))]
        kept = COMMAND.sub(" ", kept)
    return found + WORD.findall(VARIABLE.sub(" ", kept))


def _many(words: Iterable[str], project: Project, here: str) -> Iterable[str]:
    """What patterns, directories and `make` stand for."""
    every = [part.strip("\"'`,;()") for word in words for part in word.split()]
    bases = {"", here}
    for word in every:
        if any(sign in word for sign in "*?["):
            yield from _matching(word, project, bases)
        elif word.strip("./"):
            for base in {"", here}:
                inside = project.relative(f"{base}/{word}" if base and not word.startswith("/") else word)
                if inside and inside in project.names:
                    bases.add(inside)
                    yield f"{inside}/"
                    yield from (name for name in project.stamps if name.startswith(f"{inside}/"))
    if any(word.rpartition("/")[2] in MAKES for word in every):
        for base in bases:
            yield from (name for name in (f"{base}/{file}" if base else file for file in MAKEFILES) if name in project.stamps)


def _matching(word: str, project: Project, bases: Iterable[str]) -> Iterable[str]:
    for base in bases:
        pattern = project.relative(f"{base}/{word}" if base and not word.startswith("/") else word)
        if not pattern:
            continue
        directory = re.split(r"[*?\[]", pattern)[0].rpartition("/")[0]
        if directory in project.names:
            yield f"{directory}/"
        for name in project.matching([pattern]):
            yield name
            yield f"{name.rpartition('/')[0]}/"


def _files(words: Iterable[str], project: Project, here: str) -> Iterable[str]:
    tails: dict[str, list[str]] | None = None
    for word in words:
        for part in {word, word.rpartition("=")[2], *(word.split() if " " in word else ())}:
            clean = part.strip("\"'`,;()").removeprefix("./")
            if not clean:
                continue
            if clean.startswith("/"):
                inside = project.relative(clean)
                if inside in project.stamps:
                    yield inside
                    continue
                if tails is None:  # files by every ending of their path, so that what followed a variable is found
                    tails = {}
                    for name in project.stamps:
                        parts = name.split("/")
                        for at in range(len(parts)):
                            tails.setdefault("/" + "/".join(parts[at:]), []).append(name)
                yield from tails.get(clean, ())
            else:
                joined = (project.relative(f"{base}/{clean}" if base else clean) for base in {"", here})
                yield from (name for name in joined if name in project.stamps)


def _modules(argv: Sequence[str], project: Project) -> Iterable[str]:
    for flag, module in itertools.pairwise(argv):
        if flag == "-m":
            at = module.replace(".", "/")
            for root in project.roots:
                base = f"{root}/{at}" if root else at
                yield from (name for name in (f"{base}.py", f"{base}/__main__.py", f"{base}/__init__.py") if name in project.stamps)


def _script(path: str, project: Project, *, told: bool = False) -> str | None:
    """The text of a shell script, or None for anything else; `told`: a shell was given it."""
    if path.endswith((".py", "/")):
        return None
    try:
        with (project.root / path).open("rb") as stream:
            data = stream.read(1_000_000)
    except OSError:
        return None
    first = data.split(b"\n", 1)[0]
    named = told or path.endswith((".sh", ".bash", ".zsh", ".mk")) or path.rpartition("/")[2] in MAKEFILES
    shebang = first.startswith(b"#!") and any(shell.encode() in first for shell in SHELLS - {".", "source"})
    return data.decode("utf-8", "replace") if named or shebang else None
