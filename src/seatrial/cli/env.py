"""`seatrial env`: build, list, check and remove the environments that loops, and NeMo Gym, run in.

- Output is a table on a terminal and plain tab-separated lines elsewhere; `--json` prints one JSON document.
- `check` exits with 0 when the environment is ready and with 99 (Blocked) when it is not.
"""

from __future__ import annotations

import difflib
import json
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated

import typer

from seatrial import loops
from seatrial.core.errors import UserError
from seatrial.core.verdict import ExitCode
from seatrial.evidence.redact import Redactor
from seatrial.rollouts.backends import gym_install
from seatrial.runtime.environments import Environments
from seatrial.runtime.interrupt import Interruptible

app = typer.Typer(
    rich_markup_mode=None,
    add_completion=False,
    help="Build, list, check and remove the environments that loops run in.",
    no_args_is_help=True,
)

Name = Annotated[str, typer.Argument(metavar="ENV", help="trl, verl-cpu, vllm-cpu, megatron-cpu, gym, …; an unknown one lists them.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.command()
def build(
    name: Name,
    rebuild: Annotated[bool, typer.Option("--rebuild", help="Make the environment and its layer anew, even if they are complete.")] = False,
    minutes: Annotated[float, typer.Option("--deadline", metavar="MINUTES", min=0.1, help="Give up after this many minutes.")] = 30,
    as_json: Json = False,
) -> None:
    """Build the environment of a loop from its lock; does nothing when it is there already."""
    lock = _lock(name)
    with Interruptible():
        environment = Environments().build(
            name,
            lock,
            lambda line: typer.echo(line, err=True),
            rebuild=rebuild,
            deadline_s=minutes * 60,
            line_filter=Redactor(os.environ).lines().line,
        )
    if as_json:
        shown = {"name": name, "hash": environment.lock_hash, "path": str(environment.path), "python": str(environment.python)}
        typer.echo(json.dumps(shown, indent=2))
    else:
        typer.echo(f"{name}: ready: {environment.python}")


@app.command("list")
def list_(as_json: Json = False) -> None:
    """List every environment and layer in the cache, with its size and when it was last used."""
    cache = Environments()
    found = cache.list()
    if as_json:
        keys = ("name", "kind", "hash", "size_mb", "complete", "python_version", "built", "used")
        typer.echo(json.dumps([{**{key: getattr(entry, key) for key in keys}, "path": str(entry.path)} for entry in found], indent=2))
        return
    rows = [
        (
            entry.name,
            "layer" if entry.kind == "layers" else "env",
            entry.hash,
            "complete" if entry.complete else "broken",
            f"{entry.size_mb} MB",
            entry.python_version or "-",
            (entry.built or "-")[:10],
            (entry.used or "-")[:10],
        )
        for entry in found
    ]
    _print_table(("name", "kind", "hash", "state", "size", "python", "built", "last used"), rows)
    if not found:
        typer.echo(f"{cache.root}: no environments", err=True)


@app.command()
def check(name: Name, as_json: Json = False) -> None:
    """Check that a loop's environment is there, complete, runs, and holds exactly the locked versions."""
    findings = Environments().check(name, _lock(name))
    if as_json:
        typer.echo(json.dumps([finding.model_dump(mode="json") for finding in findings], indent=2))
    else:
        _print_table(("check", "", "what was found"), [(f.name, "ok" if f.ok else "not ok", f.message) for f in findings])
        for finding in findings:
            if not finding.ok:
                typer.echo(f"fix: {finding.fix}")
    if not all(finding.ok for finding in findings):
        raise typer.Exit(ExitCode.BLOCKED)


@app.command()
def remove(
    name: Annotated[str, typer.Argument(metavar="LOOP", help="The environment to remove, as `seatrial env list` names it.")],
) -> None:
    """Remove every environment of a loop, and layers that no environment needs any more."""
    for path in Environments().remove(name):
        typer.echo(f"removed {path}")


def _lock(name: str) -> Path:
    """The lock of an environment; an unknown one is an error that lists the known ones."""
    known = {**loops.environments(), gym_install.GYM_ENVIRONMENT: gym_install.GYM_LOCK}
    if name not in known:
        close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
        raise UserError(f"unknown environment {name!r}; known: {', '.join(known)}", f"use {close[0]!r}" if close else "use a known one")
    return known[name]


def _print_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    if not sys.stdout.isatty():
        for row in rows:
            typer.echo("\t".join(row))
        return
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from seatrial.core.text import visible

    table = Table(box=None, pad_edge=False)
    for title in head:
        table.add_column(title, overflow="fold")
    for row in rows:
        table.add_row(*(escape(visible(cell)) for cell in row))
    Console().print(table)
