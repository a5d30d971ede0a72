"""A block of ports for one instance of Gym.

- Gym picks its ports long before its servers bind them, so a port that was free at the moment of the call is not enough: whoever
  binds the first port of a block has the whole block, on this machine, until it lets go or dies. All Seatrials keep to it.
- Blocks lie below the ports that the kernel gives to connections, and above those that Ray gives to workers.
- A block in which anybody listens is passed over.
"""

from __future__ import annotations

import random
import socket
from types import TracebackType
from typing import Self

from seatrial.launch.ports import port_in_use
from seatrial.model.errors import BlockedError
from seatrial.model.verdict import Boundary

SIZE = 200
_LOW, _HIGH = 20_000, 32_600
_HOST = "127.0.0.1"


class Block:
    """Ports `head` and `low` to `high`; nobody else's until `close`."""

    def __init__(self) -> None:
        starts = list(range(_LOW, _HIGH, SIZE))
        random.shuffle(starts)
        for start in starts:
            held = _hold(start)
            if held is None:
                continue
            if not any(port_in_use(port) for port in range(start + 1, start + SIZE)):
                self._held = held
                self.head, self.low, self.high = start + 1, start + 2, start + SIZE - 1
                return
            held.close()
        message = f"no {SIZE} free ports in a row between {_LOW} and {_HIGH} on this machine"
        raise BlockedError(Boundary.ENVIRONMENT, message, "end what listens there: ss -ltnp")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the block."""
        self._held.close()


def _hold(port: int) -> socket.socket | None:
    """Bind a port without listening; None when somebody has it."""
    held = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        held.bind((_HOST, port))
    except OSError:
        held.close()
        return None
    return held
