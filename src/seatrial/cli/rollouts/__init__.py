"""`seatrial rollouts`: collect rollouts in campaigns, follow and resume them, merge, profile, select, rescore.

Exit codes: 0 everything is settled, 99 something is still owed or was refused, 2 usage, 130 interrupted.
"""

from __future__ import annotations

import typer

from seatrial.cli.rollouts import inside, launch, results, watch

app = typer.Typer(
    rich_markup_mode=None,
    add_completion=False,
    help="Collect rollouts: rows x repeats, in shards, here or over many Slurm jobs; nothing lost, nothing twice.\n\n"
    "A campaign lives in a directory. `start` makes it and collects, `resume` collects what is missing, `merge` and `profile` "
    "read what was collected. docs/rollouts.md describes campaign.toml. Exit codes: 0 everything settled, 99 something is still "
    "owed or was refused, 2 usage, 130 interrupted.",
    no_args_is_help=True,
)

app.command()(launch.start)
app.command()(watch.status)
app.command()(launch.resume)
app.command()(launch.cancel)
app.command()(results.merge)
app.command()(results.profile)
app.command()(results.select)
app.command()(results.rescore)
app.command("import")(results.import_)
app.command()(results.export)
app.command()(launch.demo)
app.command()(inside.sandbox)
app.command(hidden=True)(inside.collect)
app.command(hidden=True)(inside.finish)
