"""Python runs this module as an interpreter starts, when its directory is on PYTHONPATH: it starts the recorder of executed functions.

It breaks no process: where the recorder does not start, one line says so. Another sitecustomize that this one hides runs after it.
"""

from __future__ import annotations

import os
import sys


def _start() -> None:
    directory = os.environ.get("SEATRIAL_EXECUTED")
    if not directory:
        return
    try:
        from seatrial.instruments import executed, provenance

        provenance.begin()
        executed.start(directory, "child")
    except Exception as error:  # noqa: BLE001 - whatever it is, the process must run as it would without us
        print(f"seatrial: executed functions are not recorded in this process: {error!r}", file=sys.stderr, flush=True)


def _next() -> None:
    """Run the sitecustomize that this one hides, if there is one: it is looked for behind us on the path."""
    here = os.path.realpath(os.path.dirname(__file__))  # noqa: PTH120 - pathlib would cost every process of the run
    places = [index for index, entry in enumerate(sys.path) if os.path.realpath(entry or ".") == here]
    finders = [finder for finder in sys.meta_path if getattr(finder, "__name__", "") == "PathFinder"]
    behind = sys.path[places[0] + 1 :] if places else []
    spec = next((found for finder in finders if (found := finder.find_spec("sitecustomize", behind))), None)
    if spec is not None and spec.loader is not None:
        module = type(sys)("sitecustomize")
        module.__spec__, module.__file__, module.__loader__ = spec, spec.origin, spec.loader
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


_start()
_next()
