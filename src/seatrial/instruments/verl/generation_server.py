"""The generation server: a transformers model in its own Ray actor, and the two ends by which verl reaches it.

- The server starts from random weights and loads strictly: what it generates with can only be what was synchronised. After every load both
  ends hash: the adapter what it sent, the server the live tensors it then holds.
- A completion depends on weights, prompt, version of the weights and its place in the group only: each draws alone from its own generator,
  so that a resumed run samples what an uninterrupted one samples.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections import Counter
from collections.abc import Iterable
from typing import Any

import ray
import torch
from verl.workers.rollout.base import BaseRollout
from verl.workers.rollout.replica import RolloutReplica, TokenOutput

from seatrial.instruments import facts
from seatrial.instruments.bits import fingerprint
from seatrial.instruments.verl import verl_process, watched_engine

SERVER = "seatrial_server_{}"
LOAD_SECONDS = 300
"""How long the server may take to load: its process starts while the first weights already wait."""


class Server:
    """Owns a copy of the model. Methods that do nothing are there because verl calls them on every server."""

    def __init__(self, path: str, dtype: str, length: int, seed: int) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

        torch.manual_seed(seed + 1)
        self.model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path), dtype=getattr(torch, dtype)).eval()
        self.eos, self.length, self.seed = AutoTokenizer.from_pretrained(path).eos_token_id, length, seed
        self.version = -1
        self.asked: Counter[tuple[int, ...]] = Counter()
        self.record = watched_engine.ServerRecord()

    def load(self, weights: list[tuple[str, Any]], peft: dict[str, Any] | None, version: int | None) -> dict[str, Any]:
        """Copy the weights into the live model, strictly; returns the names that did not fit and the hashes of what is held now."""
        if peft is not None and not hasattr(self.model, "peft_config"):
            self._wrap(peft)
        own = self._own(adapter=peft is not None)
        unknown, known = [name for name, _ in weights if name not in own], [name for name, _ in weights if name in own]
        # Tied tensors are one: whichever name was sent fills both.
        filled = {own[name].data_ptr() for name in known}
        absent = sorted(name for name, value in own.items() if value.data_ptr() not in filled)
        for name, value in weights if verl_process.current_fault() != "stale-generator" or self.version < 0 else []:
            if name in own:
                own[name].data.copy_(value)
        self.version = self.version if version is None else version
        self.asked.clear()
        return {"unknown": unknown, "absent": absent, "held": fingerprint.tensors((name, own[name]) for name in known)}

    def _wrap(self, peft: dict[str, Any]) -> None:
        from peft import LoraConfig, get_peft_model

        self.model = get_peft_model(self.model, LoraConfig(**{**peft, "inference_mode": True}), autocast_adapter_dtype=False).eval()

    def _own(self, adapter: bool) -> dict[str, Any]:
        """Live tensors under the names that verl exports."""
        if adapter:
            named = self.model.named_parameters()
            return {_plain(name.replace(".default.", ".")): value for name, value in named if "lora_" in name}
        return dict(self.model.state_dict(keep_vars=True))

    async def generate(self, request_id: str, prompt_ids: list[int], sampling_params: dict[str, Any], **_: Any) -> TokenOutput:
        place = self.asked[tuple(prompt_ids)]
        self.asked[tuple(prompt_ids)] += 1
        text = f"{self.seed} {self.version} {place} {prompt_ids}"
        draw = torch.Generator().manual_seed(int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "big"))
        tokens, logprobs, scores = self._sample(prompt_ids, float(sampling_params["temperature"]), draw)
        self.record.add(prompt_ids, tokens, scores, sampling_params, self.version)
        return TokenOutput(token_ids=tokens, log_probs=logprobs, stop_reason="completed", extra_fields={"global_steps": self.version})

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def _sample(self, prompt: list[int], heat: float, draw: Any) -> tuple[list[int], list[float], list[Any]]:
        """Tokens until the end token or the longest length, the log-probability of each and what it was drawn from; heat 0 is greedy."""
        scores: list[Any] = []
        tokens: list[int] = []
        logprobs: list[float] = []
        given, cache = torch.tensor([prompt]), None
        while len(tokens) < self.length and (not tokens or tokens[-1] != self.eos):
            output = self.model(input_ids=given, past_key_values=cache, use_cache=True)
            scores.append(output.logits[0, -1].float() / (heat or 1.0))
            table = torch.log_softmax(scores[-1], -1)
            token = int(torch.multinomial(table.exp(), 1, generator=draw)) if heat else int(table.argmax())
            tokens.append(token)
            logprobs.append(float(table[token]))
            given, cache = torch.tensor([[token]]), output.past_key_values
        return tokens, logprobs, scores

    async def nothing(self, *_: Any, **__: Any) -> None:
        """There is no memory to give back on a CPU."""

    wake_up = sleep = abort_all_requests = resume_generation = clear_kv_cache = nothing
    release_kv_cache = resume_kv_cache = start_profile = stop_profile = nothing


class Replica(RolloutReplica):  # type: ignore[misc]
    """Starts the server."""

    async def launch_servers(self) -> None:
        name = SERVER.format(self.replica_rank)
        made = ray.remote(Server).options(name=name, num_cpus=0, max_concurrency=self.max_concurrency)
        handle = made.remote(self.model_config.path, self.config.dtype, self.config.response_length, self.config.seed)
        self.servers, self._server_handle, self._server_address = [handle], handle, name


class Adapter(BaseRollout):  # type: ignore[misc]
    """The actor's end of the weight sync."""

    sleep_level = 2

    async def resume(self, tags: list[str]) -> None:
        """Nothing was released."""

    async def release(self) -> None:
        """Nothing to release."""

    async def update_weights(self, weights: Iterable[tuple[str, Any]], wire_format: str = "named_tensors", **kwargs: Any) -> None:
        """Send every exported tensor, and prove that the server then holds exactly those."""
        peft, base = kwargs.get("peft_config"), not kwargs.get("base_sync_done", True)
        sent = [(_plain(name), value.detach().clone()) for name, value in weights]
        hashes = fingerprint.tensors(sent)
        server = ray.get_actor(SERVER.format(0))
        try:
            answer = await asyncio.wait_for(server.load.remote(sent, None if base else peft, kwargs.get("global_steps")), LOAD_SECONDS)
        except TimeoutError as error:
            raise RuntimeError(f"the generation server has not loaded the weights within {LOAD_SECONDS} s") from error
        wrong = fingerprint.differing(hashes, answer["held"])
        row = {"fact": "sync", "step": kwargs.get("global_steps"), "adapter": peft is not None and not base}
        row |= {"unknown": answer["unknown"], "absent": answer["absent"], "wrong": wrong, "sent": hashes}
        facts.append(os.environ["SEATRIAL_FACTS"], row)
        watched_engine.version = kwargs.get("global_steps") or 0


def _plain(name: str) -> str:
    """The name of a tensor without what PEFT puts around a model: the base is loaded before adapters are added, and engines differ."""
    return name.removeprefix("base_model.model.").replace(".base_layer.", ".")
