"""The patch that turns a clean checkout of the recorded commit into the tree under test.

- It holds everything that differs from HEAD: staged, unstaged, untracked and binary files, and the same of every
  submodule (paths in front, against the commit that the submodule has checked out), so that one `git apply` restores it.
- What it cannot hold is said in its first lines, which `git apply` skips: files beyond the limit (with size and hash),
  files behind a filter that was not run, repositories inside the checkout, and lines that were redacted.
- Binary hunks are encoded and are not redacted; a changed letter there would make the patch unusable. Key files are left out.
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

_HUNK = re.compile(r"@@ -\d+(?:,\d+)? \+\d+(?:,\d+)? @@ ?")
_KEY_FILE = re.compile(
    r"(?i)\.(?:p12|pfx|jks|keystore|kdbx?|pem|key|der|ppk|gpg|asc)$|/id_(?:rsa|dsa|ecdsa|ed25519)[^/]*$|/(?:private|secret)[^/]*$"
)
# In program text the right side of `token = …` is an expression; only literals can be secrets there.
_PROGRAM = re.compile(r"\.(?:py|pyi|pyx|c|cc|cpp|cu|cuh|h|hpp|rs|go|js|ts|tsx|java)$")


def make_patch(root: Path, redactor: Redactor) -> bytes:
    """The full patch of the checkout at `root` against its HEAD, redacted."""
    notes: list[str] = []
    body: list[str] = []
    redacted = 0
    for piece in _pieces(root, "", notes):
        for before, after in _redact(piece, redactor, notes):
            redacted += before != after
            body.append(after)
    if redacted:
        notes.append(f"{redacted} lines are redacted; where they stand this patch differs from the tree under test")
    head = "".join(f"# seatrial: {redactor.text(note)}\n" for note in notes)
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
        notes += [f"{_left_out(root, prefix, path)}; no filter of a checkout is run, so it may differ" for path in tree.unfiltered]
        yield text(sink.read())
        submodules = gitlinks(root, tree.index)
    for link in submodules:
        if is_checkout(root, link.path):
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


def _redact(patch: str, redactor: Redactor, notes: list[str]) -> Iterator[tuple[str, str]]:
    """Each line of a patch before and after redaction. All lines of a file belong together: a key block may begin in one hunk and
    end in the next, and git repeats a line of the file behind `@@`."""
    file: list[str] = []
    for row in io.StringIO(patch, newline="\n"):  # a carriage return is content, not the end of a line
        if row.startswith("diff --git ") and file:
            yield from _redact_file(file, redactor, notes)
            file = []
        file.append(row)
    yield from _redact_file(file, redactor, notes)


def _redact_file(rows: list[str], redactor: Redactor, notes: list[str]) -> Iterator[tuple[str, str]]:
    """The lines of one file: its header holds names, its hunks hold text; a binary hunk is left as it is, or left out."""
    first = next((at for at, row in enumerate(rows) if row.startswith(("@@ ", "GIT binary patch"))), len(rows))
    header, body = rows[:first], rows[first:]
    name = next((row for row in header if row.startswith("+++ ")), header[0] if header else "").rstrip('\t\n"')
    if body and body[0].startswith("GIT binary patch") and _KEY_FILE.search(name):
        notes.append(f"left out {name.partition(' b/')[2]!r}: a binary file that holds keys by its name")
        return
    yield from ((row, redactor.text(row)) for row in header)
    if body and body[0].startswith("GIT binary patch"):
        yield from ((row, row) for row in body)
        return
    cuts = [_sign(row) for row in body]
    texts = redactor.rows([row[cut:] for row, cut in zip(body, cuts, strict=True)], program=_PROGRAM.search(name) is not None)
    yield from ((row, row[:cut] + text) for row, cut, text in zip(body, cuts, texts, strict=True))


def _sign(row: str) -> int:
    """How much of a line of a hunk is git's own: the sign, or the place of the hunk."""
    place = _HUNK.match(row)
    return place.end() if place else 1
