"""`seatrial config`: the configuration in force."""

from __future__ import annotations

from typing import Annotated

import typer

from seatrial.cli import request
from seatrial.trial.trial_request import load_config

app = typer.Typer(rich_markup_mode=None, add_completion=False, no_args_is_help=True, help="The configuration in force.")


@app.callback()
def _config() -> None:
    """The configuration in force."""


@app.command("show")
def show(
    settings: request.Set = None,
    config: request.ConfigFile = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Print every setting, its value, where it came from, and what it means."""
    import json as encoder

    rows = list(load_config(config, settings).rows())
    if json:
        typer.echo(encoder.dumps({key: {"value": value, "origin": origin} for key, value, origin, _ in rows}, indent=2))
        return
    width = max(len(key) for key, *_ in rows)
    for key, value, origin, meaning in rows:
        typer.echo(f"{key:{width}}  {value!r:24}  {origin:14}  {meaning}")
