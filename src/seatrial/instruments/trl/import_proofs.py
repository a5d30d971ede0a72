"""Every process of the loop proves where its packages come from: before it does anything else, and again at its end.

A package under test that the loop does not import itself is located, never imported just to be reported.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterable, Iterator, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

from seatrial.instruments import executed, provenance
from seatrial.instruments.witness import WRONG_IMPORT

TRAINER = ("torch", "transformers", "trl", "peft", "accelerate", "datasets")
GENERATOR = ("torch", "transformers")


class Imports:
    """The import proofs of one process."""

    def __init__(self, directory: Path, process: str, under_test: Sequence[str]) -> None:
        self.path, self.process = directory / "imports.jsonl", process
        self.loaded = directory / "loaded.jsonl"
        self.expected = dict(item.split("=", 1) for item in under_test)
        if executed.RECORDER is None:  # else it began as the interpreter did
            provenance.begin()
        executed.start(str(directory), process, inherit=True)

    def prove(self, packages: Sequence[str]) -> None:
        """Import the loop's own packages and locate the others; end the process when one under test is elsewhere."""
        with provenance.uncollected():
            # A package under test that breaks on import must show its traceback: that is the change, not its surroundings.
            for name in self._told(name for name in self.expected if name in packages):
                if importlib.util.find_spec(name) is not None:
                    importlib.import_module(name)
            rows = provenance.report(str(self.path), self.process, self._told(packages), self.expected)
        rows += provenance.locate(str(self.path), self.process, self._others(packages), self.expected)
        problems = provenance.verify(rows)
        for problem in problems:
            print(f"seatrial: wrong import in {self.process}: {problem}", flush=True)
        if problems:
            sys.exit(WRONG_IMPORT)
        print(f"seatrial: imports proven in {self.process}", flush=True)

    def close(self, packages: Sequence[str]) -> None:
        since = [name for name in self._others(packages) if name in sys.modules]
        provenance.report(str(self.path), self.process, since, self.expected)
        provenance.loaded(str(self.loaded), self.process, sorted(set(self.expected.values())))
        executed.flush()

    def _told(self, packages: Iterable[str]) -> Iterator[str]:
        """Each package, after a line that says so: on a crowded machine imports take long, and silence is what a stall is known by."""
        for name in packages:
            print(f"seatrial: importing {name} in {self.process}", flush=True)
            yield name

    def _others(self, packages: Sequence[str]) -> list[str]:
        return [name for name in self.expected if name not in packages]


class _Absent:
    def __init__(self, *_: object, **__: object) -> None:
        raise RuntimeError("the trainer's process has no vLLM of its own: generation runs in the server")


def _no_transport(*_: object, **__: object) -> None:
    raise RuntimeError("no transport was put in place by vllm_rollouts")


STAND_IN: dict[str, dict[str, Any]] = {
    # The newest version that TRL 1.16 says it supports.
    "vllm": {"__version__": "0.31.0", **dict.fromkeys(("LLM", "RequestOutput", "SamplingParams"), _Absent)},
    "vllm.sampling_params": {"StructuredOutputsParams": _Absent},
    "vllm.utils": {},
    "vllm.utils.network_utils": {"get_ip": lambda: "127.0.0.1"},
    "vllm.distributed": {},
    "vllm.distributed.weight_transfer": {},
    "vllm.distributed.weight_transfer.nccl_common": {"trainer_init": _no_transport},
    "vllm.distributed.weight_transfer.packed_tensor": {"packed_nccl_broadcast_producer": _no_transport},
}
"""The names that TRL imports of vLLM in a trainer that only talks to a server: the real vLLM, in its own process and environment."""


def allow_vllm_import() -> None:
    """Before TRL is imported: it takes up its client of vLLM only where `vllm` can be imported. An installed one goes first."""
    if importlib.util.find_spec("vllm") is not None:
        return
    for name, held in STAND_IN.items():
        module = importlib.util.module_from_spec(ModuleSpec(name, None, is_package=True))
        vars(module).update(held)
        sys.modules[name] = module
