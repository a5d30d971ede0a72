"""Python runs this at its start in every child of a recorded test: our directory is first on PYTHONPATH.

- The sitecustomize that would have run without us runs, first of all, and takes this one's place.
- Then the recorder starts; the modules of ours that it needs are taken out of sys.modules again, since the child may have, or be, another
  version of them. No failure of ours stops the child: it leaves a line in the session's directory.
"""

# Paths are text here: pathlib may not be loaded yet, and what it does is watched.
# ruff: noqa: PTH100, PTH118, PTH120, PTH123

from __future__ import annotations

import os
import sys


def _next() -> None:
    """Run the sitecustomize that we hide, and leave sys.path as it would have been."""
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [path for path in sys.path if os.path.abspath(path or ".") != here]
    from importlib.machinery import PathFinder
    from importlib.util import module_from_spec

    spec = PathFinder.find_spec("sitecustomize", sys.path)
    if spec is not None and spec.loader is not None:
        module = module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


def _record() -> None:
    source = os.path.abspath(__file__)
    for _ in range(4):  # start/ select/ pytest_seatrial/ and what holds it
        source = os.path.dirname(source)
    before = set(sys.modules)
    sys.path.insert(0, source)
    try:
        from pytest_seatrial.select.trace import startup

        startup.begin()
    except Exception as error:  # noqa: BLE001  # whatever it is, the child must go on
        _failed(error)
    finally:
        sys.path.remove(source)
        for name in set(sys.modules) - before:
            if name.split(".")[0] == "pytest_seatrial":
                del sys.modules[name]


def _failed(error: Exception) -> None:
    import json

    try:
        session = json.loads(os.environ["SEATRIAL_SELECT"])["session"]
        with open(os.path.join(session, f"{os.getpid()}-failed.log"), "a") as file:
            file.write(f"! {type(error).__name__}: {error}".replace("\n", " ") + "\n")
    except (OSError, ValueError, KeyError):
        pass  # the session is over


_next()
if os.environ.get("SEATRIAL_SELECT"):
    _record()
