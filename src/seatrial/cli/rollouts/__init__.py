"""`seatrial rollouts`: collect rollouts in campaigns, follow and resume them, merge, profile, select, rescore.

Exit codes: 0 everything is settled, 99 something is still owed, no rollout worked, or it was refused, 2 usage, 130 interrupted.
"""

from __future__ import annotations

import typer

from seatrial.cli.rollouts import inside, launch, results, watch

app = typer.Typer(
    rich_markup_mode=None,
    add_completion=False,
    help="Collect rollouts: rows x repeats, in shards, here or over many Slurm jobs; nothing lost, nothing twice.\n\n"
    "A campaign lives in a directory. `start` makes it and collects, `resume` collects what is missing, `merge` and `profile` "
    "read what was collected. Try it with `seatrial rollouts demo`. Against a server of yours:\n\n"
    "\b\n"
    "  seatrial rollouts start --input rows.jsonl --url http://127.0.0.1:8000/v1 \\\n"
    "      --verifier math --repeats 4 --out DIR\n"
    "  seatrial rollouts status DIR --follow\n\n"
    "More than that is said in a campaign.toml: docs/rollouts.md. Exit codes: 0 everything settled, 99 something is still owed, "
    "no rollout worked, or it was refused, 2 usage, 130 interrupted.",
    no_args_is_help=True,
)

app.command(short_help="Make a campaign, collect it, merge and profile.")(launch.start)
app.command(short_help="Say where a campaign stands; --follow, --json.")(watch.status)
app.command(short_help="Collect what is missing, then merge and profile.")(launch.resume)
app.command(short_help="Stop a campaign and its Slurm jobs.")(launch.cancel)
app.command(short_help="One file, each rollout exactly once.")(results.merge)
app.command(short_help="Rewards per task and group: pass@k, spread, tokens.")(results.profile)
app.command(short_help="Write the rows of tasks in a band of pass rates.")(results.select)
app.command(short_help="New rewards for stored rollouts.")(results.rescore)
app.command("import", short_help="Take over rollouts of NeMo Gym or NeMo-Skills.")(results.import_)
app.command(short_help="Write the files that NeMo-Skills or NeMo Gym know.")(results.export)
app.command(short_help="Try it here with a tiny model that is served locally.")(launch.demo)
app.command(short_help="Serve the sandbox for NeMo Gym's resources servers.")(inside.sandbox)
app.command(hidden=True)(inside.collect)
app.command(hidden=True)(inside.finish)
