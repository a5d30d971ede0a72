"""TCP ports on this machine.

- A free port is free at the moment of the call; whoever needs it must bind it soon and cope with losing the race.
"""

from __future__ import annotations

import errno
import socket

_HOST = "127.0.0.1"


def free_port() -> int:
    """A port on 127.0.0.1 that nobody uses now."""
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
