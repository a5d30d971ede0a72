"""What a change touches: paths, lines and functions between a base commit and the work tree.

- The comparison starts at the merge base of the given base and HEAD and ends at the work tree, so uncommitted and untracked work
  counts. Without a base one is chosen, and the answer holds the reason.
- A function is altered when its own code differs: signature, decorators and body, without docstrings, comments and layout.
"""

from __future__ import annotations

import ast
import hashlib
import re
import shlex
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from pydantic import Field

from seatrial.core.errors import UserError
from seatrial.core.files import read_model
from seatrial.core.guarded import parse_python
from seatrial.core.records import Record, RepoState
from seatrial.evidence.git import DIFF, MissingObjectsError, commit_of, fields, git, line, no_commits, text, top_level, unparsable
from seatrial.evidence.repos import gitlinks, is_checkout, read_status, worktree

PathStatus = Literal["A", "M", "D", "R", "T"]
LINES_LIMIT = 16 * 1024 * 1024

LAST_COMMIT = "nothing is uncommitted and HEAD is on the main branch: the last commit"
EVERY_FILE = "HEAD has no parent (first commit, or a shallow clone): every file"
_DEFAULTS = ("origin/HEAD", "origin/main", "origin/master", "main", "master")
_GITLINK = "160000"
_FILES = ("100644", "100755")
UNREADABLE = b"\0"
"""Contents that no parser takes."""
_HUNK = re.compile(r"@@ -(\d+)(?:,\d+)? \+(\d+)(?:,\d+)? @@ ?(.*)")
_ESCAPED = re.compile(rb"\\([abtnvfr\\\"]|[0-7]{3})")
_LETTERS = dict(zip(b"abtnvfr", b"\a\b\t\n\v\f\r", strict=True))


@dataclass(frozen=True, slots=True)
class ChangedPath:
    """One path that differs from the base."""

    path: str
    status: PathStatus
    """Added (or untracked), modified, deleted, renamed, type changed."""
    old_path: str | None = None


@dataclass(frozen=True, slots=True)
class Changes:
    """The paths of a change and what they were compared with."""

    base: str
    """The commit compared with; the empty tree when HEAD has no parent."""
    base_reason: str
    paths: tuple[ChangedPath, ...]

    def is_guess(self) -> bool:
        """Whether the base is only the best that could be found: good for choosing levels, not for saying what the change is."""
        return self.base_reason in (LAST_COMMIT, EVERY_FILE)


@dataclass(frozen=True, slots=True)
class ChangedLine:
    """One added or removed line."""

    path: str
    number: int
    """In the new file, or in the old one when it was removed."""
    text: str
    removed: bool = False
    within: str = ""
    """What git says stands above: the line that opens the function, class or list around it, cut after some 80 letters."""


@dataclass(frozen=True, slots=True)
class ChangedLines:
    """Added and removed lines."""

    lines: tuple[ChangedLine, ...]
    complete: bool
    """False when the diff is longer than the limit or files were too large to read: a word that is missing proves nothing."""

    def __iter__(self) -> Iterator[str]:
        """Their texts."""
        return (line.text for line in self.lines)


@dataclass(frozen=True, slots=True)
class _Entry:
    """One record of `git diff --raw`."""

    change: ChangedPath
    old_mode: str
    """Empty, as the others, for a file that cannot be compared."""
    old_commit: str
    new_mode: str


def read_changes(path: Path, base: str | None = None) -> Changes:
    """Everything that differs between `base` (or a base chosen here) and the work tree of the checkout at `path`."""
    root = top_level(path)
    commit, reason = _base(root, base)
    return Changes(base=commit, base_reason=reason, paths=tuple(_paths(root, commit)))


def changed_lines(path: Path, base: str | None = None) -> ChangedLines:
    """The added and removed lines of the change, for matching words; submodules included where their old commit is known."""
    root = top_level(path)
    commit, _ = _base(root, base)
    lines: list[ChangedLine] = []
    left, complete = LINES_LIMIT, True
    for piece, whole in _diffs(root, commit):
        taken = piece[:left]
        complete = complete and whole and len(taken) == len(piece)
        left -= len(taken)
        lines += _marked_lines(text(taken))
    return ChangedLines(tuple(lines), complete)


