"""The stub model server of the tests as a process of its own: `python bench/stub_server.py PORT`. It ends with its parent's pipe."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.rollouts.stub import Stub


async def main(port: int, padding: int) -> None:
    """Serve until standard input ends."""
    async with Stub(port=port, padding=padding, keep_bodies=False):
        print("ready", flush=True)
        over = asyncio.Event()
        asyncio.get_running_loop().add_reader(0, lambda: None if os.read(0, 1024) else over.set())
        await over.wait()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0))
