"""report.html is complete, self-contained, and inert whatever it shows."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from seatrial.core.records import Report, Trial
from seatrial.core.series import Damage, Metrics, Overlap, Series
from seatrial.core.verdict import Verdict
from seatrial.report.build import build_report
from seatrial.report.html import report_html
from tests.report.trials import LADDER, TITLE, TRIALS, check, failed, level, metrics, passed, trial, write_run

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\"'&\u2028\x1b[31m\x00"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


class Page(HTMLParser):
    """Collects elements, attributes and the content of script blocks."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.text: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag == "script":
            self.scripts.append("")

    def handle_data(self, data: str) -> None:
        if self.cdata_elem == "script":
            self.scripts[-1] += data
        self.text.append(data)

    def data(self) -> Any:
        return json.loads(self.scripts[0])

    def count(self, tag: str) -> int:
        return sum(name == tag for name, _ in self.tags)


def build(run_dir: Path, made: Trial) -> Report:
    write_run(run_dir, made)
    return build_report(made, TITLE, run_dir, LADDER)


def hostile() -> tuple[Trial, dict[str, Metrics]]:
    """A trial in which every free text tries to break out."""
    bad = level(
        0,
        verdict=Verdict.FAIL,
        reason=HOSTILE,
        key_lines=(HOSTILE,),
        limitations=(HOSTILE,),
        checks=(check(HOSTILE, False, HOSTILE, HOSTILE),),
    )
    made = trial(bad, verdict=Verdict.FAIL, reason=HOSTILE, command=("seatrial", HOSTILE))
    values = Metrics({HOSTILE: Series(HOSTILE, (1, 2), (1.0, math.nan))}, damage=(Damage(HOSTILE, "line 1", 0, HOSTILE),))
    return made, {"0-smoke": values}


@pytest.mark.parametrize("name", TRIALS)
def test_page_says_everything_the_summary_says(tmp_path: Path, name: str) -> None:
    report = build(tmp_path, TRIALS[name]())
    text = " ".join(" ".join(Page(report_html(report, {})).text).split())
    assert text.index(str(report.result)) < text.index("Deliverables")
    for line in (*report.evidence, *report.limitations, *report.follow_ups, *(line.proof for line in report.deliverables), report.answer):
        assert " ".join(line.split()) in text


def test_page_needs_nothing_from_outside(tmp_path: Path) -> None:
    page = Page(report_html(build(tmp_path, failed()), {"1-resume": metrics(broken=True)}))
    links = [value for _, attrs in page.tags for key, value in attrs.items() if key in ("src", "href", "action", "srcset")]
    assert links
    assert all(value is not None and value.startswith("#") for value in links)
    assert page.count("link") == page.count("img") == page.count("iframe") == 0
    (policy,) = [attrs["content"] for _, attrs in page.tags if attrs.get("http-equiv") == "Content-Security-Policy"]
    assert policy is not None
    assert policy.startswith("default-src 'none'")
    assert "unsafe" not in policy
    assert not re.search(r"url\(|@import", report_html(build(tmp_path, failed()), {}).partition("</style>")[0])


def test_data_block_parses_and_holds_report_and_plots(tmp_path: Path) -> None:
    report = build(tmp_path, failed())
    data = Page(report_html(report, {"1-resume": metrics(broken=True)})).data()
    assert Report.model_validate(data["report"]) == report
    loss = next(plot for plot in data["plots"]["1-resume"] if plot["tag"] == "train/loss")
    assert loss["gaps"] == [[13, 14, "NaN"]]
    assert loss["values"][12:14] == [None, None]
    assert data["plots"]["0-smoke"] == []


def test_hostile_text_stays_text(tmp_path: Path) -> None:
    made, values = hostile()
    clean = Page(report_html(build(tmp_path, failed()), {}))
    text = report_html(build(tmp_path, made), values)
    page = Page(text)
    assert page.count("script") == clean.count("script") == 2
    assert page.count("img") == 0
    assert not [attrs for _, attrs in page.tags if any(key.startswith("on") for key in attrs)]
    assert page.data()["plots"]["0-smoke"][0]["tag"] == HOSTILE
    assert "\x00" not in text
    assert "\x1b" not in text


def test_gaps_damage_and_overlaps_are_shown(tmp_path: Path) -> None:
    values = metrics(broken=True)
    values = Metrics(values.series, damage=(Damage("metrics.jsonl", "line 17", 1, "torn row"),), overlaps=(Overlap("train/kl", (4, 5, 6)),))
    text = " ".join(Page(report_html(build(tmp_path, failed()), {"1-resume": values})).text)
    for words in (
        "NaN at 2 steps from 13 to 14",
        "No finite value in 20 points",
        "line 17: torn row",
        "at step 4-6; the last one is shown",
    ):
        assert words in text


def test_missed_checks_come_first_and_empty_trials_render(tmp_path: Path) -> None:
    text = report_html(build(tmp_path, failed()), {})
    body = text[text.index('aria-label="Checks of level 1"') :]
    assert body.index("missed") < body.index("met</span>")
    assert "Not requested" in report_html(build(tmp_path / "none", trial(verdict=Verdict.SKIPPED)), {})


def test_many_metrics_are_all_there_but_not_all_open(tmp_path: Path) -> None:
    many = Metrics({f"m/{number:03}": Series(f"m/{number:03}", (1,), (1.0,)) for number in range(150)})
    text = report_html(build(tmp_path, passed()), {"0-smoke": many})
    assert Page(text).count("figure") == 150
    assert "138 more metrics" in text


@pytest.mark.skipif(CHROMIUM is None, reason="needs a browser: apt-get install chromium")
def test_page_draws_its_plots_in_a_browser(tmp_path: Path) -> None:
    made, values = hostile()
    long = Series("train/long", tuple(range(30_000)), tuple(math.sin(step / 900) for step in range(30_000)))
    shown = metrics(broken=True)
    report = build(tmp_path, made.model_copy(update={"levels": (*made.levels, *failed().levels[1:])}))
    page = tmp_path / "report.html"
    text = report_html(report, values | {"1-resume": Metrics(shown.series | {"train/long": long})})
    page.write_text(text)
    options = (
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-background-networking",
        "--enable-logging=stderr",
        "--virtual-time-budget=4000",
    )
    command = [str(CHROMIUM), *options, f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert "CONSOLE" not in done.stderr
    canvases = re.findall(r"<canvas[^>]*>", done.stdout)
    drawn = [canvas for canvas in canvases if 'role="img"' in canvas and "over training steps" in canvas]
    folded = text.partition('class="more"')[2].count('class="chart"')
    assert len(drawn) == len(canvases) == text.count('class="chart"') - folded
    assert len(drawn) >= 11
    assert "<img" not in done.stdout
