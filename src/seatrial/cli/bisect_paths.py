"""Places that are named to `seatrial bisect`: refused before anything runs when they cannot mean what was meant."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from seatrial.regress.bisect.record import Repo

_OF_A_RUN = ("tree", "output", "checkpoints")
_PLACEHOLDER = re.compile(r"\{(\w+)\}")


def check_metrics(text: str | None) -> None:
    """Refuse a place outside of the files of one run: runs that share it would be judged by each other's metrics."""
    from seatrial.model.errors import UserError

    if text is None:
        return
    fix = f"a path in the tree, or one that begins with {{{'}, {'.join(_OF_A_RUN)}}}"
    strange = [name for name in _PLACEHOLDER.findall(text) if name not in _OF_A_RUN]
    if strange:
        raise UserError(f"--metrics {text}: {{{strange[0]}}} is no place of a run", fix)
    if not text or text.startswith(("/", "~")):
        raise UserError(f"--metrics {text}: not in the files of a run, and all runs would share it", fix)
    if ".." in text.split("/"):
        raise UserError(f"--metrics {text}: leads out of the files of a run", fix)


def check_places(words: Sequence[str], names: Sequence[str]) -> None:
    """Refuse a place without a name, or for the first repository, which stands first in `names`."""
    from seatrial.model.errors import UserError

    others = ", ".join(names[1:]) or "none"
    for word in words:
        name, separator, value = word.partition("=")
        if not separator or not value:
            raise UserError(f"--place {word}: takes the name of a repository and a path", "--place NAME=PATH")
        if name == names[0]:
            raise UserError(f"--place {word}: {name} is the first repository, whose tree holds the others", f"further ones are: {others}")


def check_distinct(repos: Sequence[Repo]) -> None:
    """Refuse two repositories at one place."""
    from seatrial.model.errors import UserError

    taken: dict[str, str] = {}
    for repo in repos:
        place = posixpath.normpath(repo.place)
        if place in taken:
            raise UserError(f"{taken[place]} and {repo.name} are to lie at the same place, {place}", f"--place {repo.name}=PATH")
        taken[place] = repo.name
