"""The reports of every outcome, byte for byte. SEATRIAL_UPDATE_GOLDEN=1 writes the golden files and schemas anew."""

from __future__ import annotations

import json
import os
import xml.etree.ElementTree as ET
from pathlib import Path

import jsonschema  # type: ignore[import-untyped]
import pytest

from seatrial.core.records import Report
from seatrial.report import build
from seatrial.report.build import HTML, JSON, JUNIT, SUMMARY, write_reports
from tests.report.trials import LADDER, TITLE, TRIALS, write_run
from tests.shipped_schemas import require_shipped

GOLDEN = Path(__file__).parent.parent / "data" / "report"
UPDATE = os.environ.get("SEATRIAL_UPDATE_GOLDEN") == "1"
HEADINGS = ("Result: ", "Requested coverage: ", "Model: ", "Deliverables:", "Evidence:", "Limitations:", "Follow-ups:")


def write(run_dir: Path, name: str) -> Report:
    """Write the four reports of an outcome without metrics."""
    made = TRIALS[name]()
    write_run(run_dir, made)
    return write_reports(run_dir, made, TITLE, LADDER, {})


@pytest.mark.parametrize("file", [SUMMARY, JSON, JUNIT])
@pytest.mark.parametrize("name", TRIALS)
def test_report_equals_golden_file(tmp_path: Path, name: str, file: str) -> None:
    write(tmp_path, name)
    text, golden = (tmp_path / file).read_text(), GOLDEN / name / file
    if UPDATE:
        golden.parent.mkdir(parents=True, exist_ok=True)
        golden.write_text(text)
    assert text == golden.read_text()


@pytest.mark.parametrize("name", TRIALS)
def test_summary_has_the_fixed_format(tmp_path: Path, name: str) -> None:
    report = write(tmp_path, name)
    lines = (tmp_path / SUMMARY).read_text().splitlines()
    assert lines[0].startswith(f"Result: {report.result} - ")
    heads = [line for line in lines if line and not line.startswith("- ")]
    assert len(heads) == len(HEADINGS)
    assert all(line.startswith(heading) for line, heading in zip(heads, HEADINGS, strict=True))
    assert len([line for line in lines if line.startswith("- ")]) >= len(report.deliverables) + len(report.evidence) + 2


@pytest.mark.parametrize("name", TRIALS)
def test_report_json_fits_the_shipped_schemas_and_reads_back(tmp_path: Path, name: str) -> None:
    report = write(tmp_path, name)
    data = json.loads((tmp_path / JSON).read_text())
    for file, value in (("report.schema.json", data), ("trial.schema.json", data["trial"])):
        shipped = json.loads((build.DIRECTORY / file).read_text())
        jsonschema.Draft202012Validator.check_schema(shipped)
        jsonschema.validate(value, shipped, cls=jsonschema.Draft202012Validator)
    assert Report.model_validate(data) == report


def test_schema_refuses_unknown_keys_and_verdicts(tmp_path: Path) -> None:
    write(tmp_path, "passed")
    shipped = json.loads((build.DIRECTORY / "report.schema.json").read_text())
    for change in ({"surprise": 1}, {"result": "Passed"}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(json.loads((tmp_path / JSON).read_text()) | change, shipped)


def test_shipped_schemas_are_the_generated_ones() -> None:
    require_shipped(build)


def test_write_leaves_four_reports_and_no_temporary_file(tmp_path: Path) -> None:
    write(tmp_path, "passed")
    assert {path.name for path in tmp_path.iterdir()} == {"levels", SUMMARY, JSON, JUNIT, HTML}
    assert ET.parse(tmp_path / JUNIT).getroot().tag == "testsuites"
