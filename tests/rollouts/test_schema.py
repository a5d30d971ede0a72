"""The shipped schemas are those of the types, and files of a real campaign fit them. SEATRIAL_UPDATE_GOLDEN=1 writes them anew."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import pytest

from seatrial.rollouts import json_schemas
from tests.cli.command import inside
from tests.rollouts.served import halves, run_in_process, serving, write_rows
from tests.shipped_schemas import require_shipped


def fits(name: str, value: Any) -> None:
    shipped = json.loads((json_schemas.DIRECTORY / f"{name}.schema.json").read_text())
    jsonschema.validate(value, shipped, cls=jsonschema.Draft202012Validator)


def test_the_shipped_schemas_are_those_of_the_types() -> None:
    require_shipped(json_schemas)


def test_files_of_a_campaign_fit_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_in_process(monkeypatch)
    write_rows(tmp_path / "rows.jsonl", ["[[status=400]]", *halves(3)])
    flags = ("--input", "rows.jsonl", "--verifier", "choice", "--set", "requests.concurrency=1", "--out", "c")
    with serving() as stub:
        url = ("--url", stub.url, "--set", "failures.max_count=0")
        assert inside("rollouts", "start", *flags, *url, cwd=tmp_path).code == 99
        fits("stop", json.loads((tmp_path / "c/stop.json").read_text()))
        assert inside("rollouts", "resume", "c", "--set", "failures.max_count=9", cwd=tmp_path).code == 0
    for path in ("campaign.json", "manifest.json", "merged/merge.json", "profile/profile.json", "rounds/0001/plan.json"):
        fits(Path(path).stem, json.loads((tmp_path / "c" / path).read_text()))
    for state in (tmp_path / "c/shards").glob("*/state-*.json"):
        fits("state", json.loads(state.read_text()))
    fits("status", json.loads(inside("rollouts", "status", "c", "--json", cwd=tmp_path).out))
    with pytest.raises(jsonschema.ValidationError):
        fits("status", {"name": "x"})
