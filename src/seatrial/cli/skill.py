"""`seatrial skill`: list, show and install the skills that teach a coding agent to use Seatrial.

- A skill is a folder with a SKILL.md, packaged with Seatrial; installing is copying it to where an agent looks for skills.
- Installing twice does nothing. A file that differs is replaced only with `--force`; all of them are looked at before any is written.
- Files that are not ours are left alone.
"""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

import seatrial

app = typer.Typer(
    rich_markup_mode=None,
    add_completion=False,
    help="List, show and install skills: short guides by which coding agents use Seatrial.",
    no_args_is_help=True,
)

SKILLS = Path(seatrial.__file__).parent / "skills"
GUIDE = "SKILL.md"
PLACES = (".claude", ".agents")
"""Folders of a project in which agents look for `skills`, the preferred one first."""

Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


class State(StrEnum):
    """What an installation did to a skill."""

    INSTALLED = "installed"
    REPLACED = "replaced"
    UNCHANGED = "unchanged"


@app.command("list")
def list_(as_json: Json = False) -> None:
    """List the skills that come with Seatrial: name and description."""
    known = {name: front_matter((folder / GUIDE).read_text(encoding="utf-8")) for name, folder in skills().items()}
    if as_json:
        _print_json([{**matter, "path": str(SKILLS / name)} for name, matter in known.items()])
        return
    for name, matter in known.items():
        typer.echo(f"{name}\t{matter['description']}")


@app.command()
def show(name: Annotated[str, typer.Argument(help="The skill, as `seatrial skill list` names it.")]) -> None:
    """Print a skill as it would be installed."""
    typer.echo((_find(name) / GUIDE).read_text(encoding="utf-8"), nl=False)


@app.command()
def install(
    names: Annotated[list[str] | None, typer.Argument(metavar="[NAME]...", help="Skills to install. Default: all of them.")] = None,
    to: Annotated[Path | None, typer.Option("--to", metavar="DIR", help="Directory of skills. Default: that of this project.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace files that differ.")] = False,
    as_json: Json = False,
) -> None:
    """Copy skills to where coding agents look for them: .claude/skills (or .agents/skills) of this project, or --to DIR."""
    from seatrial.core.errors import UserError
    from seatrial.core.files import write_bytes

    target = to.absolute() if to else default_target(Path.cwd(), Path.home())
    done: dict[str, State] = {}
    writing: dict[Path, bytes] = {}
    differing: list[Path] = []
    for name in dict.fromkeys(names or skills()):
        absent, different = _compare(_find(name), target / name)
        done[name] = State.REPLACED if different else State.INSTALLED if absent else State.UNCHANGED
        differing += different
        writing |= absent | different
    if differing and not force:
        raise UserError(
            f"edited here, or installed by another version of Seatrial: {', '.join(map(str, differing))}; nothing was written",
            "keep what you need of it, then replace it with --force",
        )
    for path, content in writing.items():
        write_bytes(path, content)
    if as_json:
        _print_json([{"name": name, "path": str(target / name), "state": state.value} for name, state in done.items()])
        return
    for name, state in done.items():
        typer.echo(f"{name}: {'already there' if state is State.UNCHANGED else state.value}: {target / name}")


def skills() -> dict[str, Path]:
    """The packaged skills: their folders by name."""
    return {guide.parent.name: guide.parent for guide in sorted(SKILLS.glob(f"*/{GUIDE}"))}


def front_matter(text: str) -> dict[str, str]:
    """The `key: value` lines between the first two lines of dashes: the part of YAML that our skills keep to."""
    head, *rest = text.split("---\n", 2)
    if head or len(rest) != 2:
        raise ValueError("no front matter: the text must begin with a line ---, keys, and another line ---")
    pairs = (line.partition(": ") for line in rest[0].splitlines())
    return {key: value.strip() for key, _, value in pairs}


def default_target(start: Path, home: Path) -> Path:
    """The directory of skills of the project that `start` is in: one that is there already, else below the folder that is.

    A home directory is no project for having agents' folders: everybody's has them, and a skill there would be for everything.
    """
    folders = (start.absolute(), *start.absolute().parents)
    projects = (folder for folder in folders if any((folder / mark).exists() for mark in (".git", *(PLACES if folder != home else ()))))
    root = next(projects, start.absolute())
    choices = [root / place / "skills" for place in PLACES]
    there = [path for path in choices if path.is_dir()] or [path for path in choices if path.parent.is_dir()]
    return (there or choices)[0]


def _find(name: str) -> Path:
    """The folder of a packaged skill."""
    known = skills()
    if name not in known:
        from seatrial.core.errors import UserError

        raise UserError(f"no skill is called {name!r}; known: {', '.join(known)}", "name a known one; `seatrial skill list` describes them")
    return known[name]


def _compare(source: Path, target: Path) -> tuple[dict[Path, bytes], dict[Path, bytes]]:
    """What is to be written: files that are absent at the target, and files that differ there."""
    absent: dict[Path, bytes] = {}
    different: dict[Path, bytes] = {}
    for path in sorted(path for path in source.rglob("*") if path.is_file()):
        place, content = target / path.relative_to(source), path.read_bytes()
        there = _read(place)
        if there is None:
            absent[place] = content
        elif there != content:
            different[place] = content
    return absent, different


def _read(place: Path) -> bytes | None:
    """What is installed there; None when nothing is. A file where a directory must be, or the reverse, is an error."""
    from seatrial.core.errors import UserError
    from seatrial.core.guarded import read_file

    try:
        return read_file(place)
    except FileNotFoundError:
        return None
    except NotADirectoryError:
        wrong = next(folder for folder in place.parents if folder.exists())
        raise UserError(f"{wrong}: is a file, not a directory", "name a directory with --to, or move that file away") from None
    except OSError as error:
        raise UserError(f"{place}: cannot read: {error.strerror}", "name another directory with --to, or make this one readable") from error


def _print_json(value: Any) -> None:
    typer.echo(json.dumps(value, indent=2, ensure_ascii=False))
