"""Globs over repository paths: `*` stays within a directory, `**` crosses them. Case counts."""

from __future__ import annotations

import re
from functools import lru_cache

_PARTS = re.compile(r"\*\*/|\*\*|\*|\?|[^*?]+")


@lru_cache(maxsize=4096)
def _compiled(glob: str) -> re.Pattern[str]:
    meaning = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    return re.compile("".join(meaning.get(part, re.escape(part)) for part in _PARTS.findall(glob)))


def matches(path: str, glob: str) -> bool:
    """Whether the whole path is matched."""
    return _compiled(glob).fullmatch(path) is not None
