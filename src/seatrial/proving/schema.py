"""The JSON Schema of probe.json, generated from the types that write it; a test holds the shipped file equal to it."""

from __future__ import annotations

from pathlib import Path

from seatrial.files import write_text
from seatrial.proving.bridge.record import Probe as BridgeProbe
from seatrial.proving.record import Probe
from seatrial.report.schema import schema_text

DIRECTORY = Path(__file__).parent / "schemas"


def schemas() -> dict[str, str]:
    """The text of every shipped schema, by file name."""
    return {
        "probe-refit.schema.json": schema_text("probe-refit", Probe),
        "probe-bridge.schema.json": schema_text("probe-bridge", BridgeProbe),
    }


def write_schemas(directory: Path = DIRECTORY) -> None:
    """Write the shipped schemas anew, after a change of the types."""
    for name, text in schemas().items():
        write_text(directory / name, text)
