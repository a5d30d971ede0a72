"""What a resumed trial must share with its beginning: the change, and the environment of the loop. Anything else is refused."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from seatrial.evidence.environment import compare
from seatrial.evidence.redact import Redactor
from seatrial.evidence.repos import differs
from seatrial.model.errors import UserError
from seatrial.model.record import EnvironmentRecord, RepoState


def refuse_other_change(recorded: Sequence[RepoState], path: Path, redactor: Redactor) -> None:
    """The change must be what the stored levels ran with."""
    for repo in recorded:
        what = differs(repo, path / "evidence", redactor)
        if what:
            raise UserError(
                f"{repo.path}: {what} since this trial began",
                f"restore that state (see {path / 'evidence'}), or start a new trial",
            )


def refuse_other_environment(old: EnvironmentRecord | None, new: EnvironmentRecord) -> None:
    """A resumed trial must run in the environment it began in."""
    if old is None or old.fingerprint == new.fingerprint:
        return
    differences = "; ".join(compare(old, new)[:5])
    raise UserError(
        f"the loop's environment is not the one this trial began in: {differences}", "rebuild that environment, or start a new trial"
    )
