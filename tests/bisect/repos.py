"""Git repositories for tests, built by one `git fast-import` each (a history of 500 commits takes a fraction of a second).

- `build(path, commits)` makes a checkout with those commits on branch `main` and returns their ids, in the order given.
- `linear(count)` is the plainest history: commit i writes `i` into `number.txt`.
- Everything is fixed (people, dates one minute apart, ids), so that the same commits give the same ids on every machine.
- `submodule` and `gitmodules` make submodules that point at local repositories; the checkout of `build` does not populate them,
  `populate` does.

    library = build(tmp_path / "library", linear(3))
    ids = build(tmp_path / "repo", [
        Commit({"a.py": "1\n", "run.sh": Script("#!/bin/sh\n"), **submodule("third/library", tmp_path / "library", library[0])}),
        Commit({"third/library": Link(library[2])}, subject="Move the library"),
        Commit({"b.py": "1\n"}, parents=(0,), tag="v1"),   # a side branch off the first commit
        Commit({"a.py": None}, parents=(1, 2)),             # a merge; None removes a file
    ])
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

START = 1_700_000_000
"""Time of the first commit."""
STEP = 60
"""Seconds between two commits."""
_PERSON = "Tester <tester@example.org>"
_SETTINGS = {"user.name": "Tester", "user.email": "tester@example.org", "commit.gpgsign": "false", "protocol.file.allow": "always"}


@dataclass(frozen=True)
class Link:
    """A submodule at a commit."""

    commit: str


@dataclass(frozen=True)
class Script:
    """An executable file."""

    text: str


@dataclass(frozen=True)
class Symlink:
    """A symbolic link."""

    target: str


Entry = str | bytes | Link | Script | Symlink | None
"""What a commit does to a path; None removes it."""


@dataclass(frozen=True)
class Commit:
    """One commit: the paths that it changes against its first parent (a merge names what comes from the others, too)."""

    files: Mapping[str, Entry] = field(default_factory=dict)
    subject: str = ""
    """Empty: `commit 7`, by its index."""
    parents: tuple[int, ...] | None = None
    """Indices of earlier commits; None: the one before; (): a root."""
    time: int | None = None
    """Author and commit time; None: one minute after the commit before it in the list."""
    tag: str = ""


def build(path: Path, commits: Sequence[Commit], checkout: bool = True) -> list[str]:
    """Make the repository `path` with these commits; `main`, and the work tree unless told otherwise, are at the last one."""
    path.mkdir(parents=True)
    run_git(path, "init", "--quiet", "--initial-branch=main")
    marks = path / ".git" / "test-marks"
    run_git(path, "fast-import", "--quiet", "--force", f"--export-marks={marks}", stdin=_stream(commits))
    ids = {int(mark[1:]): commit for mark, commit in (row.split() for row in marks.read_text(encoding="utf-8").splitlines())}
    marks.unlink()
    if checkout:
        run_git(path, "reset", "--quiet", "--hard", "main")
    return [ids[index + 1] for index in range(len(commits))]


def linear(count: int, files: Mapping[str, Entry] | None = None) -> list[Commit]:
    """`count` commits in a row, each with another number in `number.txt`; the first one also has `files`."""
    return [Commit({**(files or {} if index == 0 else {}), "number.txt": f"{index}\n"}) for index in range(count)]


def gitmodules(modules: Mapping[str, Path | str]) -> str:
    """The text of `.gitmodules`: path of each submodule, and where its repository is (a local path or any URL)."""
    return "".join(f'[submodule "{path}"]\n\tpath = {path}\n\turl = {url}\n' for path, url in modules.items())


def submodule(path: str, url: Path | str, commit: str) -> dict[str, Entry]:
    """The files of a commit that adds one submodule (for several write `.gitmodules` yourself, by `gitmodules`)."""
    return {".gitmodules": gitmodules({path: url}), path: Link(commit)}


def populate(path: Path, *submodules: str) -> None:
    """Check out these submodules of the repository `path` (all, when none is named), as a user would."""
    run_git(path, "submodule", "--quiet", "update", "--init", "--recursive", "--", *submodules)


def run_git(path: Path, *arguments: str, stdin: bytes = b"") -> str:
    """Git in `path`, free of the settings of this machine's user; what it printed, without the last newline."""
    settings = [part for name, value in _SETTINGS.items() for part in ("-c", f"{name}={value}")]
    date = f"{START} +0000"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_") or name == "GIT_TEMPLATE_DIR"}
    environment |= {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1", "GIT_AUTHOR_DATE": date, "GIT_COMMITTER_DATE": date}
    command = ["git", *settings, "-C", str(path), *arguments]
    done = subprocess.run(command, input=stdin, stdout=subprocess.PIPE, env=environment, timeout=120, check=True)
    return done.stdout.decode("utf-8", "surrogateescape").removesuffix("\n")


def _stream(commits: Sequence[Commit]) -> bytes:
    """The input of `git fast-import`."""
    parts: list[bytes] = []
    time = START - STEP
    for index, commit in enumerate(commits):
        time = time + STEP if commit.time is None else commit.time
        parents = commit.parents if commit.parents is not None else (index - 1,) if index else ()
        assert all(0 <= parent < index for parent in parents), f"commit {index}: a parent must come before it"
        if not parents:
            parts.append(b"reset refs/heads/main\n")
        who = f"{_PERSON} {time} +0000"
        parts.append(f"commit refs/heads/main\nmark :{index + 1}\nauthor {who}\ncommitter {who}\n".encode())
        parts.append(_data(commit.subject or f"commit {index}"))
        parts.extend(f"{'merge' if place else 'from'} :{parent + 1}\n".encode() for place, parent in enumerate(parents))
        parts.extend(_change(path, entry) for path, entry in commit.files.items())
        if commit.tag:
            parts.append(f"reset refs/tags/{commit.tag}\nfrom :{index + 1}\n".encode())
    return b"".join([*parts, b"done\n"])


def _change(path: str, entry: Entry) -> bytes:
    quoted = '"' + path.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'
    match entry:
        case None:
            return f"D {quoted}\n".encode()
        case Link(commit):
            return f"M 160000 {commit} {quoted}\n".encode()
        case Symlink(target):
            return f"M 120000 inline {quoted}\n".encode() + _data(target)
        case Script(text):
            return f"M 100755 inline {quoted}\n".encode() + _data(text)
    return f"M 100644 inline {quoted}\n".encode() + _data(entry)


def _data(content: str | bytes) -> bytes:
    data = content.encode("utf-8", "surrogateescape") if isinstance(content, str) else content
    return b"data %d\n" % len(data) + data + b"\n"
