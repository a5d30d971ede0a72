"""The shipped schema of probe.json is that of its types. SEATRIAL_UPDATE_GOLDEN=1 writes it anew."""

from __future__ import annotations

import json
import os

import jsonschema  # type: ignore[import-untyped]
import pytest

from seatrial.probes import refit_run


def test_the_shipped_schema_is_that_of_the_types() -> None:
    if os.environ.get("SEATRIAL_UPDATE_GOLDEN") == "1":
        refit_run.write_schemas()
    assert {path.name: path.read_text() for path in refit_run.DIRECTORY.iterdir()} == refit_run.schemas()
    for text in refit_run.schemas().values():
        jsonschema.Draft202012Validator.check_schema(json.loads(text))


def test_it_refuses_what_is_no_probe() -> None:
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"probe": "refit"}, json.loads(refit_run.schemas()["probe-refit.schema.json"]))
