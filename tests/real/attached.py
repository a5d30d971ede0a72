"""Stand-ins of upstream with the refit probe on, and a small model whose loader fuses, ties and casts as engines do."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from seatrial.instruments.engines import attach

STANDINS = Path(__file__).parents[1] / "instruments" / "standins"
VLLM = {"verl": "verl.workers.rollout.vllm_rollout", "nemo_rl": "nemo_rl.models.generation.vllm"}
SIZE = 16
Q, K, V = "q_proj.weight", "k_proj.weight", "v_proj.weight"


class Model(torch.nn.Module):  # type: ignore[misc]
    """q, k and v in one tensor; `skip` names are not loaded after the first time, which is the fault."""

    def __init__(self, dtype: torch.dtype, skip: str = "") -> None:
        super().__init__()
        self.embed = torch.nn.Parameter(torch.zeros(SIZE, SIZE, dtype=dtype))
        self.qkv_proj = torch.nn.Linear(SIZE, 3 * SIZE, bias=False, dtype=dtype)
        self.head = self.embed
        self.skip, self.refits = skip, 0

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """The loader; it knows three parts and the embedding."""
        places = {name: self.qkv_proj.weight[place * SIZE : (place + 1) * SIZE] for place, name in enumerate((Q, K, V))}
        taken = set()
        for name, value in weights:
            if name != self.skip or self.refits == 0:
                {**places, "embed": self.embed}[name].copy_(value)
            taken.add(name)
        return taken


class World:
    """One process in which the probe was started for a framework."""

    def __init__(self, tmp: Path, framework: str, path: Path = STANDINS) -> None:
        for name in [name for name in sys.modules if name.partition(".")[0] in ("verl", "nemo_rl", "wire")]:
            del sys.modules[name]
        sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, attach.Hook)]
        if str(path) not in sys.path:
            sys.path.insert(0, str(path))
        self.file = tmp / "facts.jsonl"
        self.framework = framework
        attach.start({attach.VARIABLE: str(self.file)}, framework)

    def hook(self) -> attach.Hook:
        """What was started in this process."""
        return next(finder for finder in sys.meta_path if isinstance(finder, attach.Hook))

    def module(self, name: str) -> ModuleType:
        """A module of upstream, imported now."""
        return importlib.import_module(name)

    def worker(self, model: Model, **more: Any) -> Any:
        """A generation worker with this model."""
        place, owner = {
            "verl": ("utils", "vLLMColocateWorkerExtension"),
            "nemo_rl": ("vllm_backend", "VllmInternalWorkerExtension"),
        }[self.framework]
        made = getattr(self.module(f"{VLLM[self.framework]}.{place}"), owner)()
        made.model_runner, made.rank = SimpleNamespace(model=model, **more), 0
        return made

    def rows(self, fact: str = "") -> list[dict[str, Any]]:
        """The facts so far."""
        found = [json.loads(line) for line in self.file.read_text().splitlines()]
        return [row for row in found if not fact or row["fact"] == fact]

    def sides(self, side: str) -> list[dict[str, Any]]:
        """The rows of hashes of one side."""
        return [row for row in self.rows("hashes") if row["side"] == side]


def export(seed: int, dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    """What a policy exports."""
    draw = torch.Generator().manual_seed(seed)
    return {name: torch.randn(SIZE, SIZE, generator=draw).to(dtype) for name in ("embed", Q, K, V)}


def reused(weights: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights in one buffer, which is used again for each: nobody may keep what this yields."""
    buffer = torch.empty(SIZE, SIZE, dtype=next(iter(weights.values())).dtype)
    for name, value in weights.items():
        buffer.copy_(value)
        yield name, buffer
    buffer.fill_(float("nan"))
