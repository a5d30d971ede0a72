"""A small OpenAI-compatible server for the demo's model: one turn, no streams, loopback only.

    python -m seatrial.rollouts.demo.serve --host 127.0.0.1 --port 8000 --cache DIR

- GET /health and /v1/models; POST /v1/chat/completions and /v1/responses with temperature, top_p, seed and the most tokens.
- The same request with the same seed has the same answer, whoever else asks meanwhile. /v1/responses takes a seed from
  `metadata.extra_body`, too.
- What it cannot do is refused (400, or 404 for another model) in the shape of vLLM's errors; other parameters are ignored, as there.
- It listens when the model is ready, and ends with 0 when it is told to (SIGTERM).
"""

from __future__ import annotations

import argparse
import collections
import ipaddress
import itertools
import json
import logging
import random
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import FrameType
from typing import Any

from seatrial.rollouts.demo.policy import CONTEXT, Answer, Ask, Policy, ensure

NAME = "seatrial-demo"
_MOST_BYTES = 1024 * 1024
_MOST_AT_ONCE = 32
_IDLE_S = 75.0
_log = logging.getLogger("serve")


class Refused(Exception):
    """A request that gets an error instead of an answer."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message


@dataclass(slots=True)
class _Job:
    ask: Ask
    answer: Answer | None = None


class Batches:
    """Whoever gets the model answers for everybody who waits."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self._waiting: collections.deque[_Job] = collections.deque()
        self._model = threading.Lock()

    def answer(self, ask: Ask) -> Answer:
        """The answer to one request; called by many threads."""
        job = _Job(ask)
        self._waiting.append(job)
        with self._model:
            while job.answer is None:
                batch = [self._waiting.popleft() for _ in range(min(len(self._waiting), _MOST_AT_ONCE))]
                if not batch:
                    raise RuntimeError("the batch with this request failed")
                for one, answer in zip(batch, self.policy.answer([one.ask for one in batch]), strict=True):
                    one.answer = answer
        return job.answer


def number(body: Mapping[str, Any], key: str, default: float, low: float, high: float) -> float:
    """A number of the request within its bounds; null is the default."""
    value = body.get(key)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise Refused(400, f"{key} must be a number from {low:g} to {high:g}, and is {json.dumps(value)}")
    return value


def whole(body: Mapping[str, Any], keys: Sequence[str], low: int) -> int | None:
    """The first of these keys that the request has, a whole number; None when it has none."""
    for key in keys:
        value = body.get(key)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < low:
            raise Refused(400, f"{key} must be a whole number, at least {low}, and is {json.dumps(value)}")
        return value
    return None


def text_of(messages: Any, key: str) -> str:
    """The texts of a list of messages, or a plain text, as one prompt."""
    if isinstance(messages, str):
        return messages
    if not isinstance(messages, list) or not messages:
        raise Refused(400, f"{key} must be a list of messages, and not an empty one")
    texts = []
    for message in messages:
        content = message.get("content") if isinstance(message, dict) else None
        parts = [{"text": content}] if isinstance(content, str) else content
        if not isinstance(parts, list) or not all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in parts):
            raise Refused(400, f"{key}: each message needs a content that is text")
        texts += [part["text"] for part in parts]
    return "\n".join(texts)


def ask_of(body: Mapping[str, Any], tokens: tuple[int, ...], most: int | None) -> Ask:
    """The request for a prompt of these tokens."""
    if body.get("model") not in (None, NAME):
        raise Refused(404, f"The model {json.dumps(body['model'])} does not exist; the only one is {NAME}.")
    for key, only in (("stream", False), ("n", 1), ("tools", [])):
        if body.get(key) not in (None, only):
            raise Refused(400, f"{key} = {json.dumps(body[key])} is not supported")
    limit = f"This model's maximum context length is {CONTEXT} tokens"
    if not tokens:
        raise Refused(400, "the prompt is empty")
    if len(tokens) + (most or 1) > CONTEXT:
        raise Refused(
            400, f"{limit}. However, you requested {most or 1} output tokens and your prompt contains {len(tokens)} input tokens."
        )
    seed = whole(body, ("seed",), 0)
    return Ask(
        tokens=tokens,
        most=most or CONTEXT - len(tokens),
        temperature=number(body, "temperature", 1.0, 0.0, 2.0),
        top_p=number(body, "top_p", 1.0, 1e-6, 1.0),
        seed=random.getrandbits(64) if seed is None else seed,
    )


def chat(batches: Batches, body: Mapping[str, Any], id: str) -> dict[str, Any]:
    """POST /v1/chat/completions."""
    tokens = batches.policy.encode(text_of(body.get("messages"), "messages"))
    answer = batches.answer(ask_of(body, tokens, whole(body, ("max_completion_tokens", "max_tokens"), 1)))
    message = {"role": "assistant", "content": answer.text}
    return {
        "id": f"chatcmpl-{id}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": NAME,
        "choices": [{"index": 0, "message": message, "logprobs": None, "finish_reason": answer.finish}],
        "usage": {"prompt_tokens": len(tokens), "completion_tokens": answer.tokens, "total_tokens": len(tokens) + answer.tokens},
    }


