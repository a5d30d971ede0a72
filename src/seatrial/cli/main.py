"""The command line: a table of commands that are imported only when they are called.

Errors that a user can fix are printed without a traceback and end with exit code 2; a defect of Seatrial ends with 3.
"""

from __future__ import annotations

import importlib
import os
import re
import sys
from typing import Any, TextIO, cast

import typer
from typer.core import TyperCommand, TyperGroup

from seatrial.cli.typer_base import Plain, explained
from seatrial.core.errors import BlockedError, UserError
from seatrial.core.text import visible
from seatrial.core.verdict import ExitCode
from seatrial.evidence.lazy_redactor import LazyRedactor

COMMANDS: dict[str, tuple[str, str]] = {
    "run": ("run", "Run levels of a loop on a change, to a verdict and a report."),
    "plan": ("plan", "Say what would run, why, and what it would cost; runs nothing."),
    "resume": ("run", "Finish a trial that was killed, interrupted or blocked."),
    "attach": ("run", "Follow a trial that runs as a Slurm job, to its verdict."),
    "jobs": ("jobs", "Submit jobs to a cluster, list them, wait for them, read their logs, cancel them."),
    "rollouts": ("rollouts", "Collect rollouts in campaigns: shards here or over many jobs; resume, merge, profile, select."),
    "report": ("judge", "Print the summary of a trial; rebuild its reports."),
    "judge": ("judge", "Judge the files that any run left, without running anything."),
    "localize": ("judge", "Show which sequences and tokens a log-probability mismatch sits in."),
    "isolate": ("run", "Rerun a failed level with one setting changed at a time, to name suspects."),
    "bisect": ("bisect", "Find the commit that broke a test or moved a metric, over one repository or several."),
    "history": ("history", "Metrics of all runs over time: show, compare, trends with change points, a gate, thresholds, export."),
    "functional": ("functional", "Run functional test scripts: metric table, logs, deadlines, JUnit."),
    "hermetic": ("hermetic", "Run a command in a container, or in a fresh environment of its own."),
    "probe": ("probe", "Run one instrument alone: show bit for bit that a generator has its policy's weights."),
    "doctor": ("doctor", "Preflight alone: is this machine ready for a trial?"),
    "env": ("env", "Build, list, check and remove the environments of loops."),
    "check": ("judge", "Check expressions against metrics."),
    "metrics": ("metrics", "Dump or show the metrics in a log directory."),
    "config": ("config", "Show the configuration and where each value came from."),
    "new": ("new", "Write the start of an extension: a loop that runs at once."),
    "skill": ("skill", "List, show and install skills: short guides by which coding agents use Seatrial."),
}

PASS_ON = ("run", "plan", "doctor", "bisect", "functional", "hermetic")
"""Commands that pass what stands after `--` on, to the loop or as the command to run."""
PAIRS = {"bisect": ("--edit",)}
"""Options that take two words; they are joined by a newline, since an option that is repeated can have only one."""


