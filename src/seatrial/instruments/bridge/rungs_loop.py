"""Rung loop: generate in a process of its own, reward, policy-gradient step on the Megatron model, Bridge export, refit; many steps.

- The loop is that of the refit probe, with `MegatronPolicy` as the policy. A transformers generator keeps the experts of a checkpoint in
  fused parameters: only for it, and only where names differ, the export goes through transformers' own loader on its way out.
- Before the first step both sides hold the same bits: `token_mult_prob_error` there (step 0) is the floor of this device and dtype.
- Two controls use the generator of the real run: one never refits it, one has a learning rate of zero.
- After the last step the export is imported again, by the Bridge, into a second model: it must be the policy, parameter by parameter.

Options of the plan: `steps`, `rate`, `engine` (`transformers` or `vllm`), `engine_python` and `server` (options) for vLLM.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from seatrial.instruments.bits import fingerprint
from seatrial.instruments.bridge import forward, rungs
from seatrial.instruments.bridge.rungs import BridgeSession, Missing, Rank, unwrapped
from seatrial.instruments.engines import transformers_loop
from seatrial.instruments.engines.transformers_generator import Remote
from seatrial.instruments.engines.transformers_loop import LENGTH, PROMPTS, WIDTH, Loop
from seatrial.instruments.engines.vllm_loop import Engine, stamped
from seatrial.instruments.engines.vllm_server import VllmServer
from seatrial.instruments.refit import agreement
from seatrial.instruments.refit.payload_header import TRANSPORTS

WANTED = 8
"""Every eighth token of the vocabulary is what the reward asks for: a random model gives it about 1/8."""
RATE_BY_WIDTH = 0.32
"""Learning rate times hidden size: 0.005 for the tiny models, 4e-4 for one of 896. With more a tied model ends at one token per prompt,
where wrong weights show in no log-probability; with less the reward hardly rises in 20 steps."""


def reward(tokens: Sequence[int]) -> float:
    return sum(token % WANTED == 0 for token in tokens) / len(tokens)


def precision(session: BridgeSession) -> dict[str, Any]:
    """How a model is built to train: in half precision below Megatron's wrapper, without which local norms stay in float32."""
    from megatron.core.transformer.module import Float16Module

    return {} if session.dtype == "float32" else {"mixed_precision_wrapper": Float16Module}


class MegatronPolicy(transformers_loop.TrainedPolicy):
    """The model that trains. `rate` is its learning rate; `fused`: whether the generator is a transformers model."""

    def __init__(self, session: BridgeSession, rate: float, fused: bool) -> None:
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
        return self.session.export(self.chunks)

    def export(self) -> dict[str, Any]:
        """What the generator is sent, under its names."""
        made = self.exported()
        return made if self._target is None else self._target.named(made)

    def step(self, completions: Sequence[Sequence[int]]) -> float:
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
        import torch

        with torch.no_grad():
            found: list[list[float]] = self._logprobs(completions).tolist()
        return found

    def _logprobs(self, completions: Sequence[Sequence[int]]) -> Any:
        return forward.logprobs(self.session, self.chunks, self.rows(completions), WIDTH)


class Fused:
    def __init__(self, session: BridgeSession) -> None:
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


OTHER_SEEDS = 1000
"""Samples of a control are drawn from other seeds than those of the real run: the two are compared as independent samples."""


def train(loop: Loop, first: int, steps: int) -> None:
    """Sample, step, refit, so many times; the first step has the number `first`."""
    for step in range(first, first + steps):
        loop.sample(step)
        assert loop.completions is not None
        loop.policy.step(loop.completions)
        loop.refit(step)


def no_refit(rank: Rank, loop: Loop, policy: MegatronPolicy, steps: int) -> None:
    """A policy that learns from a generator that keeps the weights it has: the base."""
    before = loop.remote.ask("state")["hashes"]
    gaps = []
    for step in range(1, steps + 1):
        done = loop.remote.ask("sample", policy.prompts, LENGTH, OTHER_SEEDS + step)["tokens"]
        policy.step(done)
        theirs = loop.remote.ask("logprobs", policy.rows(done), WIDTH)
        gap = agreement.token_mult_prob_error(theirs, policy.logprobs(done))
        gaps.append({"value": gap.value, "p50": gap.p50})
    touched = fingerprint.differing(before, loop.remote.ask("state")["hashes"])
    rank.write(
        "control", run="no-refit", rewards=policy.rewards, still=[len(names) for names in policy.unmoved], mismatch=gaps, touched=touched
    )


def no_learning(rank: Rank, loop: Loop, policy: MegatronPolicy, last: int, steps: int) -> None:
    """The whole loop with a learning rate of zero, on the generator of a run that ended with step `last`: the base is put back first."""
    loop.policy, loop.driver.facts = policy, rank.out / "no-learning.jsonl"
    loop.refit(last + 1)
    train(loop, last + 2, steps)
    rows = [row for row in read(loop.driver.facts) if row["fact"] == "refit"]
    kept = [{key: row[key] for key in ("step", "changed", "wrong_names", "refused")} for row in rows]
    still = [len(names) for names in policy.unmoved]
    rank.write(
        "control",
        run="no-learning",
        rewards=policy.rewards,
        still=still,
        parameters=sum(1 for _ in policy.model.named_parameters()),
        refits=kept,
    )


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


STEPS = 20
SPARE_S = 45.0
"""The rung ends itself this long before its deadline, while it can still end the server."""
GPU_SERVER = ("--gpu-memory-utilization", "0.2")
"""The policy has the same GPU."""
WORLD = ("RANK", "WORLD_SIZE", "LOCAL_RANK")