def _blob(root: Path, name: str) -> bytes:
    try:
        return git(root, "cat-file", "blob", name)
    except UserError:
        return UNREADABLE


def _unescaped(found: re.Match[bytes]) -> bytes:
    code = found[1]
    return bytes([int(code, 8) if len(code) > 1 else _LETTERS.get(code[0], code[0])])


def base_contents(root: Path, commit: str, prefix: str = "") -> Iterator[tuple[str, bytes | None]]:
    """Every changed Python file as it was at a commit, under its path of today; None for one that is new, `UNREADABLE` for one that git
    cannot give (a partial clone). Deleted files are left out."""
    entries, left_out = _raw(root, commit)
    for entry in entries:
        name, gone = entry.change.path, entry.change.status == "D"
        if name.endswith(".py") and not entry.new_mode:  # behind a filter that is not run
            yield prefix + name, UNREADABLE
        elif name.endswith(".py") and not gone and entry.new_mode in _FILES:
            yield prefix + name, _blob(root, entry.old_commit) if entry.old_mode in _FILES else None
    for name in left_out:
        if name.endswith(".py"):
            yield prefix + name, None
    for submodule, old in _moved_submodules(root, entries):
        yield from base_contents(root / submodule, old, f"{prefix}{submodule}/")


def _base(root: Path, base: str | None) -> tuple[str, str]:
    """The commit to compare with, and why."""
    head = commit_of(root, "HEAD")
    if head is None:
        raise no_commits(root)
    if base is not None:
        commit = commit_of(root, base)
        if commit is None:
            raise UserError(
                f"{root}: unknown base {base!r}", f"git -C {shlex.quote(str(root))} fetch origin, or name a commit or branch that exists"
            )
        fork = _merge_base(root, commit)
        if fork is None:
            message = f"{root}: base {base!r} and HEAD have no common commit"
            raise UserError(message, f"fetch the whole history: git -C {shlex.quote(str(root))} fetch --unshallow origin")
        return fork, f"the merge base of {base} and HEAD" if fork != commit else f"the given base {base}"
    for candidate in _DEFAULTS:
        commit = commit_of(root, candidate)
        fork = _merge_base(root, commit) if commit else None
        if fork and fork != head:
            return fork, f"the merge base of {candidate} and HEAD"
        if fork:
            break  # HEAD is on the main branch
    if read_status(root).dirty:
        return head, "uncommitted work against HEAD"
    parent = commit_of(root, "HEAD~1")
    if parent:
        return parent, LAST_COMMIT
    return line(git(root, "hash-object", "-t", "tree", "--stdin")), EVERY_FILE


def _merge_base(root: Path, commit: str) -> str | None:
    found = line(git(root, "merge-base", commit, "HEAD", ok=(0, 1)))
    return found or None


def _paths(root: Path, commit: str) -> Iterator[ChangedPath]:
    entries, left_out = _raw(root, commit)
    found = [entry.change for entry in entries] + [ChangedPath(path, "A") for path in left_out]
    for submodule, old in _moved_submodules(root, entries):
        for inner in _paths(root / submodule, old):
            old_path = None if inner.old_path is None else f"{submodule}/{inner.old_path}"
            found.append(ChangedPath(f"{submodule}/{inner.path}", inner.status, old_path))
    yield from sorted(found, key=lambda change: change.path)


def _raw(root: Path, commit: str) -> tuple[list[_Entry], tuple[str, ...]]:
    """The records of the diff, and untracked paths that were not read."""
    with worktree(root) as tree:
        options = (*DIFF, "--raw", "-z", "--no-abbrev", "--ignore-submodules=dirty")
        try:
            entries = list(_records(root, fields(git(root, *options, "-M", commit, "--", index=tree.index))))
        except MissingObjectsError:
            # A partial clone: what was committed is told by names of contents, and only what is uncommitted by contents.
            sides = (("--cached", commit), ("HEAD",))
            rows = [fields(git(root, *options, "--no-renames", *side, "--", index=tree.index)) for side in sides]
            found = {entry.change.path: entry for row in reversed(rows) for entry in _records(root, row)}
            entries = list(found.values())
        links = gitlinks(root, tree.index)
    known = {entry.change.path for entry in entries}
    entries += [_Entry(ChangedPath(path, "M"), "", "", "") for path in tree.unfiltered if path not in known]
    for link in links:  # git does not look for changes inside submodules, where it would run what they configure
        if link.path not in known and is_checkout(root, link.path) and read_status(root / link.path).dirty:
            entries.append(_Entry(ChangedPath(link.path, "M"), _GITLINK, link.commit, _GITLINK))
    return entries, tree.left_out


