"""The shipped schemas are those of the types. SEATRIAL_UPDATE_GOLDEN=1 writes them anew."""

from __future__ import annotations

import json
import os

import jsonschema  # type: ignore[import-untyped]
import pytest

from seatrial.bisect import bisect_report


def test_the_shipped_schemas_are_those_of_the_types() -> None:
    if os.environ.get("SEATRIAL_UPDATE_GOLDEN") == "1":
        bisect_report.write_schemas()
    assert {path.name: path.read_text() for path in bisect_report.DIRECTORY.iterdir()} == bisect_report.schemas()
    for text in bisect_report.schemas().values():
        jsonschema.Draft202012Validator.check_schema(json.loads(text))


def test_they_refuse_what_is_no_run() -> None:
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"mark": "broken"}, json.loads(bisect_report.schemas()["bisect-run.schema.json"]))
