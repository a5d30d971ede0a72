"""TCP ports on this machine.

- A free port is free at the moment of the call; whoever needs it must bind it soon and cope with losing the race.
- This process hands out no port twice in a row, so that its own simultaneous jobs do not race each other.
"""

from __future__ import annotations

import errno
import socket
import threading
from collections import deque

_HOST = "127.0.0.1"

_given: deque[int] = deque(maxlen=1000)
"""Ports handed out lately, whose servers may not have bound them yet."""
_lock = threading.Lock()


def free_port() -> int:
    """A port on 127.0.0.1 that nobody uses now."""
    with _lock:
        while (port := _any_port()) in _given:
            pass
        _given.append(port)
    return port


def _any_port() -> int:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind((_HOST, 0))
        return int(probe.getsockname()[1])


def port_in_use(port: int) -> bool:
    """Whether a server could not bind `port` on 127.0.0.1 because somebody has it."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        # As servers do: connections that linger after their server ended do not occupy the port.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((_HOST, port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return True
            raise
    return False
