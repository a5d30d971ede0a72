"""The winning rollouts of a campaign as columns: some numbers per unit, no objects, so that millions of units fit in memory.

- Read straight from the journal, in one pass, heads only; no merge is needed, and a campaign may still be running.
- Which record wins is the scanner's to say, as it is for a merge: a rollout beats a failure, then the lowest attempt, then the lowest
  offset. A failure that is not final settles nothing.
- In a column of numbers NaN says that the unit has none; no record holds one.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from typing import Any

from seatrial.rollouts.journal.attempt import AttemptFile
from seatrial.rollouts.journal.scan import Scan, Scanner
from seatrial.rollouts.place import Place
from seatrial.rollouts.units import Units

MOST_METRICS = 64
"""Names beyond these are counted, not kept: a verifier that invents a name per row must not fill the memory."""
_MOST_NAMES = 256
_NAN = float("nan")


class Columns:
    """Per unit: its reward, answer, numbers, and how it ended. A `journal.scan.Winners`."""

    def __init__(self, units: int) -> None:
        self._units = units
        self.state = bytearray()
        """OWED, OK or FAILED, as the scanner says in the end."""
        self.reward = self._empty()
        self.answer = array("q", bytes(8 * units))
        """Equal for equal answers; 0 for none. A 64-bit hash: within the rollouts of a task two answers do not meet by chance."""
        self.input_tokens = self._empty()
        self.output_tokens = self._empty()
        self.turns = self._empty()
        self.latency_s = self._empty()
        self.metrics: dict[str, array[float]] = {}
        self.metrics_left_out = 0
        self.finish = bytearray(units)
        self.finishes = [""]
        """What the numbers in `finish` stand for; 0 for what says nothing."""
        self.kind = bytearray(units)
        self.kinds = [""]
        """Classes of failures, in the same way."""

        self._ordered: dict[int, list[float]] = {}

    def _empty(self) -> array[float]:
        return array("d", [_NAN]) * self._units

    def put(self, unit: int, head: Mapping[str, Any], file: AttemptFile, offset: int, length: int) -> None:
        """The record that is the best of its unit so far; where it lies is of no interest here."""
        del file, offset, length
        get = head.get
        if head["outcome"] != "ok":
            self.kind[unit] = _code(self.kinds, get("kind", "unknown"))
            return
        self.kind[unit] = 0
        self.reward[unit] = head["reward"]
        if (answer := get("answer")) is not None:
            self.answer[unit] = hash(answer) or 1
        if (value := get("input_tokens")) is not None:
            self.input_tokens[unit] = value
        if (value := get("output_tokens")) is not None:
            self.output_tokens[unit] = value
        if (value := get("turns")) is not None:
            self.turns[unit] = value
        if (value := get("latency_s")) is not None:
            self.latency_s[unit] = value
        if (finish := get("finish")) is not None:
            self.finish[unit] = _code(self.finishes, finish)
        if metrics := get("metrics"):
            self._take_metrics(unit, metrics)

    def ordered(self, column: array[float]) -> list[float]:
        """All values of a column, sorted; the overall figures and the histograms share the work."""
        if id(column) not in self._ordered:
            self._ordered[id(column)] = sorted([value for value in column if value == value])
        return self._ordered[id(column)]

    def _take_metrics(self, unit: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            column = self.metrics.get(name)
            if column is None:
                if len(self.metrics) == MOST_METRICS:
                    self.metrics_left_out += 1
                    continue
                column = self.metrics[name] = self._empty()
            column[unit] = value


def read_columns(place: Place, units: Units) -> tuple[Columns, Scan]:
    """All winners of the journal, and what the scan says of the rest."""
    columns = Columns(units.total)
    scan = Scanner(place, units, columns).update()
    columns.state = scan.settled
    return columns, scan


def _code(names: list[str], name: str) -> int:
    """The number of a name. There are few; all that come too late for a number share the last one."""
    try:
        return names.index(name)
    except ValueError:
        if len(names) == _MOST_NAMES - 1:
            names.append("others")
        if len(names) == _MOST_NAMES:
            return _MOST_NAMES - 1
        if not isinstance(name, str):
            raise TypeError(f"{name!r} is no text") from None
        names.append(name)
        return len(names) - 1
