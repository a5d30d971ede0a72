"""Starting processes in an event loop, and being cancelled meanwhile.

asyncio's own start, when it is cancelled half-way, may wait for ever for pipes that nobody closes (seen with Python 3.11.7). So a start
is always let finish, which takes milliseconds, and is undone when somebody cancelled it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


async def whole(starting: Coroutine[Any, Any, T], undo: Callable[[T], Awaitable[Any]]) -> T:
    """What `starting` gives; when this is cancelled, what it started is ended by `undo`."""
    task = asyncio.create_task(starting)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait({task})
        if not task.cancelled() and task.exception() is None:
            await undo(task.result())
        raise
