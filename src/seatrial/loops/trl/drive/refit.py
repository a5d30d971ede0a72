"""Rollouts of levels 2 and 3: a separate generation process, refitted before every generation, and proven each time.

Level 2's process is `generator.py`, here; level 3's is a vLLM server, which is asked in the same way (see `served.py`).

- For every refit one fact is written: which names differ between the trainer's export and the generator's live
  weights before and after, and how far recomputed log-probabilities are apart with the stale and with the fresh
  weights. The stale comparison is the negative control: it shows that the instrument would have seen a missed refit.
- The transport changes over the run: full, packed, then sparse. A refit is committed only when the generator's own
  fingerprint is the trainer's. A payload that the generator refuses ends the run.
- At the end stands what became of every tensor of the generator, and what of the trainer's model changed and is not exported.
"""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from typing import Any, Protocol

from seatrial.loops.trl.drive import sampler
from seatrial.loops.trl.drive.record import say
from seatrial.probes import facts, fingerprint
from seatrial.probes.refit import coverage
from seatrial.probes.refit.errors import RefitRefused
from seatrial.probes.refit.header import TRANSPORTS
from seatrial.probes.refit.mismatch import token_mult_prob_error
from seatrial.probes.refit.producer import Producer

ANSWER_SECONDS = 300.0


class Ended(RuntimeError):
    """The generation process is gone."""


class Generates(Protocol):
    """What a generation process must answer, seen from the trainer."""

    shared: Path
    """A directory that both sides see."""
    incarnation: int | str
    """Which life of the process answered last."""

    def ask(self, do: str, **request: Any) -> Any:
        """`map`, `hash`, `load`, `sample`, `logprobs` or `cover`. Raises RefitRefused, or Ended when the process is gone."""

    def close(self) -> None:
        """End the process, and what it shared."""


class Generator:
    """The generation process of level 2, seen from the trainer."""

    def __init__(self, arguments: Sequence[str]) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="seatrial-", dir="/dev/shm" if Path("/dev/shm").is_dir() else None)
        self.shared = Path(self._directory.name)
        key = secrets.token_bytes(16)
        socket = str(self.shared / "socket")
        listener = Listener(socket, family="AF_UNIX", authkey=key)
        command = [sys.executable, "-m", "seatrial.loops.trl.drive.generator", "--socket", socket, *arguments]
        self.process = subprocess.Popen(command, env={**os.environ, "SEATRIAL_SOCKET_KEY": key.hex()})
        self.incarnation: int | str = self.process.pid
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
        """One request and its answer; an error or a refusal there is raised here."""
        try:
            self.connection.send({"do": do, **request})
            if not self.connection.poll(ANSWER_SECONDS):
                raise RuntimeError(f"the generation process did not answer {do!r} within {ANSWER_SECONDS:.0f} s")
            status, value = self.connection.recv()
        except (EOFError, OSError):
            raise Ended(f"the generation process ended with code {self._code()} at {do!r}") from None
        if status == "refused":
            raise RefitRefused(*value)
        if status != "ok":
            raise RuntimeError(f"the generation process failed at {do!r}: {value}")
        return value

    def _code(self) -> int | None:
        """How the process ended; None when it closed the socket and lives."""
        try:
            return self.process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            return None

    def close(self) -> None:
        """End the process and remove the shared directory."""
        try:
            self.connection.send({"do": "stop"})
            self.process.wait(timeout=10)
        except (OSError, subprocess.TimeoutExpired):
            self.process.kill()
            self.process.wait()
        self._directory.cleanup()


