"""`seatrial doctor`: the preflight alone, for one loop or for all of them."""

from __future__ import annotations

import dataclasses
import json as encoder
import os
import shlex
import shutil
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from seatrial.cli import request
from seatrial.core.errors import BlockedError, UserError
from seatrial.core.loop import Context, as_finding, gather, read_options
from seatrial.core.records import Finding, replace
from seatrial.core.text import as_rows
from seatrial.core.verdict import ExitCode
from seatrial.loops import get_loop
from seatrial.trial.trial_request import TrialRequest, ask, named_path

if TYPE_CHECKING:
    from seatrial.core.config import Loaded
    from seatrial.core.loop import Context

EVERY: tuple[tuple[str, Mapping[str, str]], ...] = (("trl", {}), ("verl", {"device": "cpu"}), ("verl", {"device": "gpu"}), ("nemo-rl", {}))
"""What is gone through when no loop is named."""
CHECKOUTS = ("verl", "nemo_rl")
"""Options that name the checkout which a loop drives."""
MACHINE = "this machine"
WIDTHS = (60, 100)


@dataclass(frozen=True, slots=True)
class OrderedGroup:
    """The findings about one thing."""

    title: str
    """This machine, or a loop as `seatrial run` takes it: `verl --device cpu`."""
    findings: tuple[Finding, ...]

    @property
    def ready(self) -> bool:
        return all(finding.ok for finding in self.findings)


