"""Waiting until servers can be used: with a deadline, saying what for, and no longer than there is hope.

- A service of ours is ready when its path answers 200, or, without a path, when its port takes a connection.
- A server that runs elsewhere is there when it answers with anything below 500: even 401 comes from it.
- Redirects are not followed. One that leads to another server is no answer of this one, and the message says so.
- Loopback is asked directly, whatever proxy the environment names.
- A server that hangs holds nobody up: every target is asked by a thread of its own.
"""

from __future__ import annotations

import http.client
import ipaddress
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from email.message import Message
from typing import IO, TypeVar
from urllib.parse import urljoin, urlsplit

T = TypeVar("T")

_ASK_EVERY_S = 0.5
_REQUEST_S = 10.0
_LOOK_S = 0.1
_SAY_EVERY_S = 15.0


@dataclass(frozen=True, slots=True)
class Target:
    """A server to wait for."""

    name: str
    """As logs and results call it."""
    url: str
    """`http://`, `https://`, or `tcp://host:port` for a mere connection."""
    deadline_s: float
    foreign: bool = False
    """Not ours: any answer below 500 will do."""


@dataclass(frozen=True, slots=True)
class Missed:
    """A target that was not ready in time."""

    name: str
    message: str


def foreign_target(name: str, url: str, deadline_s: float) -> Target:
    """A server that runs elsewhere; an OpenAI-compatible base URL (.../v1) is asked for its models."""
    bare = url.rstrip("/")
    return Target(name, f"{bare}/models" if bare.endswith("/v1") else url, deadline_s, foreign=True)


def wait_ready(targets: Sequence[Target], halt: Callable[[], T | None], progress: Callable[[str], None]) -> T | Missed | None:
    """Wait until every target is ready (None), one missed its deadline, or `halt()`, asked ten times a second, gave a reason."""
    stop = threading.Event()
    waits = [_Wait(target, stop) for target in targets]
    began = said = time.monotonic()
    try:
        for wait in waits:
            threading.Thread(target=wait.run, name=f"ready-{wait.target.name}", daemon=True).start()
        while True:
            if (reason := halt()) is not None:
                return reason
            waits = [wait for wait in waits if not wait.ready.is_set()]
            if not waits:
                return None
            passed = time.monotonic() - began
            for wait in waits:
                if passed >= wait.target.deadline_s:
                    return Missed(wait.target.name, f"not ready within {wait.target.deadline_s:g} s: {wait.says()}")
            if time.monotonic() - said >= _SAY_EVERY_S:
                said = time.monotonic()
                progress("waiting for " + "; ".join(f"{wait.says()} ({wait.target.deadline_s - passed:.0f} s left)" for wait in waits))
            waits[0].ready.wait(_LOOK_S)
    finally:
        stop.set()


class _Wait:
    """Asks one target until it is ready or `stop` is set."""

    def __init__(self, target: Target, stop: threading.Event) -> None:
        self.target = target
        self.ready = threading.Event()
        self._stop = stop
        self._answer = "did not answer yet"

    def says(self) -> str:
        """Who, and the last answer; without what a URL may hold of secrets."""
        return f"{self.target.name}: {_shown(self.target.url)} {self._answer}"

    def run(self) -> None:
        while not self._stop.is_set():
            ok, self._answer = ask(self.target)
            if ok:
                self.ready.set()
                return
            self._stop.wait(_ASK_EVERY_S)


def ask(target: Target, timeout_s: float = _REQUEST_S) -> tuple[bool, str]:
    """Ask once: whether it is ready, and its answer in words."""
    try:
        parts = urlsplit(target.url)
        if parts.scheme == "tcp":
            socket.create_connection((parts.hostname or "", parts.port or 0), timeout_s).close()
            return True, "took the connection"
        status, leads_to = _get(target.url, timeout_s)
    except (OSError, http.client.HTTPException, ValueError) as error:
        return False, _in_words(error, timeout_s)
    answer = f"answered {status}"
    if leads_to and (_origin(leads_to) != _origin(target.url) or not target.foreign):
        return False, f"{answer}, a redirect to {_shown(leads_to)}"
    return (status < 500 if target.foreign else status == 200), answer


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: Message, newurl: str
    ) -> urllib.request.Request | None:
        del req, fp, code, msg, headers, newurl
        return None


def _get(url: str, timeout_s: float) -> tuple[int, str | None]:
    """The status of a GET, and where it leads to if it is a redirect."""
    handlers: list[urllib.request.BaseHandler] = [_NoRedirect()]
    if _is_loopback(urlsplit(url).hostname or ""):
        handlers.append(urllib.request.ProxyHandler({}))
    try:
        with urllib.request.build_opener(*handlers).open(_bare(url), timeout=timeout_s) as answer:
            return answer.status, None
    except urllib.error.HTTPError as error:
        with error:
            where = error.headers.get("Location") if 300 <= error.code < 400 else None
            return error.code, urljoin(url, where) if where else None


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _bare(url: str) -> str:
    """Without user and password, which urllib takes for a part of the host."""
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()


def _shown(url: str) -> str:
    parts = urlsplit(_bare(url))
    return parts._replace(query="", fragment="").geturl()


def _origin(url: str) -> tuple[str, str | None, int | None]:
    parts = urlsplit(url)
    return parts.scheme, parts.hostname, parts.port


def _in_words(error: Exception, timeout_s: float) -> str:
    cause = error.reason if isinstance(error, urllib.error.URLError) else error
    if isinstance(cause, ConnectionRefusedError):
        return "refused the connection"
    if isinstance(cause, TimeoutError):
        return f"did not answer within {timeout_s:g} s"
    return f"gave no answer: {cause or type(error).__name__}"
