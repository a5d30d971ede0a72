"""Globs over repository paths: `*` stays within a directory, `**` crosses them, `{a,b}` is one of several. Case counts."""

from __future__ import annotations

import re
from functools import lru_cache

_PARTS = re.compile(r"\*\*/|\*\*|\*|\?|\{|\}|,|[^*?{},]+")
_MEANING = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
_BRACES = {"{": "(?:", ",": "|", "}": ")"}


@lru_cache(maxsize=4096)
def _compiled(glob: str) -> re.Pattern[str]:
    depth, made = 0, []
    for part in _PARTS.findall(glob):
        closes = part == "}" and depth > 0
        special = part == "{" or (part in ",}" and depth > 0)
        depth += (part == "{") - closes
        made.append(_BRACES[part] if special else _MEANING.get(part, re.escape(part)))
    if depth:
        raise ValueError(f"glob {glob!r}: a brace is not closed")
    return re.compile("".join(made))


def matches(path: str, glob: str) -> bool:
    """Whether the whole path is matched."""
    return _compiled(glob).fullmatch(path) is not None
