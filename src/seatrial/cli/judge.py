"""`seatrial judge`: a verdict on files that any run left."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from seatrial.evidence.redact import Redactor
    from seatrial.trial.files_judge import FileVerdict


_LINES_BEFORE, _LONGEST_LINE = 400, 100_000
"""What is read before the decisive line to know what it holds: the name of a value, the begin of a key."""


def redacted(found: FileVerdict, redactor: Redactor) -> FileVerdict:
    """The verdict without secrets: what it quotes is from a log that is not redacted."""
    shown = _in_its_place(found, redactor)

    def clear(text: str) -> str:
        return redactor.text(text.replace(found.text, shown) if shown != found.text else text)

    quoted = {name: clear(getattr(found, name)) for name in ("text", "reason", "advice")}
    limitations = tuple(map(clear, found.limitations))
    signature = found.signature and clear(found.signature)
    return redactor.record(found.model_copy(update={**quoted, "limitations": limitations, "signature": signature}))


def _in_its_place(found: FileVerdict, redactor: Redactor) -> str:
    """The decisive line as the lines before it leave it: a value may stand below its name."""
    if not found.file or not found.line or not found.text.strip():
        return found.text
    try:
        with Path(found.file).open(encoding="utf-8", errors="surrogateescape", newline="\n") as stream:
            rows = [row[:_LONGEST_LINE] for row in islice(stream, max(0, found.line - _LINES_BEFORE), found.line)]
    except OSError:
        return found.text
    cleared = redactor.rows(rows)
    if not rows or cleared[-1] == rows[-1] or cleared[-1] == redactor.text(rows[-1]):
        return found.text
    return cleared[-1].strip()[: max(len(found.text), 200)]


def judge(
    loop: Annotated[str, typer.Argument(help="The loop that wrote the files.")],
    logs: Annotated[list[Path], typer.Option("--log", help="The log of the run.")],
    metrics: Annotated[list[Path] | None, typer.Option("--metrics", help="Metrics: a file or a directory; repeat for several.")] = None,
    level: Annotated[int | None, typer.Option("--level", "-l", help="Judge against the checks of this level.")] = None,
    expect_steps: Annotated[int | None, typer.Option("--expect-steps", min=1, help="Training steps the run was to take.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the verdict as JSON.")] = False,
) -> None:
    """Judge the files that any run left, without running anything. The exit code is the verdict's."""
    import os

    from seatrial.evidence.redact import Redactor
    from seatrial.loops import get_loop
    from seatrial.model.errors import UserError
    from seatrial.model.verdict import exit_code
    from seatrial.report.text import one_line
    from seatrial.trial.files_judge import judge_files
    from seatrial.trial.plan import parse_levels

    known = get_loop(loop)
    if len(logs) != 1:
        raise UserError(f"--log is given {len(logs)} times", "judge one run at a time: name its log once")
    (log,) = logs
    if not log.is_file():
        wrong = "a directory, not a log file" if log.is_dir() else "no such log file"
        raise UserError(f"{log}: {wrong}", "name the file that holds the output of the run")
    chosen = None
    if level is not None:
        (number,) = parse_levels(str(level), known)
        chosen = next(item for item in known.levels() if item.number == number)
    result = redacted(judge_files(known, log, metrics or [], chosen, expect_steps), Redactor(os.environ))
    if json:
        typer.echo(result.model_dump_json(indent=2))
        raise typer.Exit(exit_code(result.verdict))
    shown = one_line  # recorded text has no lines of its own
    where = f"{result.file}:{result.line}" if result.line else (result.file or "none")
    of = f" of {result.steps_expected}" if result.steps_expected is not None else ""
    typer.echo(f"verdict:   {result.verdict}\nboundary:  {result.boundary or 'none'}\nreason:    {shown(result.reason)}")
    typer.echo(f"decisive:  {shown(where)}\n           {shown(result.text)}")
    typer.echo(f"steps:     {result.steps_reached if result.steps_reached is not None else 'none'}{of}")
    typer.echo(f"milestone: {shown(result.milestone or 'none')}")
    missed = [check for check in result.checks if not check.passed]
    typer.echo(f"checks:    {len(result.checks)} made, {len(missed)} missed")
    for check in missed:
        typer.echo(f"missed:    {shown(check.name)}" + (f" (measured {shown(str(check.value))})" if check.value is not None else ""))
    if result.advice:
        typer.echo(f"advice:    {shown(result.advice)}")
    for text in result.limitations:
        typer.echo(f"note:      {shown(text)}")
    raise typer.Exit(exit_code(result.verdict))
