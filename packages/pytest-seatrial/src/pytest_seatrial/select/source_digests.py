"""Digests of dependencies (block, file, listing, absence), and the facts of a source file that they rest on."""

from __future__ import annotations

import ast
import hashlib
import marshal
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from pytest_seatrial.select.project_files import Import, Project, counts, imports, resolve, stamp
from pytest_seatrial.select.trace import instrument, memoized
from pytest_seatrial.select.trace.instrument import Slice, half, look

Names = dict[str, frozenset[str]]


class Other(NamedTuple):
    """The other names in one file."""

    aliases: Names
    kept: frozenset[str]
    decorators: Names


def other(tree: ast.Module) -> Other:
    """Look at one file; does not change the tree."""
    found: dict[str, set[str]] = {}
    kept: set[str] = set()
    pending: list[tuple[ast.AST, bool]] = [(tree, False)]  # with whether it stands inside a function
    while pending:
        node, inside = pending.pop()
        within = inside or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        pending.extend((child, within) for child in ast.iter_child_nodes(node))
        for name, value in _given(node):
            keeps = memoized.caches(value)
            if keeps:
                kept.add(name)
            if keeps or not inside:
                found.setdefault(name, set()).update(_words(value, called=keeps))
        if isinstance(node, ast.Import | ast.ImportFrom):
            for alias in node.names:
                if alias.asname and alias.asname != alias.name:
                    found.setdefault(alias.asname, set()).add(alias.name.rpartition(".")[2])
    decorators = {
        name: frozenset(word for part in node.decorator_list for word in _words(part, called=True))
        for name, node in instrument.functions(tree)
        if node.decorator_list
    }
    return Other({name: frozenset(words - {name}) for name, words in found.items() if words - {name}}, frozenset(kept), decorators)


