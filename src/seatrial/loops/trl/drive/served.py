"""Level 3's rollouts: a vLLM server in its own environment generates, refitted through its own weight-update routes.

The server is asked as in the refit probe (`probes.engines.vllm_loop`), and refits are made and compared by the same driver. What its
worker really holds is read back by the worker extension, through a coordinate map that is learned before the first refit; how each
tensor was read is part of the fact. The coverage over all refits is written at the end.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from seatrial.loops.trl.drive.imports import WRONG_IMPORT
from seatrial.loops.trl.drive.record import say
from seatrial.loops.trl.drive.refit import RefittedRollouts
from seatrial.probes import facts
from seatrial.probes.engines import vllm_loop
from seatrial.probes.engines.serve import Server

PROCESS = "vllm"
PACKAGES = ("torch", "transformers", "vllm")
BREAKS = {"swap-layers": "swap-tensors"}
"""Faults that the worker extension makes under another name."""
PROMPT_TOKENS = 120


class Engine(vllm_loop.Engine):
    """The server, seen from the trainer. It starts at once and is waited for when the rollouts begin."""

    def __init__(
        self, python: str, model: str, out: Path, length: int, fault: str | None, more: Sequence[str] = (), paths: Sequence[str] = ()
    ) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="seatrial-", dir="/dev/shm" if Path("/dev/shm").is_dir() else None)
        # The policy is trained in fp32, and sampled from as it is: not with what its generation_config.json would make of it.
        options = ("--dtype", "float32", "--generation-config", "vllm", "--max-model-len", str(PROMPT_TOKENS + length), *more)
        fault = BREAKS.get(fault or "", fault)
        faults = fault in ("flip-bit", "swap-tensors")
        server = Server(Path(model), out / "server.log", say, options, python=python, faults=faults, more_paths=paths)
        super().__init__(server, Path(self._directory.name), fault)
        self.python, self.out = python, out

    def begin(self, imports: Path, under_test: Sequence[str]) -> None:
        """Wait for the server, and let its worker prove its imports."""
        self.server.__enter__()
        said = self.client.call("/version", method="GET")["version"]
        row = {"fact": "process", "process": "generator", "engine": f"vLLM {said}", "python": self.python}
        facts.append(self.out / "facts.jsonl", row | {"pid": self.server.process.pid, "parent": os.getpid()})
        expected = dict(item.split("=", 1) for item in under_test)
        given = {"path": str(imports / "imports.jsonl"), "process": PROCESS, "packages": PACKAGES, "expected": expected}
        problems = self.rpc("seatrial_imports", **given)
        for problem in problems:
            say(f"wrong import in {PROCESS}: {problem}")
        if problems:
            sys.exit(WRONG_IMPORT)
        say(f"imports proven in {PROCESS}")

    def loaded(self, imports: Path, under_test: Sequence[str]) -> None:
        """Write which files of the checkouts the worker loaded."""
        roots = sorted({item.split("=", 1)[1] for item in under_test})
        self.rpc("seatrial_loaded", path=str(imports / "loaded.jsonl"), process=PROCESS, roots=roots)

    def sample(self, prompts: Sequence[Sequence[int]], seeds: Sequence[int], length: int, *_: Any) -> dict[str, Any]:  # type: ignore[override]
        """Completions, each from its own seed."""
        return vllm_loop.stamped(self.client.rollouts(prompts, length, seeds))

    def logprobs(self, prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]], _: Any) -> list[list[float]]:  # type: ignore[override]
        """Of given completions."""
        rows = [[*prompt, *done] for prompt, done in zip(prompts, completions, strict=True)]
        return self.client.logprobs(rows, [len(prompt) for prompt in prompts])

    def close(self) -> None:
        """End the server with all its processes, and remove what was shared."""
        super().close()
        self._directory.cleanup()


class ServedRollouts(RefittedRollouts):
    """A rollout function for the trainer: refit the server, prove it, sample."""

    def __init__(self, engine: Engine, imports: Path, under_test: Sequence[str], seed: int, fault: str | None) -> None:
        super().__init__(engine, engine.out, seed, fault)
        self.engine, self.imports, self.under_test = engine, imports, under_test

    def export(self, model: Any) -> dict[str, Any]:
        """The weights under the names of a checkpoint, which is what vLLM loads."""
        from transformers.core_model_loading import revert_weight_conversion

        return {name: value.contiguous() for name, value in revert_weight_conversion(model, super().export(model)).items()}

    def begin(self) -> None:
        """The server is waited for."""
        self.engine.begin(self.imports, self.under_test)

    def finish(self) -> None:
        """What became of every tensor of the worker, and which files it loaded."""
        super().finish()
        self.engine.loaded(self.imports, self.under_test)
