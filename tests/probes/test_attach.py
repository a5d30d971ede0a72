"""One look at a server that runs already, through a stand-in that answers the extension's calls."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from seatrial.checks.refit_judge import JudgedRefitProbe, RefitProbe, RefitRequest
from seatrial.core.errors import BlockedError
from seatrial.core.verdict import Verdict
from seatrial.probes.refit_run import _why, ask_server, judge_attached, refit_summary
from tests.probes.tiny_weights import weights

NAMES = ["a.weight", "b.weight"]


def answers() -> dict[str, Any]:
    """What one rank of a healthy server says."""
    empty: dict[str, Any] = {"shared": {}, "derived": {}, "constant": ["rope"], "idle": [], "unconsumed": {}, "unwritten": {}, "opaque": {}}
    empty |= {"padding": {}, "never_changed": []}
    return {
        "seatrial_map": {"elements": 32, "runs": 2, "duplicates": {}, "restored": True, "misplaced": {}},
        "seatrial_verify": {"wrong": {}, "names": 2, "methods": {"read": 2}, "version": 7},
        "seatrial_coverage": {"fact": "coverage", "replica": "0", "tensors": 3, "written": NAMES, **empty},
        "seatrial_version": {"version": 7, "incarnation": "life", "rank": 0},
    }


@contextmanager
def serving(ranks: list[dict[str, Any]], calls: list[str], broken: str = "") -> Iterator[str]:
    """A server with these ranks; the call `broken` fails."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])) or b"{}")
            name = body.get("method", self.path.partition("?")[0])
            calls.append(name)
            found = {"results": [rank[name] for rank in ranks]} if "method" in body else {}
            self.send_response(500 if name == broken else 200)
            self.end_headers()
            self.wfile.write(json.dumps(found).encode())

        def log_message(self, *_: Any) -> None:
            """Quiet."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    weights(tmp_path / "model.safetensors")
    return tmp_path


def judged(checkpoint: Path, *ranks: dict[str, Any]) -> JudgedRefitProbe:
    with serving(list(ranks), []) as url:
        return judge_attached(ask_server(url, checkpoint, 5), RefitRequest(source="attach", engine=url, model=str(checkpoint)))


def test_a_server_that_holds_the_files_passes(checkpoint: Path) -> None:
    calls: list[str] = []
    with serving([answers()], calls) as url:
        found = judge_attached(ask_server(url, checkpoint, 5), RefitRequest(source="attach", engine=url, model="M"))
    assert (found.verdict, found.reason) == (Verdict.PASS, "2 tensors are bit-equal: the server holds M")
    assert calls[:2] == ["seatrial_version", "/pause"]
    assert calls[-1] == "/resume"
    assert any("one look" in text for text in found.limitations)
    assert "1 buffers were compared with nothing: rope" in found.limitations
    assert "Refits:" not in (
        said := refit_summary(RefitProbe(seatrial="0", created="now", command=(), wanted=RefitRequest(source="attach"), judged=found), None)
    )
    assert said.startswith("Result: Pass - 2 tensors are bit-equal: the server")


def test_a_wrong_tensor_fails_with_its_runtime_name(checkpoint: Path) -> None:
    rank = answers()
    rank["seatrial_verify"]["wrong"] = {"a.weight": {"count": 3, "first": 0, "total": 16, "runtime": "fused.weight", "method": "read"}}
    found = judged(checkpoint, rank)
    assert found.verdict is Verdict.FAIL
    assert "a.weight (layer a), held as fused.weight, on replica 0" in found.reason


def test_a_cast_is_not_called_bit_equal(checkpoint: Path) -> None:
    rank = answers()
    rank["seatrial_map"]["casts"] = dict.fromkeys(NAMES, "torch.float32 to torch.bfloat16")
    found = judged(checkpoint, rank)
    assert found.verdict is Verdict.PASS
    assert found.reason.startswith("2 tensors are equal after the same cast (torch.float32 to torch.bfloat16): the server holds")
    assert any("what it drops is not seen" in text for text in found.limitations)


@pytest.mark.parametrize(
    ("call", "fields"),
    [
        ("seatrial_map", {"restored": False}),
        ("seatrial_map", {"misplaced": {"fused.weight": "its slots are out of order"}}),
        ("seatrial_map", {"elements": "many"}),
        ("seatrial_verify", {"names": 0, "methods": {}}),
        ("seatrial_verify", {"methods": {"read": 1}}),
        ("seatrial_coverage", {"unconsumed": {"b.weight": 4}}),
        ("seatrial_coverage", {"unwritten": {"x": 4}}),
        ("seatrial_coverage", {"constant": ["a.weight"]}),
        ("seatrial_coverage", {"tensors": 4}),
        ("seatrial_coverage", {"constant": [], "moved": {"rope": "its bits changed with load 1"}}),
        ("seatrial_coverage", {"opaque": {"b.weight": "it comes back changed"}}),
        ("seatrial_verify", {"methods": {"compare": 2}}),
    ],
)
def test_each_answer_can_fail_it(checkpoint: Path, call: str, fields: dict[str, Any]) -> None:
    rank = answers()
    rank[call].update(fields)
    found = judged(checkpoint, rank)
    assert found.verdict is Verdict.FAIL
    assert found.reason.startswith("not proven: ")


def test_ranks_must_agree_on_the_version(checkpoint: Path) -> None:
    other = answers()
    assert judged(checkpoint, answers(), other).verdict is Verdict.PASS
    other["seatrial_version"]["version"] = 6
    assert judged(checkpoint, answers(), other).verdict is Verdict.FAIL


def test_what_cannot_be_shown_is_blocked(checkpoint: Path) -> None:
    half = answers()
    half["seatrial_coverage"]["unconsumed"] = {"a.weight": 8}
    found = judged(checkpoint, half, half)
    assert found.verdict is Verdict.BLOCKED
    assert "sharded over ranks" in found.reason
    opaque = answers()
    opaque["seatrial_coverage"].update(tensors=0, written=[], opaque={"a.weight": "the loader quantises"})
    assert "the loader quantises" in judged(checkpoint, opaque).reason
    assert judged(checkpoint, opaque).verdict is Verdict.BLOCKED


def test_a_server_without_the_extension_is_blocked_and_resumed(checkpoint: Path) -> None:
    calls: list[str] = []
    with serving([answers()], calls, broken="seatrial_map") as url, pytest.raises(BlockedError) as caught:
        ask_server(url, checkpoint, 5)
    assert "/collective_rpc: status 500" in caught.value.message
    assert "--worker-extension-cls" in caught.value.fix
    assert calls[-1] == "/resume"


def test_a_server_that_cannot_be_looked_at_is_not_disturbed(checkpoint: Path) -> None:
    calls: list[str] = []
    with serving([answers()], calls, broken="seatrial_version") as url, pytest.raises(BlockedError):
        ask_server(url, checkpoint, 5)
    assert not [call for call in calls if "pause" in call]


def test_a_server_that_is_not_there_is_blocked(checkpoint: Path) -> None:
    with serving([], []) as url:
        pass
    with pytest.raises(BlockedError, match=f"nothing listens at {url}"):
        ask_server(url, checkpoint, 5)


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        ("POST u: status 500: 'Worker' object has no attribute 'seatrial_version'", "runs without our worker extension"),
        ("POST u: status 404: no body", "no vLLM server in development mode"),
        ("POST u: status 501: <!DOCTYPE HTML>", "no vLLM server in development mode"),
        ("POST u: not JSON: '<html>'", "no vLLM server in development mode"),
        ("POST u: no answer within 5 s: [Errno 111] Connection refused", "nothing listens at u"),
        ("POST u: status 500: boom", "boom"),
    ],
)
def test_what_an_error_means_is_said(said: str, meant: str) -> None:
    message, fix = _why("u", said)
    assert meant in message
    assert "<" not in message
    assert fix
