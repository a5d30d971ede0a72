"""The demo's questions, its tiny model, and an OpenAI-compatible server for it: one turn, no streams, loopback only.

    python -m seatrial.rollouts.demo_server --host 127.0.0.1 --port 8000 --cache DIR

- Runs in an environment with torch and transformers in which nothing else of Seatrial exists: only the standard library is imported at
  the top. The host imports it for the questions.
- The model is a two-layer Qwen2 with 84,000 parameters that learns sums and the largest of four numbers in half a minute and stops before
  it is perfect. The same recipe and libraries give the same weights, which are cached by a hash of both.
- The same request with the same seed has the same answer, whatever else is in the batch: double precision keeps rounding errors of
  padding too small to change a drawn token. Errors have the shape of vLLM's.
"""

from __future__ import annotations

import argparse
import collections
import hashlib
import ipaddress
import itertools
import json
import logging
import math
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple

LETTERS = "ABCD"


class Question(NamedTuple):
    """One row of the demo."""

    prompt: str
    answer: str
    difficulty: str


def sum_of(draw: random.Random, digits: int) -> Question:
    low, high = (0, 9) if digits == 1 else (10 ** (digits - 1), 10**digits - 1)
    left, right = draw.randint(low, high), draw.randint(low, high)
    return Question(f"What is {left}+{right}?", str(left + right), f"{digits}-digit")


