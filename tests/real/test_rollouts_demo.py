"""The demo's server for real: a tiny model is trained, answers over HTTP, keeps to its seeds and refuses what it cannot do."""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import tomllib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from seatrial.rollouts.campaign import Campaign
from seatrial.rollouts.collect_campaign import write_demo
from seatrial.runtime.environments import Environment
from seatrial.runtime.servers import Target, free_port, wait_ready

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]

CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
SUM, LARGEST = "What is 34+58?", "Which is largest? A) 12 B) 47 C) 41 D) 20"


class Served:
    """The server as the campaign starts it, with the placeholders filled in."""

    def __init__(self, campaign: Path, log: Path) -> None:
        server = Campaign.model_validate(tomllib.loads(campaign.read_text())).policy.server
        assert server is not None
        self.port = free_port()
        words = [word.format(bind="127.0.0.1", port=self.port) for word in server.command]
        environment = {"HOME": os.environ["HOME"], "PATH": os.environ["PATH"], **server.environment}
        with log.open("ab") as stream:
            self.process = subprocess.Popen(words, cwd=campaign.parent, env=environment, stdout=stream, stderr=stream)
        health = Target("policy", f"http://127.0.0.1:{self.port}/health", server.deadline_s)
        missed = wait_ready([health], self.process.poll, lambda _: None)
        assert missed is None, f"{missed}: {log.read_text()}"

    def ask(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        """The status and the JSON of an answer; `body` may be bytes that are no JSON."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        try:
            connection.request(method, path, body if body is None or isinstance(body, bytes) else json.dumps(body))
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read())
        finally:
            connection.close()

    def chat(self, prompt: str, seed: int | None = None, **more: Any) -> str:
        """What the model says to one message."""
        body = {"messages": [{"role": "user", "content": prompt}], "seed": seed, "max_tokens": 8, **more}
        status, answer = self.ask("POST", CHAT, body)
        assert status == 200, answer
        return str(answer["choices"][0]["message"]["content"])


@pytest.fixture(scope="module")
def demo(environment: Environment, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's campaign.toml, with an empty cache: the model is trained here."""
    root = tmp_path_factory.mktemp("demo")
    return write_demo(root / "a demo", environment.python, root / "cache")


@pytest.fixture(scope="module")
def served(demo: Path) -> Iterator[Served]:
    found = Served(demo, demo.parent / "serve.log")
    yield found
    found.process.send_signal(signal.SIGTERM)
    try:
        assert found.process.wait(60) == 0
    finally:
        found.process.kill()


def test_it_says_what_it_serves(served: Served) -> None:
    assert served.ask("GET", "/health") == (200, {"status": "ok"})
    status, models = served.ask("GET", "/v1/models")
    assert (status, [model["id"] for model in models["data"]]) == (200, ["seatrial-demo"])
    assert served.ask("GET", "/v2")[0] == 404


def test_a_chat_completion_is_whole(served: Served) -> None:
    body = {"model": "seatrial-demo", "messages": [{"role": "user", "content": "What is 2+3?"}], "temperature": 0}
    status, answer = served.ask("POST", CHAT, body)
    (choice,) = answer["choices"]
    assert (status, answer["object"], answer["model"]) == (200, "chat.completion", "seatrial-demo")
    assert (choice["message"], choice["finish_reason"]) == ({"role": "assistant", "content": "5"}, "stop")
    assert answer["usage"] == {"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7}
    cut = served.ask("POST", CHAT, {**body, "max_tokens": 1})[1]
    assert (cut["choices"][0]["finish_reason"], cut["usage"]["completion_tokens"]) == ("length", 1)


def test_a_response_is_whole(served: Served) -> None:
    parts = [{"type": "input_text", "text": "Which is largest? A) 12 B) 93 C) 41 D) 20"}]
    body = {"input": [{"role": "user", "content": parts}], "temperature": 0}
    status, answer = served.ask("POST", RESPONSES, body)
    assert (status, answer["object"], answer["status"], answer["incomplete_details"]) == (200, "response", "completed", None)
    assert answer["output"][0]["content"] == [{"type": "output_text", "text": "Answer: B", "annotations": []}]
    assert {key: answer["usage"][key] for key in ("input_tokens", "output_tokens", "total_tokens")} == {
        "input_tokens": 13,
        "output_tokens": 3,
        "total_tokens": 16,
    }
    cut = served.ask("POST", RESPONSES, {**body, "max_output_tokens": 1})[1]
    assert (cut["status"], cut["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})


def test_a_seed_decides_the_answer_and_neighbours_do_not(served: Served) -> None:
    asks = [(prompt, seed) for prompt in (SUM, LARGEST, "What is 123+456?", "What is 1+2?") for seed in range(24)]
    alone = [served.chat(*ask) for ask in asks]
    with ThreadPoolExecutor(16) as pool:
        together = list(pool.map(lambda ask: served.chat(*ask), reversed(asks)))
    assert together[::-1] == alone
    assert len({served.chat("What is 123+456?", seed, temperature=2) for seed in range(24)}) > 1
    assert len({served.chat("What is 123+456?", temperature=2) for _ in range(24)}) > 1, "without a seed answers vary, too"
    assert len({served.chat("What is 123+456?", seed, temperature=0) for seed in range(4)}) == 1
    assert len({served.chat("What is 123+456?", seed, top_p=0.01) for seed in range(4)}) == 1


def test_both_interfaces_draw_alike(served: Served) -> None:
    for seed in range(8):
        asked = {"input": "What is 123+456?", "max_output_tokens": 8}
        by_extra = served.ask("POST", RESPONSES, {**asked, "metadata": {"extra_body": json.dumps({"seed": seed})}})[1]
        by_key = served.ask("POST", RESPONSES, {**asked, "seed": seed})[1]
        texts = {answer["output"][0]["content"][0]["text"] for answer in (by_extra, by_key)}
        assert texts == {served.chat("What is 123+456?", seed)}


def test_it_is_good_and_not_perfect(served: Served, demo: Path) -> None:
    rates: dict[str, list[bool]] = {}
    for name in ("sums", "largest"):
        for line in (demo.parent / f"{name}.jsonl").read_text().splitlines():
            row = json.loads(line)
            rates.setdefault(row["difficulty"], []).extend(
                served.chat(row["prompt"], seed).removeprefix("Answer: ") == row["answer"] for seed in range(4)
            )
    mean = {difficulty: sum(right) / len(right) for difficulty, right in rates.items()}
    assert 0.2 > mean["3-digit"] < mean["2-digit"] < mean["1-digit"] > 0.6, mean
    assert 0.3 < mean["near"] < mean["far"] > 0.7, mean


BAD: tuple[tuple[str, str, Any, int, str], ...] = (
    ("POST", "/v1/completions", {}, 404, "/v1/chat/completions"),
    ("POST", CHAT, b"{", 400, "not JSON"),
    ("POST", CHAT, [], 400, "a JSON object"),
    ("POST", CHAT, {}, 400, "messages must be a list"),
    ("POST", CHAT, {"messages": [{"role": "user", "content": 3}]}, 400, "content that is text"),
    ("POST", CHAT, {"messages": [{"role": "user", "content": ""}]}, 400, "empty"),
    ("POST", CHAT, {"messages": SUM, "model": "other"}, 404, "does not exist"),
    ("POST", CHAT, {"messages": SUM, "temperature": "hot"}, 400, "temperature"),
    ("POST", CHAT, {"messages": SUM, "top_p": 0}, 400, "top_p"),
    ("POST", CHAT, {"messages": SUM, "max_tokens": 0}, 400, "max_tokens"),
    ("POST", CHAT, {"messages": SUM, "seed": 1.5}, 400, "seed"),
    ("POST", CHAT, {"messages": SUM, "stream": True}, 400, "stream"),
    ("POST", CHAT, {"messages": SUM, "n": 2}, 400, "n = 2"),
    ("POST", RESPONSES, {"input": SUM, "metadata": {"extra_body": "{"}}, 400, "extra_body"),
    ("POST", CHAT, {"messages": "What is " + "1+" * 40}, 400, "This model's maximum context length is 64 tokens"),
    ("POST", CHAT, {"messages": SUM, "max_tokens": 100}, 400, "This model's maximum context length is 64 tokens"),
)


def test_what_it_cannot_do_is_refused_in_json(served: Served) -> None:
    for method, path, body, status, words in BAD:
        got, answer = served.ask(method, path, body)
        assert (got, answer["error"]["code"]) == (status, status), (path, body, answer)
        assert words in answer["error"]["message"], (path, body, answer)
    assert served.chat("What is 2+3?", temperature=0) == "5", "and goes on afterwards"


@pytest.mark.parametrize(("length", "status"), [("1048577", 413), ("-1", 411), ("many", 411)])
def test_a_body_of_no_or_too_great_length_is_not_read(served: Served, length: str, status: int) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=30)
    connection.request("POST", CHAT, headers={"Content-Length": length})
    answer = connection.getresponse()
    assert (answer.status, answer.getheader("Connection")) == (status, "close")
    connection.close()


def test_a_second_server_takes_the_trained_model(served: Served, demo: Path) -> None:
    log = demo.parent / "second.log"
    second = Served(demo, log)
    try:
        assert [second.chat("What is 123+456?", seed) for seed in range(8)] == [served.chat("What is 123+456?", seed) for seed in range(8)]
        assert "training" not in log.read_text()
    finally:
        second.process.kill()
        second.process.wait()


def test_it_listens_on_loopback_only(demo: Path, environment: Environment) -> None:
    words = [str(environment.python), "-m", "seatrial.rollouts.demo_server", "--host", "0.0.0.0", "--port", "1", "--cache", "."]
    ran = subprocess.run(words, env={"PYTHONPATH": str(demo.parent / "program")}, capture_output=True, text=True, timeout=60, check=False)
    assert ran.returncode == 2
    assert "--host" in ran.stderr