def _given(node: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    if isinstance(node, ast.Assign | ast.AnnAssign | ast.NamedExpr) and node.value is not None:
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        for target in targets:
            for part in ast.walk(target):
                if isinstance(part, ast.Name):
                    yield part.id, node.value
                elif isinstance(part, ast.Attribute):
                    yield part.attr, node.value


def _words(value: ast.AST, *, called: bool) -> Iterator[str]:
    """Names in an expression: of `a.b.c` the last; without what is called unless that is asked for."""
    pending = [value]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr
            if not isinstance(node.value, ast.Name | ast.Attribute):
                pending.append(node.value)
        elif isinstance(node, ast.Call) and not called:
            inner = node.func
            pending.extend([*node.args, *(part.value for part in node.keywords)])
            name = memoized.last(inner)
            if not name or name.lstrip("_")[:1].isupper():  # called like a class: its instances do things later
                pending.append(inner)
        else:
            pending.extend(ast.iter_child_nodes(node))


class SourceFacts(NamedTuple):
    """One content of a Python file; `level` holds names used at module level outside import statements."""

    blocks: dict[str, str]
    halves: dict[int, str]  # blocks by their part of a number (`trace.blocks`)
    imports: tuple[Import, ...]
    mentions: dict[str, frozenset[str]]
    sticky: frozenset[str]
    keepers: dict[str, tuple[Slice, ...]]
    setters: dict[str, frozenset[str]]
    remote: frozenset[str]
    level: frozenset[str]
    other: Other

    def to_bytes(self) -> bytes:
        keepers = {name: tuple(tuple(one) for one in some) for name, some in self.keepers.items()}
        plain = self._asdict() | {"keepers": keepers, "other": tuple(self.other)}
        return marshal.dumps(tuple(plain.values()))

    @classmethod
    def from_bytes(cls, data: bytes) -> SourceFacts:
        found = cls(*marshal.loads(data))
        keepers = {name: tuple(Slice(*one) for one in some) for name, some in found.keepers.items()}
        return found._replace(keepers=keepers, other=Other(*found.other))


def sha(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def facts(source: bytes) -> SourceFacts:
    try:
        tree = instrument.parse_source(source)
    except instrument.BROKEN:
        return SourceFacts({"*": sha(source)}, {}, (), {}, frozenset(), {}, {}, frozenset(), frozenset(), Other({}, frozenset(), {}))
    imported, level, names = tuple(imports(tree)), frozenset(_level(tree)), other(tree)
    found = look(tree)  # the last: it changes the tree
    halves = {half(block): block for block in found.digests}
    return SourceFacts(
        found.digests, halves, imported, found.mentions, found.sticky, found.keepers, found.setters, found.remote, level, names
    )


class Shelf:
    """Facts from the cache, or found and put there; `version` is that of our own text, which says what facts mean."""

    def __init__(self, cache: Path | None, version: str) -> None:
        self._cache = "" if cache is None else str(cache)
        self._tag = f"facts\0{version}\0{sys.version}\0".encode()

    def __call__(self, source: bytes) -> SourceFacts:
        place = instrument.cached_place(self._cache, self._tag + source)
        data = instrument.load_cached(place)
        if data is not None:
            return SourceFacts.from_bytes(data)
        found = facts(source)
        instrument.store_cached(self._cache, place, found.to_bytes())
        return found


def _level(tree: ast.Module) -> Iterator[str]:
    """Names that run at import: everything but import statements and the bodies of functions."""
    pending: list[ast.AST] = [tree]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Import | ast.ImportFrom):
            continue
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            pending.extend([*node.decorator_list, node.args])
        else:
            pending.extend(ast.iter_child_nodes(node))


LEVEL = ""
WHOLE = "*"
LISTING = "/"
EXISTS = "?"
IMPORTS = "@imports"
ABSENT = "absent"
UNSETTLED = "unsettled"

# A path, a block in it, and its digest.
Version = tuple[str, str, str]


class Digests:
    def __init__(self, project: Project, look: Callable[[bytes], SourceFacts] = facts) -> None:
        self.project = project
        self._look = look
        self._facts: dict[str, SourceFacts] = {}
        self._targets: dict[str, frozenset[str]] = {}
        self._now: dict[tuple[str, str], str] = {}
        self._same: dict[str, bool] = {}

    def now(self, path: str, block: str) -> str:
        key = (path, block)
        if key not in self._now:
            self._now[key] = self._find(path, block)
        return self._now[key]

    def version(self, path: str, block: str) -> Version:
        """A dependency as it is recorded now: with `UNSETTLED` for what changed since the session began."""
        if self._settled(path, block):
            return path, block, self.now(path, block)
        # Records speak of how a session began: what is made on the way by a test or a tool was not there.
        return path, block, self.project.kind(path) if block == EXISTS else UNSETTLED

    def _settled(self, path: str, block: str) -> bool:
        """Whether this is as it was when the session began; what was not looked at then is taken as it is."""
        if path not in self._same:
            names = self.project.names.get(path)
            if names is not None or _is_dir(self.project.root / path):
                self._same[path] = names is not None and _names(self.project.root / path) == frozenset(filter(counts, names))
            else:
                known = path if path in self.project.stamps else self.project.relative(path)  # a link on the way has another name
                self._same[path] = known is None or stamp(self.project.root / path) == self.project.stamps.get(known)
        if block == EXISTS and not self._same[path]:
            return self._kind(path) == self.project.kind(path)
        return self._same[path] or (block != LISTING and path in self.project.names)

    def facts(self, path: str) -> SourceFacts | None:
        """Facts of a Python file, None when it is not there."""
        if path not in self._facts and (data := self._read(path)) is not None:
            self._facts[path] = self._look(data)
        return self._facts.get(path)

    def mentions(self, path: str, block: str) -> frozenset[str]:
        found = self.facts(path) if path.endswith(".py") else None
        return found.mentions.get(block, frozenset()) if found else frozenset()

    def targets(self, path: str) -> frozenset[str]:
        if path not in self._targets:
            found = self.facts(path)
            self._targets[path] = resolve(path, found.imports, self.project) if found else frozenset()
        return self._targets[path]

    def _find(self, path: str, block: str) -> str:
        if block == LISTING:
            names = _names(self.project.root / path)
            return ABSENT if names is None else sha("\n".join(sorted(names)).encode("utf-8", "surrogateescape"))
        if block == WHOLE:
            if _is_dir(self.project.root / path):
                return "directory"
            data = self._read(path)
            return ABSENT if data is None else sha(data)
        if block == EXISTS:
            return self._kind(path)
        found = self.facts(path)
        if found is None:
            return ABSENT
        if block == IMPORTS:
            return sha("\n".join(sorted(self.targets(path))).encode())
        if WHOLE in found.blocks:
            return f"unreadable {found.blocks[WHOLE]}"
        return found.blocks.get(block, ABSENT)

    def _kind(self, path: str) -> str:
        place = self.project.root / path
        return "directory" if _is_dir(place) else "file" if os.path.exists(place) else ABSENT  # noqa: PTH110  # as _is_dir

    def _read(self, path: str) -> bytes | None:
        try:
            return (self.project.root / path).read_bytes()
        except (OSError, ValueError):
            return None


def _is_dir(path: Path) -> bool:
    # Unlike those of Path this never raises: a test may ask for names that no file can have.
    return os.path.isdir(path)  # noqa: PTH112


def _names(directory: Path) -> frozenset[str] | None:
    """Names in a directory, without those that tools keep for themselves."""
    try:
        return frozenset(filter(counts, (path.name for path in directory.iterdir())))
    except (OSError, ValueError):
        return None
