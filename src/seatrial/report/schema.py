"""The JSON Schemas of trial.json and report.json, generated from the types that write them.

The files under `schemas/` are shipped for consumers; a test holds them equal to what is generated here.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

from seatrial.files import write_text
from seatrial.model.record import SCHEMA_VERSION, TRIAL_VERSION, Record, Report, Trial

DIRECTORY = Path(__file__).parent / "schemas"
_KINDS: dict[str, type[Record]] = {"report": Report, "trial": Trial}


def schemas() -> dict[str, str]:
    """The text of every shipped schema, by file name."""
    return {f"{name}.schema.json": schema_text(name, kind, version=TRIAL_VERSION) for name, kind in _KINDS.items()}


def write_schemas(directory: Path = DIRECTORY) -> None:
    """Write the shipped schemas anew, after a change of the types."""
    for name, text in schemas().items():
        write_text(directory / name, text)


def schema_text(
    name: str, kind: type[Record], mode: Literal["serialization", "validation"] = "serialization", version: int = SCHEMA_VERSION
) -> str:
    """The schema of a file; `validation` where keys that were not said may be absent."""
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "$id": f"urn:seatrial:{name}:{version}"}
    return json.dumps(head | kind.model_json_schema(mode=mode), indent=2, ensure_ascii=False) + "\n"
