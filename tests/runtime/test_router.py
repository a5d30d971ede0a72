"""The router as a program of its own, in front of real servers: distribution, streams, big bodies, and every way to break."""

from __future__ import annotations

import ast
import contextlib
import hashlib
import http.client
import http.server
import json
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from seatrial.runtime.servers import free_port
from seatrial.runtime.staged import router

PROGRAM = Path(router.__file__)
pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]


class Handler(http.server.BaseHTTPRequestHandler):
    """What a server does is in its path."""

    protocol_version = "HTTP/1.1"
    server: Backend

    def do_GET(self) -> None:
        if self.path == "/health":
            return self._say(200 if self.server.healthy else 503, b"{}")
        if self.path == "/stream":
            return self._stream()
        if self.path == "/break":
            self._head(200, [("Content-Length", "1000")])
            self.wfile.write(b"only this")
            self.close_connection = True
            return None
        if self.path == "/drop":
            self.close_connection = True
            return None
        if self.path == "/to-the-end":
            self._head(200, [("Connection", "close")])
            self.wfile.write(b"all of it")
            self.close_connection = True
            return None
        return self._say(200, json.dumps(dict(self.headers)).encode())

    def do_HEAD(self) -> None:
        self._head(200, [("Content-Length", "12345")])

    def do_POST(self) -> None:
        length = self.headers.get("Content-Length")
        digest, size = hashlib.sha256(), 0
        for piece in self._pieces(int(length)) if length is not None else self._chunks():
            digest.update(piece)
            size += len(piece)
        time.sleep(self.server.slow_s)
        self.server.seen += 1
        self._say(200, json.dumps({"who": self.server.name, "sha": digest.hexdigest(), "size": size}).encode())

    def _pieces(self, left: int) -> Iterator[bytes]:
        while left:
            piece = self.rfile.read(min(left, 65536))
            left -= len(piece)
            yield piece

    def _chunks(self) -> Iterator[bytes]:
        while size := int(self.rfile.readline(), 16):
            yield self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()

    def _stream(self) -> None:
        self._head(200, [("Transfer-Encoding", "chunked"), ("Content-Type", "text/event-stream")])
        try:
            for number in range(1000 if self.server.endless else 5):
                self.wfile.write(b"%x\r\ndata: %d\n\n\r\n" % (9 if number < 10 else 10 if number < 100 else 11, number))
                if self.server.endless:
                    time.sleep(0.1)
                else:
                    self.server.taken.append(self.server.pace.acquire(timeout=20))
            self.wfile.write(b"0\r\n\r\n")
        except OSError:
            self.server.left.set()

    def _say(self, status: int, body: bytes) -> None:
        self._head(status, [("Content-Length", str(len(body)))])
        self.wfile.write(body)

    def _head(self, status: int, headers: list[tuple[str, str]]) -> None:
        self.send_response(status)
        for name, value in headers:
            self.send_header(name, value)
        self.end_headers()
        self.wfile.flush()

    def log_message(self, format: str, *args: Any) -> None:
        pass


