"""A client of a vLLM server that runs with the refit extension: refit, read back, log-probabilities, samples.

Standard library only. Every call has a deadline; an error names the route, what was waited for and what the server said. A sample
carries the version that the generator held when it was dispatched; a generator that changes under a running request is an error.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

CALL_SECONDS = 120.0
PROOF_SECONDS = 1800.0
PROOFS = ("seatrial_map", "seatrial_read", "seatrial_verify", "seatrial_coverage", "seatrial_state")
"""Methods that go over every weight: on a CPU, minutes for a large model."""
AT_ONCE = 16
"""Requests that are under way together: as many as the server takes into one batch."""


class ServerError(RuntimeError):
    """A route of the server failed; says which, and how."""


@dataclass(frozen=True)
class Sample:
    """One completion, with the log-probability of each of its tokens and the version it came from."""

    tokens: list[int]
    logprobs: list[float]
    version: int
    incarnation: str


class Client:
    """One vLLM server, seen from outside. `timeout_s` is for every call; without it PROOFS have longer than the others."""

    def __init__(self, url: str, model: str = "policy", timeout_s: float | None = None) -> None:
        self.url, self.model = url.rstrip("/"), model
        self._call_s, self._proof_s = (CALL_SECONDS, PROOF_SECONDS) if timeout_s is None else (timeout_s, timeout_s)

    def call(self, route: str, body: dict[str, Any] | None = None, method: str = "POST") -> Any:
        """One request; the parsed answer."""
        return self._ask(route, body, method, self._call_s, "")

    def _ask(self, route: str, body: dict[str, Any] | None, method: str, seconds: float, waiting: str) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self.url}{route}", data=data, method=method, headers={"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=seconds) as answer:
                text = answer.read().decode()
        except urllib.error.HTTPError as error:
            said = error.read().decode(errors="replace")[-2000:]
            raise ServerError(f"{method} {self.url}{route}: status {error.code}: {said or 'no body'}") from error
        except (urllib.error.URLError, OSError) as error:
            raise ServerError(f"{method} {self.url}{route}: no answer within {seconds:.0f} s{waiting}: {error}") from error
        try:
            return json.loads(text) if text else None
        except json.JSONDecodeError as error:
            raise ServerError(f"{method} {self.url}{route}: not JSON: {text[:200]!r}") from error

    def rpc(self, method: str, **arguments: Any) -> list[Any]:
        """Call a method of the extension in every worker; one answer per rank."""
        seconds = self._proof_s if method in PROOFS else self._call_s
        body = {"method": method, "kwargs": arguments, "timeout": seconds}
        results: list[Any] = self._ask("/collective_rpc", body, "POST", seconds, f" (waited for {method} in every worker)")["results"]
        return results

    def start(self, version: int = 0) -> None:
        """Tell the transfer backend which version the generator starts with."""
        self.call("/init_weight_transfer_engine", {"init_info": {"version": version}})

    def refit(self, path: str, version: int) -> None:
        """Pause, send one payload file through the weight-update routes, resume. The caches are cleared; a refusal is raised."""
        self.call("/pause?mode=abort&clear_cache=true", {})
        try:
            self.call("/start_weight_update", {})
            self.call("/update_weights", {"update_info": {"path": path}})
            self.call("/finish_weight_update", {"weight_version": str(version)})
        finally:
            self.call("/resume", {})

    def versions(self) -> list[dict[str, Any]]:
        """The version that each rank holds."""
        return self.rpc("seatrial_version")

    def _held(self) -> tuple[int, str]:
        """The version that all ranks hold right now."""
        found = self.versions()
        if len({row["version"] for row in found}) != 1:
            raise ServerError(f"{self.url}: the ranks hold different versions: {found}")
        return int(found[0]["version"]), str(found[0]["incarnation"])

    def logprobs(self, sequences: Sequence[Sequence[int]], starts: Sequence[int]) -> list[list[float]]:
        """Log-probability of every token of each sequence from its start (>= 1) on."""
        body = {
            "model": self.model,
            "prompt": [list(tokens) for tokens in sequences],
            "max_tokens": 1,
            "prompt_logprobs": 0,
            "temperature": 1.0,
        }
        choices = sorted(self.call("/v1/completions", body)["choices"], key=lambda choice: int(choice["index"]))
        result = []
        for tokens, start, choice in zip(sequences, starts, choices, strict=True):
            rows = choice["prompt_logprobs"]
            result.append([float(rows[place][str(tokens[place])]["logprob"]) for place in range(start, len(tokens))])
        return result

    def sample(self, prompts: Sequence[Sequence[int]], length: int, seed: int) -> list[Sample]:
        """One completion of exactly `length` tokens per prompt, stamped with the version at dispatch."""
        given = {"min_tokens": length, "ignore_eos": True}
        return self._stamped(prompts, lambda: self._complete([list(tokens) for tokens in prompts], length, seed, **given))

    def rollouts(self, prompts: Sequence[Sequence[int]], length: int, seeds: Sequence[int], **given: Any) -> list[Sample]:
        """One completion of at most `length` tokens per prompt, each from its own seed, with the model's end token if it came to one.

        `given` is added to each request.
        """

        def ask() -> list[dict[str, Any]]:
            with ThreadPoolExecutor(AT_ONCE) as pool:
                asked = [pool.submit(self._complete, [list(row)], length, seed, **given) for row, seed in zip(prompts, seeds, strict=True)]
                return [choice for each in asked for choice in each.result()]

        return self._stamped(prompts, ask)

    def _complete(self, prompts: list[list[int]], length: int, seed: int, **given: Any) -> list[dict[str, Any]]:
        """One request; its choices in the order of the prompts."""
        body = {"model": self.model, "prompt": prompts, "max_tokens": length, "seed": seed, **given}
        body |= {"logprobs": 0, "temperature": 1.0, "return_token_ids": True}
        return sorted(self.call("/v1/completions", body)["choices"], key=lambda choice: int(choice["index"]))

    def _stamped(self, prompts: Sequence[Sequence[int]], ask: Callable[[], list[dict[str, Any]]]) -> list[Sample]:
        """What was sampled, with the version that was held before, during and after it."""
        version, incarnation = self._held()
        choices = ask()
        if self._held() != (version, incarnation):
            raise ServerError(f"{self.url}: the generator changed from version {version} while it was sampling")
        samples = [
            Sample(
                [int(token) for token in choice["token_ids"]],
                [float(value) for value in choice["logprobs"]["token_logprobs"]],
                version,
                incarnation,
            )
            for choice in choices
        ]
        if len(samples) != len(prompts) or any(len(sample.tokens) != len(sample.logprobs) for sample in samples):
            raise ServerError(
                f"{self.url}/v1/completions: {len(samples)} completions for {len(prompts)} prompts, or tokens without log-probability"
            )
        return samples
