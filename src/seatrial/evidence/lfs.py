"""Git LFS: files whose contents git does not hold.

Git LFS that skips its downloads, or is not installed, leaves pointers in a work tree. They are no contents: what then fails would
look like the fault of the revision.
"""

from __future__ import annotations

from pathlib import Path

from seatrial.evidence.git import fields, git
from seatrial.files import read_text

POINTER = "version https://git-lfs.github.com/spec/v1"


def pointers(place: Path) -> list[str]:
    """Paths in the work tree at `place` that are pointers and not what they point to."""
    attributes = [place / path for path in fields(git(place, "ls-files", "-z")) if path.rpartition("/")[2] == ".gitattributes"]
    if not any("filter=lfs" in read_text(file) for file in attributes if file.is_file()):
        return []
    held = fields(git(place, "grep", "-l", "-z", "--cached", "-F", POINTER, ok=(0, 1)))
    return [path for path in held if is_pointer(place / path)]


def is_pointer(path: Path) -> bool:
    """Whether this file is a pointer."""
    try:
        with path.open("rb") as stream:
            return stream.read(len(POINTER)) == POINTER.encode()
    except OSError:
        return False
