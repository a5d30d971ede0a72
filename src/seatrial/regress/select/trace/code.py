"""Code of a module: instrumented, kept in a cache of our own; `__pycache__` is neither read nor written.

- The key of the cache is everything that the code depends on: the source, the path, this Python, what instrumenting does, and who else
  changes the tree. A file of the cache that was damaged is made again.
- Everything is imported with this module: in a child nothing of ours can be found any more when the first module of the project comes.
- Files that hand functions to other compilers (which would stumble over a hit) are not instrumented: `compiled` returns None for them,
  as for what cannot be parsed.
"""

from __future__ import annotations

import ast
import marshal
import re
import sys
from collections.abc import Callable
from types import CodeType
from typing import Any

from seatrial.regress.select.trace import kept
from seatrial.regress.select.trace.blocks import MODULE, number
from seatrial.regress.select.trace.instrument import instrument, numbers
from seatrial.regress.select.trace.name import VERSION

Rewrite = Callable[[ast.Module, bytes, str], None]

OTHERS = re.compile(rb"\btorch\s*\.\s*(compile|jit|_dynamo|export)\b|\bfrom\s+torch\s+import\b.*\b(compile|jit)\b|\btriton\b|\bnumba\b")
BROKEN = (SyntaxError, ValueError, RecursionError, MemoryError)


def compiled(source: bytes, path: str, relative: str, cache: str, rewrite: Rewrite | None, salt: str) -> CodeType | None:
    """The code, from the cache or made and put there; None if this file is not to be instrumented."""
    if OTHERS.search(source):
        return None
    tag = f"{VERSION}\0{path}\0{relative}\0{sys.version}\0{sys.flags.optimize}\0{salt}\0"
    place = kept.place(cache, tag.encode("utf-8", "surrogateescape") + source)
    found = _load(place)
    if found is None:
        found = _make(source, path, relative, rewrite)
        if found is not None:
            kept.keep(cache, place, marshal.dumps(found))
    return found


def _make(source: bytes, path: str, relative: str, rewrite: Rewrite | None) -> CodeType | None:
    try:
        tree = ast.parse(source, path)
        known = numbers(tree, relative)  # of the text, before asserts are something else
        if rewrite is not None:
            rewrite(tree, source, path)
        instrument(tree, known, number(relative, MODULE))
        made: Any = compile(tree, path, "exec", dont_inherit=True)
    except BROKEN:
        return None  # Python itself says it better, or can do it without us
    return made if isinstance(made, CodeType) else None


def _load(place: str) -> CodeType | None:
    data = kept.load(place)
    try:
        found = None if data is None else marshal.loads(data)
    except (ValueError, EOFError, TypeError):
        return None
    return found if isinstance(found, CodeType) else None
