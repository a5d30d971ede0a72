"""Level 3's rollouts: a vLLM server in its own environment generates, refitted through its own weight-update routes.

The server answers the same questions as level 2's generator, so that refits are made and compared by the same code. What its
worker really holds is read back by the worker extension of `probes.engines`, through a coordinate map that is learned before the
first refit; how each tensor was read is part of the fact. The coverage over all refits is written at the end.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from seatrial.loops.trl.drive.imports import WRONG_IMPORT
from seatrial.loops.trl.drive.record import say
from seatrial.loops.trl.drive.refit import Ended, RefittedRollouts
from seatrial.probes import facts
from seatrial.probes.engines.serve import Server
from seatrial.probes.engines.vllm_client import Client, ServerError
from seatrial.probes.refit import payload
from seatrial.probes.refit.errors import RefitRefused

PROCESS = "vllm"
PACKAGES = ("torch", "transformers", "vllm")
FAULTY_LOAD = 3
BREAKS = {"flip-bit": "flip-bit", "swap-layers": "swap-tensors"}
"""Faults that the worker extension makes, under its own names."""
PROMPT_TOKENS = 120


class Engine:
    """The server, seen from the trainer. It starts at once and is waited for when it is first asked."""

    def __init__(self, python: str, model: str, out: Path, length: int, fault: str | None) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="seatrial-", dir="/dev/shm" if Path("/dev/shm").is_dir() else None)
        self.shared = Path(self._directory.name)
        self.reference, self.facts = self.shared / "reference.safetensors", out / "facts.jsonl"
        # The policy is trained in fp32, and sampled from as it is: not with what its generation_config.json would make of it.
        options = ("--dtype", "float32", "--generation-config", "vllm", "--max-model-len", str(PROMPT_TOKENS + length))
        self.server = Server(Path(model), out / "server.log", say, options, python=python, faults=fault in BREAKS)
        self.client = Client(self.server.url)
        self.python, self.fault, self.loads = python, fault, 0
        self.incarnation: int | str = ""
        self.methods: dict[str, str] = {}

    def begin(self, imports: Path, under_test: Sequence[str]) -> None:
        """Wait for the server, let its worker prove its imports, and learn the map from the reference."""
        self.server.__enter__()
        said = self.ask("call", route="/version", method="GET")["version"]
        row = {"fact": "process", "process": "generator", "engine": f"vLLM {said}", "python": self.python}
        facts.append(self.facts, row | {"pid": self.server.process.pid, "parent": os.getpid()})
        expected = dict(item.split("=", 1) for item in under_test)
        given = {"path": str(imports / "imports.jsonl"), "process": PROCESS, "packages": PACKAGES, "expected": expected}
        problems = self.ask("rpc", method="seatrial_imports", **given)
        for problem in problems:
            say(f"wrong import in {PROCESS}: {problem}")
        if problems:
            sys.exit(WRONG_IMPORT)
        say(f"imports proven in {PROCESS}")
        facts.append(self.facts, {"fact": "map", "replica": 0, **self.ask("rpc", method="seatrial_map", reference=str(self.reference))})
        self.client.start()

    def finish(self, imports: Path, under_test: Sequence[str]) -> dict[str, Any]:
        """What became of every runtime tensor; writes which files of the checkouts the worker loaded."""
        covered: dict[str, Any] = self.ask("rpc", method="seatrial_coverage")
        roots = sorted({item.split("=", 1)[1] for item in under_test})
        self.ask("rpc", method="seatrial_loaded", path=str(imports / "loaded.jsonl"), process=PROCESS, roots=roots)
        return covered

    def ask(self, do: str, **request: Any) -> Any:
        """One question; an error or a refusal there is raised here."""
        try:
            return getattr(self, f"_{do}")(**request)
        except ServerError as error:
            code, cause = self._code(), self._cause()
            if code is not None:
                raise Ended(f"the generation process ended with code {code} at {do!r}{cause}") from None
            raise RuntimeError(f"the generation process failed at {do!r}: {error}{cause}") from None

    def _code(self) -> int | None:
        """How the server ended; None when it lives."""
        try:
            return self.server.process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            return None

    def _cause(self) -> str:
        """The last error that the engine itself logged; the server only says that there was one."""
        log = self.server.log.read_text(encoding="utf-8", errors="replace")
        said = re.findall(r"^\(EngineCore.* ERROR .*\] (\w+(?:Error|Exception): .*)$", log, re.MULTILINE)
        return f": {said[-1]}" if said else ""

    def _call(self, route: str, method: str) -> Any:
        return self.client.call(route, method=method)

    def _rpc(self, method: str, **given: Any) -> Any:
        (answer,) = self.client.rpc(method, **given)  # one worker: the server is started with one
        return answer

    def _hash(self) -> dict[str, str]:
        read = self._rpc("seatrial_read", reference=str(self.reference))
        self.methods = read["methods"]
        found: dict[str, str] = read["hashes"]
        return found

    def _load(self, path: str) -> dict[str, Any]:
        self.loads += 1
        if self.fault == "dead-generator" and self.loads == FAULTY_LOAD:
            os.killpg(self.server.process.pid, signal.SIGKILL)
        try:
            if self.fault != "skip-refit" or self.loads == 1:
                self.client.refit(path, payload.read(Path(path)).header.version)
        except ServerError:
            refused = self._rpc("seatrial_version")["refused"]  # the route says only that it failed
            if refused is None:
                raise
            raise RefitRefused(refused["reason"], refused["names"], detail=refused["text"]) from None
        if self.fault in BREAKS and self.loads > 1:
            say(f"broken on purpose: {self._rpc('seatrial_break', fault=BREAKS[self.fault])}")
        held = self._rpc("seatrial_version")
        self.incarnation = held["incarnation"]
        return {"version": held["version"]}

    def _sample(self, arguments: tuple[Any, ...]) -> tuple[int, list[list[int]], list[list[float]]]:
        prompts, seeds, length, _, _ = arguments
        made = self.client.rollouts(prompts, length, seeds)
        self.incarnation = made[0].incarnation
        return made[0].version, [sample.tokens for sample in made], [sample.logprobs for sample in made]

    def _logprobs(self, arguments: tuple[Any, ...]) -> list[list[float]]:
        prompts, completions, _ = arguments
        rows = [[*prompt, *done] for prompt, done in zip(prompts, completions, strict=True)]
        return self.client.logprobs(rows, [len(prompt) for prompt in prompts])

    def close(self) -> None:
        """End the server with all its processes, and remove what was shared."""
        self.server.end()
        self._directory.cleanup()


class ServedRollouts(RefittedRollouts):
    """A rollout function for the trainer: refit the server, prove it, sample."""

    def __init__(self, engine: Engine, imports: Path, under_test: Sequence[str], metrics_path: Path, seed: int) -> None:
        super().__init__(engine, engine.facts, metrics_path, seed)
        self.engine, self.imports, self.under_test = engine, imports, under_test

    def export(self, model: Any) -> dict[str, Any]:
        """The weights under the names of a checkpoint, which is what vLLM loads; the server finds them as its reference."""
        from safetensors.torch import save_file
        from transformers.core_model_loading import revert_weight_conversion

        made = {name: value.contiguous() for name, value in revert_weight_conversion(model, super().export(model)).items()}
        save_file(made, self.engine.reference)
        return made

    def begin(self) -> None:
        """The server is waited for, and learns the map from the reference."""
        self.engine.begin(self.imports, self.under_test)

    def cover(self) -> dict[str, Any]:
        """What became of every tensor of the worker."""
        return self.engine.finish(self.imports, self.under_test)

    def seen(self, after: Mapping[str, str], wrong: Sequence[str]) -> dict[str, Any]:
        """By which method each tensor was read, and which none proves; of a wrong one, where it is held and how many elements differ."""
        known = self.engine.methods
        unproven = [name for name in after if name not in known]
        for name in unproven[:5]:
            say(f"refit {self.count}: no method proves {name}")
        found = self.engine.ask("rpc", method="seatrial_verify", reference=str(self.engine.reference))["wrong"] if wrong else {}
        for name in wrong[:5]:
            place = found.get(name) or {"runtime": "?", "count": 0, "total": 0}
            say(f"wrong after refit {self.count}: {name}, held as {place['runtime']}: {place['count']} of {place['total']} elements")
        methods = dict(Counter(known[name] for name in after if name in known))
        return {"methods": methods, "unproven": unproven, "wrong": {name: found.get(name) for name in wrong}}
