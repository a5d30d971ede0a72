"""Cases with a real vLLM server on the CPU: one server per model. Run inside the environment vllm-cpu by test_vllm.py."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from seatrial.instruments.bits import fingerprint
from seatrial.instruments.engines.tiny_models import ensure
from seatrial.instruments.engines.transformers_loop import Loop
from seatrial.instruments.engines.vllm_loop import Engine, Policy
from seatrial.instruments.engines.vllm_server import ServerError, VllmServer, running
from seatrial.instruments.refit.payload_header import RefitRefused
from seatrial.instruments.refit.refit_driver import say
from seatrial.instruments.refit.weight_transfer import Producer

ALL = ("full", "packed", "sparse")
NORMS = ["model.layers.0.input_layernorm.weight", "model.layers.0.post_attention_layernorm.weight"]


@contextmanager
def served(kind: str, tmp: Path) -> Iterator[Loop]:
    """A loop over a fresh server; afterwards none of its processes is left."""
    model = ensure(kind, tmp / "model")
    options = ("--dtype", "float32", "--worker-extension-cls", "tests.real.vllm_broken.Broken")
    with VllmServer(model, tmp / "server.log", say, options, faults=True) as server:
        yield Loop(Policy(model, False), Engine(server, tmp, None), tmp, ALL, None)
    assert running(server.process.pid) == []


def rows(tmp: Path, fact: str) -> list[dict[str, Any]]:
    """All facts of one kind."""
    every = [json.loads(line) for line in (tmp / "facts.jsonl").read_text().splitlines()]
    return [row for row in every if row["fact"] == fact]


def case_an_untied_llama_passes_and_bad_payloads_are_refused(tmp: Path) -> None:
    with served("tiny-llama", tmp) as loop:
        loop.run(3)
        refits, (covered,), (mapped,) = rows(tmp, "refit"), rows(tmp, "coverage"), rows(tmp, "map")
        assert [row["wrong_names"] for row in refits] == [[]] * 4
        assert [(row["transport"], row["kind"]) for row in refits[:3]] == [
            ("full", "overwrite"),
            ("packed", "overwrite"),
            ("sparse", "difference"),
        ]
        assert [row["version"] for row in refits] == [row["version"] for row in rows(tmp, "version")] == [1, 2, 3, 4]
        assert refits[0]["stale_names"] == refits[0]["touched_names"] == 0
        assert all(row["stale_names"] and row["touched_names"] and row["stale_max_dlogp"] > 1e-3 for row in refits[1:])
        assert all(row["fresh_max_dlogp"] < 1e-5 and row["methods"] == {"read": 6, "forward": 15} for row in refits[1:])
        assert all(row["value"] < 1.0001 for row in rows(tmp, "mismatch"))
        assert {row["version"] for row in rows(tmp, "sample")} == {1, 2, 3}
        assert mapped["restored"]
        assert mapped["unconsumed"] == mapped["opaque"] == mapped["misplaced"] == mapped["duplicates"] == {}
        assert len(covered["written"]) == 15
        assert set(covered["padding"]) == {"model.embed_tokens.weight", "lm_head.weight"}
        refusals(loop)
        breakages(loop)
        unfaithful(loop)
        state = engine(loop).client.rpc("seatrial_state")[0]["tensors"]
        assert state["model.layers.0.self_attn.rotary_emb.cos_sin_cache"]["parameter"] is False
        said = failure(lambda: engine(loop).client.rpc("seatrial_map", reference=str(tmp / "nowhere")))
        assert isinstance(said, ServerError)
        assert "/collective_rpc" in str(said)


def failure(call: Callable[[], object]) -> Exception | None:
    """What a call raises; there is no pytest in an engine's environment."""
    try:
        call()
    except (ServerError, RefitRefused) as error:
        return error
    return None


def engine(loop: Loop) -> Engine:
    assert isinstance(loop.remote, Engine)
    return loop.remote


def refused(loop: Loop, data: bytes, reason: str) -> None:
    """A payload is refused for this reason, and leaves everything as it was."""
    before, place = engine(loop).state(), engine(loop).payload
    place.write_bytes(data)
    said = failure(lambda: engine(loop).apply(str(place)))
    assert isinstance(said, RefitRefused), f"{reason}: {said}"
    assert said.reason == reason, said
    assert engine(loop).state() == before


