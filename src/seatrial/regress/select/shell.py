"""What a command line or a shell script names: files of the project, found without running anything.

- Words are split as a shell splits them where that works, else by white space and punctuation; a word that is a file of the project counts,
  relative to the root, to the script's directory and by its last part when variables stand before it (`$HERE/run.yaml`).
- Scripts that scripts name are read in turn.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Sequence

from seatrial.regress.select.project import Project

SHELLS = frozenset({"sh", "bash", "dash", "zsh", "ksh", "source", "."})
WORD = re.compile(r"[\w@%+=:,./~-]+")
MODULE = re.compile(r"-m\s+([\w.]+)")


def named(argv: Sequence[str], project: Project, here: str = "") -> frozenset[str]:
    """Files of the project that a command line names, with those that the scripts among them name."""
    found: set[str] = set()
    pending = list(_files(argv, project, here))
    pending.extend(_modules(argv, project))
    while pending:
        path = pending.pop()
        if path in found:
            continue
        found.add(path)
        text = _script(path, project)
        if text is not None:
            pending.extend(_files(_words(text), project, path.rpartition("/")[0]))
            for module in MODULE.findall(text):
                pending.extend(_modules(["-m", module], project))
    return frozenset(found)


def _words(text: str) -> list[str]:
    """Words of a script; a variable in a path leaves the part after it."""
    kept = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))
    return WORD.findall(re.sub(r"\$\{[^}]*\}|\$\([^)]*\)|\$\w+", " ", kept))


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
                if tails is None:
                    tails = _tails(project)
                yield from tails.get(clean, ())
            else:
                for base in {"", here}:
                    joined = project.relative(f"{base}/{clean}" if base else clean)
                    if joined in project.stamps:
                        yield joined


def _tails(project: Project) -> dict[str, list[str]]:
    """Files by every ending of their path, so that what followed a variable is found."""
    tails: dict[str, list[str]] = {}
    for name in project.stamps:
        parts = name.split("/")
        for at in range(len(parts)):
            tails.setdefault("/" + "/".join(parts[at:]), []).append(name)
    return tails


def _modules(argv: Sequence[str], project: Project) -> Iterable[str]:
    for flag, module in itertools.pairwise(argv):
        if flag == "-m":
            at = module.replace(".", "/")
            for root in project.roots:
                base = f"{root}/{at}" if root else at
                yield from (name for name in (f"{base}.py", f"{base}/__main__.py", f"{base}/__init__.py") if name in project.stamps)


def _script(path: str, project: Project) -> str | None:
    """The text of a shell script, or None for anything else."""
    if path.endswith(".py"):
        return None
    try:
        with (project.root / path).open("rb") as stream:
            data = stream.read(1_000_000)
    except OSError:
        return None
    first = data.split(b"\n", 1)[0]
    if path.endswith((".sh", ".bash", ".zsh", ".mk")) or path.rpartition("/")[2] == "Makefile":
        return data.decode("utf-8", "replace")
    if first.startswith(b"#!") and any(shell.encode() in first for shell in SHELLS - {".", "source"}):
        return data.decode("utf-8", "replace")
    return None
