"""`seatrial rollouts status`."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Annotated

import typer

from seatrial.cli.rollouts import show

Directory = Annotated[Path, typer.Argument(metavar="DIR", help="The campaign's directory.")]


def status(
    directory: Directory,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Look every two seconds until nothing is owed or it stopped. Ctrl-C ends it.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON; with --follow one line each time.")] = False,
) -> None:
    """Say where a campaign stands: shards, rollouts a second, failures by class, time to go, mean reward. Needs no server."""
    from seatrial.launch.interrupt import Interruptible
    from seatrial.rollouts.conduct.conductor import wait_a_moment
    from seatrial.rollouts.conduct.status import Watch
    from seatrial.rollouts.manifest import load
    from seatrial.rollouts.place import Place
    from seatrial.rollouts.units import Units

    place = Place(directory)
    manifest = load(place)
    progress = show.Progress()
    with Units(place, manifest) as units, Interruptible(), closing(progress):
        watch = Watch(place, manifest, units)
        found = watch.look()
        while follow:
            if as_json:
                typer.echo(found.model_dump_json())
            else:
                progress.show(found)
            if not found.owed or found.stopped:
                break
            wait_a_moment()
            found = watch.look()
    if not follow:
        typer.echo(found.model_dump_json(indent=2) if as_json else show.table(found))
