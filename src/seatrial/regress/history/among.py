"""The runs that --project, --name, --machine, --kind and --branch choose.

- Options that choose none are an error that says what there is: silence would read as a result.
- A run that was named by its number must be what the options say, too.
"""

from __future__ import annotations

from seatrial.model.errors import UserError
from seatrial.regress.history.record import Run
from seatrial.regress.history.store import Store

_SHOWN = 5


def require(
    store: Store,
    *,
    project: str | None = None,
    name: str | None = None,
    machine: str | None = None,
    kind: str | None = None,
    branch: str | None = None,
) -> None:
    """Raise a UserError unless a run is of all that is given; it names the first option that leaves none, and what the runs have."""
    before: dict[str, str] = {}
    given: dict[str, str | None] = {**_given(project, name, machine), "kind": kind, "branch": branch}
    for option, word in given.items():
        if word is None:
            continue
        there = store.distinct(option, before)
        if word not in there:
            where = f"those of {_told(before)}" if before else "all"
            fix = f"--{option} takes one of: {_listed(there)}" if there else "import runs first: seatrial history import PATH"
            raise UserError(f"--{option} {word}: no run of this {option} among {where} in {store.path}", fix)
        before[option] = word


def require_of(run: Run, *, project: str | None = None, name: str | None = None, machine: str | None = None) -> None:
    """Raise a UserError unless this run is of all that is given."""
    for option, word in _given(project, name, machine).items():
        own = getattr(run, option)
        if own != word:
            raise UserError(f"--{option} {word}: run {run.id} is of {option} {own!r}", f"leave --{option} out, or name another run")


def options(*, project: str | None = None, name: str | None = None, machine: str | None = None) -> str:
    """What is given, as a person writes it; empty where nothing is."""
    return _told(_given(project, name, machine))


def none_has(what: str, *, project: str | None = None, name: str | None = None, machine: str | None = None) -> str:
    """The sentence for metrics that no run has among those that are chosen."""
    given = options(project=project, name=name, machine=machine)
    return f"no run has {what}" + (f" among those of {given}" if given else "")


def _told(given: dict[str, str]) -> str:
    return " ".join(f"--{option} {word}" for option, word in given.items())


def _given(project: str | None, name: str | None, machine: str | None) -> dict[str, str]:
    """Options and their words, in the order in which they are asked for; an empty word is one, too."""
    words = {"project": project, "name": name, "machine": machine}
    return {option: word for option, word in words.items() if word is not None}


def _listed(words: list[str]) -> str:
    return ", ".join(map(repr, words[:_SHOWN])) + (f", … ({len(words)} in all)" if len(words) > _SHOWN else "")
