"""Writing the four reports of a run directory, each atomically, all from the same report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from seatrial.files import write_json, write_text
from seatrial.model.knowledge import Level
from seatrial.model.record import Report, Trial
from seatrial.model.series import Metrics
from seatrial.report.build import build_report
from seatrial.report.html import report_html
from seatrial.report.junit import junit_xml
from seatrial.report.summary import summary_md

SUMMARY, JSON, JUNIT, HTML = "summary.md", "report.json", "junit.xml", "report.html"


def write_reports(run_dir: Path, trial: Trial, loop_title: str, ladder: Sequence[Level], metrics_by_level: Mapping[str, Metrics]) -> Report:
    """Build the report of `trial` and write summary.md, report.json, junit.xml and report.html into `run_dir`.

    `metrics_by_level` has the metrics of each level under `<number>-<name>`, the name of its directory.
    Everything is rendered before anything is written: an error leaves the earlier reports as they were.
    """
    report = build_report(trial, loop_title, run_dir, ladder)
    texts = {SUMMARY: summary_md(report), JUNIT: junit_xml(report), HTML: report_html(report, metrics_by_level)}
    write_json(run_dir / JSON, report)
    for name, text in texts.items():
        write_text(run_dir / name, text)
    return report