class RefittedRollouts:
    """A rollout function for the trainer: refit, prove, sample."""

    def __init__(self, generator: Generates, facts_path: Path, metrics_path: Path, seed: int) -> None:
        self.generator, self.facts, self.metrics, self.seed = generator, facts_path, metrics_path, seed
        self.count = 0
        self.producer: Producer | None = None
        self.owned = coverage.Owned()
        self.history: list[Mapping[str, str]] = []
        self.probe: tuple[list[list[int]], list[list[int]]] | None = None

    def __call__(self, prompts: list[str], trainer: Any) -> dict[str, Any]:
        """TRL calls this once per generation with the prompts of this process."""
        tokenizer, model = trainer.processing_class, trainer.accelerator.unwrap_model(trainer.model)
        prompt_ids = tokenizer(prompts).input_ids
        training = model.training
        model.eval()
        step = trainer.state.global_step
        self.refit(model, tokenizer.pad_token_id, step)
        drawn = sampler.seeds(prompts, step, self.seed)
        length = trainer.args.max_completion_length
        given = (prompt_ids, drawn, length, tokenizer.eos_token_id, tokenizer.pad_token_id)
        version, completions, logprobs = self.generator.ask("sample", arguments=given)
        row = {"fact": "samples", "step": step, "count": len(completions), "version": version, "incarnation": self.generator.incarnation}
        facts.append(self.facts, row)
        self.compare(step, logprobs, sampler.logprobs_of(model, prompt_ids, completions, tokenizer.pad_token_id))
        self.probe = (prompt_ids[:8], completions[:8])
        model.train(training)
        return {"prompt_ids": prompt_ids, "completion_ids": completions, "logprobs": logprobs}

    def compare(self, step: int, logprobs: Sequence[Sequence[float]], own: Sequence[Sequence[float]]) -> None:
        """Write how far the sampled tokens' log-probabilities are from the trainer's."""
        found = token_mult_prob_error(logprobs, own)
        facts.append(self.facts, {"fact": "mismatch", "step": step, **asdict(found)})
        row = {"refit/sampled_max_dlogp": found.max_abs, "refit/token_mult_prob_error": found.value}
        row |= {"refit/median_sequence_prob_error": found.p50, "refit/p99_sequence_prob_error": found.p99}
        facts.append(self.metrics, {"step": step + 1, **row, "refit/worst_sequence_prob_error": found.max_sequence})

    def gap(self, model: Any, pad: int) -> float | None:
        """How far the generator's log-probabilities of the last batch are from the trainer's, right now."""
        if self.probe is None:
            return None
        theirs = self.generator.ask("logprobs", arguments=(*self.probe, pad))
        return token_mult_prob_error(theirs, sampler.logprobs_of(model, *self.probe, pad)).max_abs

    def export(self, model: Any) -> dict[str, Any]:
        """The weights as they are sent: tied ones once."""
        return {name: value.detach().cpu() for name, value in model.named_parameters()}

    def begin(self) -> None:
        """Let the generator learn the map, before the first refit."""
        facts.append(self.facts, {"fact": "map", "replica": 0, **self.generator.ask("map")})

    def cover(self) -> dict[str, Any]:
        """What became of every tensor of the generator."""
        covered: dict[str, Any] = self.generator.ask("cover")
        return covered

    def finish(self) -> None:
        """The facts that need the whole run. What changed shows only over two refits: without them there is no fact, a missed proof."""
        if len(self.history) > 1:
            mine = {"never_changed": coverage.never_changed(self.history), "unexported": self.owned.unexported()}
            facts.append(self.facts, {**self.cover(), "fact": "coverage", "replica": 0, **mine})

    def seen(self, after: Mapping[str, str], wrong: Sequence[str]) -> dict[str, Any]:
        """How the live weights were read, and what is known of those that are wrong."""
        return {"methods": {"read": sum(name in after for name in self.history[-1])}}

    def refit(self, model: Any, pad: int, step: int) -> None:
        """Export, compare, transfer, compare again, commit or roll back, and write the fact."""
        export = self.export(model)
        if self.producer is None:
            self.begin()
        produced, before = fingerprint.tensors(export.items()), self.generator.ask("hash")
        self.owned.look(model, export)
        self.history.append(produced)
        stale = self.gap(model, pad)
        self.producer = self.producer or Producer(export)
        # In fp32 every element changes, so that sparse is coded densely or as a bitmap.
        path = self.producer.prepare(export, TRANSPORTS[min(self.count, 2)], path=self.generator.shared / "weights")
        sent = self.producer.prepared
        assert sent is not None
        facts.append(self.facts, {"fact": "hashes", "side": "sent", "version": sent.version, "step": step, "hashes": produced})
        row = {
            **{"fact": "refit", "index": self.count, "step": step, "replica": 0, "incarnation": self.generator.incarnation},
            **{key: value for key, value in asdict(sent).items() if key not in ("hashes", "root")},
            **{"names": len(produced), "produced": fingerprint.tree(produced).root, "methods": {}},
            "stale_names": len(fingerprint.differing(produced, before)),
            "stale_max_dlogp": stale,
        }
        try:
            applied = self.generator.ask("load", path=str(path))
        except (RefitRefused, Ended) as error:
            self.producer.rollback()
            refusal = error if isinstance(error, RefitRefused) else RefitRefused("dead", detail=str(error))
            row |= {"refused": refusal.reason, "committed": False, "consumed": None, "wrong_names": list(refusal.names)}
            facts.append(self.facts, row | {"touched_names": 0, "fresh_max_dlogp": None})
            raise RuntimeError(str(refusal)) from None  # the first exception of a chain is taken for the cause
        after = self.generator.ask("hash")
        refused = self.commit(fingerprint.tree(after).root, applied["version"])
        wrong = fingerprint.differing(produced, after)
        row |= {
            **{"refused": refused, "committed": refused is None, "consumed": fingerprint.tree(after).root},
            **{"wrong_names": wrong, "incarnation": self.generator.incarnation, **self.seen(after, wrong)},
            "touched_names": len(fingerprint.differing(before, after)),
            "fresh_max_dlogp": self.gap(model, pad),
        }
        self.note(row, applied["version"])

    def commit(self, root: str, version: int) -> str | None:
        """Take what the generator holds for the baseline, or return why not."""
        assert self.producer is not None
        try:
            self.producer.commit(root, version)
        except RefitRefused as error:
            return error.reason
        return None

    def note(self, row: dict[str, Any], version: int) -> None:
        """Write the facts of a refit that was applied, and the version that the generator says it holds."""
        facts.append(self.facts, row)
        held = {"replica": row["replica"], "incarnation": row["incarnation"], "version": version}
        facts.append(self.facts, {"fact": "version", **held, "root": row["consumed"]})
        stale, fresh = row["stale_max_dlogp"], row["fresh_max_dlogp"]
        if stale is not None:
            facts.append(self.metrics, {"step": row["step"] + 1, "refit/stale_max_dlogp": stale, "refit/fresh_max_dlogp": fresh})
        wrong, old = len(row["wrong_names"]), row["stale_names"]
        said = f"{row['names']} tensors, {row['transport']} ({row['kind']}), {row['changed']} of {row['elements']} elements changed"
        say(f"refit {self.count}: {said}, {row['bytes']} bytes, {wrong} wrong after, {old} stale before")
        self.count += 1
