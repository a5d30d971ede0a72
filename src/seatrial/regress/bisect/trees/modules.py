"""What a commit says about its submodules: where they are, at which commits, and where their repositories are.

Everything is read from commits, never from a work tree, so it works in a bare repository too.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from seatrial.evidence.git import fields, git


@dataclass(frozen=True, slots=True)
class Module:
    """A submodule as `.gitmodules` declares it."""

    name: str
    url: str
    """Empty when there is none."""
    left_out: bool
    """`update = none`: git does not populate it unless it is told to."""


def declared(git_dir: Path, commit: str, path: str) -> Module:
    """The submodule at `path` of a commit; one that `.gitmodules` forgot has its path for a name."""
    options = ("config", "--blob", f"{commit}:.gitmodules", "-z", "--list")
    entries = fields(git(git_dir, *options)) if _has_gitmodules(git_dir, commit) else []
    values = dict(_split(entry) for entry in entries)
    name = next((key[0] for key, value in values.items() if key[1] == "path" and value.rstrip("/") == path), path)
    return Module(name, values.get((name, "url"), ""), values.get((name, "update")) == "none")


def _has_gitmodules(git_dir: Path, commit: str) -> bool:
    return bool(git(git_dir, "ls-tree", "--full-tree", "-z", commit, "--", ".gitmodules"))


def _split(entry: str) -> tuple[tuple[str, str], str]:
    """`submodule.<name>.<key>` and its value; the name may hold dots."""
    key, _, value = entry.partition("\n")
    name, _, variable = key.removeprefix("submodule.").rpartition(".")
    return (name, variable), value


def resolve_url(base: str, url: str) -> str:
    """A URL of `.gitmodules`; one that starts with `./` or `../` is meant from the superproject's own URL, as in git."""
    if not url.startswith(("./", "../")):
        return url
    base, separator = base.rstrip("/"), "/"
    while url.startswith(("./", "../")):
        if url.startswith("../"):
            at = base.rfind("/") if "/" in base else base.rfind(":")
            separator = base[at] if at >= 0 else "/"
            base = base[: max(at, 0)]
        url = url.partition("/")[2]
    return f"{base}{separator}{url}".rstrip("/")


def first_link(git_dir: Path, commit: str, path: str) -> tuple[str, str] | None:
    """The outermost submodule on the way to `path`, and the commit it is at."""
    parts = path.split("/")
    ways = ["/".join(parts[: count + 1]) for count in range(len(parts))]
    return next(((way, found) for way in ways if (found := gitlink(git_dir, commit, way))), None)


def gitlink(git_dir: Path, commit: str, path: str) -> str | None:
    """The commit at which `commit` has the submodule `path`."""
    for entry in fields(git(git_dir, "ls-tree", "--full-tree", "-z", commit, "--", path)):
        stamp, _, name = entry.partition("\t")
        mode, _, found = stamp.split(" ")
        if mode == "160000" and name == path:
            return found
    return None
