"""The client of a vLLM server against a stub that answers as told: order of calls, versions, errors that name route and body."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from seatrial.instruments.engines.vllm_extension import Extension
from seatrial.instruments.engines.vllm_server import PROOFS, ServerError, VllmClient

Answer = Callable[[str, dict[str, Any]], tuple[int, Any]]


@contextmanager
def stub(answer: Answer, timeout_s: float | None = 5.0) -> Iterator[tuple[VllmClient, list[str]]]:
    """A client of a server that answers every route with `answer`, and the routes that were called."""
    called: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or b"{}")
            called.append(self.path)
            status, value = answer(self.path, body)
            data = value if isinstance(value, bytes) else json.dumps(value).encode()
            self.send_response(status)
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: Any) -> None:
            """Quiet."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield VllmClient(f"http://127.0.0.1:{server.server_address[1]}/", timeout_s=timeout_s), called
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def held(*versions: int) -> dict[str, Any]:
    return {"results": [{"version": version, "incarnation": "1-1"} for version in versions]}


def completions(count: int) -> dict[str, Any]:
    made = [{"index": place, "token_ids": [place, 5], "logprobs": {"token_logprobs": [-0.5, -place]}} for place in range(count)]
    return {"choices": made[::-1]}


def test_a_refit_pauses_sends_and_resumes() -> None:
    seen = {}

    def answer(path: str, body: dict[str, Any]) -> tuple[int, Any]:
        seen[path] = body
        return 200, {}

    with stub(answer) as (client, called):
        client.refit("/x/payload", 3)
    routes = ["/pause?mode=abort&clear_cache=true", "/start_weight_update", "/update_weights", "/finish_weight_update", "/resume"]
    assert called == routes
    assert seen["/update_weights"] == {"update_info": {"path": "/x/payload"}}
    assert seen["/finish_weight_update"] == {"weight_version": "3"}


def test_a_refused_refit_names_route_and_body_and_resumes() -> None:
    def answer(path: str, body: dict[str, Any]) -> tuple[int, Any]:
        del body
        return (500, b"refused (gap)") if path == "/update_weights" else (200, {})

    with stub(answer) as (client, called), pytest.raises(ServerError, match=r"/update_weights: status 500: refused \(gap\)"):
        client.refit("/x/payload", 3)
    assert called[-1] == "/resume"
    assert "/finish_weight_update" not in called


def test_an_answer_that_is_not_json_is_an_error() -> None:
    with stub(lambda path, body: (200, b"<html>")) as (client, _), pytest.raises(ServerError, match="/pause: not JSON: '<html>'"):
        client.call("/pause", {})


def test_a_server_that_is_slow_or_gone_is_an_error_within_the_deadline() -> None:
    def slow(path: str, body: dict[str, Any]) -> tuple[int, Any]:
        del path, body
        time.sleep(0.3)
        return 200, {}

    with stub(slow, timeout_s=0.1) as (client, _), pytest.raises(ServerError, match=r"/resume: no answer within 0"):
        client.call("/resume", {})
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        nobody = VllmClient(f"http://127.0.0.1:{probe.getsockname()[1]}", timeout_s=1)
        with pytest.raises(ServerError, match="no answer"):
            nobody.versions()


def test_what_goes_over_every_weight_has_a_longer_deadline_and_is_named() -> None:
    given: dict[str, float] = {}

    def answer(path: str, body: dict[str, Any]) -> tuple[int, Any]:
        del path
        given[body["method"]] = body["timeout"]
        return 200, held(4)

    with stub(answer, timeout_s=None) as (client, _):
        for method in (*PROOFS, "seatrial_version"):
            client.rpc(method)
    assert given == {**dict.fromkeys(PROOFS, 1800.0), "seatrial_version": 120.0}
    assert {"seatrial_map", "seatrial_read", "seatrial_verify"} <= {*PROOFS} <= {*vars(Extension)}
    with stub(answer, timeout_s=7) as (client, _):
        client.rpc("seatrial_map")
    assert given["seatrial_map"] == 7, "who names a deadline gets it"

    def slow(path: str, body: dict[str, Any]) -> tuple[int, Any]:
        time.sleep(0.3)
        return answer(path, body)

    with (
        stub(slow, timeout_s=0.1) as (client, _),
        pytest.raises(ServerError, match="within 0 s \\(waited for seatrial_map in every worker\\)"),
    ):
        client.rpc("seatrial_map")


def test_samples_carry_the_version_at_dispatch() -> None:
    with stub(lambda path, body: (200, held(4) if "rpc" in path else completions(2))) as (client, _):
        samples = client.sample([[1], [2]], 2, seed=0)
    assert [(sample.tokens, sample.logprobs, sample.version) for sample in samples] == [([0, 5], [-0.5, 0.0], 4), ([1, 5], [-0.5, -1.0], 4)]


@pytest.mark.parametrize(
    ("versions", "count", "said"),
    [
        ([held(4), held(5)], 2, "changed from version 4"),
        ([held(4, 5)], 2, "hold different versions"),
        ([held(4), held(4)], 1, "1 completions for 2 prompts"),
    ],
)
def test_samples_that_cannot_be_stamped_are_an_error(versions: list[dict[str, Any]], count: int, said: str) -> None:
    left = list(versions)
    answer: Answer = lambda path, body: (200, left.pop(0) if "rpc" in path else completions(count))  # noqa: E731
    with stub(answer) as (client, _), pytest.raises(ServerError, match=said):
        client.sample([[1], [2]], 2, seed=0)


def test_rollouts_have_a_seed_each_and_stay_in_order() -> None:
    def answer(path: str, body: dict[str, Any]) -> tuple[int, Any]:
        if "rpc" in path:
            return 200, held(4)
        assert (body["max_tokens"], body["temperature"], "min_tokens" in body, "ignore_eos" in body) == (3, 1.0, False, False)
        time.sleep(0.001 * (9 - body["seed"]))
        return 200, {"choices": [{"index": 0, "token_ids": [*body["prompt"][0], body["seed"]], "logprobs": {"token_logprobs": [-1, -2]}}]}

    with stub(answer) as (client, called):
        samples = client.rollouts([[place] for place in range(9)], 3, list(range(9)))
    assert [sample.tokens for sample in samples] == [[place, place] for place in range(9)]
    assert {sample.version for sample in samples} == {4}
    assert len(called) == 11, "one request each, and the version before and after"


def test_a_rollout_that_is_missing_is_an_error() -> None:
    with stub(lambda path, body: (200, held(4) if "rpc" in path else {"choices": []})) as (client, _):
        with pytest.raises(ServerError, match="0 completions for 2 prompts"):
            client.rollouts([[1], [2]], 2, [5, 6])
        with pytest.raises(ValueError, match="zip"):
            client.rollouts([[1], [2]], 2, [5])


def test_log_probabilities_of_given_tokens_begin_where_asked() -> None:
    rows = [[None, {"7": {"logprob": -1.0}}, {"8": {"logprob": -2.0}, "9": {"logprob": -0.1}}], [None, {"5": {"logprob": -3.0}}]]
    choices = [{"index": 1, "prompt_logprobs": rows[1]}, {"index": 0, "prompt_logprobs": rows[0]}]
    with stub(lambda path, body: (200, {"choices": choices})) as (client, _):
        assert client.logprobs([[6, 7, 8], [4, 5]], [2, 1]) == [[-2.0], [-3.0]]
