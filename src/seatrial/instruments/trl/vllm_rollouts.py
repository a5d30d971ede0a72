"""Level 3's rollouts: a vLLM server in its own environment, refitted by its weight-update routes or by TRL's own weight sync."""

from __future__ import annotations

import copy
import os
import random
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from seatrial.instruments import facts
from seatrial.instruments.bits import fingerprint
from seatrial.instruments.engines import vllm_loop
from seatrial.instruments.engines.vllm_server import Sender, VllmServer, free_port
from seatrial.instruments.refit.payload_header import RefitRefused
from seatrial.instruments.refit.refit_driver import REPLICA, RefitDriver
from seatrial.instruments.shadow import formulas
from seatrial.instruments.shadow.interface import ShadowSettings
from seatrial.instruments.trl import seeded_rollouts
from seatrial.instruments.trl.recorders import say
from seatrial.instruments.trl.seeded_rollouts import RefittedRollouts
from seatrial.instruments.witness import WRONG_IMPORT

PROCESS = "vllm"
PACKAGES = ("torch", "transformers", "vllm")
BREAKS = {"swap-layers": "swap-tensors"}  # faults that the worker extension makes under another name
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
        server = VllmServer(Path(model), out / "server.log", say, options, python=python, faults=faults, more_paths=paths)
        super().__init__(server, Path(self._directory.name), fault)
        self.python, self.out = python, out

    def begin(self, imports: Path, under_test: Sequence[str]) -> None:
        self.server.__enter__()
        said = self.client.call("/version", method="GET")["version"]
        row = {"fact": "process", "process": "generator", "engine": f"vLLM {said}", "python": self.python}
        facts.append(self.out / "facts.jsonl", row | {"pid": self.server.process.pid, "parent": os.getpid()})
        expected = dict(item.split("=", 1) for item in under_test)
        given = {"path": str(imports / "imports.jsonl"), "process": PROCESS, "packages": PACKAGES, "expected": expected}
        if problems := self.rpc("seatrial_imports", **given):
            for problem in problems:
                say(f"wrong import in {PROCESS}: {problem}")
            sys.exit(WRONG_IMPORT)
        say(f"imports proven in {PROCESS}")

    def loaded(self, imports: Path, under_test: Sequence[str]) -> None:
        roots = sorted({item.split("=", 1)[1] for item in under_test})
        self.rpc("seatrial_loaded", path=str(imports / "loaded.jsonl"), process=PROCESS, roots=roots)

    def sample(self, prompts: Sequence[Sequence[int]], seeds: Sequence[int], length: int, *_: Any) -> dict[str, Any]:  # type: ignore[override]
        return vllm_loop.stamped(self.client.rollouts(prompts, length, seeds))

    def logprobs(self, prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]], _: Any) -> list[list[float]]:  # type: ignore[override]
        rows = [[*prompt, *done] for prompt, done in zip(prompts, completions, strict=True)]
        return self.client.logprobs(rows, [len(prompt) for prompt in prompts])

    def close(self) -> None:
        super().close()
        self._directory.cleanup()


class ServedRollouts(RefittedRollouts):
    def __init__(self, engine: Engine, imports: Path, under_test: Sequence[str], seed: int, fault: str | None) -> None:
        super().__init__(engine, engine.out, seed, fault)
        self.engine, self.imports, self.under_test = engine, imports, under_test

    def export(self, model: Any) -> dict[str, Any]:
        """The weights under the names of a checkpoint, which is what vLLM loads."""
        return vllm_loop.by_checkpoint_name(model, super().export(model))

    def begin(self) -> None:
        self.engine.begin(self.imports, self.under_test)

    def finish(self) -> None:
        super().finish()
        self.engine.loaded(self.imports, self.under_test)


OPTIONS = ("--logprobs-mode", "processed_logprobs", "--max-logprobs", "-1")  # what TRL's guide starts the server with
MISMATCH = 0.3
"""How far the log-probabilities that TRL is told are moved at most. On one CPU in fp32 the server's are the policy's, and TRL's
correction for the difference would have no effect: neither would its bugs."""
SKIPPED, SWAPPED, MANGLED = "sync-skips-tensor", "sync-swaps-names", "sync-mangles-name"
MOST = 20.0  # the largest difference of two log-probabilities that the trainer is told: more is no number once it is an error


def server_paths(python: str) -> tuple[str, ...]:
    """A stand-in for pip, where the server's environment has none."""
    asked = "import importlib.util, sys; sys.exit(importlib.util.find_spec('pip') is None)"
    lacks = subprocess.run([python, "-c", asked], check=False, timeout=60).returncode
    return (str(Path(__file__).parent / "standin_server"),) if lacks else ()


