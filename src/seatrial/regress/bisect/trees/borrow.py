"""One store: a bare repository of our own that borrows the objects of the user's repositories.

- The user's repositories are only read: their objects by `objects/info/alternates`, so a store costs no copy.
  (Git itself renews the time stamp of a borrowed object when a patch makes the same contents; the object stays as it is.)
- A store knows the user's tags (versions are derived from them), where a shallow clone ends, and where a partial clone gets the rest.
- Opening a store again, also one that was half made when Seatrial was killed, makes it whole.
"""

from __future__ import annotations

import hashlib
import re
import threading
from dataclasses import dataclass, field
from pathlib import Path

from seatrial.evidence.git import fields, git, line, quoted
from seatrial.evidence.repos import without_credentials
from seatrial.files import write_bytes, write_text

WHOLE = "seatrial-whole"
"""A file in a store that was unshallowed: where the user's clone ends is no longer its end."""


@dataclass(frozen=True, slots=True)
class Store:
    """One repository of our own."""

    name: str
    git_dir: Path
    sources: tuple[Path, ...]
    """The user's repositories that it borrows from: checkouts, or git directories of submodules."""
    lock: threading.Lock = field(default_factory=threading.Lock)
    """Held while something is fetched into it."""


def open_store(root: Path, name: str, sources: tuple[Path, ...], like: Path | None = None) -> Store:
    """The store of that name below `root`, made if it is not there. Without sources it is `like` another repository."""
    store = Store(name, root / f"{file_name(name)}.git", sources)
    store.git_dir.mkdir(parents=True, exist_ok=True)
    model = sources[0] if sources else like
    kind = line(git(model, "rev-parse", "--show-object-format")) if model else "sha1"
    for left in store.git_dir.glob("*.lock"):  # by a git that was killed: nobody else works in the stores of this bisect
        left.unlink(missing_ok=True)
    git(store.git_dir, "init", "--quiet", "--bare", "--template=", f"--object-format={kind}", ".")
    # Nothing names the fetched commits, and a clean-up would drop them.
    git(store.git_dir, "config", "gc.auto", "0")
    objects = (source / line(git(source, "rev-parse", "--git-path", "objects")) for source in sources)
    write_bytes(store.git_dir / "objects" / "info" / "alternates", b"".join(map(quoted, objects)))
    _copy_tags(store)
    _copy_shallow(store)
    for source in sources[:1]:
        _copy_remotes(store, source)
    return store


def _copy_tags(store: Store) -> None:
    tags: dict[str, str] = {}
    for source in store.sources:
        for row in line(git(source, "for-each-ref", "--format=%(refname) %(objectname)", "refs/tags")).splitlines():
            name, _, target = row.partition(" ")
            tags.setdefault(name, target)
    text = "".join(f"{target} {name}\n" for name, target in sorted(tags.items()))
    write_bytes(store.git_dir / "packed-refs", text.encode("utf-8", "surrogateescape"))


def _copy_shallow(store: Store) -> None:
    if (store.git_dir / WHOLE).exists():
        return
    files = [source / line(git(source, "rev-parse", "--git-path", "shallow")) for source in store.sources]
    ends = sorted({end for file in files if file.is_file() for end in file.read_text(encoding="ascii").split()})
    if ends:
        write_text(store.git_dir / "shallow", "".join(f"{end}\n" for end in ends))
    else:
        (store.git_dir / "shallow").unlink(missing_ok=True)


def _copy_remotes(store: Store, source: Path) -> None:
    """Where relative URLs start, and where a partial clone gets what it left out; without credentials."""
    wanted = r"^remote\..*\.(url|promisor|partialclonefilter)$"
    entries = [entry.partition("\n") for entry in fields(git(source, "config", "-z", "--get-regexp", wanted, ok=(0, 1)))]
    promisors = {key.removesuffix(".promisor") for key, _, value in entries if key.endswith(".promisor") and value == "true"}
    for key, _, value in entries:
        if key.rpartition(".")[0] in promisors or key == "remote.origin.url":
            git(store.git_dir, "config", key, without_credentials(value))


def setting(source: Path, key: str) -> str:
    """A value of a repository's configuration, or nothing."""
    return line(git(source, "config", "--get", key, ok=(0, 1)))


def file_name(name: str) -> str:
    """A name for a file; what had to be changed carries a hash, so that it stays unique."""
    if re.fullmatch(r"\w[\w.-]{0,80}", name, re.ASCII):
        return name
    return re.sub(r"[^\w.-]+", "_", name, flags=re.ASCII)[-60:].lstrip(".-") + "-" + hashlib.sha256(name.encode()).hexdigest()[:8]
