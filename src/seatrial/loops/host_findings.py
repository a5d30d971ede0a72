"""Preflight helpers of several loops: a child process with a deadline, the GPUs of this machine, names of changes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from seatrial.core.guarded import BadValue, parse_json
from seatrial.core.loop import Context
from seatrial.core.records import Finding
from seatrial.core.verdict import Boundary
from seatrial.runtime.command import NoAnswerError, run_command


def ask(start: Sequence[str], driver: Path, cwd: Path, environment: Mapping[str, str], seconds: float, request: Any) -> Any:
    """The JSON answer of a driver, run in the loop's own interpreter, to a JSON request; NoAnswerError when there is none."""
    quiet = {**environment, "PYTHONSAFEPATH": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    done = run_command([*start, str(driver)], seconds, cwd=cwd, env=quiet, stdin=json.dumps(request).encode(), own_session=True)
    if done.code:
        raise NoAnswerError(f"{start[0]}: {done.last_words}")
    try:
        return parse_json(done.out)
    except BadValue as error:
        raise NoAnswerError(f"{start[0]}: what it said is no answer: {done.out[:200]!r}") from error


NVIDIA_SMI_SECONDS = 30


def gpus_here(wanted: int, without: str) -> Finding:
    """Whether there are as many as wanted; `without` says what to do where there is none."""
    smi = shutil.which("nvidia-smi")
    listed = ""
    if smi:
        try:
            listed = run_command([smi, "-L"], NVIDIA_SMI_SECONDS).out
        except NoAnswerError as error:
            listed = f"({error})"
    count = sum(line.startswith("GPU ") for line in listed.splitlines())
    if count == 0:
        why = "no GPU was found here" + ("" if smi else ": there is no nvidia-smi")
        return Finding(name="GPUs", ok=False, boundary=Boundary.CLUSTER, message=why, fix=without)
    ok = count >= wanted
    fix = "" if ok else f"--set options.gpus={count}"
    return Finding(name="GPUs", ok=ok, boundary=Boundary.CLUSTER, message=f"{count} GPUs here, {wanted} wanted", fix=fix)


def wrong_names(context: Context, packages: Mapping[str, str]) -> Iterator[Finding]:
    """A change that is called by a known name must provide that package."""
    for repo in context.changes:
        wanted = packages.get(repo.name)
        if wanted and wanted not in repo.packages:
            own = next((name for name, package in packages.items() if package in repo.packages), None)
            message = f"{repo.path} is called {repo.name} and does not provide {wanted}, but {', '.join(repo.packages) or 'no package'}"
            fix = f"--change {own}={repo.path}" if own else f"name the checkout that provides {wanted}"
            yield Finding(name="change", ok=False, boundary=Boundary.CONFIG, message=message, fix=fix)
