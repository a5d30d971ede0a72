"""What the router costs per request: the same small requests through it and directly to the server. Peer: no router."""

from __future__ import annotations

import http.client
import statistics
import subprocess
import sys
import time
from pathlib import Path

from seatrial.runtime.servers import free_port
from seatrial.runtime.staged import router

REQUESTS = 500
ROUNDS = 5
SERVER = """
import asyncio, sys
async def serve(reader, writer):
    while True:
        try:
            head = await reader.readuntil(b"\\r\\n\\r\\n")
        except asyncio.IncompleteReadError:
            return writer.close()
        last = b"connection: close" in head.lower()
        writer.write(b"HTTP/1.1 200 OK\\r\\nContent-Length: 2\\r\\n\\r\\n{}")
        if last:
            return writer.close()
async def main():
    server = await asyncio.start_server(serve, "127.0.0.1", int(sys.argv[1]))
    await server.serve_forever()
asyncio.run(main())
"""


def seconds(port: int) -> float:
    """Median seconds of one request on a connection that is kept."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    times = []
    for _ in range(REQUESTS):
        began = time.perf_counter()
        connection.request("GET", "/v1/models")
        connection.getresponse().read()
        times.append(time.perf_counter() - began)
    connection.close()
    return statistics.median(times)


def wait(port: int) -> None:
    """Until the port answers."""
    for _ in range(200):
        try:
            return seconds_of_one(port)
        except OSError:
            time.sleep(0.05)
    sys.exit(f"nothing answers on port {port}")


def seconds_of_one(port: int) -> None:
    """One request, whatever it takes."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    connection.request("GET", "/router/status")
    connection.getresponse().read()
    connection.close()


def main() -> None:
    """Print both figures and their ratio."""
    direct, routed = free_port(), free_port()
    place = ["--host", "127.0.0.1", "--port", str(routed), "--backends", f"http://127.0.0.1:{direct}"]
    children = [
        subprocess.Popen([sys.executable, "-c", SERVER, str(direct)]),
        subprocess.Popen([sys.executable, str(Path(router.__file__)), *place], stderr=subprocess.DEVNULL),
    ]
    try:
        wait(direct)
        wait(routed)
        pairs = [(seconds(direct), seconds(routed)) for _ in range(ROUNDS)]
    finally:
        for child in children:
            child.kill()
            child.wait()
    without, through = (min(pair[place] for pair in pairs) * 1e6 for place in (0, 1))
    print(f"one request: direct {without:.0f} us, through the router {through:.0f} us")
    print(f"overhead: {through - without:.0f} us per request, ratio {through / without:.1f}")


if __name__ == "__main__":
    main()