class Seeded(Engine):
    """Samples that are independent: from one seed for a whole batch, vLLM draws the same numbers for each of its prompts."""

    def sample(self, prompts: Sequence[Sequence[int]], length: int, seed: int) -> dict[str, Any]:
        seeds = [seed * len(prompts) + index for index in range(len(prompts))]
        return stamped(self.client.rollouts(prompts, length, seeds, min_tokens=length, ignore_eos=True))


def run_loop(rank: Rank) -> None:
    options, config = rank.options or {}, rank.config()
    engine = chosen(rank, config)
    steps = int(options.get("steps") or STEPS)
    rate = float(options.get("rate") or RATE_BY_WIDTH / config.hidden_size)
    dtype = str(config.dtype or "float32").removeprefix("torch.")
    experts = experts_of(config)
    rank.write("setup", engine=engine, steps=steps, rate=rate, dtype=dtype, experts=experts)
    session = rank.session(dtype)

    def policy(rate: float) -> MegatronPolicy:
        return MegatronPolicy(session, rate, engine == "transformers")

    with ending(rungs.TABLE[rank.rung].minutes * 60 - SPARE_S), generator(rank, engine, dtype, policy(rate)) as loop:
        loop.begin()
        loop.completions = loop.remote.ask("sample", loop.policy.prompts, LENGTH, 0)["tokens"]
        loop.refit(0)
        rank.say("control without refits")
        no_refit(rank, loop, policy(rate), steps)
        rank.say(f"{steps} steps")
        learn(rank, loop, session, steps)
        rank.say("control with learning rate 0")
        no_learning(rank, loop, policy(0.0), steps, steps)


def learn(rank: Rank, loop: Loop, session: BridgeSession, steps: int) -> None:
    train(loop, 1, steps)
    loop.driver.end()
    policy = loop.policy
    assert isinstance(policy, MegatronPolicy)
    rows, unmoved = read(loop.driver.facts), [{"count": len(names), "names": names[:20]} for names in policy.unmoved]
    rank.write("loop", run="learn", rewards=policy.rewards, unmoved=unmoved, rows=rows)
    off = reimported(session, policy, rank.out / "export")
    rank.write("reimport", parameters=sum(1 for _ in policy.model.named_parameters()), unequal=off[:20], unequal_count=len(off))


def reimported(session: BridgeSession, policy: MegatronPolicy, place: Path) -> list[str]:
    """Parameters that differ between the policy and a model into which the Bridge imports the policy's export."""
    from safetensors.torch import save_file

    place.mkdir()
    for file in session.directory.glob("*.json"):
        if not file.name.endswith(".index.json"):
            shutil.copy(file, place)
    save_file({name: value.contiguous() for name, value in policy.exported().items()}, place / "model.safetensors", {"format": "pt"})
    (chunk,) = BridgeSession(place, session.device, session.dtype).build(**precision(session))
    again = fingerprint.tensors(unwrapped(chunk).named_parameters())
    shutil.rmtree(place)
    return fingerprint.differing(fingerprint.tensors(policy.model.named_parameters()), again)


def chosen(rank: Rank, config: Any) -> str:
    """The generator. An engine that was asked for by name and cannot generate here is a missing part."""
    wanted = str((rank.options or {}).get("engine") or ("transformers" if rank.device == "cpu" else "vllm"))
    if wanted not in ("transformers", "vllm"):
        raise ValueError(f"option engine: {wanted!r}; known: transformers, vllm")
    if wanted == "vllm" and rank.device == "cpu":
        # Both defects are upstream's and were measured: the head of a tied model stays stale, and experts are loaded wrongly.
        if config.tie_word_embeddings:
            raise Missing("vLLM that refits tied embeddings: on a CPU it does not; take an untied model, or --engine transformers")
        if experts_of(config):
            raise Missing("vLLM that refits experts: on a CPU it does not; take a dense model, or --engine transformers")
    return wanted


def experts_of(config: Any) -> int:
    """How many experts a layer has; 0 for a dense model."""
    found = (getattr(config, name, None) for name in ("num_experts", "num_local_experts", "n_routed_experts"))
    return int(next((value for value in found if value), 0))


@contextlib.contextmanager
def generator(rank: Rank, engine: str, dtype: str, policy: MegatronPolicy) -> Iterator[Loop]:
    """The loop over a generator in a new process, which has none of the shims; it ends with the context."""
    options = rank.options or {}
    if engine == "transformers":
        with _alone():
            remote = Remote(("--model", str(rank.directory)))
        with remote:
            yield Loop(policy, remote, rank.out, TRANSPORTS, None)
        return
    words = ["--dtype", dtype, *(GPU_SERVER if rank.device != "cpu" else ())]
    words += ["--attention-backend", "TRITON_ATTN"] if rank.device != "cpu" and dtype == "float32" else []
    python = str(options.get("engine_python") or sys.executable)
    with _alone():
        server = VllmServer(rank.directory, rank.out / "server.log", rank.say, [*words, *options.get("server", ())], python=python)
    with server:
        yield Loop(policy, Seeded(server, rank.out, None), rank.out, TRANSPORTS, None)


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """Without the variables that make a process a rank of this rung's world, and with one thread: this process has a core of its own."""
    kept = {name: os.environ.pop(name) for name in WORLD if name in os.environ}
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    try:
        yield
    finally:
        os.environ.update(kept)


@contextlib.contextmanager
def ending(seconds: float) -> Iterator[None]:
    """End by an exception, and so with everything that was started: a killed rung would leave its server behind."""

    def late(number: int, _frame: object) -> None:
        if number == signal.SIGTERM:
            raise SystemExit("ended from outside")
        raise TimeoutError(f"the closed loop did not come to its end within {seconds:.0f} s")

    before = {number: signal.signal(number, late) for number in (signal.SIGALRM, signal.SIGTERM)}
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in before.items():
            signal.signal(number, handler)