class Transport:
    """In the place of NCCL between TRL's client and the server's worker; remembers the names and bytes of the last update."""

    def __init__(self) -> None:
        self.sender: Sender | None = None
        self.names: list[str] = []

    def install(self) -> None:
        """Put it under TRL's client: the functions that TRL calls, and its check for a CUDA device."""
        from trl.generation import vllm_client

        wanted = ("open_trainer_endpoint", "packed_nccl_broadcast_producer", "get_ip")
        missing = [name for name in wanted if not hasattr(vllm_client, name)]
        if missing:
            raise RuntimeError(f"TRL's vLLM client has no {', '.join(missing)}: level 3 knows TRL 1.16 with vLLM 0.28 or newer")
        vllm_client.open_trainer_endpoint = self.open
        vllm_client.packed_nccl_broadcast_producer = self.produce
        vllm_client.get_ip = lambda: "127.0.0.1"
        init = vllm_client.VLLMClient.init_communicator

        def init_communicator(client: Any, device: Any = 0) -> None:
            # TRL refuses a trainer that is not on CUDA; all else of it is its own.
            cuda = SimpleNamespace(type="cuda", index=None)
            with mock.patch.object(vllm_client, "torch", SimpleNamespace(**{**vars(torch), "device": lambda *_: cuda})):
                init(client, device)

        vllm_client.VLLMClient.init_communicator = init_communicator

    def open(self, init_info: dict[str, Any]) -> Sender:
        self.sender = Sender(init_info["master_address"], init_info["master_port"])
        return self.sender

    def produce(self, iterator: Iterator[tuple[str, Any]], group: Sender, src: int, post_iter_func: Any) -> None:
        assert src == 0
        self.names = []

        def values() -> Iterator[Any]:
            for item in iterator:
                self.names.append(item[0])
                yield post_iter_func(item)

        group.send(values())


class SyncDriver(RefitDriver):
    """A refit is one sync of TRL's own. `transport` is what it sends over, `policy` the model that it sends."""

    def __init__(
        self, engine: Engine, path: Path, first: dict[str, Any], sync: Callable[[], None], transport: Transport, policy: Any
    ) -> None:
        super().__init__(engine, path, first, ("trl",), None)
        self.engine, self.sync, self.transport, self.policy = engine, sync, transport, policy
        self._row: dict[str, Any] = {}
        self._names: set[str] = set()

    def prepare(self, export: dict[str, Any], held: dict[str, str]) -> tuple[dict[str, Any], dict[str, str]]:
        """Nothing is made here: what the policy holds, and what is known before TRL sends it."""
        hashes, version = fingerprint.tensors(export.items()), self.count + 1
        self._history.append(hashes)
        self._names = set(hashes)
        self.write("hashes", side="sent", version=version, step=self.step, hashes=hashes)
        self._row = {"index": self.count, "step": self.step, "replica": REPLICA, "names": len(hashes), "version": version}
        self._row |= {"transport": "trl", "kind": "sync", "modes": {}, "elements": sum(value.numel() for value in export.values())}
        self._row |= {"produced": fingerprint.tree(hashes).root, "stale_names": len(fingerprint.differing(hashes, held))}
        return self._row, hashes

    def send(self) -> RefitRefused | None:
        """Let TRL sync. An error of it says what the server said, which TRL's client does not."""
        held = {name: value.detach().clone() for name, value in self.policy.named_parameters()}
        try:
            self.sync()
        except Exception as error:  # noqa: BLE001 - TRL raises plain exceptions
            raise RuntimeError(f"the generation process failed at TRL's own sync: {error}{self.engine.cause(first=True)}") from None
        # Merging an adapter and taking it out again rounds: the frozen base is not what it was.
        moved = {name: float((value.detach() - held[name]).abs().max()) for name, value in self.policy.named_parameters()}
        names = set(self.transport.names)
        assert self.transport.sender is not None
        self._row |= {"bytes": self.transport.sender.bytes, "unsent": sorted(self._names - names), "unknown": sorted(names - self._names)}
        self._row |= {"policy_moved": [name for name, by in moved.items() if by != 0], "policy_moved_by": max(moved.values())}
        return None

    def settle(self, root: str | None, version: int, refused: RefitRefused | None) -> bool:
        """Whether the server holds what the policy held; the next sync sends everything, whatever it holds."""
        return refused is None and version == self._row["version"] and root == self._row["produced"]