class Lazy(Plain, TyperGroup):
    """Lists commands from the table and imports one only when it is used."""

    def list_commands(self, ctx: Any) -> list[str]:
        """In the order of the table."""
        return list(COMMANDS)

    def get_command(self, ctx: Any, name: str) -> Any:
        """Import the module of a command; help of the whole program needs none of them."""
        if name not in COMMANDS:
            return None
        if ctx.resilient_parsing or getattr(self, "listing", False):
            return TyperCommand(name=name, help=COMMANDS[name][1])
        module = importlib.import_module(f"seatrial.cli.{COMMANDS[name][0]}")
        app = getattr(module, "app", None)
        if app is None:
            app = typer.Typer(rich_markup_mode=None, add_completion=False)
            app.command(name)(getattr(module, name))
        found = typer.main.get_command(app)
        found.name, found.help = name, found.help or COMMANDS[name][1]
        return found

    def make_context(self, *args: Any, **words: Any) -> Any:
        """As typer does it, with errors of ours."""
        with explained():
            return super().make_context(*args, **words)

    def invoke(self, ctx: Any) -> Any:
        """As typer does it, with errors of ours."""
        with explained(ctx):
            return super().invoke(ctx)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """The list of commands, from the table alone."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])


app = typer.Typer(cls=Lazy, rich_markup_mode=None, add_completion=False, no_args_is_help=True)


def _version(value: bool) -> None:
    if value:
        from seatrial import __version__

        typer.echo(f"seatrial {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=False)
def seatrial(version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Print the version.")) -> None:
    """Seatrial proves that a change survives real RL post-training, and says where it breaks when it does not.

    Start with `seatrial run`. Exit codes: 0 Pass, 1 Fail, 77 Skipped, 99 Blocked, 2 usage, 3 internal error, 130 interrupted.
    """


_COMMAND = re.compile(r"^([^\S\n]*)(:)(?=:)|(#)(?=#\[)", re.MULTILINE)
"""What GitHub Actions takes for a command: `::` at the start of a line, `##[` anywhere."""


class Output:
    """Standard output or error.

    - Its reader may go away (`| head`): the rest is not printed, and the verdict's exit code stays.
    - In GitHub Actions recorded text is no workflow command; `command` writes ours.
    - Text from a log cannot steer the terminal: control characters are written out. What draws on the terminal itself (rich, a line
      that is rewritten) uses `rich_proxied_file`, and makes recorded text visible before.
    - What is a secret wherever it stands is not printed: an error may quote an argument, a verdict a log.
    """

    def __init__(self, stream: TextIO, plain: bool = True, redactor: LazyRedactor | None = None) -> None:
        self.stream, self.plain = stream, plain
        self.github = os.environ.get("GITHUB_ACTIONS") == "true"
        self.redactor = redactor or LazyRedactor(os.environ)

    @property
    def rich_proxied_file(self) -> Output:
        """Where rich writes, by the name that rich looks for."""
        return Output(self.stream, plain=False, redactor=self.redactor)

    def write(self, text: str) -> int:
        """Write recorded text."""
        text = visible(text) if self.plain else text
        return self.command(_COMMAND.sub(_written_out, text) if self.github else text)

    def command(self, text: str) -> int:
        """Write, or give up writing for good. What the stream cannot encode (half of a surrogate pair) is shown escaped."""
        text = self.redactor.tokens(text)
        try:
            return self.stream.write(text)
        except UnicodeEncodeError as error:
            return self.stream.write(text.encode(error.encoding, "backslashreplace").decode(error.encoding))
        except BrokenPipeError:
            return self._give_up(len(text))

    def flush(self) -> None:
        """Flush, or give up writing for good."""
        try:
            self.stream.flush()
        except BrokenPipeError:
            self._give_up(0)

    def _give_up(self, count: int) -> int:
        os.dup2(os.open(os.devnull, os.O_WRONLY), self.stream.fileno())
        return count

    def __getattr__(self, name: str) -> Any:
        if name == "buffer":  # would go round `write`
            raise AttributeError(name)
        return getattr(self.stream, name)


def _written_out(command: re.Match[str]) -> str:
    return f"{command[1] or ''}\\u{ord(command[2] or command[3]):04x}"


def split_arguments(words: list[str]) -> tuple[list[str], tuple[str, ...]]:
    """What stands after `--` is never read as ours."""
    passed_on: tuple[str, ...] = ()
    if words[:1] and words[0] in PASS_ON and "--" in words:
        place = words.index("--")
        words, passed_on = words[:place], tuple(words[place + 1 :])
    return join_pairs(words), passed_on


def join_pairs(words: list[str]) -> list[str]:
    """The words with both values of an option that takes two as one."""
    pairs, joined, rest = PAIRS.get(words[0] if words else "", ()), list[str](), list(words)
    while rest:
        word = rest.pop(0)
        joined.append(word)
        if word in pairs and len(rest) > 1:
            joined.append(f"{rest.pop(0)}\n{rest.pop(0)}")
    return joined


def require_text(words: list[str]) -> None:
    """Refuse a word that is not valid UTF-8, such as a file's name in Latin-1: no report could name it."""
    for word in words:
        try:
            word.encode("utf-8")
        except UnicodeEncodeError as error:
            raise UserError(f"{word!r}: not valid UTF-8", "rename the file or directory, or name it by a link") from error


def run() -> None:
    """Entry point."""
    words, passed_on = split_arguments(sys.argv[1:])
    sys.stdout, sys.stderr = cast(TextIO, Output(sys.stdout)), cast(TextIO, errors := Output(sys.stderr))
    clear = errors.redactor.text  # an error may quote a line of a configuration, or what a program said
    try:
        require_text(words)
        app(words, obj=passed_on)
    except (UserError, BlockedError) as error:
        blocked = f"Blocked ({error.boundary}): " if isinstance(error, BlockedError) else ""
        typer.echo(f"seatrial: {blocked}{clear(error.message)}", err=True)
        if error.fix:
            typer.echo(f"  fix: {error.fix}", err=True)
        sys.exit(ExitCode.BLOCKED if blocked else ExitCode.USAGE)
    except KeyboardInterrupt:
        typer.echo("seatrial: interrupted", err=True)
        sys.exit(ExitCode.INTERRUPTED)
    except SystemExit as error:
        if isinstance(error.__context__, BrokenPipeError):
            # The reader of our output went away; nothing more can be said, and 1 would read as Fail.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            sys.exit(ExitCode.INTERNAL)
        raise
    except Exception as error:  # noqa: BLE001 - the last line of defence gives defects their own exit code
        import traceback

        traceback.print_exc()
        typer.echo(f"seatrial: internal error: {error}\n  please report it with the lines above", err=True)
        sys.exit(ExitCode.INTERNAL)


if __name__ == "__main__":
    run()
