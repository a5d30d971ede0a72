"""One writer at a time in a directory (a shard, the merge), by numbered leases that fence off whoever is late.

- A claim is a new file `lease-NNNN.json`, one more than any before, made by a link: of two who try, exactly one gets it, on network
  file systems too. The highest number holds the lease. Nobody writes into another's file, so a late renewal undoes nothing.
- It is taken over at once when its holder released it, or is known to be gone (same machine, no such process); else after nothing of
  it changed for STALE_S as seen by the watcher's own monotonic clock. No two clocks are compared, and wall clocks never matter.
- A holder that was taken over learns so at its next `renew` (FencedError) and must stop. What it writes until then lies in its own
  file: a unit that it settles twice has one winner by rule, so that is harmless.
- Lease files are never deleted here: numbers must not come twice.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

from pydantic import ValidationError

from seatrial.files import write_error, write_json
from seatrial.launch.interrupt import check_stop
from seatrial.model.errors import BlockedError
from seatrial.model.guarded import read_file
from seatrial.model.record import Record
from seatrial.model.verdict import Boundary
from seatrial.rollouts.journal.attempt import attempt_files
from seatrial.rollouts.journal.holder import Holder

RENEW_S = 5.0
"""`renew` writes at most so often."""
STALE_S = 60.0
"""So long must nothing change before a holder elsewhere counts as gone."""

_POLL_S = 0.2
_NAME = re.compile(r"lease-(\d{4,})\.json")


class FencedError(Exception):
    """A newer attempt holds the lease: stop; its results count."""


class HeldError(BlockedError):
    """Somebody else holds the lease, and is alive as far as can be known."""


class LeaseFile(Record):
    """lease-NNNN.json."""

    holder: Holder
    counter: int = 0
    """Changes while the holder lives."""
    released: bool = False


class Lease:
    """The right to write, until somebody with a higher number has it."""

    def __init__(self, directory: Path, holder: Holder, clock: Callable[[], float]) -> None:
        self.directory = directory
        self.holder = holder
        """With its fencing number."""
        self._clock = clock
        self._counter = 0
        self._renewed = clock()

    @classmethod
    def acquire(
        cls,
        directory: Path,
        holder: Holder,
        wait_s: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> Self:
        """Get the lease; waits at most `wait_s` for its holder and then raises a HeldError. Less than STALE_S finds no dead node."""
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise write_error(directory, error) from error
        began = since = clock()
        seen: tuple[int, bytes | None] | None = None
        while True:
            number = newest(directory)
            now, content = clock(), _content(directory, number)
            if (number, content) != seen:
                seen, since = (number, content), now
            if _free(content) or now - since >= STALE_S:
                claimed = holder.model_copy(update={"number": number + 1})
                if _claim(directory, claimed):
                    return cls(directory, claimed, clock)
            if now - began >= wait_s:
                raise _held(directory, content, wait_s)
            check_stop()
            sleep(_POLL_S)

    def renew(self) -> None:
        """Say that we live; raises a FencedError when a newer attempt holds the lease. Cheap: call it every second or two."""
        self.check()
        if self._clock() - self._renewed >= RENEW_S:
            self._write(released=False)

    def check(self) -> None:
        """Raise a FencedError when a newer attempt holds the lease."""
        if (number := newest(self.directory)) > self.holder.number:
            raise FencedError(f"{self.directory}: attempt {number} holds the lease, attempt {self.holder.number} must stop")

    def release(self) -> None:
        """Let the next one have it at once."""
        self._write(released=True)

    def _write(self, *, released: bool) -> None:
        self._counter += 1
        self._renewed = self._clock()
        write_json(_path(self.directory, self.holder.number), LeaseFile(holder=self.holder, counter=self._counter, released=released))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.release()


def newest(directory: Path) -> int:
    """The highest number that any lease or attempt in a directory has; 0 when there is none."""
    leases = [int(match[1]) for path in directory.iterdir() if (match := _NAME.fullmatch(path.name))]
    return max([*leases, *(file.number for file in attempt_files(directory))], default=0)


def holder_of(directory: Path) -> LeaseFile | None:
    """The newest lease, for whoever shows it; None when there is none that can be read."""
    return _parsed(_content(directory, newest(directory))) if directory.is_dir() else None


def _path(directory: Path, number: int) -> Path:
    return directory / f"lease-{number:04d}.json"


def _content(directory: Path, number: int) -> bytes | None:
    try:
        return read_file(_path(directory, number))
    except FileNotFoundError:
        return None


def _parsed(content: bytes | None) -> LeaseFile | None:
    try:
        return None if content is None else LeaseFile.model_validate_json(content)
    except ValidationError:
        return None


def _free(content: bytes | None) -> bool:
    """Whether the lease can be had at once. A file that cannot be read may be that of somebody who lives: it is watched."""
    if content is None:
        return True
    found = _parsed(content)
    return found is not None and (found.released or found.holder.gone())


def _claim(directory: Path, holder: Holder) -> bool:
    """Make the lease file of that number; False when somebody else was faster."""
    path, temporary = _path(directory, holder.number), directory / f".lease-{holder.token}"
    write_json(temporary, LeaseFile(holder=holder))
    try:
        path.hardlink_to(temporary)
    except FileExistsError:
        # A network file system may repeat a link whose answer was lost: then the file that exists is ours.
        return path.samefile(temporary)
    except OSError as error:
        raise write_error(path, error) from error
    finally:
        temporary.unlink(missing_ok=True)
    return True


def _held(directory: Path, content: bytes | None, wait_s: float) -> HeldError:
    found = _parsed(content)
    who = str(found.holder) if found else "somebody whose lease cannot be read"
    message = f"{directory}: {who} holds the lease and is alive as far as can be known; waited {wait_s:.0f} s"
    return HeldError(Boundary.CLUSTER, message, f"wait for it or end it; a holder on a lost node is taken over after {STALE_S:.0f} s")
