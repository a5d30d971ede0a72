"""pytest in processes of their own, each forked from one that has imported pytest: less than half of what a new interpreter costs.

- A forked process gets its directory, its variables and its files for output as if it had been started by itself with `-m pytest`.
- Variables that Python reads only when it starts (but for PYTHONPATH and PYTHONDONTWRITEBYTECODE) mean a new interpreter.
- One server per process that asks; it ends with that process.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

SERVER = """
import importlib, json, os, runpy, signal, sys
import pytest, _pytest.config
for name in _pytest.config.default_plugins:
    importlib.import_module("_pytest." + name)
while line := sys.stdin.readline():
    asked = json.loads(line)
    pid = os.fork()
    if not pid:
        break
    print(pid, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
else:
    sys.exit()
for number, (name, flags) in enumerate([(os.devnull, os.O_RDONLY), *((name, os.O_WRONLY | os.O_APPEND) for name in asked["files"])]):
    file = os.open(name, flags)
    os.dup2(file, number)
    os.close(file)
os.chdir(asked["cwd"])
os.environ.clear()
os.environ.update(asked["env"])
sys.dont_write_bytecode = bool(os.environ.get("PYTHONDONTWRITEBYTECODE"))
sys.path[0:1] = [os.getcwd(), *(os.path.abspath(part) for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part)]
sys.argv = ["pytest", *asked["arguments"]]
del asked, line, pid, number, name, flags, file, importlib, json
runpy.run_module("pytest", run_name="__main__", alter_sys=True)
"""
SET_LATER = ("PYTHONPATH", "PYTHONDONTWRITEBYTECODE")


def _read_at_start(env: Mapping[str, str]) -> dict[str, str]:
    return {name: env[name] for name in env if name.startswith(("PYTHON", "LC_", "LANG", "LD_", "MALLOC")) and name not in SET_LATER}


@functools.cache
def _server() -> subprocess.Popen[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "SEATRIAL", *SET_LATER))}
    server = subprocess.Popen([sys.executable, "-c", SERVER], env=clean, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    atexit.register(_end, server)
    return server


def _end(server: subprocess.Popen[str]) -> None:
    assert server.stdin is not None
    server.stdin.close()
    server.wait(timeout=10)


def run_pytest(
    arguments: Sequence[str], *, cwd: Path, env: Mapping[str, str], timeout: float, merged: bool = False
) -> subprocess.CompletedProcess[str]:
    """As `subprocess.run([sys.executable, "-m", "pytest", *arguments], ...)` with captured output; `merged`: errors go to stdout."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        files = out, out if merged else err
        if _read_at_start(env) == _read_at_start(os.environ):
            code = _forked(arguments, cwd, env, timeout, files)
        else:
            command = [sys.executable, "-m", "pytest", *arguments]
            code = subprocess.run(command, cwd=cwd, env=env, stdout=files[0], stderr=files[1], timeout=timeout, check=False).returncode
        for file in (out, err):
            file.seek(0)
        return subprocess.CompletedProcess(arguments, code, out.read().decode(errors="replace"), err.read().decode(errors="replace"))


def _forked(arguments: Sequence[str], cwd: Path, env: Mapping[str, str], timeout: float, files: tuple[IO[bytes], IO[bytes]]) -> int:
    server = _server()
    assert server.stdin is not None
    assert server.stdout is not None
    names = [f"/proc/{os.getpid()}/fd/{file.fileno()}" for file in files]
    asked = {"arguments": list(arguments), "cwd": str(cwd), "env": dict(env), "files": names}
    server.stdin.write(json.dumps(asked) + "\n")
    server.stdin.flush()
    pid = int(server.stdout.readline())
    late = threading.Timer(timeout, os.kill, (pid, signal.SIGKILL))
    late.start()
    began = time.monotonic()
    try:
        code = int(server.stdout.readline())
    finally:
        late.cancel()
    if time.monotonic() - began >= timeout:
        raise subprocess.TimeoutExpired(list(arguments), timeout)
    return code
