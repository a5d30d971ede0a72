"""Git LFS: files whose contents git does not hold.

- Git LFS that skips its downloads, or is not installed, leaves pointers in a work tree. They are no contents: what then fails would
  look like the fault of the revision.
- Git LFS itself never runs on a checkout: its configuration can name commands. A pointer is made here from the contents, and
  contents are copied from where Git LFS keeps them.
"""

from __future__ import annotations

import hashlib
import re
import shutil
from pathlib import Path

from seatrial.evidence.git import fields, git, line
from seatrial.files import LFS_POINTER, is_lfs_pointer, read_text

DRIVER = "lfs"
"""The filter that `.gitattributes` names for files of Git LFS."""
_OID = re.compile(rb"^oid sha256:([0-9a-f]{64})$", re.MULTILINE)


def pointers(place: Path) -> list[str]:
    """Paths in the work tree at `place` that are pointers and not what they point to."""
    attributes = [place / path for path in fields(git(place, "ls-files", "-z")) if path.rpartition("/")[2] == ".gitattributes"]
    if not any("filter=lfs" in read_text(file) for file in attributes if file.is_file()):
        return []
    held = fields(git(place, "grep", "-l", "-z", "--cached", "-F", LFS_POINTER, ok=(0, 1)))
    return [path for path in held if is_lfs_pointer(place / path)]


def pointer_of(path: Path) -> bytes | None:
    """The pointer that Git LFS would give git for the contents of a file; None for one that goes to git as it is."""
    if is_lfs_pointer(path) or path.stat().st_size == 0:
        return None
    with path.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
        return f"{LFS_POINTER}\noid sha256:{digest}\nsize {stream.tell()}\n".encode()


def smudge(source: Path, place: Path) -> None:
    """Replace pointers in the work tree at `place` by what they point to, where Git LFS keeps it for the checkout `source`."""
    kept = source / line(git(source, "rev-parse", "--git-common-dir")) / "lfs" / "objects"
    if not kept.is_dir():
        return
    for path in pointers(place):
        target = place / path
        if target.is_symlink() or (found := _OID.search(target.read_bytes()[:1024])) is None:
            continue
        name = found[1].decode()
        held = kept / name[:2] / name[2:4] / name
        if held.is_file() and _digest(held) == name:
            target.unlink()  # never write through a hard link
            shutil.copyfile(held, target)


def _digest(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