class Backend(http.server.ThreadingHTTPServer):
    """A server with its knobs."""

    daemon_threads = True

    def __init__(self, name: str, slow_s: float = 0.0) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.name, self.slow_s, self.seen, self.healthy, self.endless = name, slow_s, 0, True, False
        self.left = threading.Event()
        self.pace, self.taken = threading.Semaphore(0), list[bool]()
        """A stream that ends sends its next piece when the reader has taken the last one, and whether it had."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


@contextlib.contextmanager
def backends(*slow_s: float) -> Iterator[list[Backend]]:
    servers = [Backend(str(number), seconds) for number, seconds in enumerate(slow_s)]
    for server in servers:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    try:
        yield servers
    finally:
        for server in servers:
            server.shutdown()
            server.server_close()


@contextlib.contextmanager
def running(*urls: str, python: str = sys.executable, more: tuple[str, ...] = ()) -> Iterator[tuple[int, subprocess.Popen[str]]]:
    """The router, as it is started on a node."""
    port = free_port()
    argv = [python, "-I", str(PROGRAM), "--host", "127.0.0.1", "--port", str(port), "--backends", ",".join(urls), *more]
    process = subprocess.Popen(argv, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        line = process.stderr.readline()
        assert "listening" in line, line + process.stderr.read()
        yield port, process
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


def ask(port: int, path: str, method: str = "GET", body: Any = None, **headers: str) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    try:
        connection.request(method, path, body, headers)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def raw(port: int, data: bytes) -> bytes:
    """Everything that comes back until the connection ends."""
    with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
        connection.sendall(data)
        found = b""
        while piece := connection.recv(65536):
            found += piece
        return found


def status(port: int) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(ask(port, "/router/status")[1])["backends"]
    return found


def test_it_runs_on_an_old_python() -> None:
    ast.parse(PROGRAM.read_text(encoding="utf-8"), feature_version=(3, 8))


@pytest.mark.skipif(shutil.which("python3.8") is None, reason="no python3.8 here")
def test_it_serves_on_python_38() -> None:
    if subprocess.run(["python3.8", "-c", ""], capture_output=True, check=False, timeout=30).returncode:
        pytest.skip("python3.8 does not run here")
    with backends(0) as [server], running(server.url, python="python3.8") as (port, process):
        assert json.loads(ask(port, "/x", "POST", b"abc")[1])["size"] == 3
        for _ in range(5):
            server.pace.release()
        assert b"data: 4" in ask(port, "/stream")[1]
        assert ask(port, "/health")[0] == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=45) == 0


def test_equal_servers_share_equally_and_a_slow_one_gets_less() -> None:
    with backends(0.4, 0.02, 0.02) as servers, running(*(server.url for server in servers)) as (port, _):
        with ThreadPoolExecutor(6) as pool:
            answers = list(pool.map(lambda _: ask(port, "/v1/completions", "POST", b"{}")[0], range(120)))
        assert set(answers) == {200}
        slow, *fast = (server.seen for server in servers)
        assert slow + sum(fast) == 120
        assert slow < 20
        assert min(fast) > 35
        assert [row["active"] for row in status(port)] == [0, 0, 0]
        assert [row["total"] for row in status(port)] == [slow, *fast]


def test_idle_servers_take_turns() -> None:
    with backends(0, 0, 0) as servers, running(*(server.url for server in servers)) as (port, _):
        assert [json.loads(ask(port, "/x", "POST", b"")[1])["who"] for _ in range(6)] == ["0", "1", "2", "0", "1", "2"]


def test_a_stream_arrives_piece_by_piece() -> None:
    with backends(0) as [server], running(server.url) as (port, _):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
        connection.request("GET", "/stream")
        answer = connection.getresponse()
        assert answer.getheader("Content-Type") == "text/event-stream"
        while line := answer.readline():
            if line.strip():
                server.pace.release()
        connection.close()
        assert server.taken == [True] * 5


@pytest.mark.parametrize("chunked", [False, True])
def test_a_big_body_passes_unchanged(chunked: bool) -> None:
    data = bytes(range(256)) * (64 * 1024)
    with backends(0) as [server], running(server.url) as (port, _):
        body = iter([data[:5], data[5:1_000_000], data[1_000_000:]]) if chunked else data
        headers = {"Transfer-Encoding": "chunked"} if chunked else {}
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
        connection.request("POST", "/x", body, headers, encode_chunked=chunked)
        answer = json.loads(connection.getresponse().read())
        connection.close()
        assert (answer["size"], answer["sha"]) == (len(data), hashlib.sha256(data).hexdigest())


def test_a_connection_takes_several_requests() -> None:
    with backends(0) as [server], running(server.url) as (port, _):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
        connection.connect()
        first = connection.sock
        for _ in range(3):
            connection.request("POST", "/x", b"abc")
            assert json.loads(connection.getresponse().read())["size"] == 3
        connection.request("GET", "/router/status")
        connection.getresponse().read()
        assert connection.sock is first
        connection.close()


def test_headers_pass_and_those_of_the_connection_do_not() -> None:
    with backends(0) as [server], running(server.url) as (port, _):
        seen = json.loads(ask(port, "/echo", Authorization="Bearer x", Connection="keep-alive", TE="trailers")[1])
        assert seen["Authorization"] == "Bearer x"
        assert seen["Connection"] == "close"
        assert "TE" not in seen


def test_answers_without_length_or_body() -> None:
    with backends(0) as [server], running(server.url) as (port, _):
        assert ask(port, "/to-the-end") == (200, b"all of it")
        assert ask(port, "/x", "HEAD") == (200, b"")


def test_it_asks_for_the_rest_of_a_body_itself() -> None:
    with backends(0) as [server], running(server.url) as (port, _):
        head = b"POST /x HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\nExpect: 100-continue\r\nConnection: close\r\n\r\n"
        with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
            connection.sendall(head)
            assert connection.recv(100).startswith(b"HTTP/1.1 100 ")
            connection.sendall(b"abc")
            assert b'"size": 3' in connection.makefile("rb").read()


def test_a_server_that_refuses_is_left_for_another() -> None:
    dead = f"http://127.0.0.1:{free_port()}"
    with backends(0) as [server], running(dead, server.url) as (port, _):
        assert [ask(port, "/x", "POST", b"{}")[0] for _ in range(4)] == [200] * 4
        assert server.seen == 4
        refused, healthy = status(port)
        assert refused["refused"] >= 1
        assert healthy["total"] == 4


def test_when_nobody_accepts_the_error_says_who() -> None:
    dead = f"http://127.0.0.1:{free_port()}"
    with running(dead) as (port, _):
        code, body = ask(port, "/x", "POST", b"{}")
        assert code == 502
        assert dead in json.loads(body)["error"]["message"]


def test_a_request_that_was_sent_is_never_sent_twice() -> None:
    with backends(0, 0) as servers, running(*(server.url for server in servers)) as (port, _):
        code, body = ask(port, "/drop")
        assert code == 502
        assert "broke off" in json.loads(body)["error"]["message"]
        assert sum(row["total"] for row in status(port)) == 1
        assert sum(row["broken"] for row in status(port)) == 1


def test_an_answer_that_breaks_off_is_not_completed() -> None:
    with backends(0) as [server], running(server.url) as (port, _):
        with pytest.raises((http.client.IncompleteRead, ConnectionError)):
            ask(port, "/break")
        assert status(port)[0]["active"] == 0


def test_a_client_that_leaves_takes_its_request_with_it() -> None:
    with backends(0) as [server], running(server.url) as (port, _):
        server.endless = True
        with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
            connection.sendall(b"GET /stream HTTP/1.1\r\nHost: x\r\n\r\n")
            assert connection.recv(10)
            assert status(port)[0]["active"] == 1
        assert server.left.wait(45)
        assert status(port)[0]["active"] == 0


@pytest.mark.parametrize(
    "data",
    [
        b"nonsense\r\n\r\n",
        b"GET / HTTP/1.1\r\nno colon\r\n\r\n",
        b"POST / HTTP/1.1\r\nContent-Length: -1\r\n\r\n",
        b"POST / HTTP/1.1\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"GET / HTTP/1.1\r\nX: " + b"y" * 100_000 + b"\r\n\r\n",
    ],
)
def test_what_is_not_http_is_refused(data: bytes) -> None:
    with backends(0) as [server], running(server.url) as (port, _):
        assert raw(port, data).startswith(b"HTTP/1.1 400 ")
        assert status(port)[0]["total"] in (0, 1)
        assert ask(port, "/x")[0] == 200


def test_a_broken_chunk_ends_the_request() -> None:
    with backends(0) as [server], running(server.url) as (port, _):
        assert raw(port, b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n").startswith(b"HTTP/1.1 400 ")
        assert server.seen == 0


def test_health_needs_everybody() -> None:
    with backends(0, 0) as servers, running(*(server.url for server in servers)) as (port, _):
        assert ask(port, "/health")[0] == 200
        servers[1].healthy = False
        code, body = ask(port, "/health")
        assert code == 503
        assert json.loads(body)["not_healthy"] == [servers[1].url]


def test_health_of_servers_that_have_no_path_for_it() -> None:
    with backends(0) as [server]:
        server.healthy = False
        with running(server.url, more=("--health-path", "")) as (port, _):
            assert ask(port, "/health")[0] == 200
        with running(f"http://127.0.0.1:{free_port()}", more=("--health-path", "")) as (port, _):
            assert ask(port, "/health")[0] == 503


def test_it_ends_cleanly_with_a_request_under_way() -> None:
    with backends(0) as [server], running(server.url) as (port, process):
        server.endless = True
        with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
            connection.sendall(b"GET /stream HTTP/1.1\r\nHost: x\r\n\r\n")
            assert connection.recv(10)
            process.send_signal(signal.SIGTERM)
            assert process.wait(timeout=45) == 0
        assert process.stderr is not None
        rest = process.stderr.read()
        assert "told to stop, after 1 requests" in rest
        assert "Traceback" not in rest


@pytest.mark.parametrize("url", ["https://x:1", "x:1", "http://x:1/v1", ""])
def test_a_backend_is_an_address(url: str) -> None:
    argv = [sys.executable, str(PROGRAM), "--host", "127.0.0.1", "--port", "1", "--backends", url]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=30)
    assert done.returncode == 2
    assert "http://HOST:PORT" in done.stderr
