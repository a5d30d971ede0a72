"""Python runs this module as an interpreter starts, when its directory is on PYTHONPATH: it waits for the loop.

- The import witness starts as a process first imports a package that is expected somewhere (SEATRIAL_UNDER_TEST); with
  SEATRIAL_REFIT_FACTS the refit probe starts there, too, and as a process first imports NeMo-RL itself. Any other process pays one look
  at the name of each module that it imports.
- It breaks no process. A witness that cannot start says that nothing is proven, in the words of a wrong import: no Pass may rest on such
  a run. Another sitecustomize that this one hides runs after it.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False  # every Python of the run starts with this module: `typing` and `importlib` would double its start
if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

    from seatrial.instruments.witness import Witness


REFIT = "SEATRIAL_REFIT_FACTS"


class Waiting:
    """The first finder of imports, until one is of the loop."""

    def __init__(self, packages: str) -> None:
        self.tops = {entry.partition("=")[0].partition(".")[0] for entry in packages.split(os.pathsep) if entry}
        if os.environ.get(REFIT):
            self.tops.add("nemo_rl")

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Nothing; but the first import of the loop goes through the witness that it starts."""
        if name.partition(".")[0] not in self.tops:
            return None
        self.tops = set()  # it stays where it is, and idle: whoever is going through the list of finders must not miss one
        witness = _start() if os.environ.get("SEATRIAL_IMPORTS") else None
        _attach()
        return witness.find_spec(name, path, target) if witness else None


def _start() -> Witness | None:
    try:
        from seatrial.instruments.nemo_rl import nemo_process
        from seatrial.instruments.witness import watch_this_process

        command = nemo_process.command_line()
        kind = nemo_process.process_kind(command)
        return watch_this_process(os.environ, kind, nemo_process.program(command) if kind == "driver" else None, True, fresh=True)
    except Exception as error:  # noqa: BLE001 - whatever it is, the process under test must run as it would without us
        text = f"seatrial: wrong import in process: nothing is proven, the witness did not start: {error!r}"
        print(text, file=sys.stderr, flush=True)
        return None


def _attach() -> None:
    if not os.environ.get(REFIT):
        return
    try:
        from seatrial.instruments.engines import attach

        attach.start(os.environ, "nemo_rl")
    except Exception as error:  # noqa: BLE001 - as above; without its facts the judge has no proof
        print(f"seatrial: nothing is proven of refits in this process, the probe did not start: {error!r}", file=sys.stderr, flush=True)


def _next() -> None:
    """Run the sitecustomize that this one hides, if there is one."""
    here = os.path.realpath(__file__)
    path = [entry for entry in sys.path if os.path.realpath(f"{entry or '.'}/sitecustomize.py") != here]
    finders = [finder for finder in sys.meta_path if getattr(finder, "__name__", "") == "PathFinder"]
    spec = next((found for finder in finders if (found := finder.find_spec("sitecustomize", path))), None)
    if spec is not None and spec.loader is not None:
        module = type(sys)("sitecustomize")
        module.__spec__, module.__file__, module.__loader__ = spec, spec.origin, spec.loader
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


if os.environ.get("SEATRIAL_IMPORTS") or os.environ.get(REFIT):
    sys.meta_path.insert(0, Waiting(os.environ.get("SEATRIAL_UNDER_TEST", "")))
_next()
