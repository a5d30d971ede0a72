"""What of NeMo-RL is watched: its worker extension for vLLM, and the functions that stream or broadcast the policy's weights.

Names as of 7ea279abf (2026-08-22), and older ones back to v0.3.1. tests/data/refit/nemo_rl.json holds the signatures.
Not seen: what `nccl_reshard_refit` writes into the weights directly, and sparse payloads, which carry differences. Such a
refit is recorded as incomplete, with the reason.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from seatrial.instruments.engines.attach import GENERATOR, POLICY, Target

VLLM = "nemo_rl.models.generation.vllm"
MODELOPT = "nemo_rl.modelopt.models.generation"
EXTENSION = "VllmInternalWorkerExtension"
STREAMS = ("stream_weights_via_ipc_zmq_impl", "stream_weights_via_http_impl")
CALLS = ("update_weights_via_ipc_zmq", "update_weights_from_collective", "nccl_reshard_refit", "finish_sparse_delta_refit")
OLD_CALLS = ("update_weights_from_global_ipc_handles", "update_weights_from_local_ipc_handles", "update_weights_from_collective")
PARTIAL = {
    "nccl_reshard_refit": "nccl_reshard writes the weights of feed-forward layers past load_weights: only the other names were seen",
    "finish_sparse_delta_refit": "sparse payloads carry differences: what arrived cannot be compared with what was exported",
}


def _is_source(given: Mapping[str, Any]) -> bool:
    """Every rank of training joins the broadcast; one sends."""
    rank = getattr(given.get("group"), "rank", None)
    return rank is None or rank == given.get("src")


def _has_peer(given: Mapping[str, Any]) -> bool:
    """Ranks without a peer only run the export."""
    return getattr(given.get("self"), "next_agent", "") is not None


TARGETS = (
    Target(f"{VLLM}.vllm_backend", GENERATOR, EXTENSION, CALLS, "_load_weights", extends=True, aside=lambda name, _: PARTIAL.get(name, "")),
    Target("nemo_rl.models.generation.vllm_backend", GENERATOR, EXTENSION, OLD_CALLS, "_load_weights", extends=True),
    Target(
        *(f"{VLLM}.checkpoint_engine", GENERATOR, "VllmCheckpointEngineMixin", ("update_weights_from_checkpoint_engine",), "_load_weights"),
        optional=True,
    ),
    # It renames before it hands on to its parent: what arrives is what the subclass is given.
    Target(f"{MODELOPT}.vllm_quant_backend", GENERATOR, "VllmQuantInternalWorkerExtension", (), "_load_weights", optional=True),
    Target("nemo_rl.models.policy.utils", POLICY, "", STREAMS, "params_generator"),
    Target(
        "nemo_rl.utils.packed_tensor", POLICY, "", ("packed_broadcast_producer",), "iterator", mapped="post_iter_func", sends=_is_source
    ),
    Target("nemo_rl.utils.checkpoint_engines.nixl", POLICY, "NIXLCheckpointEngine", ("send_weights",), "weights", sends=_has_peer),
)
SPECIAL: dict[str, Any] = {}
