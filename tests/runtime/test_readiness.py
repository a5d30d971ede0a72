"""Waiting for servers: what counts as an answer, what the messages say, and how soon a reason to give up is noticed."""

from __future__ import annotations

import http.server
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from seatrial.runtime.servers import Missed, Target, ask, foreign_target, free_port, wait_ready
from tests.runtime.small_jobs import ALMOST_A_MINUTE, Clock, patient_clock


def never() -> str | None:
    return None


@contextmanager
def serving(status: int, location: str = "") -> Iterator[tuple[str, list[str]]]:
    """A server that gives one answer; yields its URL and the paths that were asked."""
    asked: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(status)
            if location:
                self.send_header("Location", location)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}", asked
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize(("status", "ours", "foreign"), [(200, True, True), (204, False, True), (401, False, True), (404, False, True)])
def test_what_counts_as_an_answer(status: int, ours: bool, foreign: bool) -> None:
    with serving(status) as (url, _):
        assert ask(Target("s", f"{url}/health", 1)) == (ours, f"answered {status}")
        assert ask(Target("s", url, 1, foreign=True)) == (foreign, f"answered {status}")


@pytest.mark.parametrize("status", [500, 503])
def test_errors_of_a_server_are_no_answer(status: int) -> None:
    with serving(status) as (url, _):
        assert ask(Target("s", url, 1, foreign=True)) == (False, f"answered {status}")


@pytest.mark.parametrize(("given", "path"), [("/v1", "/v1/models"), ("/v1/", "/v1/models"), ("/api", "/api"), ("", "/")])
def test_what_a_server_elsewhere_is_asked(given: str, path: str) -> None:
    with serving(200) as (url, asked):
        assert ask(foreign_target("s", url + given, 1))[0]
        assert asked == [path]


def test_redirects_are_not_followed() -> None:
    with serving(200) as (other, asked), serving(302, f"{other}/login?secret=1") as (url, _), serving(307, "/docs") as (home, at_home):
        assert ask(Target("s", url, 1)) == (False, f"answered 302, a redirect to {other}/login")
        assert ask(foreign_target("s", url, 1)) == (False, f"answered 302, a redirect to {other}/login")
        assert ask(foreign_target("s", home, 1)) == (True, "answered 307")
        assert ask(Target("s", home, 1))[0] is False
        assert asked == []
        assert set(at_home) == {"/"}


@pytest.mark.parametrize("variable", ["http_proxy", "HTTP_PROXY", "all_proxy"])
def test_loopback_is_asked_without_a_proxy(monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    monkeypatch.setenv(variable, "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    with serving(200) as (url, _):
        assert ask(Target("s", url, 1))[0]
        assert ask(Target("s", url.replace("127.0.0.1", "localhost"), 1))[0]


def test_other_hosts_are_asked_through_the_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    with serving(200) as (proxy, asked):
        monkeypatch.setenv("http_proxy", proxy)
        assert ask(foreign_target("s", "http://models.invalid/v1", 1))[0]
        assert asked == ["http://models.invalid/v1/models"]


def test_connections() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert ask(Target("s", f"tcp://127.0.0.1:{port}", 1)) == (True, "took the connection")
        assert ask(Target("s", f"http://127.0.0.1:{port}/", 1), timeout_s=0.2) == (False, "did not answer within 0.2 s")
    assert ask(Target("s", f"tcp://127.0.0.1:{free_port()}", 1)) == (False, "refused the connection")
    assert ask(Target("s", f"http://127.0.0.1:{free_port()}/", 1)) == (False, "refused the connection")


@pytest.mark.parametrize("url", ["http://no.such.host.invalid/", "http://127.0.0.1:99999/", "http://[::1/", "https://127.0.0.1:1x/"])
def test_addresses_that_cannot_work_are_no_crash(url: str) -> None:
    ok, answer = ask(Target("s", url, 1))
    assert not ok
    assert answer


def test_what_is_no_http_is_no_answer() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def babble() -> None:
            connection, _ = server.accept()
            connection.recv(1000)
            connection.sendall(b"SSH-2.0-x\r\n\r\n")
            connection.close()

        threading.Thread(target=babble, daemon=True).start()
        ok, answer = ask(Target("s", f"http://127.0.0.1:{server.getsockname()[1]}/", 1))
    assert not ok
    assert answer.startswith("gave no answer")


def test_waits_until_all_are_ready() -> None:
    port = free_port()
    late: list[socket.socket] = []
    timer = threading.Timer(0.4, lambda: late.append(socket.create_server(("127.0.0.1", port))))
    timer.start()
    with serving(200) as (url, _), Clock() as clock:
        assert wait_ready([Target("a", url, 30), Target("b", f"tcp://127.0.0.1:{port}", 30)], never, lambda _: None) is None
    late[0].close()
    assert 0.3 < clock.seconds < 30


def test_nothing_to_wait_for() -> None:
    assert wait_ready([], never, lambda _: None) is None
    assert wait_ready([], lambda: "dead", lambda _: None) == "dead"


def test_the_deadline_tells_who_and_the_last_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    patient_clock(monkeypatch, "answered 503", step=1)
    with serving(503) as (url, _):
        address = url.removeprefix("http://")
        waited = wait_ready([Target("server.1", f"http://me:my-password@{address}/health?key=1", 0.5)], never, lambda _: None)
    assert waited == Missed("server.1", f"not ready within 0.5 s: server.1: {url}/health answered 503")


def test_each_target_has_its_own_deadline() -> None:
    refusing = f"tcp://127.0.0.1:{free_port()}"
    with Clock() as clock:
        waited = wait_ready([Target("slow", refusing, 60), Target("quick", refusing, 0.5)], never, lambda _: None)
    assert isinstance(waited, Missed)
    assert waited.name == "quick"
    assert clock.seconds < ALMOST_A_MINUTE


def test_waiting_says_what_for_and_how_long_still(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("seatrial.runtime.servers._SAY_EVERY_S", 0.3)
    patient_clock(monkeypatch, "answered 503", "refused the connection", step=0.05)
    said: list[str] = []
    with serving(503) as (url, _):
        wait_ready([Target("a", f"{url}/health", 1.1), Target("b", f"tcp://127.0.0.1:{free_port()}", 100)], never, said.append)
    assert 2 <= len(said) <= 4
    assert said[0].startswith(f"waiting for a: {url}/health answered 503 (1 s left); b: tcp://127.0.0.1:")
    assert said[0].endswith("refused the connection (100 s left)")


def test_a_reason_to_give_up_is_noticed_though_a_server_hangs() -> None:
    with socket.create_server(("127.0.0.1", 0)) as hanging, Clock() as clock:
        gives_up = time.monotonic() + 0.3
        target = Target("s", f"http://127.0.0.1:{hanging.getsockname()[1]}/", 60)
        assert wait_ready([target], lambda: "dead" if time.monotonic() > gives_up else None, lambda _: None) == "dead"
    assert clock.seconds < 8, "a request that hangs takes 10 s"
