"""The patch that turns a clean checkout of the recorded commit into the tree under test.

- It holds everything that differs from HEAD: staged, unstaged, untracked and binary files, and the same of every
  submodule (paths in front, against the commit that the submodule has checked out), so that one `git apply` restores it.
- What it cannot hold is said in its first lines, which `git apply` skips: files beyond the limit (with size and hash),
  repositories inside the checkout, and lines that were redacted.
- Binary hunks are encoded and are never redacted; a changed letter there would make the patch unusable.
"""

from __future__ import annotations

import hashlib
import io
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

from seatrial.evidence.git import DIFF, git, text
from seatrial.evidence.redact import Redactor
from seatrial.evidence.worktree import gitlinks, is_checkout, worktree
from seatrial.model.errors import UserError

# In program text the right side of `token = …` is an expression; only literals can be secrets there.
_PROGRAM = re.compile(r"\.(?:py|pyi|pyx|ipynb|c|cc|cpp|cu|cuh|h|hpp|rs|go|js|ts|tsx|java|md|rst|patch|diff)$")


def make_patch(root: Path, redactor: Redactor) -> bytes:
    """The full patch of the checkout at `root` against its HEAD, redacted."""
    notes: list[str] = []
    body: list[str] = []
    redacted = 0
    for piece in _pieces(root, "", notes):
        for before, after in _redact(piece, redactor):
            redacted += before != after
            body.append(after)
    if redacted:
        notes.append(f"{redacted} lines are redacted; where they stand this patch differs from the tree under test")
    head = "".join(f"# seatrial: {note}\n" for note in notes)
    return (head + "".join(body)).encode("utf-8", "surrogateescape")


def _pieces(root: Path, prefix: str, notes: list[str]) -> Iterator[str]:
    """The diff of a checkout, then those of its submodules; what is left out is added to `notes`."""
    with worktree(root) as tree, tempfile.TemporaryFile() as sink:
        options = (
            "--binary",
            "--full-index",
            "--no-renames",
            "--ignore-submodules=dirty",
            f"--src-prefix=a/{prefix}",
            f"--dst-prefix=b/{prefix}",
        )
        git(root, *DIFF, *options, "HEAD", "--", index=tree.index, into=sink)
        sink.seek(0)
        notes += [_left_out(root, prefix, path) for path in tree.left_out]
        yield text(sink.read())
        submodules = gitlinks(root, tree.index)
    for link in submodules:
        if is_checkout(root / link.path):
            yield from _pieces(root / link.path, f"{prefix}{link.path}/", notes)


def _left_out(root: Path, prefix: str, path: str) -> str:
    name = repr(prefix + path)
    if path.endswith("/"):
        return f"left out {name}: a git repository of its own"
    try:
        with (root / path).open("rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
            return f"left out {name}: {stream.tell()} bytes, sha256 {digest}"
    except OSError as error:
        raise UserError(f"{root / path}: cannot read: {error.strerror or error}", "make it readable, or list it in .gitignore") from error


def _redact(patch: str, redactor: Redactor) -> Iterator[tuple[str, str]]:
    """Each line of a patch before and after redaction; headers and binary hunks are left as they are."""
    lines = redactor.lines()
    in_hunk = False
    for row in io.StringIO(patch, newline="\n"):  # a carriage return is content, not the end of a line
        if row.startswith(("diff --git ", "@@ ")):
            in_hunk = row.startswith("@@ ")
        elif in_hunk:
            yield row, row[0] + lines.line(row[1:])
            continue
        elif row.startswith("+++ "):
            lines = redactor.lines(program=_PROGRAM.search(row.rstrip('\t\n"')) is not None)
        yield row, row
