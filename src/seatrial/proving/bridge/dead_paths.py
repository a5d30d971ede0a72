"""Paths that the guides of a checkout (skills/**/*.md) name and that are not there any more.

- Globs, placeholders and ellipses are no paths. A path may also be meant from the guide's own directory, or inside Megatron-LM.
- A guide may name files of another repository: a path of whose first two directories there is nothing here is only counted.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from seatrial.files import read_text

MEGATRON = "3rdparty/Megatron-LM"
_PATH = re.compile(r"(?<![\w./$}>*~-])(?:\./)?((?:tests|examples|scripts|src)/[^\s`'\"()|,;:]+)")
_PLACEHOLDER = re.compile(r"[^\w./+-]|\.\.|[Ff]oo\b")


@dataclass(frozen=True, slots=True)
class Guides:
    """What the guides name in vain."""

    dead: tuple[str, ...]
    """`guide:line: path`, the first mention in each guide."""
    elsewhere: int
    """Different paths that are no part of this checkout: other repositories', as far as can be told."""


def dead_paths(root: Path) -> Guides:
    """Read every guide of the checkout at `root`."""
    dead: list[str] = []
    elsewhere: set[str] = set()
    for guide in sorted((root / "skills").rglob("*.md")):
        name = guide.relative_to(root)
        for path, line in _named(read_text(guide)).items():
            if _is_there(root, guide.parent, path):
                continue
            parts = PurePosixPath(path).parts
            if len(parts) > 2 and root.joinpath(*parts[:2]).is_dir():
                dead.append(f"{name}:{line}: {path}")
            else:
                elsewhere.add(path)
    return Guides(tuple(dead), len(elsewhere))


def _named(text: str) -> dict[str, int]:
    """Each path of a guide, and the line that names it first."""
    found: dict[str, int] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        for path in _PATH.findall(line):
            plain = path.rstrip("./")
            if not _PLACEHOLDER.search(plain):
                found.setdefault(plain, number)
    return found


def _is_there(root: Path, beside: Path, path: str) -> bool:
    return any((place / path).exists() for place in (root, beside, root / MEGATRON))