def largest_of(draw: random.Random, near: bool) -> Question:
    """Four two-digit numbers; `near`: the largest two begin with the same digit."""
    while True:
        numbers = draw.sample(range(10, 100), len(LETTERS))
        second, first = sorted(numbers)[-2:]
        if (first // 10 == second // 10) == near:
            break
    options = " ".join(f"{letter}) {number}" for letter, number in zip(LETTERS, numbers, strict=True))
    return Question(f"Which is largest? {options}", LETTERS[numbers.index(first)], "near" if near else "far")


MAKERS: dict[str, tuple[Callable[[random.Random], Question], ...]] = {
    "sums": (lambda draw: sum_of(draw, 1), lambda draw: sum_of(draw, 2), lambda draw: sum_of(draw, 3)),
    "largest": (lambda draw: largest_of(draw, False), lambda draw: largest_of(draw, True)),
}
"""Datasets, and their questions from easy to hard. Nobody taught the model the last kind of sums."""


def different(make: Callable[[random.Random], Question], count: int, draw: random.Random) -> list[Question]:
    """So many questions of one kind, none of them twice."""
    found: dict[str, Question] = {}
    while len(found) < count:
        question = make(draw)
        found.setdefault(question.prompt, question)
    return list(found.values())


CONTEXT = 64
"""Tokens of a prompt and its answer."""
_PHRASES = ("What is ", "Which is largest? ", "Answer: ", "A) ", " B) ", " C) ", " D) ")
_PIECES = ("<pad>", "<eos>", "<unk>", *"0123456789+?ABCD", *_PHRASES)
_SPLIT = r"[A-Z][a-z ]+[?:]? ?| ?[A-D]\) |."
_SEED = 20261115
_STEPS = 800
_BATCH = 96
_RATE = 4e-3
_WARM_UP = 50
_IGNORED = -100
"""What the loss leaves out: the prompt."""


class DemoRequest(NamedTuple):
    """One request, as tokens."""

    tokens: tuple[int, ...]
    most: int
    temperature: float
    top_p: float
    seed: int


class DemoAnswer(NamedTuple):
    """What the model said."""

    text: str
    tokens: int
    finish: str


class DemoPolicy:
    """A trained model that answers in batches."""

    def __init__(self, directory: Path) -> None:
        from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM

        self._words = PreTrainedTokenizerFast.from_pretrained(directory)  # not Auto: that takes the one of large Qwen2 models
        self._model = Qwen2ForCausalLM.from_pretrained(directory).double().eval()

    def encode(self, text: str) -> tuple[int, ...]:
        return tuple(self._words.encode(text))

    def answer(self, asks: Sequence[DemoRequest]) -> list[DemoAnswer]:
        """One answer each, in order."""
        import torch

        width = max(len(ask.tokens) for ask in asks)
        end = self._words.eos_token_id
        ids = torch.tensor([[0] * (width - len(ask.tokens)) + list(ask.tokens) for ask in asks])
        mask = torch.tensor([[0] * (width - len(ask.tokens)) + [1] * len(ask.tokens) for ask in asks])
        places = (mask.cumsum(1) - 1).clamp(min=0)
        draws = [random.Random(ask.seed) for ask in asks]
        said: list[list[int]] = [[] for _ in asks]
        cache = None
        with torch.inference_mode():
            while True:
                out = self._model(input_ids=ids, attention_mask=mask, position_ids=places, past_key_values=cache, use_cache=True)
                cache = out.past_key_values
                for ask, draw, tokens, logits in zip(asks, draws, said, out.logits[:, -1].tolist(), strict=True):
                    if len(tokens) < ask.most and tokens[-1:] != [end]:
                        tokens.append(choose(logits, ask.temperature, ask.top_p, draw))
                if all(len(tokens) == ask.most or tokens[-1:] == [end] for ask, tokens in zip(asks, said, strict=True)):
                    break
                ids = torch.tensor([tokens[-1:] for tokens in said])
                mask = torch.cat([mask, torch.ones_like(mask[:, :1])], 1)
                places = places[:, -1:] + 1
        texts = [self._words.decode(tokens, skip_special_tokens=True) for tokens in said]
        return [DemoAnswer(text, len(tokens), "stop" if tokens[-1] == end else "length") for text, tokens in zip(texts, said, strict=True)]


def choose(logits: Sequence[float], temperature: float, top_p: float, draw: random.Random) -> int:
    """A token: the likeliest at temperature 0, else drawn from the likeliest ones that have `top_p` together."""
    order = sorted(range(len(logits)), key=lambda token: -logits[token])
    if temperature == 0:
        return order[0]
    weights = [math.exp((logits[token] - logits[order[0]]) / temperature) for token in order]
    share, kept, total = top_p * sum(weights), 0, 0.0
    while kept < len(weights) and (kept == 0 or total < share):
        total += weights[kept]
        kept += 1
    left = draw.random() * total
    for token, weight in zip(order[:kept], weights, strict=False):
        left -= weight
        if left < 0:
            return token
    return order[kept - 1]


def ensure(cache: Path, progress: Callable[[str], None]) -> Path:
    """The directory of the trained model below `cache`, made now unless it is there; safe when two processes do it at once."""
    import torch
    import transformers

    recipe = hashlib.sha256(f"{torch.__version__} {transformers.__version__}".encode())
    recipe.update(Path(__file__).read_bytes())
    place = cache / f"policy-{recipe.hexdigest()[:12]}"
    if (place / "config.json").is_file():
        return place
    cache.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{place.name}.", dir=cache))
    try:
        model, words = _train(progress)
        model.save_pretrained(temporary)
        words.save_pretrained(temporary)
        os.rename(temporary, place)  # noqa: PTH104 - fails when another process was first, which is fine
    except OSError:
        if not (place / "config.json").is_file():
            raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return place


def _train(progress: Callable[[str], None]) -> tuple[Any, Any]:
    import torch
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    core = Tokenizer(models.WordLevel({piece: number for number, piece in enumerate(_PIECES)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(_SPLIT), "isolated")
    core.decoder = decoders.Fuse()
    words = PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")
    torch.manual_seed(_SEED)
    draw = random.Random(_SEED)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4}
    ends = {"pad_token_id": words.pad_token_id, "eos_token_id": words.eos_token_id, "bos_token_id": None}
    turns = {"rope_type": "default", "rope_theta": 100.0}  # few positions: slower rotations would hardly tell neighbours apart
    shape = Qwen2Config(vocab_size=len(_PIECES), max_position_embeddings=CONTEXT, rope_parameters=turns, **sizes, **ends)
    model = Qwen2ForCausalLM(shape)
    optimizer = torch.optim.AdamW(model.parameters(), lr=_RATE, betas=(0.9, 0.98), weight_decay=0.01)
    for step in range(_STEPS):
        for group in optimizer.param_groups:
            group["lr"] = _RATE * min(1.0, (step + 1) / _WARM_UP) * max(0.02, 1 - step / _STEPS)
        tokens, labels = _batch(words, "largest" if step % 4 == 3 else "sums", draw)
        loss = model(input_ids=tokens, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if (step + 1) % 200 == 0:
            progress(f"training: step {step + 1} of {_STEPS}, loss {loss.item():.3f}")
    return model, words


def _batch(words: Any, dataset: str, draw: random.Random) -> tuple[Any, Any]:
    """Tokens and labels of questions with their answers; only answers count."""
    import torch

    pairs: list[tuple[list[int], list[int]]] = []
    for _ in range(_BATCH):
        if dataset == "sums":
            question, before = sum_of(draw, 1 if draw.random() < 0.3 else 2), ""
        else:
            question, before = largest_of(draw, draw.random() < 0.5), "Answer: "
        pairs.append((words.encode(question.prompt), [*words.encode(before + question.answer), words.eos_token_id]))
    width = max(len(prompt) + len(answer) for prompt, answer in pairs)
    tokens = torch.full((_BATCH, width), words.pad_token_id)
    labels = torch.full((_BATCH, width), _IGNORED)
    for row, (prompt, answer) in enumerate(pairs):
        end = len(prompt) + len(answer)
        tokens[row, :end] = torch.tensor([*prompt, *answer])
        labels[row, len(prompt) : end] = torch.tensor(answer)
    return tokens, labels


NAME = "seatrial-demo"
_MOST_BYTES = 1024 * 1024
_MOST_AT_ONCE = 32
_IDLE_S = 75.0
_log = logging.getLogger("serve")


class RefusedRequestError(Exception):
    """A request that gets an error instead of an answer."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status, self.message = status, message


@dataclass(slots=True)
class _Job:
    ask: DemoRequest
    answer: DemoAnswer | None = None


class Batches:
    """Whoever gets the model answers for everybody who waits."""

    def __init__(self, policy: DemoPolicy) -> None:
        self.policy = policy
        self._waiting: collections.deque[_Job] = collections.deque()
        self._model = threading.Lock()

    def answer(self, ask: DemoRequest) -> DemoAnswer:
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


def number(body: Mapping[str, Any], keys: Sequence[str], low: float, high: float = math.inf, kind: type[float] = int) -> Any:
    """The first of these keys that the request has and does not set to null: a number within bounds; None when it has none."""
    for key, value in ((key, body[key]) for key in keys if body.get(key) is not None):
        if isinstance(value, bool) or not isinstance(value, (int, kind)) or not low <= value <= high:
            wanted = f"a number from {low:g} to {high:g}" if kind is float else f"a whole number, at least {low}"
            raise RefusedRequestError(400, f"{key} must be {wanted}, and is {json.dumps(value)}")
        return value
    return None


def text_of(messages: Any, key: str) -> str:
    """The texts of a list of messages, or a plain text, as one prompt."""
    if isinstance(messages, str):
        return messages
    if not isinstance(messages, list) or not messages:
        raise RefusedRequestError(400, f"{key} must be a list of messages, and not an empty one")
    texts = []
    for message in messages:
        content = message.get("content") if isinstance(message, dict) else None
        parts = [{"text": content}] if isinstance(content, str) else content
        if not isinstance(parts, list) or not all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in parts):
            raise RefusedRequestError(400, f"{key}: each message needs a content that is text")
        texts += [part["text"] for part in parts]
    return "\n".join(texts)


def ask_of(body: Mapping[str, Any], tokens: tuple[int, ...], most: int | None) -> DemoRequest:
    if body.get("model") not in (None, NAME):
        raise RefusedRequestError(404, f"The model {json.dumps(body['model'])} does not exist; the only one is {NAME}.")
    for key, only in (("stream", False), ("n", 1), ("tools", [])):
        if body.get(key) not in (None, only):
            raise RefusedRequestError(400, f"{key} = {json.dumps(body[key])} is not supported")
    limit = f"This model's maximum context length is {CONTEXT} tokens"
    if not tokens:
        raise RefusedRequestError(400, "the prompt is empty")
    if len(tokens) + (most or 1) > CONTEXT:
        raise RefusedRequestError(
            400, f"{limit}. However, you requested {most or 1} output tokens and your prompt contains {len(tokens)} input tokens."
        )
    seed = number(body, ("seed",), 0)
    temperature, top_p = number(body, ("temperature",), 0.0, 2.0, float), number(body, ("top_p",), 1e-6, 1.0, float)
    return DemoRequest(
        tokens=tokens,
        most=most or CONTEXT - len(tokens),
        temperature=1.0 if temperature is None else temperature,
        top_p=1.0 if top_p is None else top_p,
        seed=random.getrandbits(64) if seed is None else seed,
    )


def chat(batches: Batches, body: Mapping[str, Any], id: str) -> dict[str, Any]:
    """POST /v1/chat/completions."""
    tokens = batches.policy.encode(text_of(body.get("messages"), "messages"))
    answer = batches.answer(ask_of(body, tokens, number(body, ("max_completion_tokens", "max_tokens"), 1)))
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
    # Gym and Seatrial put there what the Responses interface does not know, the seed among it.
    metadata = body.get("metadata") or {}
    text = metadata.get("extra_body") if isinstance(metadata, dict) else None
    try:
        extra = json.loads(text or "{}")
    except (TypeError, ValueError, RecursionError) as error:
        raise RefusedRequestError(400, f"metadata.extra_body is not JSON: {error}") from error
    if not isinstance(extra, dict):
        raise RefusedRequestError(400, "metadata.extra_body must be a JSON object")
    ask = ask_of({**extra, **body}, tokens, number(body, ("max_output_tokens",), 1))
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


_POSTS = {"/v1/chat/completions": chat, "/v1/responses": responses}


class DemoServer(ThreadingHTTPServer):
    """A thread per connection."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, host: str, port: int, batches: Batches) -> None:
        super().__init__((host, port), Handler)
        self.batches = batches
        self.numbers = itertools.count(1)


class Handler(BaseHTTPRequestHandler):
    """One connection, kept open between requests."""

    server: DemoServer
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
                raise RefusedRequestError(404, f"{self.path} is not there; POST to one of {', '.join(_POSTS)}")
            self._send(200, _POSTS[self.path](self.server.batches, body, f"{next(self.server.numbers):08x}"))
        except RefusedRequestError as refused:
            self._refuse(refused.status, refused.message)
        except RuntimeError as error:
            _log.exception("a batch failed")
            self._refuse(500, f"the model failed: {error}")

    def _body(self) -> dict[str, Any]:
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal() or int(length) > _MOST_BYTES:
            self.close_connection = True  # what follows cannot be told from the next request
            raise RefusedRequestError(413 if length.isdecimal() else 411, f"Content-Length must be there, and at most {_MOST_BYTES}")
        try:
            body = json.loads(self.rfile.read(int(length)))
        except (ValueError, RecursionError) as error:
            raise RefusedRequestError(400, f"the body is not JSON: {error}") from error
        if not isinstance(body, dict):
            raise RefusedRequestError(400, "the body must be a JSON object")
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
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    library.disable_progress_bar()
    torch.set_num_threads(1)  # a second thread would wait for the collector's CPU more than it helps; and results stay the same
    place = ensure(options.cache, _log.info)
    with DemoServer(options.host, options.port, Batches(DemoPolicy(place))) as server:
        _log.info("%s from %s listens at http://%s:%d", NAME, place, options.host, options.port)
        server.serve_forever()


if __name__ == "__main__":
    main()
