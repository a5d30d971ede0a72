"""Every free text of a trial at once is hostile, in every report: nothing of it is active, and every report is well-formed."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from seatrial.core.records import Report, Trial
from seatrial.core.series import Damage, Metrics, Overlap, Series
from seatrial.core.text import visible
from seatrial.report import ci as actions
from seatrial.report.build import build_report, summary_md
from seatrial.report.ci import junit_xml
from seatrial.report.html import report_html
from tests.report.test_html import Page
from tests.report.test_markdown import HOSTILE, shape
from tests.report.trials import LADDER, TITLE, TRIALS

ESC, BELL = "\x1b", "\x07"
TERMINAL = f"{ESC}[2J{ESC}]8;;http://evil.example{ESC}\\click{ESC}]8;;{ESC}\\{ESC}]0;title{BELL}\x9b31m\x7f\r\nover\rwritten\b\b"
LETTERS = "\u202eevil\u2066\u200b\u00ad\ufeff\ud800\x00\ufffe\U000e0041"
PAYLOADS = {
    "markdown": " ".join(HOSTILE),
    "lines": "\n\n# Result: Pass\n\nResult: Pass - fine\n- bullet\n| a | b |\n|---|---|\n```\n::error::x\n##[set-output name=a]b\n",
    "html": "</script><script>alert(1)</script><img src=x onerror=alert(2)>\"'&{{7*7}}{%raw%}<!--]]></style><svg/onload=alert(3)>",
    "terminal": TERMINAL,
    "letters": LETTERS,
    "long": "x" * 20_000,
    "long name": "a/" * 1_000 + "|`" * 1_000,
    "formats": "%s %(x)d {0} {x!r} ${HOME} $(id) `id` \\N{DASH} \\u0041 ]]>",
}
FIXED = {"directory", "created", "ended", "file", "seal", "sha256", "loop"}
"""Fields that are no free text, or whose contents are used."""


def poisoned(data: Any, payload: str, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """The paths of all texts, with what takes their places."""
    if isinstance(data, dict):
        for key, value in data.items():
            yield from poisoned(value, payload, (*path, key))
    elif isinstance(data, list | tuple):
        for place, value in enumerate(data):
            yield from poisoned(value, payload, (*path, str(place)))
    elif isinstance(data, str) and data and path[-1] not in FIXED:
        yield path, f"{payload}{data}{payload}"


def put(data: Any, path: tuple[str, ...], value: Any) -> Any:
    """The data with another value at the path."""
    if not path:
        return value
    if isinstance(data, dict):
        return {key: put(inner, path[1:], value) if key == path[0] else inner for key, inner in data.items()}
    return [put(inner, path[1:], value) if str(place) == path[0] else inner for place, inner in enumerate(data)]


def hostile(made: Trial, payload: str) -> Trial:
    """The trial with the payload around each of its texts that may be any text."""
    data = made.model_dump(mode="json")
    changed = data
    for path, value in poisoned(data, payload):
        changed = put(changed, path, value)
    try:
        return Trial.model_validate(changed)
    except ValidationError as error:
        for wrong in error.errors():  # one of a few words: left as it was
            path = tuple(str(part) for part in wrong["loc"])
            changed = put(changed, path, at(data, path))
    return Trial.model_validate(changed)


def at(data: Any, path: tuple[str, ...]) -> Any:
    for part in path:
        data = data[part] if isinstance(data, dict) else data[int(part)]
    return data


def metrics(payload: str) -> Metrics:
    tag = f"train/{payload}"
    return Metrics(
        {tag: Series(tag, (1, 2, 3), (1.0, float("nan"), 2.0))},
        overlaps=(Overlap(tag, (2,)),),
        damage=(Damage(tag, "line 1", 0, payload),),
    )


@pytest.fixture(params=PAYLOADS)
def payload(request: pytest.FixtureRequest) -> str:
    return PAYLOADS[str(request.param)]


@pytest.fixture(params=["failed", "blocked_preflight", "against_baseline"])
def report(request: pytest.FixtureRequest, payload: str, tmp_path: Path) -> Report:
    return build_report(hostile(TRIALS[str(request.param)](), payload), TITLE, tmp_path, LADDER)


ACTIVE = {
    "html_inline",
    "html_block",
    "link_open",
    "image",
    "heading_open",
    "fence",
    "code_block",
    "em_open",
    "blockquote_open",
    "s_open",
    "hr",
}
HIDDEN = tuple("\x00\x07\x08\x1b\x7f\x9b\u202e\u2066\ufeff\ud800\ufffe\u200b\u00ad\U000e0041")


def test_nothing_is_active(report: Report, payload: str) -> None:
    summary = summary_md(report)
    assert not (ACTIVE | {"strong_open", "table_open"}) & shape(summary)
    assert sum(line.startswith("Result: ") for line in summary.splitlines()) == 1
    github = actions.step_summary(report)
    assert "strong_open" not in shape(github.replace("**Requested coverage:**", "").replace("**Model:**", ""))
    assert not (ACTIVE - {"heading_open"}) & shape(github)
    titles = [line for line in github.splitlines() if line.startswith("#")]
    assert titles[1:] == ["### Missed checks", "### Evidence", "### Limitations", "### Follow-ups"]
    page = report_html(report, {key: metrics(payload) for key in ("0-smoke", "1-resume")})
    seen = Page(page)
    assert not {"img", "svg", "iframe", "object", "link", "base", "form"} & {tag for tag, _ in seen.tags}
    assert seen.count("script") == 2
    assert not any(name.startswith("on") for _, attributes in seen.tags for name in attributes)
    assert all((attributes.get("href") or "#").startswith("#") for _, attributes in seen.tags)
    assert "{{" not in page.replace("{{7*7}}", "")
    seen.data()
    for text in (summary, github, page):
        assert not [letter for letter in HIDDEN if letter in text]


def test_every_report_is_well_formed(report: Report, payload: str) -> None:
    suite = ET.fromstring(junit_xml(report).encode())
    assert len(suite.findall(".//testcase")) == int(suite.attrib["tests"])
    text = json.dumps(report.model_dump(mode="json"), ensure_ascii=False, allow_nan=False)
    assert json.loads(visible(text)) == json.loads(text)
    assert json.loads(visible(json.dumps(json.loads(text), ensure_ascii=False, indent=2))) == json.loads(text)
    for line in actions.github_annotations(report):
        assert line.startswith(("::error title=", "::warning title="))
        assert len(line.splitlines()) == 1
        assert not [letter for letter in HIDDEN if letter in line]
