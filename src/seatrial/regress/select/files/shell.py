"""What a command line or a shell script names: files of the project, found without running anything.

- Words are split as a shell splits them where that works, else by white space and punctuation; a word that is a file of the project counts,
  relative to the root, to the script's directory and by its last part when variables stand before it (`$HERE/run.yaml`).
- A pattern (`data/*.txt`) stands for the files that match and for the names in their directories; a directory, for all that is in it,
  unless Python runs the command and tells by itself. `make` reads the Makefile without being told.
- Scripts that scripts name are read in turn. A name that ends with a slash is a directory whose names count.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Sequence

from seatrial.regress.select.files.project import Project

SHELLS = frozenset({"sh", "bash", "dash", "zsh", "ksh", "source", "."})
WORD = re.compile(r"[\w@%+=:,./~*?\[\]-]+")
MAKES = frozenset({"make", "gmake"})
MAKEFILES = ("GNUmakefile", "makefile", "Makefile")
HIDING = re.compile(
    r"\benv\s+(-\S*\s+)*(-i\b|-\s|--ignore-environment|-u\s*(PYTHONPATH|SEATRIAL))|\bunset\b|\bPYTHONPATH=|\s-\w*[IES]\w*\s|\bsudo\b"
)
"""A shell that runs Python so that it cannot report."""
COMMAND = re.compile(r"\$\(([^()]*)\)")
VARIABLE = re.compile(r"\$\{[^}]*\}|\$\w+")
MODULE = re.compile(r"-m\s+([\w.]+)")


def named(argv: Sequence[str], project: Project, here: str = "", *, python: bool = False) -> frozenset[str]:
    """Files of the project that a command line names, with those that the scripts among them name."""
    found: set[str] = set()
    pending = list(_files(argv, project, here))
    told = frozenset(pending) if argv and argv[0].rpartition("/")[2] in SHELLS else frozenset()  # whatever they are called
    pending.extend(_modules(argv, project))
    if not python:
        pending.extend(_many(argv, project, here))
    while pending:
        path = pending.pop()
        if path in found:
            continue
        found.add(path)
        text = _script(path, project, told=path in told)
        if text is not None:
            for base in {path.rpartition("/")[0], here}:
                pending.extend(_files(_words(text), project, base))
                pending.extend(_many(_words(text), project, base))
            for module in MODULE.findall(text):
                pending.extend(_modules(["-m", module], project))
    return frozenset(found)


def hides(argv: Sequence[str], paths: Iterable[str], project: Project) -> bool:
    """Whether a command, or a script among the files that it names, takes our variables from the programs that it runs."""
    texts = [" ".join(argv), *filter(None, (_script(path, project) for path in paths))]
    return any(HIDING.search(text) for text in texts)


def _words(text: str) -> list[str]:
    """Words of a script; a variable or a command in a path leaves the part after it, and a command has words of its own."""
    kept = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))
    found: list[str] = []
    while inner := COMMAND.findall(kept):
        found += [word for command in inner for word in WORD.findall(_bare(command))]
        kept = COMMAND.sub(" ", kept)
    return found + WORD.findall(_bare(kept))


def _bare(text: str) -> str:
    return VARIABLE.sub(" ", text)


def _many(words: Iterable[str], project: Project, here: str) -> Iterable[str]:
    """What patterns, directories and `make` stand for."""
    every = [part.strip("\"'`,;()") for word in words for part in word.split()]
    bases = {"", here}
    for word in every:
        if any(sign in word for sign in "*?["):
            yield from _matching(word, project, bases)
        elif word.strip("./"):
            for base in {"", here}:
                inside = project.relative(f"{base}/{word}" if base and not word.startswith("/") else word)
                if inside and inside in project.names:
                    bases.add(inside)
                    yield f"{inside}/"
                    yield from (name for name in project.stamps if name.startswith(f"{inside}/"))
    if any(word.rpartition("/")[2] in MAKES for word in every):
        for base in bases:
            yield from (name for name in (f"{base}/{file}" if base else file for file in MAKEFILES) if name in project.stamps)


def _matching(word: str, project: Project, bases: Iterable[str]) -> Iterable[str]:
    for base in bases:
        pattern = project.relative(f"{base}/{word}" if base and not word.startswith("/") else word)
        if not pattern:
            continue
        directory = re.split(r"[*?\[]", pattern)[0].rpartition("/")[0]
        if directory in project.names:
            yield f"{directory}/"
        for name in project.matching([pattern]):
            yield name
            yield f"{name.rpartition('/')[0]}/"


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


def _script(path: str, project: Project, *, told: bool = False) -> str | None:
    """The text of a shell script, or None for anything else; `told`: a shell was given it."""
    if path.endswith((".py", "/")):
        return None
    try:
        with (project.root / path).open("rb") as stream:
            data = stream.read(1_000_000)
    except OSError:
        return None
    first = data.split(b"\n", 1)[0]
    if told or path.endswith((".sh", ".bash", ".zsh", ".mk")) or path.rpartition("/")[2] in MAKEFILES:
        return data.decode("utf-8", "replace")
    if first.startswith(b"#!") and any(shell.encode() in first for shell in SHELLS - {".", "source"}):
        return data.decode("utf-8", "replace")
    return None