def _records(root: Path, data: list[str]) -> Iterator[_Entry]:
    """Parse `:<mode> <mode> <id> <id> <status>`, path, and for a rename the new path."""
    rest = iter(data)
    for head in rest:
        columns = head.removeprefix(":").split(" ")
        path = next(rest, "")
        if not head.startswith(":") or len(columns) != 5 or not path:
            raise unparsable(root, "diff --raw", head)
        old_mode, new_mode, old_id, _, letter = columns
        status: PathStatus | None = next((known for known in get_args(PathStatus) if letter[:1] == known), None)
        if status is None or (len(letter) > 1) != (status == "R"):
            raise unparsable(root, "diff --raw", head)
        if status == "R":
            new_path = next(rest, "")
            if not new_path:
                raise unparsable(root, "diff --raw", head)
            yield _Entry(ChangedPath(new_path, status, path), old_mode, old_id, new_mode)
        else:
            yield _Entry(ChangedPath(path, status), old_mode, old_id, new_mode)


def _moved_submodules(root: Path, entries: list[_Entry]) -> Iterator[tuple[str, str]]:
    """Path and old commit of changed submodules whose insides can be compared."""
    for entry in entries:
        directory = root / entry.change.path
        if entry.old_mode != _GITLINK or entry.new_mode != _GITLINK or not is_checkout(root, entry.change.path):
            continue
        if commit_of(directory, entry.old_commit):
            yield entry.change.path, entry.old_commit


def _diffs(root: Path, commit: str, prefix: str = "") -> Iterator[tuple[bytes, bool]]:
    """The diff of the checkout and of its changed submodules, up to a little above the limit; and whether all was read."""
    with worktree(root) as tree, tempfile.TemporaryFile() as sink:
        places = (f"--src-prefix=a/{prefix}", f"--dst-prefix=b/{prefix}")
        options = (*DIFF, "--unified=0", "--no-renames", "--ignore-submodules=dirty", *places)
        complete = not tree.left_out and not tree.unfiltered
        try:
            git(root, *options, commit, "--", index=tree.index, into=sink)
        except MissingObjectsError:  # a partial clone: at least what is uncommitted
            complete = False
            sink.truncate(0)
            sink.seek(0)
            git(root, *options, "HEAD", "--", index=tree.index, into=sink)
        sink.seek(0)
        yield sink.read(LINES_LIMIT + 1), complete
    for submodule, old in _moved_submodules(root, _raw(root, commit)[0]):
        yield from _diffs(root / submodule, old, f"{prefix}{submodule}/")


def _marked_lines(diff: str) -> Iterator[ChangedLine]:
    """Added and removed lines; `---` and `+++` in front of the first hunk name files and are none."""
    path, within, old, new, in_hunk = "", "", 0, 0, False
    for row in diff.split("\n"):
        if row.startswith("diff --git "):
            path, in_hunk = "", False
        elif hunk := _HUNK.match(row):
            old, new, within, in_hunk = int(hunk[1]), int(hunk[2]), hunk[3], True
        elif not in_hunk and row.startswith(("--- ", "+++ ")):
            path = _named(row[4:]) or path
        elif in_hunk and row.startswith("+"):
            yield ChangedLine(path, new, row[1:], within=within)
            new += 1
        elif in_hunk and row.startswith("-"):
            yield ChangedLine(path, old, row[1:], removed=True, within=within)
            old += 1


