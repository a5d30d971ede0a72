"""Level 2's rollouts: a separate generation process, refitted before every generation, and proven each time.

For every refit one fact is written: which names differ between the trainer's export and the generator's live
weights before and after, and how far recomputed log-probabilities are apart with the stale and with the fresh
weights. The stale comparison is the negative control: it shows that the instrument would have seen a missed refit.
"""

from __future__ import annotations

import math
import os
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from typing import Any

from seatrial.loops.trl.drive import sampler
from seatrial.loops.trl.drive.record import say
from seatrial.probes import facts, fingerprint

ANSWER_SECONDS = 300.0


class Generator:
    """The generation process, seen from the trainer."""

    def __init__(self, arguments: Sequence[str]) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="seatrial-", dir="/dev/shm" if Path("/dev/shm").is_dir() else None)
        self.shared = Path(self._directory.name)
        key = secrets.token_bytes(16)
        socket = str(self.shared / "socket")
        listener = Listener(socket, family="AF_UNIX", authkey=key)
        command = [sys.executable, "-m", "seatrial.loops.trl.drive.generator", "--socket", socket, *arguments]
        self.process = subprocess.Popen(command, env={**os.environ, "SEATRIAL_SOCKET_KEY": key.hex()})
        self.connection = self._accept(listener)

    def _accept(self, listener: Listener) -> Connection:
        """Wait for the generator to connect; its death or the deadline ends the wait."""
        say(f"waiting up to {ANSWER_SECONDS:.0f} s for the generation process to connect")
        raw = listener._listener._socket  # type: ignore[attr-defined]  # the only way to wait with a deadline
        raw.settimeout(1.0)
        waited = 0.0
        while True:
            try:
                return listener.accept()
            except TimeoutError:
                waited += 1.0
                if self.process.poll() is not None:
                    raise RuntimeError(f"the generation process ended with code {self.process.returncode} before it connected") from None
                if waited > ANSWER_SECONDS:
                    raise RuntimeError(f"the generation process did not connect within {ANSWER_SECONDS:.0f} s") from None

    def ask(self, do: str, **request: Any) -> Any:
        """One request and its answer; an error there is raised here."""
        self.connection.send({"do": do, **request})
        if not self.connection.poll(ANSWER_SECONDS):
            raise RuntimeError(f"the generation process did not answer {do!r} within {ANSWER_SECONDS:.0f} s")
        status, value = self.connection.recv()
        if status != "ok":
            raise RuntimeError(f"the generation process failed at {do!r}: {value}")
        return value

    def close(self) -> None:
        """End the process and remove the shared directory."""
        try:
            self.connection.send({"do": "stop"})
            self.process.wait(timeout=10)
        except (OSError, subprocess.TimeoutExpired):
            self.process.kill()
            self.process.wait()
        self._directory.cleanup()


def worst(left: Sequence[Sequence[float]], right: Sequence[Sequence[float]]) -> tuple[float, float]:
    """Largest |difference| of log-probabilities, and the mean of exp|difference| (token_mult_prob_error)."""
    gaps = [abs(a - b) for x, y in zip(left, right, strict=True) for a, b in zip(x, y, strict=True)]
    if not all(math.isfinite(gap) for gap in gaps):
        return math.nan, math.nan
    return max(gaps, default=math.nan), sum(math.exp(gap) for gap in gaps) / max(1, len(gaps))


class RefittedRollouts:
    """A rollout function for the trainer: refit, prove, sample."""

    def __init__(self, generator: Generator, facts_path: Path, metrics_path: Path, seed: int) -> None:
        self.generator, self.facts, self.metrics, self.seed = generator, facts_path, metrics_path, seed
        self.count = 0
        self.probe: tuple[list[list[int]], list[list[int]]] | None = None

    def __call__(self, prompts: list[str], trainer: Any) -> dict[str, Any]:
        """TRL calls this once per generation with the prompts of this process."""
        tokenizer, model = trainer.processing_class, trainer.accelerator.unwrap_model(trainer.model)
        prompt_ids = tokenizer(prompts).input_ids
        training = model.training
        model.eval()
        self.refit(model, tokenizer.pad_token_id, trainer.state.global_step)
        drawn = sampler.seeds(prompts, trainer.state.global_step, self.seed)
        length = trainer.args.max_completion_length
        given = (prompt_ids, drawn, length, tokenizer.eos_token_id, tokenizer.pad_token_id)
        completions, logprobs = self.generator.ask("sample", arguments=given)
        own = sampler.logprobs_of(model, prompt_ids, completions, tokenizer.pad_token_id)
        gap, error = worst(own, logprobs)
        row = {"step": trainer.state.global_step + 1, "refit/sampled_max_dlogp": gap, "refit/token_mult_prob_error": error}
        facts.append(self.metrics, row)
        self.probe = (prompt_ids[:8], completions[:8])
        model.train(training)
        return {"prompt_ids": prompt_ids, "completion_ids": completions, "logprobs": logprobs}

    def gap(self, model: Any, pad: int) -> float | None:
        """How far the generator's log-probabilities of the last batch are from the trainer's, right now."""
        if self.probe is None:
            return None
        return worst(sampler.logprobs_of(model, *self.probe, pad), self.generator.ask("logprobs", arguments=(*self.probe, pad)))[0]

    def refit(self, model: Any, pad: int, step: int) -> None:
        """Export, compare, transfer, compare again, and write the fact."""
        from safetensors.torch import save_file

        export = {name: value.detach().cpu().contiguous() for name, value in model.named_parameters()}
        produced, before = fingerprint.tensors(export.items()), self.generator.ask("hash")
        stale = self.gap(model, pad)
        path = self.generator.shared / "weights.safetensors"
        save_file(export, path)
        size = self.generator.ask("load", path=str(path))
        after = self.generator.ask("hash")
        fresh = self.gap(model, pad)
        row = {
            "fact": "refit",
            "index": self.count,
            "step": step,
            "names": len(produced),
            "bytes": size,
            "produced": fingerprint.digest(produced),
            "consumed": fingerprint.digest(after),
            "stale_names": len(fingerprint.differing(produced, before)),
            "wrong_names": fingerprint.differing(produced, after),
            "touched_names": len(fingerprint.differing(before, after)),
            "stale_max_dlogp": stale,
            "fresh_max_dlogp": fresh,
        }
        facts.append(self.facts, row)
        if stale is not None:
            facts.append(self.metrics, {"step": step + 1, "refit/stale_max_dlogp": stale, "refit/fresh_max_dlogp": fresh})
        say(f"refit {self.count}: {len(produced)} tensors, {len(row['wrong_names'])} wrong after, {row['stale_names']} stale before")
        self.count += 1
