"""The shipped schema of probe.json is that of its types. SEATRIAL_UPDATE_GOLDEN=1 writes it anew."""

from __future__ import annotations

import json

import jsonschema  # type: ignore[import-untyped]
import pytest

from seatrial.probes import refit_run
from tests.shipped_schemas import require_shipped


def test_the_shipped_schema_is_that_of_the_types() -> None:
    require_shipped(refit_run)


def test_it_refuses_what_is_no_probe() -> None:
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"probe": "refit"}, json.loads(refit_run.schemas()["probe-refit.schema.json"]))