def _named(name: str) -> str:
    """The path that a `---` or `+++` line names; nothing for the side where there is no file."""
    name = name.removesuffix("\t")  # behind a name with spaces
    if name.startswith('"'):
        raw = name.strip('"').encode("utf-8", "surrogateescape")
        name = text(
            _ESCAPED.sub(lambda found: bytes([int(found[1], 8) if len(found[1]) > 1 else _LETTERS.get(found[1][0], found[1][0])]), raw)
        )
    return "" if name == "/dev/null" else name.partition("/")[2]


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
            before, paths = dict(base_contents(top_level(Path(repo.path)), repo.base)), read_changes(Path(repo.path), repo.base).paths
        except UserError as error:
            unknown[repo.name] = error.message
            continue
        files += [made for path in sorted(before) if (made := _file(repo, path, before[path]))]
        deleted[repo.name] = tuple(item.path for item in paths if item.status == "D" and item.path.endswith(".py"))
        others = [item.path for item in paths if item.status != "D" and not item.path.endswith(".py")]
        unseen[repo.name] = tuple(path for path in others if (place := Path(repo.path, path)).is_file() and _in_package(repo, place))
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


def _in_package(repo: RepoState, place: Path) -> bool:
    """Whether a file belongs to a package of the checkout; what lies in a submodule may be one that the loop imports."""
    if any(item.path and place.is_relative_to(Path(repo.path, item.path)) for item in repo.submodules):
        return "tests" not in place.relative_to(repo.path).parts
    roots = [Path(repo.import_root, *package.split(".")) for package in repo.packages] if repo.import_root else []
    return any(place.is_relative_to(root) for root in roots)


def _compared(before: bytes | None, after: bytes) -> tuple[tuple[ChangedFunction, ...], tuple[str, ...], bool]:
    """The altered functions of a file, what it lost, and whether it could be parsed."""
    try:
        tree = parse_python(after)
        new = _Pieces(tree).found
        old = _Pieces(parse_python(before)).found if before is not None else []
    except _UNPARSABLE:
        return (), (), False
    known: dict[tuple[str, bool], set[str]] = {}
    for piece, code in old:
        known.setdefault((piece.name, piece.at_import), set()).add(code)
    altered = tuple(piece for piece, code in new if code not in known.get((piece.name, piece.at_import), ()))
    if before is None and not _body(tree.body):  # a new module that holds no more than its docstring
        altered = tuple(piece for piece in altered if piece.name != MODULE)
    names = {piece.name for piece, _ in new}
    return altered, tuple(dict.fromkeys(name for (name, _) in known if name not in names and not name.endswith(LAMBDA))), True


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
        head = [
            self._text(part, around, at_import) for part in (node.args, node.decorator_list, node.returns, getattr(node, "type_params", []))
        ]
        code = self._statements(node.body, f"{name}.<locals>.", False)
        compiled = any(map(_compiles, node.decorator_list))
        self.found.append((ChangedFunction(name=name, line=_first(node), compiled=compiled), f"{type(node).__name__} {head} {code}"))

    def _class(self, node: ast.ClassDef, around: str, at_import: bool) -> None:
        name = around + node.name
        head = [
            self._text(part, around, at_import)
            for part in (node.bases, node.keywords, node.decorator_list, getattr(node, "type_params", []))
        ]  # since Python 3.12
        code = self._statements(node.body, f"{name}.", at_import)
        self.found.append((ChangedFunction(name=name, line=_first(node), at_import=at_import), f"{head} {code}"))

    def _lambda(self, node: ast.Lambda, around: str, at_import: bool) -> str:
        name = around + LAMBDA
        head = self._text(node.args, around, at_import)
        body = self._text(node.body, f"{name}.<locals>.", False)
        column = node.body.col_offset if node.lineno in self.shared else 0
        self.found.append((ChangedFunction(name=name, line=node.lineno, column=column), f"{head} {body}"))
        return f"lambda {head}: {body}"


def _compiles(decorator: ast.expr) -> bool:
    """Whether a decorator hands the function to a compiler that is not Python's; Dynamo (`torch.compile`) tells what it runs."""
    named = ast.unparse(decorator.func if isinstance(decorator, ast.Call) else decorator)
    return named in COMPILERS or named.startswith(("triton.", "numba.", "tilelang.", "cute.")) or named.endswith((".jit", ".njit"))


def _first(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> int:
    return min([node.lineno, *(item.lineno for item in node.decorator_list)])
