"""Finds the commit that broke a command, a metric or a trial, over repositories, submodules and noise.

`seatrial.bisect(…)` of the public API has the name of this room, so the room can be called: it calls `find_commit`.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any


class _CallableRoom(ModuleType):
    """This module, as the function of the public API."""

    def __call__(self, *words: Any, **named: Any) -> Any:
        """See `seatrial.bisect.find_commit.find_commit`."""
        from seatrial.bisect.find_commit import find_commit

        return find_commit(*words, **named)


sys.modules[__name__].__class__ = _CallableRoom
