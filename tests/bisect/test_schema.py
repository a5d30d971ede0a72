"""The shipped schemas are those of the types. SEATRIAL_UPDATE_GOLDEN=1 writes them anew."""

from __future__ import annotations

import json

import jsonschema  # type: ignore[import-untyped]
import pytest

from seatrial.bisect import bisect_report
from tests.shipped_schemas import require_shipped


def test_the_shipped_schemas_are_those_of_the_types() -> None:
    require_shipped(bisect_report)


def test_they_refuse_what_is_no_run() -> None:
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"mark": "broken"}, json.loads(bisect_report.schemas()["bisect-run.schema.json"]))
