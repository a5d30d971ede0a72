"""Rung loop: generate in a process of its own, reward, policy-gradient step on the Megatron model, Bridge export, refit; many steps.

- The loop is that of the refit probe: every refit is compared before and after, name by name, by the bits of the live weights. Its rows
  are passed on unchanged, so that the same judge reads them.
- Before the first step both sides hold the same bits: `token_mult_prob_error` there (step 0) is the floor of this device and dtype.
- After the last step the export is imported again, by the Bridge, into a second model: it must be the policy, parameter by parameter.
- Two controls (`controls`) show what reward and log-probabilities do without a refit, and without learning.

Options of the plan: `steps`, `rate`, `engine` (`transformers` or `vllm`), `engine_python` and `server` (options) for vLLM.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from seatrial.probes import fingerprint
from seatrial.probes.bridge import controls, rungs
from seatrial.probes.bridge.policy_model import RATE_BY_WIDTH, MegatronPolicy, precision
from seatrial.probes.bridge.rank import Missing, Rank
from seatrial.probes.bridge.session import Session, unwrapped
from seatrial.probes.engines.serve import Server
from seatrial.probes.engines.transformers_loop import LENGTH, Loop
from seatrial.probes.engines.transformers_remote import Remote
from seatrial.probes.engines.vllm_loop import Engine, stamped
from seatrial.probes.refit.header import TRANSPORTS

STEPS = 20
SPARE_S = 45.0
"""The rung ends itself this long before its deadline, while it can still end the server."""
GPU_SERVER = ("--gpu-memory-utilization", "0.2")
"""The policy has the same GPU."""
WORLD = ("RANK", "WORLD_SIZE", "LOCAL_RANK")


class Seeded(Engine):
    """Samples that are independent: from one seed for a whole batch, vLLM draws the same numbers for each of its prompts."""

    def sample(self, prompts: Sequence[Sequence[int]], length: int, seed: int) -> dict[str, Any]:
        """Completions of equal length."""
        seeds = [seed * len(prompts) + index for index in range(len(prompts))]
        return stamped(self.client.rollouts(prompts, length, seeds, min_tokens=length, ignore_eos=True))


def run(rank: Rank) -> None:
    """Start the generator, run the loop and its controls."""
    options, config = rank.options or {}, rank.config()
    engine, note = chosen(rank, config)
    steps = int(options.get("steps") or STEPS)
    rate = float(options.get("rate") or RATE_BY_WIDTH / config.hidden_size)
    dtype = str(config.dtype or "float32").removeprefix("torch.")
    experts = experts_of(config)
    rank.write("setup", engine=engine, note=note, steps=steps, rate=rate, dtype=dtype, experts=experts)
    session = rank.session(dtype)

    def policy(rate: float) -> MegatronPolicy:
        return MegatronPolicy(session, rate, engine == "transformers")

    with ending(rungs.TABLE[rank.rung].minutes * 60 - SPARE_S), generator(rank, engine, dtype, policy(rate)) as loop:
        loop.begin()
        loop.completions = loop.remote.ask("sample", loop.policy.prompts, LENGTH, 0)["tokens"]
        loop.refit(0)
        rank.say("control without refits")
        controls.no_refit(rank, loop, policy(rate), steps)
        rank.say(f"{steps} steps")
        learn(rank, loop, session, steps)
        rank.say("control with learning rate 0")
        controls.no_learning(rank, loop, policy(0.0), steps, steps)


def learn(rank: Rank, loop: Loop, session: Session, steps: int) -> None:
    """The real run, after its base was compared."""
    controls.train(loop, 1, steps)
    loop.driver.end()
    policy = loop.policy
    assert isinstance(policy, MegatronPolicy)
    rows, unmoved = controls.read(loop.driver.facts), [_capped(names) for names in policy.unmoved]
    rank.write("loop", run="learn", rewards=policy.rewards, unmoved=unmoved, rows=rows)
    off = reimported(session, policy, rank.out / "export")
    rank.write("reimport", parameters=controls.count(policy), unequal=off[:20], unequal_count=len(off))


def _capped(names: list[str]) -> dict[str, Any]:
    return {"count": len(names), "names": names[:20]}


def reimported(session: Session, policy: MegatronPolicy, place: Path) -> list[str]:
    """Parameters that differ between the policy and a model into which the Bridge imports the policy's export."""
    from safetensors.torch import save_file

    place.mkdir()
    for file in session.directory.glob("*.json"):
        if not file.name.endswith(".index.json"):
            shutil.copy(file, place)
    save_file({name: value.contiguous() for name, value in policy.exported().items()}, place / "model.safetensors", {"format": "pt"})
    (chunk,) = Session(place, session.device, session.dtype).build(**precision(session))
    again = fingerprint.tensors(unwrapped(chunk).named_parameters())
    shutil.rmtree(place)
    return fingerprint.differing(fingerprint.tensors(policy.model.named_parameters()), again)


def chosen(rank: Rank, config: Any) -> tuple[str, str]:
    """The generator, and a note about it. An engine that was asked for by name and cannot generate here is a missing part."""
    wanted = str((rank.options or {}).get("engine") or ("transformers" if rank.device == "cpu" else "vllm"))
    if wanted not in ("transformers", "vllm"):
        raise ValueError(f"option engine: {wanted!r}; known: transformers, vllm")
    if wanted == "vllm" and rank.device == "cpu":
        # Both defects are upstream's and were measured: the head of a tied model stays stale, and experts are loaded wrongly.
        if config.tie_word_embeddings:
            raise Missing("vLLM that refits tied embeddings: on a CPU it does not; take an untied model, or --engine transformers")
        if experts_of(config):
            raise Missing("vLLM that refits experts: on a CPU it does not; take a dense model, or --engine transformers")
    return wanted, ""


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
        server = Server(rank.directory, rank.out / "server.log", rank.say, [*words, *options.get("server", ())], python=python)
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
