"""Runs drivers of the TRL loop in forked children, with one function mutated or none: imports are paid once.

    python -m bench.mutants.server < requests > answers      (one JSON object per line each)

A request is {"module", "argv", "log", "timeout"}, with {"mutant": {"file", "number", "lines"}} for a mutant or {"mutant": {"file",
"before", "after"}} for a hand-written change; {"trace": [files]} answers with the lines of these files that ran. A changed function is
compiled from its whole file and its code is put into the live function, so that every reference to it runs the change. The process that
answers is never changed.
"""

from __future__ import annotations

import ast
import gc
import importlib
import json
import os
import resource
import signal
import sys
import time
import types
from collections import defaultdict
from pathlib import Path
from typing import Any

from bench.mutants.mutations import mutated, mutations

IMPORTS = ("torch", "transformers", "trl", "peft", "accelerate", "datasets", "safetensors.torch")
DRIVE = "seatrial.instruments.trl"


def warm() -> None:
    """Import all that drivers use."""
    for name in (*IMPORTS, "trl.trainer.grpo_trainer", "peft.tuners.lora.layer", "transformers.models.qwen2.modeling_qwen2"):
        importlib.import_module(name)
    for name in ("train", "shadow", "recorders", "tasks", "faults", "models_on_disk"):
        importlib.import_module(f"{DRIVE}.{name}")
    importlib.import_module("seatrial.instruments.shadow.recompute")
    import torch

    torch.set_num_threads(1)
    (torch.randn(8, 8) @ torch.randn(8, 8)).sum().item()


def functions(tree: ast.Module, file: str) -> dict[tuple[str, int], types.CodeType]:
    """Every code object of a file, by its qualified name and first line."""
    found: dict[tuple[str, int], types.CodeType] = {}
    stack = [compile(tree, file, "exec")]
    while stack:
        for const in stack.pop().co_consts:
            if isinstance(const, types.CodeType):
                found[const.co_qualname, const.co_firstlineno] = const
                stack.append(const)
    return found


def patch(file: str, number: int, lines: set[int]) -> str:
    """Put the mutated function into every live function object of the file; returns what was changed."""
    source = Path(file).read_text(encoding="utf-8")
    mutation, tree = mutated(source, file, lines, number)
    original = functions(ast.parse(source), file)
    replace(file, {key: code for key, code in functions(tree, file).items() if key in original and original[key] != code})
    return mutation.name()


def edit(file: str, before: str, after: str) -> None:
    """Put hand-written functions into every live function object of the file: `before` becomes `after`, wherever it stands."""
    source = Path(file).read_text(encoding="utf-8")
    if before not in source:
        raise RuntimeError(f"{file} does not hold {before!r}")
    kept = functions(ast.parse(source), file)
    made: dict[str, list[types.CodeType]] = defaultdict(list)
    for (name, _), code in functions(ast.parse(source.replace(before, after)), file).items():
        made[name].append(code)
    changed = {}
    for name, codes in made.items():
        places = [key for key in kept if key[0] == name]
        for key, code in zip(places, codes, strict=False):  # lines have moved: functions of one name stay in order
            if kept[key].replace(co_firstlineno=1, co_linetable=b"") != code.replace(co_firstlineno=1, co_linetable=b""):
                changed[key] = code
    replace(file, changed)


def replace(file: str, changed: dict[tuple[str, int], types.CodeType]) -> None:
    """Give every live function of the file its changed code."""
    patched = 0
    for item in gc.get_objects():
        if isinstance(item, types.FunctionType) and item.__code__.co_filename == file:
            code = changed.get((item.__code__.co_qualname, item.__code__.co_firstlineno))
            if code is not None and code.co_freevars == item.__code__.co_freevars:
                item.__code__ = code
                patched += 1
    if not patched:
        raise RuntimeError(f"no live function of {file} was changed")


def child(request: dict[str, Any]) -> None:
    """What a forked child does: never returns."""
    code = 1
    try:
        log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.setsid()
        os.environ.update(request.get("env", {}))
        seen: dict[str, set[int]] = defaultdict(set)
        if request.get("mutant"):
            mutant = request["mutant"]
            if "before" in mutant and "number" not in mutant:
                edit(mutant["file"], mutant["before"], mutant["after"])
            else:
                patch(mutant["file"], mutant["number"], set(mutant["lines"]))
        if request.get("trace"):
            files = set(request["trace"])

            def local(frame: Any, event: str, _: Any) -> Any:
                if event == "line":
                    seen[frame.f_code.co_filename].add(frame.f_lineno)
                return local

            sys.settrace(lambda frame, *_: local if frame.f_code.co_filename in files else None)
        sys.argv = [request["module"], *request["argv"]]
        importlib.import_module(f"{DRIVE}.{request['module']}").main()
        sys.settrace(None)
        if request.get("trace"):
            Path(request["lines"]).write_text(json.dumps({file: sorted(lines) for file, lines in seen.items()}), encoding="utf-8")
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:  # noqa: BLE001 - a mutant may raise anything
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Run one request to its end or its deadline."""
    start, before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
    pid = os.fork()
    if pid == 0:
        child(request)
    stops = start + float(request.get("timeout", 120))
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            break
        if time.monotonic() > stops:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return {"exit": None, "seconds": time.monotonic() - start}
        time.sleep(0.01)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"exit": os.waitstatus_to_exitcode(status), "seconds": time.monotonic() - start, "cpu": cpu}


def main() -> None:
    """Answer requests until the input ends."""
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    warm()
    print(json.dumps({"ready": True, "cpu": time.process_time()}), file=channel, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        if request.get("list"):
            file = request["list"]
            source = Path(file).read_text(encoding="utf-8")
            made = [vars(mutation) for mutation in mutations(source, file, set(request["lines"]))]
            print(json.dumps(made), file=channel, flush=True)
            continue
        print(json.dumps(answer(request)), file=channel, flush=True)


if __name__ == "__main__":
    main()
