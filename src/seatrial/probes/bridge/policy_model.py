"""The policy of the closed loop: a Megatron model under DDP and Megatron's own distributed optimizer, exported by the Bridge.

It has the interface of `transformers_loop.Policy`, so the loop around it, its facts and its proofs are those of the refit probe. What a
generator is sent is the Bridge's export and nothing else. A transformers generator keeps the experts of a checkpoint in fused
parameters: only for it, and only where names differ, the export goes through transformers' own loader on its way out.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from seatrial.probes import fingerprint
from seatrial.probes.bridge import forward
from seatrial.probes.bridge.session import Session, unwrapped
from seatrial.probes.engines import transformers_loop
from seatrial.probes.engines.transformers_loop import PROMPTS, WIDTH

WANTED = 8
"""Every eighth token of the vocabulary is what the reward asks for: a random model gives it about 1/8."""
RATE_BY_WIDTH = 0.32
"""Learning rate times hidden size: 0.005 for the tiny models, 4e-4 for one of 896. With more a tied model ends at one token per prompt,
where wrong weights show in no log-probability; with less the reward hardly rises in 20 steps."""


def reward(tokens: Sequence[int]) -> float:
    """The share of wanted tokens."""
    return sum(token % WANTED == 0 for token in tokens) / len(tokens)


def precision(session: Session) -> dict[str, Any]:
    """How a model is built to train: in half precision below Megatron's wrapper, without which local norms stay in float32."""
    from megatron.core.transformer.module import Float16Module

    return {} if session.dtype == "float32" else {"mixed_precision_wrapper": Float16Module}


class MegatronPolicy(transformers_loop.Policy):
    """The model that trains. `rate` is its learning rate; `fused`: whether the generator is a transformers model."""

    def __init__(self, session: Session, rate: float, fused: bool) -> None:
        from megatron.core.distributed import DistributedDataParallelConfig
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

        self.session = session
        ddp = DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True)
        # A transformers generator has the bias of a router as a buffer, which no refit reaches: it is trained in no run here.
        provider = session.provider(moe_router_bias_update_rate=0.0)
        self.chunks = session.build(provider=provider, wrap_with_ddp=True, ddp_config=ddp, **precision(session))
        half = {"bf16": session.dtype == "bfloat16", "fp16": session.dtype == "float16", "params_dtype": session.torch_dtype()}
        config = OptimizerConfig(optimizer="adam", lr=rate, weight_decay=0.0, use_distributed_optimizer=True, **half)
        self.optimizer = get_megatron_optimizer(config, self.chunks)
        self.model = unwrapped(self.chunks[0])
        draw, words = random.Random(0), forward.vocabulary(session)
        self.prompts = [[draw.randrange(words) for _ in range(WIDTH)] for _ in range(PROMPTS)]
        self.rewards: list[list[float]] = []
        """Of every sample, by step."""
        self.unmoved: list[list[str]] = []
        """Parameters that a step left as they were, by step."""
        self._held = fingerprint.tensors(self.model.named_parameters())
        self._target = Fused(session) if fused else None

    def exported(self) -> dict[str, Any]:
        """What the Bridge exports: the names of the checkpoint."""
        return self.session.export(self.chunks)

    def export(self) -> dict[str, Any]:
        """What the generator is sent, under its names."""
        made = self.exported()
        return made if self._target is None else self._target.named(made)

    def step(self, completions: Sequence[Sequence[int]]) -> float:
        """One policy-gradient step; the mean reward."""
        import torch
        from megatron.core.distributed import finalize_model_grads

        rewards = [reward(tokens) for tokens in completions]
        mean = sum(rewards) / len(rewards)
        advantages = torch.tensor([value - mean for value in rewards], device=self.session.device)
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        loss = -(advantages[:, None] * self._logprobs(completions)).mean()
        loss.backward()
        finalize_model_grads(self.chunks)
        self.optimizer.step()
        before, self._held = self._held, fingerprint.tensors(self.model.named_parameters())
        self.unmoved.append([name for name, value in before.items() if self._held[name] == value])
        self.rewards.append(rewards)
        return mean

    def logprobs(self, completions: Sequence[Sequence[int]]) -> list[list[float]]:
        """What the policy itself gives the completions."""
        import torch

        with torch.no_grad():
            found: list[list[float]] = self._logprobs(completions).tolist()
        return found

    def _logprobs(self, completions: Sequence[Sequence[int]]) -> Any:
        return forward.logprobs(self.session, self.chunks, self.rows(completions), WIDTH)


class Fused:
    """How transformers names what a checkpoint holds."""

    def __init__(self, session: Session) -> None:
        model = session.hf()
        self.session, self.owner, self.config = session, type(model), model.config
        self.dtypes = {name: value.dtype for name, value in model.named_parameters()}

    def named(self, export: dict[str, Any]) -> dict[str, Any]:
        """The export under the names of transformers' parameters. A name that its loader misses or does not know is an error."""
        if export.keys() == self.dtypes.keys():
            return export
        # The loader casts: what the Bridge exports in another dtype would look right behind it.
        cast = [name for name, value in export.items() if value.dtype != self.dtypes.get(name, value.dtype)]
        if cast:
            raise ValueError(f"exported in another dtype than transformers has: {', '.join(cast[:5])}")
        model, told = self.owner.from_pretrained(
            None,
            config=self.config,
            state_dict=dict(export),
            dtype=self.session.torch_dtype(),
            output_loading_info=True,
        )
        wrong = {kind: sorted(map(str, names)) for kind, names in told.items() if names}
        if wrong:
            raise ValueError(f"transformers does not load what the Bridge exports: {wrong}")
        return {name: value.detach() for name, value in model.named_parameters()}
