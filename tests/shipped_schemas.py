"""What the tests of all shipped JSON Schemas share."""

from __future__ import annotations

import json
import os
from types import ModuleType

import jsonschema  # type: ignore[import-untyped]


def require_shipped(module: ModuleType) -> None:
    """The files in `DIRECTORY` of a module are what its `schemas` generates. SEATRIAL_UPDATE_GOLDEN=1 writes them anew."""
    if os.environ.get("SEATRIAL_UPDATE_GOLDEN") == "1":
        for name, text in module.schemas().items():
            (module.DIRECTORY / name).write_text(text, encoding="utf-8")
    assert {path.name: path.read_text() for path in module.DIRECTORY.iterdir()} == module.schemas()
    for text in module.schemas().values():
        jsonschema.Draft202012Validator.check_schema(json.loads(text))
