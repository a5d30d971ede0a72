"""The JSON Schemas of bisect.json, of a row of runs.jsonl and of report.json, generated from the types that write them; a test holds the
shipped files equal to them."""

from __future__ import annotations

from pathlib import Path

from seatrial.files import write_text
from seatrial.model.record import Record
from seatrial.regress.bisect.record import Plan, Run
from seatrial.regress.bisect.reports.report import BisectReport
from seatrial.report.schema import schema_text

DIRECTORY = Path(__file__).parent / "schemas"


def schemas() -> dict[str, str]:
    """The text of every shipped schema, by file name."""
    kinds: dict[str, type[Record]] = {"bisect": Plan, "bisect-run": Run, "bisect-report": BisectReport}
    return {f"{name}.schema.json": schema_text(name, kind) for name, kind in kinds.items()}


def write_schemas(directory: Path = DIRECTORY) -> None:
    """Write the shipped schemas anew, after a change of the types."""
    for name, text in schemas().items():
        write_text(directory / name, text)