def doctor(
    context: typer.Context,
    loop: Annotated[str | None, typer.Argument(metavar="LOOP", help="The loop to check; all of them when it is left out.")] = None,
    level: request.Levels = None,
    model: request.Model = None,
    change: request.Change = None,
    device: request.Device = None,
    verl: request.Verl = None,
    nemo_rl: request.NemoRl = None,
    opt: request.Opt = None,
    auto: request.Auto = False,
    base: request.Base = None,
    python: request.Python = None,
    settings: request.Set = None,
    config: request.ConfigFile = None,
    json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """Is this machine ready for a trial? Each finding that is not ok has the command that fixes it. Runs no training.

    Takes what `seatrial run` takes. Without LOOP it goes through every loop. Exit codes: 0 ready, 99 something blocks, 2 usage.
    """
    from seatrial.trial.preflight import of_machine

    flags = {"device": device, "verl": verl, "nemo_rl": nemo_rl}
    others = {"levels": level, "model": model, "changes": change, "base": base, "python": python}
    loaded = request.loaded_with(opt, flags, settings, config, loop, arguments=context.obj or (), **others)
    groups = [OrderedGroup(MACHINE, of_machine(os.environ))]
    _require_usable(loaded, auto)
    if loop is not None:
        groups.append(OrderedGroup(" ".join([loop, *(["--device", device] if device else [])]), _findings(loaded, auto)))
    else:
        given = device or request.given_options(opt, {}).get("device")
        groups += _every(loaded, auto, str(given) if given else None)
    blocked = not all(group.ready for group in groups)
    following = _next(groups, loop)
    _print_json(groups, following) if json else _print_text(groups, following)
    raise typer.Exit(ExitCode.BLOCKED if blocked else ExitCode.PASS)


def _require_usable(loaded: Loaded, auto: bool) -> None:
    """A checkout that does not exist, and `--auto` without a change, are wrong usage."""
    paths = loaded.config.change.paths
    if auto and not paths:
        raise UserError("--auto needs a change to read", "name the checkout under test with --change PATH")
    for word in paths:
        path = named_path(word)[1]
        if not path.exists():
            raise UserError(f"{path}: no such directory", "name an existing checkout with --change PATH")
    for name in CHECKOUTS:
        text = loaded.config.options.get(name)
        if text and not Path(text).exists():
            raise UserError(f"{text}: no such directory", f"name an existing checkout with {_flag(name)} PATH")


def _every(loaded: Loaded, auto: bool, device: str | None) -> list[OrderedGroup]:
    """Each loop with the options that it takes; what every one of them refuses is wrong usage."""
    chosen = [(name, given) for name, given in EVERY if not device or given.get("device", device) == device]
    known = {name: {option.name: option for option in get_loop(name).options} for name, _ in chosen}
    wrong = set(loaded.config.options) - {name for options in known.values() for name in options}
    read_options("every loop", [one for options in known.values() for one in options.values()], dict.fromkeys(wrong, ""))
    made, refused = list[OrderedGroup](), list[UserError]()
    for name, given in chosen:
        try:
            found = _findings(_narrowed(loaded, name, given, set(known[name])), auto)
        except UserError as error:
            refused.append(error)
            found = (as_finding(error, "request"),)
        made.append(OrderedGroup(" ".join([name, *(f"--{key} {value}" for key, value in given.items())]), found))
    if len(refused) == len(made):
        raise refused[0]
    return made


def _narrowed(loaded: Loaded, loop: str, options: Mapping[str, str], known: set[str]) -> Loaded:
    """The configuration for one of several loops, with the options that this one takes."""
    config = loaded.config
    kept = {key: value for key, value in config.options.items() if key in known}
    run = replace(config.run, loop=loop)
    return dataclasses.replace(loaded, config=replace(config, run=run, options={**kept, **options}, known_issues={}))


def _findings(loaded: Loaded, auto: bool) -> tuple[Finding, ...]:
    """Everything about one loop; wrong usage is an error."""
    from seatrial.trial.preflight import of_loop
    from seatrial.trial.staging import engine_interpreters

    made: list[Finding] = []
    try:
        asked = ask(loaded, auto)
    except (UserError, BlockedError) as error:
        made.append(as_finding(error, "request"))
        try:  # a checkout that cannot be read must not hide the rest
            asked = _with_options(ask(_without_checkouts(loaded), auto=False), loaded)
        except (UserError, BlockedError):
            raise error from None
    for level in asked.plan.levels:
        if level.skip:
            made.append(Finding(name=f"level {level.number}", ok=True, message=f"{level.title}: skipped: {level.skip}"))
    if auto and not made:
        numbers = ", ".join(str(level.number) for level in asked.plan.levels)
        made.append(
            Finding(name="level", ok=True, message=f"the diff asks for level {numbers}" if numbers else "the diff asks for no level")
        )
    python, found = _environment(asked)
    trials = Path(asked.loaded.config.run.trials).absolute()
    context = Context.of(asked.plan, trials, python or Path("no-interpreter"), engine_interpreters())
    of_its_own = gather(lambda: of_loop(asked.loop, asked.plan, context, os.environ))
    return (*made, *(_once(finding, of_its_own) for finding in found), *of_its_own)


def _once(finding: Finding, others: Sequence[Finding]) -> Finding:
    """What the loop says itself stands in the way of its environment, too: said once, it blocks once."""
    other = next((other for other in others if not other.ok and other.message == finding.message), None)
    if finding.ok or other is None:
        return finding
    return replace(finding, ok=True, fix="", message=f"not looked for yet: see {other.name}")


def _without_checkouts(loaded: Loaded) -> Loaded:

    config = loaded.config
    named = {name.replace("-", "_") for name in get_loop(config.run.loop).configured(config.options).checkouts()}
    options = {key: value for key, value in config.options.items() if key not in named}
    change = replace(config.change, paths=[])
    return dataclasses.replace(loaded, config=replace(config, change=change, options=options))


def _with_options(asked: TrialRequest, loaded: Loaded) -> TrialRequest:
    """What was asked with all options again: a checkout that git cannot read was named all the same."""
    loop = get_loop(loaded.config.run.loop).configured(loaded.config.options)
    return dataclasses.replace(asked, loop=loop, plan=replace(asked.plan, options=loop.chosen))


def _environment(asked: TrialRequest) -> tuple[Path | None, tuple[Finding, ...]]:
    """The loop's interpreter, None where there is none, and what there is to say about it."""
    from seatrial.runtime.environments import Environments
    from seatrial.runtime.venvs import read_installed
    from seatrial.trial.staging import find_interpreter

    named = asked.loaded.config.environment.python
    own, name = Path(named) if named else None, asked.loop.environment
    checked: tuple[Finding, ...] = ()
    if name is not None and own is None:
        checked = gather(lambda: Environments().check(name, asked.loop.environments()[name]))
    try:
        found = find_interpreter(asked.loop, own, lambda _: None, build=False)
    except (BlockedError, UserError) as error:
        return None, checked or (as_finding(error, "environment"),)
    if own is not None:
        try:
            read_installed(found.python)
        except BlockedError as error:  # nothing else is asked of it
            fix = "name the Python of the loop's environment with --python"
            return None, (as_finding(BlockedError(error.boundary, error.message, fix), "environment"),)
    return found.python, checked or found.findings


def _next(groups: Sequence[OrderedGroup], loop: str | None) -> str:
    """The command to type now: the first fix that is one, or the trial."""
    words = [word for word in sys.argv[2:] if word != "--json"]
    ready = [group.title for group in groups[1:] if group.ready] if groups[0].ready else []
    if loop is not None and ready:
        return shlex.join(["seatrial", "run", *words])
    if ready:
        return shlex.join(["seatrial", "run", *ready[0].split(), *_taken(words, ready[0])])
    return shlex.join(["seatrial", "doctor", *words])


def _flag(option: str) -> str:
    return f"--{option.replace('_', '-')}"


def _taken(words: Sequence[str], title: str) -> Iterator[str]:
    """The words of a call for every loop that the one with this title takes, without what its title says already."""
    name, *said = title.split()
    loop = get_loop(name)
    left = [_flag(option) for option in ("device", *CHECKOUTS) if not loop.takes(option) or _flag(option) in said]
    rest = iter(words)
    for word in rest:
        if word == "--":
            yield from (word, *rest)
        elif word in left:
            next(rest, None)
        elif word.partition("=")[0] == "--opt":
            given = word.partition("=")[2] or next(rest, "")
            yield from ("--opt", given) if loop.takes(given.partition("=")[0]) else ()
        elif word.partition("=")[0] not in left:
            yield word


def _print_json(groups: Sequence[OrderedGroup], following: str) -> None:

    rows = [
        {"about": group.title, "severity": finding.severity, **finding.model_dump(mode="json")}
        for group in groups
        for finding in group.findings
    ]
    ready = {group.title: group.ready for group in groups}
    typer.echo(encoder.dumps({"ready": all(ready.values()), "about": ready, "findings": rows, "next": following}, indent=2))


def _print_text(groups: Sequence[OrderedGroup], following: str) -> None:
    """Group by group, what blocks first; commands stay on one line, so that they can be copied."""
    width = min(max(shutil.get_terminal_size((80, 24)).columns, WIDTHS[0]), WIDTHS[1])
    for group in groups:
        typer.echo(f"{group.title}: {'ready' if group.ready else 'blocked'}" if group.title != MACHINE else group.title)
        for finding in sorted(group.findings, key=lambda found: ("blocks", "warns", "ok").index(found.severity)):
            for line in _lines(finding, width):
                typer.echo(line)
    blocks = [finding for group in groups for finding in group.findings if not finding.ok]
    warns = sum(finding.severity == "warns" for group in groups for finding in group.findings)
    ready = ", ".join(group.title for group in groups[1:] if group.ready) if groups[0].ready else ""
    typer.echo(f"\n{len(blocks)} block, {warns} warn. " + (f"Ready: {ready}." if ready else "Do what each fix says, then look again."))
    typer.echo(f"next: {following}")


def _lines(finding: Finding, width: int) -> Iterator[str]:
    word = {"blocks": "BLOCKS", "warns": "warns"}.get(finding.severity, "ok")
    first = f"  {word:<6}  "
    text = f"{finding.name}: {finding.message}"
    yield from textwrap.wrap(
        text, width, initial_indent=first, subsequent_indent=" " * len(first), break_long_words=False, break_on_hyphens=False
    )
    if finding.fix and finding.severity != "ok":
        yield f"{' ' * len(first)}fix: {as_rows([finding.fix])}"
