"""The refit probe inside the workers of another framework, without an edit there.

`start` waits for the modules of upstream that move weights, and wraps them as they are imported. The start-up path is that of
the import witness: `VERL_USE_EXTERNAL_MODULES` in verl, `sitecustomize` in NeMo-RL; our instruments are on PYTHONPATH there.

- SEATRIAL_REFIT_FACTS=/path/facts.jsonl turns it on. Without it nothing is imported, wrapped or written.
- A process writes {"fact": "waiting"} as it starts, and {"fact": "attached"} for each module of upstream that it found, with what
  was missing. A run in which no generator attached has proven nothing.
- `graft` adds our methods to the worker of an engine that runs already; `via_rpc` (rpc.py) calls them.
Runs inside a worker of the loop: standard library only.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

from seatrial.probes.engines import wrapping
from seatrial.probes.engines.recorder import Recorder
from seatrial.probes.engines.rpc import via_rpc

__all__ = ["VARIABLE", "Hook", "graft", "start", "via_rpc"]

VARIABLE = "SEATRIAL_REFIT_FACTS"
EXTENSION = "seatrial.probes.engines.vllm_extension"
METHODS = tuple(f"seatrial_{name}" for name in ("state", "map", "read", "verify", "coverage", "version"))
"""What a worker of somebody's real run gets; our extension has more for its own tests."""


class Hook:
    """A finder of imports that finds nothing itself: it wraps what the finders behind it find."""

    def __init__(self, adapter: ModuleType, recorder: Recorder) -> None:
        self.adapter, self.recorder = adapter, recorder
        self.modules = {target.module for target in adapter.TARGETS} | set(adapter.SPECIAL)

    def start(self) -> None:
        """Wrap what is imported already, and wait for the rest right in front of what searches directories.

        There the import witness, which comes first, still sees these modules.
        """
        late = sorted(name for name in self.modules if name in sys.modules)
        self.recorder.write("waiting", modules=sorted(self.modules), late=late)
        for name in late:
            self.apply(sys.modules[name])
        place = next((place for place, finder in enumerate(sys.meta_path) if finder is PathFinder), 0)
        sys.meta_path.insert(place, self)

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        """The spec that the finders behind this one give, with a loader that wraps the module when it has run."""
        if name not in self.modules:
            return None
        # Only those behind: the witness in front asks us, and would be asked again.
        for finder in sys.meta_path[sys.meta_path.index(self) + 1 :]:
            find = getattr(finder, "find_spec", None)
            spec: ModuleSpec | None = find(name, path, target) if find else None
            if spec is not None:
                with self.recorder.guard(f"{name}: waiting for it"):
                    self._wait(spec)
                return spec
        return None

    def _wait(self, spec: ModuleSpec) -> None:
        loader: Any = spec.loader
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            self.apply(module)

        loader.exec_module = exec_module

    def apply(self, module: ModuleType) -> None:
        """Wrap what the adapter names in this module."""
        name = module.__name__
        for target in (target for target in self.adapter.TARGETS if target.module == name):
            with self.recorder.guard(f"{name}: attaching"):
                wrapping.attach(target, module, self.recorder, extend)
        if name in self.adapter.SPECIAL:
            with self.recorder.guard(f"{name}: attaching"):
                self.adapter.SPECIAL[name](module, self.recorder)


def start(environment: Mapping[str, str], framework: str) -> Hook | None:
    """Turn the probe on in this process, if it is asked for. `framework` names the adapter: verl or nemo_rl."""
    path = environment.get(VARIABLE)
    if not path:
        return None
    hooked = next((finder for finder in sys.meta_path if isinstance(finder, Hook)), None)
    if hooked is not None:
        return hooked
    hook = Hook(importlib.import_module(f"seatrial.probes.engines.{framework}"), Recorder(path, framework))
    hook.start()
    return hook


def extend(owner: type) -> list[str]:
    """Add the methods of our worker extension, and their helpers, to a class; returns which of METHODS were added."""
    mixin: Any = importlib.import_module(EXTENSION).Extension
    added = []
    for base in reversed(mixin.__mro__[:-1]):
        for name, value in vars(base).items():
            helper = name.startswith("_") and not name.startswith("__")
            if (helper or name in METHODS) and not hasattr(owner, name):
                setattr(owner, name, value)
                added.append(name)
    return sorted(name for name in added if name in METHODS)


def graft(worker: Any) -> list[str]:
    """Give the worker of a running engine our methods: `engine.collective_rpc(graft)`, where the engine takes callables."""
    return extend(type(worker))