class SyncedGeneration(ServedRollouts):
    """TRL's own sync and generation, observed: every sync is followed by a readback, every batch has the version it came from."""

    def __init__(
        self, python: str, model: str, out: Path, settings: Any, imports: Path, under_test: Sequence[str], fault: str | None
    ) -> None:
        engine = Engine(python, model, out, settings.max_completion_length, None, OPTIONS, server_paths(python))
        super().__init__(engine, imports, under_test, settings.seed, fault)
        self.transport = Transport()
        self.trainer: Any = None
        self.transport.install()
        settings.use_vllm, settings.vllm_mode = True, "server"
        settings.vllm_server_base_url, settings.vllm_group_port = engine.server.url, free_port()
        engine.server.__enter__()  # TRL would wait for a server that is dead

    def attach(self, trainer: Any, recorded: Any = None) -> None:
        self.trainer, self.recorded = trainer, recorded
        generation = trainer.vllm_generation
        if self.fault in (SKIPPED, SWAPPED, MANGLED):
            generation._iter_named_params = broken(generation._iter_named_params, self.fault)
        self.sync, self.draw = generation.sync_weights, generation.generate
        generation.sync_weights, generation.generate = self.observed_sync, self.observed_generate

    def new_driver(self, export: dict[str, Any]) -> RefitDriver:
        return SyncDriver(
            self.engine, self.facts, export, self.sync, self.transport, self.trainer.accelerator.unwrap_model(self.trainer.model)
        )

    def plain(self, model: Any) -> Any:
        return merge(model)

    def observed_sync(self) -> None:
        """One sync of TRL's: stale before, bit-equal after."""
        with seeded_rollouts.evaluated(self.trainer) as model:
            self.refit(model, self.trainer.processing_class.pad_token_id, self.trainer.state.global_step)

    def observed_generate(self, prompts: list[list[int]], images: Any, num_generations: int, profiler: Any = None) -> Any:
        """One generation of TRL's, with the version that the server held all the while."""
        (held,) = self.engine.client.versions()
        drawn = self.draw(prompts, images, num_generations, profiler)
        if self.engine.client.versions() != [held]:
            raise RuntimeError(f"the server changed from version {held['version']} while it was sampling")
        given, completions, logprobs, names = drawn
        first = [[entry[0] for entry in sequence] for sequence in logprobs]
        made = {"tokens": completions, "logprobs": first, "version": held["version"], "incarnation": held["incarnation"]}
        if self.driver is None:
            raise RuntimeError("TRL generates before its first sync")
        with seeded_rollouts.evaluated(self.trainer) as model:
            self.sampled(self.driver, made, given, self._scores(model, given, completions, first))
        told = [self._moved([*prompt, *made], said) for prompt, made, said in zip(given, completions, logprobs, strict=True)]
        if self.recorded is not None:
            rows = {"prompt_ids": given, "completion_ids": completions, "logprobs": first}
            self.recorded.rolled("vllm", rows | {"told": [[entry[0] for entry in sequence] for sequence in told]})
        return given, completions, told, names

    def _scores(self, model: Any, prompts: list[list[int]], completions: list[list[int]], said: list[list[float]]) -> list[list[float]]:
        """Log-probabilities of drawn tokens under the policy, after every processor; what rounding alone decides is taken as `said`."""
        names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
        asked = ShadowSettings(max_steps=0, processors="vllm", **{name: getattr(self.trainer.args, name) for name in names})
        rows = [[*prompt, *completion] for prompt, completion in zip(prompts, completions, strict=True)]
        with torch.no_grad():
            logits = seeded_rollouts.forward(model, rows, self.trainer.processing_class.pad_token_id).double().cpu()
        made = [list(row) for row in said]
        for row, completion in enumerate(completions):
            for place, token in enumerate(completion):
                before = torch.tensor([rows[row][: len(prompts[row]) + place]])
                left = len(completion) - place + 1
                scores, near = formulas.processed(logits[row, -left].unsqueeze(0), before, torch.ones_like(before), asked, Counter())
                own, told = float(torch.log_softmax(scores, -1)[0, token]), said[row][place]
                made[row][place] = told if bool(near.any()) else max(own, told - MOST)  # one that no policy draws has minus infinity
        return made

    def _moved(self, tokens: list[int], said: list[list[float]]) -> list[list[float]]:
        """What the trainer is told of a completion's log-probabilities, moved as other kernels would (see `MISMATCH`).

        Rows of the same tokens are moved alike: nothing else tells them apart.
        """
        chance = random.Random(f"{self.seed} {self.trainer.state.global_step} {tokens}")
        return [[value + chance.uniform(-MISMATCH, MISMATCH) for value in entry] for entry in said]


def merge(model: Any) -> Any:
    """The policy as a plain model: in a copy, each adapted layer becomes a linear one with `W + (B @ A) * scale`.

    Neither TRL nor PEFT does it: what they make of the adapters is compared with this.
    """
    if not hasattr(model, "peft_config"):
        return model
    made = copy.deepcopy(model).base_model.model
    for name, layer in list(made.named_modules()):
        if hasattr(layer, "lora_A") and hasattr(layer, "base_layer"):
            (adapter,) = layer.lora_A
            settings = model.peft_config[adapter]
            with torch.no_grad():
                delta = (layer.lora_B[adapter].weight @ layer.lora_A[adapter].weight) * (settings.lora_alpha / settings.r)
                layer.base_layer.weight += delta
            parent, _, own = name.rpartition(".")
            setattr(made.get_submodule(parent), own, layer.base_layer)
    return made


def broken(walk: Any, fault: str) -> Any:
    """TRL's walk over the parameters with a bug: one norm is left out, keeps a wrapper's prefix, or changes its name with another."""
    one, two = "layers.0.input_layernorm", "layers.0.post_attention_layernorm"

    def walked() -> Iterator[tuple[str, Any]]:
        for name, value in walk():
            if fault == SWAPPED:
                name = name.replace(one, two) if one in name else name.replace(two, one)
            elif one in name and fault == MANGLED:
                name = f"_orig_mod.{name}"
            if fault != SKIPPED or one not in name:
                yield name, value

    return walked
