"""What runs in a worker process: `python -m seatrial.rollouts.verifiers.verify_worker math`, or `function BASE SPEC`.

- Requests come on standard input, answers go to what was standard output, each behind 12 digits of its number and 12 of its length.
  What a function prints goes nowhere.
- The first answer, number 0, says whether it could load: null, or why not. Then one answer for each request: {"error": …}, or what
  the kind gives.
- Only the process that was asked answers: a function may fork, and its child may return.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import logging
import os
import signal
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

from seatrial.rollouts.verifiers.process_verifiers import STOPS, equivalence

Answerer = Callable[[Mapping[str, Any]], Mapping[str, Any]]


def load(arguments: list[str]) -> Answerer:
    """What answers requests of this kind."""
    if arguments[0] == "math":
        logging.disable(logging.CRITICAL)
        return equivalence()
    function = load_function(Path(arguments[1]), arguments[2])
    return lambda request: {"value": _plain(function(request["row"], request["text"]))}


def load_function(base: Path, spec: str) -> Callable[[Any, str], Any]:
    """The user's function: `module:name`, or `path/file.py:name` with a path that starts at `base`."""
    module_name, _, name = spec.rpartition(":")
    sys.path.insert(0, str(base))
    if module_name.endswith(".py"):
        path = base / module_name
        found = importlib.util.spec_from_file_location(path.stem, path)
        if found is None or found.loader is None:
            raise ImportError(f"{path}: no Python file")
        module = importlib.util.module_from_spec(found)
        sys.modules[path.stem] = module
        found.loader.exec_module(module)
    else:
        module = importlib.import_module(module_name)
    function = getattr(module, name)
    if not callable(function):
        raise TypeError(f"{spec} is not a function")
    return function  # type: ignore[no-any-return]


def _plain(value: Any) -> Any:
    """As JSON has it; numbers of other libraries become ours."""
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    if value is None or isinstance(value, str | bool | int | float):
        return value
    return value.item() if hasattr(value, "item") else repr(value)


def _send(stream: IO[bytes], number: int, answer: Any) -> None:
    body = json.dumps(answer).encode()
    stream.write(b"%012d%012d" % (number, len(body)) + body)
    stream.flush()


def main() -> None:
    """Answer until standard input ends."""
    for stop in STOPS:
        # A handler that does nothing, because what is ignored would stay ignored in whatever a function starts.
        signal.signal(stop, lambda *_: None)
    own = os.getpid()
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1):
        os.dup2(nothing, number)
    try:
        answerer = load(sys.argv[1:])
    except (KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as error:  # noqa: BLE001 - whatever a user's module raises, even SystemExit, is why it was not loaded
        _send(answers, 0, f"verifier {' '.join(sys.argv[1:])}: {_last(error)}")
        return
    _send(answers, 0, None)
    while head := requests.read(24):
        request = json.loads(requests.read(int(head[12:])))
        try:
            answer = answerer(request)
        except (KeyboardInterrupt, GeneratorExit):
            raise
        except BaseException as error:  # noqa: BLE001 - a function may raise anything; it is the answer's failure, not the worker's
            answer = {"error": _last(error)}
        if os.getpid() != own:
            os._exit(0)
        _send(answers, int(head[:12]), answer)


def _last(error: BaseException) -> str:
    """The exception in one line, and where the user's code raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return "".join(traceback.format_exception_only(error)).strip().replace("\n", " ")[:1000] + where


if __name__ == "__main__":
    main()
