"""TRL's own weight sync over our stand-in for NCCL, against a small server that keeps what it receives. Runs inside the environment trl.

The real vLLM is the server in level 3; here it is what TRL sends that is looked at.
"""

from __future__ import annotations

import copy
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from seatrial.instruments.trl.train import allow_vllm_import

allow_vllm_import()

import torch  # noqa: E402 - TRL looks for vLLM as it is imported
from accelerate import Accelerator  # noqa: E402
from peft import LoraConfig, get_peft_model  # noqa: E402
from transformers import LlamaConfig, LlamaForCausalLM  # noqa: E402
from trl.generation.vllm_generation import VLLMGeneration  # noqa: E402

from seatrial.instruments.engines.vllm_server import (  # noqa: E402
    Receiver,
    Sender,
    StreamError,
    free_port,
)
from seatrial.instruments.trl.vllm_rollouts import (  # noqa: E402
    SKIPPED,
    SWAPPED,
    Transport,
    broken,
    merge,
)


class Held:
    """What the server holds."""

    def __init__(self) -> None:
        self.tensors: dict[str, Any] = {}
        self.routes: list[str] = []
        self.stream: Receiver | None = None

    def answer(self, route: str, body: dict[str, Any]) -> dict[str, Any]:
        self.routes.append(route)
        if route == "/init_weight_transfer_engine":
            self.stream = Receiver(body["init_info"]["master_address"], body["init_info"]["master_port"])
        elif route == "/update_weights":
            info = body["update_info"]
            assert self.stream is not None
            self.tensors = dict(self.stream.receive(info["names"], info["dtype_names"], info["shapes"]))
        known: dict[str, dict[str, Any]] = {
            "/v1/models": {"data": [{"id": "policy"}]},
            "/server_info": {"vllm_config": {"weight_transfer_config": {}, "model_config": {"logprobs_mode": "processed_logprobs"}}},
            "/get_world_size": {"world_size": 1},
        }
        return known.get(route, {})


@contextmanager
def server() -> Iterator[tuple[str, Held]]:
    held = Held()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.do_POST()

        def do_POST(self) -> None:
            data = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            try:
                code, answer = 200, held.answer(self.path.partition("?")[0], json.loads(data) if data else {})
            except StreamError as error:
                code, answer = 400, {"error": str(error)}
            text = json.dumps(answer).encode()
            self.send_response(code)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_: Any) -> None:
            pass

    made = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=made.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{made.server_port}", held
    finally:
        made.shutdown()


def policy(lora: bool = False) -> Any:
    torch.manual_seed(1)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=32, tie_word_embeddings=False, **sizes))
    if not lora:
        return model
    made = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False))
    return made.eval()


TRANSPORT = Transport()
TRANSPORT.install()


def generation(url: str, model: Any) -> Any:
    return VLLMGeneration(model, Accelerator(cpu=True), None, mode="server", server_base_url=url, group_port=free_port())


def same(one: dict[str, Any], two: dict[str, Any]) -> bool:
    return one.keys() == two.keys() and all(torch.equal(value, two[name]) for name, value in one.items())


def weights(model: Any) -> dict[str, Any]:
    return {name: value.detach().clone() for name, value in model.named_parameters()}


def raised(call: Callable[[], object]) -> str:
    """What a call raises; TRL raises plain exceptions."""
    try:
        call()
    except Exception as error:  # noqa: BLE001
        return str(error)
    raise AssertionError("nothing was raised")


def case_what_trl_sends_is_what_the_policy_holds() -> None:
    with server() as (url, held):
        model = policy()
        sync = generation(url, model)
        for _ in range(2):
            sync.sync_weights()
            assert same(held.tensors, weights(model))
            assert list(held.tensors) == TRANSPORT.names
            with torch.no_grad():
                for value in model.parameters():
                    value += 0.25
        assert not same(held.tensors, weights(model))
        order = [route for route in held.routes if route.endswith(("update", "weights", "cache"))]
        assert order == ["/start_weight_update", "/update_weights", "/finish_weight_update", "/reset_prefix_cache"] * 2


def case_adapters_are_merged_and_taken_out_again() -> None:
    with server() as (url, held):
        model = policy(lora=True)
        before, merged = weights(model), weights(merge(model))
        sync = generation(url, model)
        sync.sync_weights()
        assert same(held.tensors, merged)
        assert not any("lora" in name for name in held.tensors)
        plain = {name.removeprefix("base_model.model.").replace(".base_layer", ""): value for name, value in before.items()}
        assert not same(held.tensors, {name: plain[name] for name in held.tensors}), "the adapters change nothing"
        drift = max(float((value - before[name]).abs().max()) for name, value in weights(model).items())
        assert drift < 1e-6


def case_a_tensor_that_is_left_out_and_names_that_are_swapped_show() -> None:
    for fault in (SKIPPED, SWAPPED):
        with server() as (url, held):
            model = policy()
            with torch.no_grad():
                model.model.layers[0].input_layernorm.weight += 1
            sync = generation(url, model)
            sync._iter_named_params = broken(sync._iter_named_params, fault)
            sync.sync_weights()
            assert not same(held.tensors, weights(model))
            left = set(weights(model)) - set(held.tensors)
            assert left == ({"model.layers.0.input_layernorm.weight"} if fault == SKIPPED else set())


def case_a_walk_that_raises_ends_the_sync_and_nobody_waits() -> None:
    with server() as (url, _):
        model = policy()
        sync = generation(url, model)
        sync.sync_weights()
        whole = sync._iter_named_params

        def torn() -> Iterator[tuple[str, Any]]:
            for number, item in enumerate(whole()):
                if number == 3:
                    raise ValueError("the walk broke off")
                yield item

        sync._iter_named_params = torn
        assert raised(sync.sync_weights) == "the walk broke off"


def case_a_walk_that_is_not_what_it_announced_is_refused() -> None:
    for drop in (True, False):
        with server() as (url, _):
            model = policy()
            sync = generation(url, model)
            sync.sync_weights()
            whole = sync._iter_named_params
            items = list(whole())
            sync._iter_named_params = lambda items=items, drop=drop: iter(items[:-1] if drop else [*items, items[0]])
            assert ("ended before" if drop else "goes on after") in raised(sync.sync_weights)


def case_every_dtype_and_shape_goes_over_the_stream() -> None:
    port = free_port()
    given = [torch.randn(3, 4), torch.randn(5).bfloat16(), torch.tensor(7), torch.empty(0, 2), torch.randn(4, 4).t(), torch.tensor([True])]
    found: list[Receiver] = []
    thread = threading.Thread(target=lambda: found.append(Receiver("127.0.0.1", port)))
    thread.start()
    sender = Sender("127.0.0.1", port)
    thread.join()
    names = [str(number) for number in range(len(given))]
    threading.Thread(target=sender.send, args=(given,)).start()
    dtypes, shapes = [str(value.dtype).removeprefix("torch.") for value in given], [list(value.shape) for value in given]
    received = dict(found[0].receive(names, dtypes, shapes))
    assert all(torch.equal(received[name], value) and received[name].dtype == value.dtype for name, value in zip(names, given, strict=True))
    threading.Thread(target=sender.send, args=(given[:1],)).start()
    assert "48 bytes arrived for float32 of shape [3, 5]" in raised(lambda: list(found[0].receive(["w"], ["float32"], [[3, 5]])))


def case_merging_a_copy_leaves_the_policy_alone() -> None:
    model = policy(lora=True)
    before = copy.deepcopy(weights(model))
    merge(model)
    assert same(before, weights(model))
