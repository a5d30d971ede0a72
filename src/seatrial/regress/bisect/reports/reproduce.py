"""Shell lines that repeat one point by hand, in a worktree of the reader's own.

- They do what a step does, in its order: tree, submodules, other repositories, patches, edits, environment, command; then the check.
- A commit that was found inside of a submodule is put there; without that the lines would show the move, not its cause.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

from seatrial.regress.bisect.record import PLACEHOLDERS, EnvironmentPlan, Pin, Plan, Point, Repo, Standing
from seatrial.regress.bisect.running.steps import tree_variable

_HOLES = re.compile("{(" + "|".join(PLACEHOLDERS) + ")}")
_MADE = ("output", "checkpoints")
"""Directories that a step has before its command runs."""


def commands(plan: Plan, point: Point, patches: Path, inside: Sequence[Standing] = ()) -> tuple[str, ...]:
    """The lines. `patches`: where the patches lie that are files; `inside`: what was found out about submodules that the point moves."""
    pins = {pin.repo: pin for pin in point.pins}
    main = plan.repos[0]
    place = f"../{main.name}-{pins[main.name].commit[:12]}"
    lines = [f"cd {shlex.quote(main.path)}", shlex.join(["git", "worktree", "add", "--detach", place, pins[main.name].commit])]
    lines += [f"cd {shlex.quote(place)}", "git submodule update --init --recursive", *_inside(inside)]
    for repo in plan.repos[1:]:
        lines += _further(repo, pins[repo.name])
    for patch in plan.patches:
        file = patches / patch.source
        apply = ["git", "apply", "--3way", str(file)] if file.is_file() else ["git", "cherry-pick", "--no-commit", patch.source]
        lines.append(shlex.join(apply))
    lines += [shlex.join(["sed", "-i", "-e", edit.clauses, "--", edit.file]) for edit in plan.edits]
    return (*lines, *_environment(plan.environment), *_command(plan, point.commit))


def _inside(standings: Sequence[Standing]) -> Iterator[str]:
    """The commit that was found in a submodule, and those found further inside. Of two submodules that are guilty each by itself only
    the first is moved: the other was never tried together with it."""
    found = [one for one in standings if one.commit]
    for one in found:
        if one is found[0] or one.repo.startswith(f"{found[0].repo}/"):
            place = shlex.quote(one.repo)
            yield f"git -C {place} checkout --detach {one.commit} && git -C {place} submodule update --init --recursive"


def _further(repo: Repo, pin: Pin) -> Iterator[str]:
    """A further repository at its place in, or beside, the worktree of the first."""
    place = shlex.quote(pin.place)
    if not pin.place.startswith("../"):
        yield f"rm -rf {place}"  # the submodule as it is recorded
    yield f"git init --quiet {place} && git -C {place} fetch {shlex.quote(repo.path)} {pin.commit}"
    yield f"git -C {place} checkout --detach {pin.commit} && git -C {place} submodule update --init --recursive"
    yield f'export {tree_variable(repo.name)}="$PWD"/{place} PYTHONPATH="$PWD"/{place}/src:"$PWD"/{place}:"$PYTHONPATH"'


def _environment(plan: EnvironmentPlan) -> Iterator[str]:
    if plan.kind == "pip":
        yield f"python{plan.python} -m venv .venv && . .venv/bin/activate && pip install -r {shlex.quote(plan.lock)}"
    elif plan.kind == "uv":
        yield f"uv sync --frozen{f' --python {plan.python}' if plan.python else ''} && . .venv/bin/activate"
    if plan.packages and plan.kind != "none":
        pip = "pip" if plan.kind == "pip" else "uv pip"
        yield f"{pip} freeze > .venv/present.txt && {pip} install -c .venv/present.txt {shlex.join(plan.packages)}"
    if plan.build:
        yield shlex.join(plan.build)


def _command(plan: Plan, commit: str) -> Iterator[str]:
    """Places, variables, the command, and the check on what it leaves."""
    filled = {"tree": ".", "output": "output", "checkpoints": "checkpoints", "commit": commit, "python": "python"}

    def fill(text: str) -> str:
        return _HOLES.sub(lambda hole: filled[hole[1]], text)

    words = (*plan.command, *plan.extra)
    told = "\n".join((*words, *plan.variables.values()))
    metrics = plan.metrics if plan.check else ""
    # A command that is not told where its metrics are to lie knows it by the variable.
    by_name = [name for name in _MADE if f"SEATRIAL_{name.upper()}" in told or (f"{{{name}}}" in metrics and f"{{{name}}}" not in told)]
    if made := [name for name in _MADE if name in by_name or f"{{{name}}}" in told or f"{{{name}}}" in metrics]:
        yield f"mkdir -p {' '.join(made)}"
    yield from (f'export SEATRIAL_{name.upper()}="$PWD"/{name}' for name in by_name)
    yield from (f"export {name}={shlex.quote(fill(value))}" for name, value in plan.variables.items())
    yield shlex.join([*(["seatrial", "run"] if plan.trial else []), *(fill(word) for word in words)])
    if plan.check:
        yield shlex.join(["seatrial", "check", fill(metrics), plan.check])
