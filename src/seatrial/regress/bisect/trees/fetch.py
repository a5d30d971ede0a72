"""Getting a commit from another repository into a store, with its whole history.

- Nothing is written anywhere but into that store; there is a deadline, and nothing of the fetch is left running.
- A remote that no longer has the commit is told apart from one that cannot be reached.
"""

from __future__ import annotations

import re
import uuid
from pathlib import Path

from seatrial.evidence.git import command_line, commit_of, environment
from seatrial.evidence.redact import Redactor
from seatrial.evidence.repos import without_credentials
from seatrial.files import read_text
from seatrial.launch.interrupt import check_stop
from seatrial.launch.linelog import STAMP_LENGTH
from seatrial.launch.process import ProcessSpec, run

DEADLINE_S = 900.0
_OPTIONS = ("--no-tags", "--no-write-fetch-head", "--no-auto-maintenance", "--no-recurse-submodules")
_GONE = re.compile(r"not our ref|unadvertised object|couldn't find remote ref|did not send all necessary objects")


class FetchFailed(Exception):
    """A commit that could not be fetched."""

    def __init__(self, message: str, *, lost: bool) -> None:
        super().__init__(message)
        self.message = message
        self.lost = lost
        """The remote answered, and does not have it: trying again is of no use."""


def fetch(git_dir: Path, url: str, commit: str, *, unshallow: bool, deadline_s: float = DEADLINE_S) -> None:
    """Bring `commit` from `url` into the store, and what a shallow clone cut off if told to; else FetchFailed."""
    try:
        _fetch(git_dir, url, (commit,), ("--unshallow",) if unshallow else (), deadline_s)
    except FetchFailed as error:
        if not error.lost or "unadvertised" not in error.message:
            raise
        # An old server gives only what it names: then everything that it names.
        _fetch(git_dir, url, ("+refs/heads/*:refs/fetched/heads/*", "+refs/tags/*:refs/fetched/tags/*"), (), deadline_s)
    if commit_of(git_dir, commit) is None:
        raise FetchFailed(f"{without_credentials(url)} does not have {commit}", lost=True)


def _fetch(git_dir: Path, url: str, wanted: tuple[str, ...], options: tuple[str, ...], deadline_s: float) -> None:
    log = git_dir / "fetch.log"
    log.unlink(missing_ok=True)
    # Our own fetch of a local repository is what the user asked for; git forbids it in submodules only.
    words = command_line(git_dir, "-c", "protocol.file.allow=always", "fetch", *_OPTIONS, *options, "--", url, *wanted)
    env = environment(git_dir, own=True)
    spec = ProcessSpec(
        argv=tuple(words),
        env=env,
        cwd=git_dir,
        log=log,
        run_id=f"fetch-{uuid.uuid4().hex[:12]}",
        deadline_s=deadline_s,
        stall_s=deadline_s,
        line_filter=Redactor(env).lines().line,
    )
    outcome = run(spec)
    if outcome.ended == "interrupted":
        check_stop()
    if outcome.ended != "exited":
        raise FetchFailed(f"fetching from {without_credentials(url)} did not end within {deadline_s:.0f} s", lost=False)
    if outcome.exit_code:
        said = [line[STAMP_LENGTH:].strip() for line in read_text(log).splitlines()]
        told = "; ".join(line for line in said if line.startswith(("fatal:", "error:", "remote:"))) or (said or ["no message"])[-1]
        raise FetchFailed(f"fetching from {without_credentials(url)}: {told}", lost=bool(_GONE.search(told)))