def responses(batches: Batches, body: Mapping[str, Any], id: str) -> dict[str, Any]:
    """POST /v1/responses."""
    said = [body["instructions"]] if isinstance(body.get("instructions"), str) else []
    tokens = batches.policy.encode("\n".join([*said, text_of(body.get("input"), "input")]))
    ask = ask_of({**_extra(body), **body}, tokens, whole(body, ("max_output_tokens",), 1))
    answer = batches.answer(ask)
    status = "completed" if answer.finish == "stop" else "incomplete"
    content = [{"type": "output_text", "text": answer.text, "annotations": []}]
    return {
        "id": f"resp_{id}",
        "object": "response",
        "created_at": int(time.time()),
        "model": NAME,
        "status": status,
        "incomplete_details": None if answer.finish == "stop" else {"reason": "max_output_tokens"},
        "output": [{"id": f"msg_{id}", "type": "message", "role": "assistant", "status": status, "content": content}],
        "temperature": ask.temperature,
        "top_p": ask.top_p,
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
        "usage": {
            "input_tokens": len(tokens),
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": answer.tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": len(tokens) + answer.tokens,
        },
    }


def _extra(body: Mapping[str, Any]) -> dict[str, Any]:
    """`metadata.extra_body`, a JSON text: where Gym and Seatrial put what the Responses interface does not know, the seed among it."""
    metadata = body.get("metadata") or {}
    text = metadata.get("extra_body") if isinstance(metadata, dict) else None
    try:
        extra = json.loads(text or "{}")
    except (TypeError, ValueError, RecursionError) as error:
        raise Refused(400, f"metadata.extra_body is not JSON: {error}") from error
    if not isinstance(extra, dict):
        raise Refused(400, "metadata.extra_body must be a JSON object")
    return extra


_POSTS = {"/v1/chat/completions": chat, "/v1/responses": responses}


class Server(ThreadingHTTPServer):
    """A thread per connection."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, host: str, port: int, batches: Batches) -> None:
        super().__init__((host, port), Handler)
        self.batches = batches
        self.numbers = itertools.count(1)


class Handler(BaseHTTPRequestHandler):
    """One connection, kept open between requests."""

    server: Server
    protocol_version = "HTTP/1.1"
    timeout = _IDLE_S
    disable_nagle_algorithm = True

    def do_GET(self) -> None:
        if self.path == "/health":
            self._send(200, {"status": "ok"})
        elif self.path == "/v1/models":
            model = {"id": NAME, "object": "model", "created": 0, "owned_by": "seatrial", "max_model_len": CONTEXT}
            self._send(200, {"object": "list", "data": [model]})
        else:
            self._refuse(404, f"{self.path} is not there")

    def do_POST(self) -> None:
        try:
            body = self._body()
            if self.path not in _POSTS:
                raise Refused(404, f"{self.path} is not there; POST to one of {', '.join(_POSTS)}")
            self._send(200, _POSTS[self.path](self.server.batches, body, f"{next(self.server.numbers):08x}"))
        except Refused as refused:
            self._refuse(refused.status, refused.message)
        except RuntimeError as error:
            _log.exception("a batch failed")
            self._refuse(500, f"the model failed: {error}")

    def _body(self) -> dict[str, Any]:
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal() or int(length) > _MOST_BYTES:
            self.close_connection = True  # what follows cannot be told from the next request
            raise Refused(413 if length.isdecimal() else 411, f"Content-Length must be there, and at most {_MOST_BYTES}")
        try:
            body = json.loads(self.rfile.read(int(length)))
        except (ValueError, RecursionError) as error:
            raise Refused(400, f"the body is not JSON: {error}") from error
        if not isinstance(body, dict):
            raise Refused(400, "the body must be a JSON object")
        return body

    def _refuse(self, status: int, message: str) -> None:
        kind = {404: "NotFoundError", 500: "InternalServerError"}.get(status, "BadRequestError")
        self._send(status, {"error": {"message": message, "type": kind, "param": None, "code": status}})

    def _send(self, status: int, value: Mapping[str, Any]) -> None:
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *arguments: Any) -> None:
        _log.debug(format, *arguments)


def _loopback(host: str) -> str:
    if host != "localhost" and not ipaddress.ip_address(host).is_loopback:
        raise ValueError(host)
    return host


def _end(signum: int, frame: FrameType | None) -> None:
    del signum, frame
    raise SystemExit(0)


def main() -> None:
    """Make the model ready, then serve it until SIGTERM."""
    import torch
    from transformers.utils import logging as library

    parser = argparse.ArgumentParser(description="serve the demo's tiny model")
    parser.add_argument("--host", type=_loopback, default="127.0.0.1", help="a loopback address: there is no key to keep others out")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--cache", type=Path, required=True, help="where the trained model is kept")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    signal.signal(signal.SIGTERM, _end)
    library.disable_progress_bar()
    torch.set_num_threads(1)  # a second thread would wait for the collector's CPU more than it helps; and results stay the same
    place = ensure(options.cache, _log.info)
    with Server(options.host, options.port, Batches(Policy(place))) as server:
        _log.info("%s from %s listens at http://%s:%d", NAME, place, options.host, options.port)
        server.serve_forever()


if __name__ == "__main__":
    main()
