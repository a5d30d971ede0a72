"""Cases of test_refit_clean.py: real architectures, 20 optimizer steps each, refitted after every step; nothing may raise an alarm."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from itertools import cycle
from typing import Any

import torch
import transformers

from seatrial.instruments.bits import fingerprint
from seatrial.instruments.refit import map_learner, tensor_coverage
from seatrial.instruments.refit.agreement import Ledger
from seatrial.instruments.refit.weight_transfer import Consumer, Producer

STEPS = 20
SMALL = {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
DENSE = {**SMALL, "intermediate_size": 48, "max_position_embeddings": 64}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 8}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "n_routed_experts": 4}
ROUTED = {"n_group": 1, "topk_group": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 1, "moe_intermediate_size": 24}


def run(config: Any, dtype: Any, tied: bool) -> None:
    """Train, refit, prove, after every step."""
    torch.manual_seed(0)
    policy = transformers.AutoModelForCausalLM.from_config(config).to(dtype)
    generator = copy.deepcopy(policy).requires_grad_(False)
    live = dict(generator.state_dict(keep_vars=True))
    assert (policy.get_output_embeddings().weight is policy.get_input_embeddings().weight) == tied

    def load(weights: Iterable[tuple[str, Any]]) -> None:
        for name, value in weights:
            live[name].copy_(value)

    export = policy.state_dict()
    learned = map_learner.learn(generator, load, export)
    watch, ledger = tensor_coverage.LoaderWatch(generator, learned), Ledger()
    producer, consumer = Producer(export), Consumer(live)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3)
    draw = torch.Generator().manual_seed(1)
    root, used = "", set()
    for step, transport in zip(range(1, STEPS + 1), cycle(("full", "sparse", "packed", "sparse")), strict=False):
        tokens = torch.randint(0, config.vocab_size, (2, 12), generator=draw)
        policy(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        data = producer.prepare(policy.state_dict(), transport)
        applied = consumer.apply(data)
        assert producer.prepared is not None
        used.add((producer.prepared.transport, producer.prepared.kind))
        producer.commit(applied.root, applied.version)
        sent, held = fingerprint.tree(fingerprint.tensors(policy.state_dict().items())), fingerprint.tree(consumer.state()["hashes"])
        assert sent.root == held.root == applied.root != root, f"step {step}: {sent.differing(held)}"
        assert fingerprint.model(policy) == fingerprint.model(generator), f"step {step}"
        root = applied.root
        watch.look()
        ledger.report("g", applied.version, applied.root, "g-1")
        ledger.dispatch(f"{step}", applied.version)
    assert used == {("full", "overwrite"), ("packed", "overwrite"), ("sparse", "difference")}
    silent(policy, generator, learned, watch, ledger)


def silent(policy: Any, generator: Any, learned: map_learner.Map, watch: tensor_coverage.LoaderWatch, ledger: Ledger) -> None:
    """No instrument has anything to say after the run."""
    assert ledger.problems() == []
    assert learned.compare(generator, policy.state_dict()) == {}
    assert (learned.opaque, learned.unconsumed, learned.duplicates, learned.casts) == ({}, {}, {}, {})
    assert tensor_coverage.misplaced(learned) == {}
    found = tensor_coverage.classify(generator, learned, watch.touched, watch.moved)
    assert found.idle == ()
    assert all(part.constant for part in found.padding.values())
    assert found.derived == found.moved == {}
    parameters = dict(generator.named_parameters())
    assert set(parameters) <= set(found.written), set(parameters) - set(found.written)
    kept = tensor_coverage.never_changed(watch.history)
    assert not [name for name in kept if name in parameters and "expert" not in name and "norm" not in name], kept
    assert tensor_coverage.unexported(watch.history, policy.state_dict()) == []


def case_llama_untied() -> None:
    run(transformers.LlamaConfig(**DENSE, tie_word_embeddings=False), torch.bfloat16, tied=False)


def case_qwen2_tied() -> None:
    run(transformers.Qwen2Config(**DENSE, tie_word_embeddings=True), torch.float32, tied=True)


def case_qwen3_moe() -> None:
    run(transformers.Qwen3MoeConfig(**DENSE, **EXPERTS, tie_word_embeddings=False), torch.bfloat16, tied=False)


def case_gpt2() -> None:
    run(transformers.GPT2Config(vocab_size=96, n_embd=32, n_layer=2, n_head=4, n_positions=64), torch.float32, tied=True)


def case_deepseek_v3() -> None:
    heads = {**DENSE, "num_key_value_heads": 4}
    run(transformers.DeepseekV3Config(**heads, **LATENT, **ROUTED, tie_word_embeddings=False), torch.bfloat16, tied=False)