def refusals(loop: Loop) -> None:
    """Truncated, damaged, replayed, with a gap, on another base, with other names."""
    export = loop.policy.export()
    good = loop.driver.producer.prepare(export, "full")
    loop.driver.producer.rollback()
    assert isinstance(good, bytes)
    refused(loop, good[:-1], "truncated")
    refused(loop, good[:4000] + bytes([good[4000] ^ 1]) + good[4001:], "corrupt")
    refused(loop, payload(export, 0, "full"), "replay")
    refused(loop, payload(export, 7, "sparse"), "gap")
    other = {name: value + 1 for name, value in export.items()}
    refused(loop, payload(other, 4, "sparse"), "wrong-base")
    refused(loop, payload({name: value for name, value in export.items() if "norm" in name}, 4, "full"), "absent-name")


def payload(export: dict[str, Any], version: int, transport: str) -> bytes:
    """What a policy that believes in this base sends next."""
    made = Producer(export, version).prepare({name: value + 1 for name, value in export.items()}, transport, "overwrite")
    assert isinstance(made, bytes)
    return made


def breakages(loop: Loop) -> None:
    """Damage in the live weights is seen and named, and a sparse payload does not build on it."""
    client, reference = engine(loop).client, str(engine(loop).reference)
    for fault, names in (("flip-bit", NORMS[:1]), ("swap-tensors", NORMS)):
        client.rpc("seatrial_break", fault=fault)
        wrong = client.rpc("seatrial_verify", reference=reference)[0]["wrong"]
        assert sorted(wrong) == names, wrong
        assert [wrong[name]["count"] for name in names] == ([1] if fault == "flip-bit" else [64, 64]), wrong
        refused(loop, payload(loop.policy.export(), loop.driver.producer.version, "sparse"), "wrong-base")
        # Swapping twice, and flipping twice, puts it right.
        client.rpc("seatrial_break", fault=fault)
        assert client.rpc("seatrial_verify", reference=reference)[0]["wrong"] == {}


def unfaithful(loop: Loop) -> None:
    """Parameters that are right, and a module that computes with something else: seen by reading and by comparing, and put right."""
    client, reference = engine(loop).client, str(engine(loop).reference)
    expected = {
        "embedding-copy": "model.embed_tokens.weight",
        "norm-copy": "model.norm.weight",
        "few-rows-copy": "model.layers.0.self_attn.o_proj.weight",
        "rotary-bit": "model.layers.0.self_attn.rotary_emb.cos_sin_cache",
    }
    good = client.rpc("seatrial_read", reference=reference)[0]["hashes"]
    for fault, name in expected.items():
        client.rpc("broken_start", fault=fault)
        wrong = client.rpc("seatrial_verify", reference=reference)[0]["wrong"]
        assert list(wrong) == [name], (fault, wrong)
        held = client.rpc("seatrial_read", reference=reference)[0]["hashes"]
        assert fingerprint.differing(good, held) == [name], fault
        client.rpc("broken_end")
        assert client.rpc("seatrial_verify", reference=reference)[0]["wrong"] == {}, fault


def case_a_tied_head_that_stays_stale_is_found_and_named(tmp: Path) -> None:
    with served("tiny-qwen2", tmp) as loop:
        loop.run(1)
    base, refit = rows(tmp, "refit")
    assert base["wrong_names"] == []
    assert refit["wrong_names"] == ["model.embed_tokens.weight"]
    assert refit["wrong"]["model.embed_tokens.weight"]["runtime"] == "lm_head.weight"
    assert rows(tmp, "mismatch")[0]["value"] < 1.05, "the weak check would have seen it"
    assert rows(tmp, "coverage")[0]["shared"]["lm_head.weight"] == "model.embed_tokens.weight"


def case_experts_that_are_not_packed_again_are_found_and_named(tmp: Path) -> None:
    with served("tiny-moe", tmp) as loop:
        loop.run(1)
    for refit in rows(tmp, "refit"):
        assert len(refit["wrong_names"]) == 2 * 4 * 3
        assert all(".mlp.experts." in name for name in refit["wrong_names"])
        assert {row["method"] for row in refit["wrong"].values()} == {"compare"}
    assert rows(tmp, "refit")[0]["stale_names"] == 0, "the experts were right before the first reload"
    assert rows(tmp, "mismatch")[0]["value"] < 1.05, "the weak check would have seen it"
