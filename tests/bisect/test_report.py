"""The reports of a bisect answer first, leave nothing out, claim no more than was shown, and are inert whatever they show."""

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

from seatrial.bisect.bisect_records import BisectAnswer, Edit, EnvironmentPlan, Failure, Mark, Patch, SkipKind, Standing
from seatrial.bisect.bisect_report import BisectReport, bisect_summary, page, write_reports
from seatrial.bisect.bisect_view import BisectView, percent
from seatrial.evidence.redact import Redactor
from seatrial.report.markdown import code, pieces, prose
from tests.bisect.bisects import PLAN, TWO, answer, history, run, runs, view

GOOD, BAD, SKIP = Mark.GOOD, Mark.BAD, Mark.SKIP
TOKEN = "hf_" + "a" * 34
HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\"'&|`@octocat`\u2028## x\x1b[31m\x00"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
CHECK = PLAN.model_copy(update={"check": 'mean(data["reward"]) > 0.5', "repeat": 10})
PAST = history(40)
ROWS = runs(PAST, (0, GOOD), (39, BAD), (20, GOOD), (30, BAD), (25, BAD), (22, GOOD), (24, SKIP), (23, GOOD))
VALUES = runs(PAST, (0, GOOD, 0.9), (39, BAD, 0.1), (24, GOOD, 0.8), (24, GOOD, 0.9), (25, BAD, 0.3))
FOUND = answer(PAST, 25)


class Page(HTMLParser):
    """Collects elements and the content of script blocks."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.text = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag == "script":
            self.scripts.append("")

    def handle_data(self, data: str) -> None:
        if self.cdata_elem == "script":
            self.scripts[-1] += data
        elif self.cdata_elem is None:
            self.text += data

    def data(self) -> Any:
        return json.loads(self.scripts[0])


def hostile() -> BisectView:
    """A bisect in which every free text tries to break out."""
    past = history(30, subject=HOSTILE.replace("{", "{{"))
    rows = [
        run(past, number, index, mark, reason=HOSTILE, notes=(HOSTILE,), value=HOSTILE)
        for number, index, mark in ((1, 0, GOOD), (2, 9, SKIP))
    ]
    standing = Standing(repo=HOSTILE, verdict="unknown", why=HOSTILE)
    found = answer(past, 10, 11, why=HOSTILE, notes=(HOSTILE,), standings=(standing,), model=HOSTILE, confidence=0.5)
    change = {
        "extra": (HOSTILE,),
        "notes": (HOSTILE,),
        "edits": (Edit(file=HOSTILE, clauses=HOSTILE),),
        "check": HOSTILE,
        "failure": HOSTILE,
    }
    return view(past, rows, found, PLAN.model_copy(update={**change, "patches": (Patch(source=HOSTILE.replace("\0", "")),)}))


def plain(text: str) -> str:
    return " ".join(text.split())


def section(text: str, title: str) -> str:
    return text.split(f"## {title}\n", 1)[1].split("\n## ", 1)[0].strip()


def test_the_first_line_is_the_answer() -> None:
    first = bisect_summary(view(PAST, ROWS, FOUND)).splitlines()[0]
    assert first == f"The first bad commit is `{PAST.points[25].commit[:12]}` `commit 25`."
    noisy = answer(PAST, 25, confidence=0.99999, model="step")
    assert bisect_summary(view(PAST, ROWS, noisy)).splitlines()[0].endswith("with a confidence of 99.9 %.")
    between = answer(PAST, 24, 25, why="only skipped commits are left")
    said = bisect_summary(view(PAST, ROWS, between)).splitlines()[0]
    assert said == "The first bad commit is one of 2, and no more can be told: only skipped commits are left."
    assert bisect_summary(view(PAST, ROWS[:1], BisectAnswer(state="open", why="stopped"))).startswith("Not finished: ")


@pytest.mark.parametrize(("share", "shown"), [(1.0, "100 %"), (0.9999, "99.9 %"), (0.99, "99 %"), (0.29, "29 %"), (0.3333, "33.3 %")])
def test_confidence_is_never_rounded_up(share: float, shown: str) -> None:
    assert percent(share) == shown


def test_an_open_bisect_blames_nobody() -> None:
    still = answer(PAST, 24, 25, 26).model_copy(update={"state": "open", "why": "stopped"})
    made = view(PAST, ROWS, still)
    text = bisect_summary(made)
    assert "3 of 39 commits are still suspected" in text
    assert "## Reproduce" not in text
    assert "→" not in text
    assert Page(page(made)).data()["suspects"] == []
    assert f"seatrial bisect resume {made.directory}" in text


def test_the_steps_stand_in_the_order_of_the_commits_with_what_was_not_run() -> None:
    steps = section(bisect_summary(view(PAST, VALUES, FOUND, CHECK)), "Steps")
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in steps.splitlines()[4:]]
    short = [f"`{PAST.points[index].commit[:12]}`" for index in (0, 24, 25, 39)]
    assert [row[1] for row in rows] == [short[0], "… 23 not run", short[1], short[2], "… 13 not run", short[3]]
    assert rows[2][2:5] == ["good", "0.85 (0.8 to 0.9)", "2"]
    assert [row[0] for row in rows] == ["", "", "", "→", "", ""]
    assert len({len(line) for line in steps.splitlines()[2:]}) == 1


def test_values_that_are_not_finite_and_runs_that_disagree_are_shown() -> None:
    rows = (run(PAST, 1, 3, BAD, value="NaN"), run(PAST, 2, 3, BAD, value=1.5), run(PAST, 3, 4, GOOD), run(PAST, 4, 4, BAD))
    made = view(PAST, rows, answer(PAST, 3, flaky=(PAST.points[4].id,)), CHECK)
    assert made.lines[0].value == "1.5, NaN"
    assert made.lines[1].mark == "1 good, 1 bad"
    assert "`commit 4`: 1 good, 1 bad" in section(bisect_summary(made), "Flaky")


def test_skipped_commits_are_listed_by_reason() -> None:
    rows = [run(PAST, number, number, SKIP, skip=SkipKind.BUILD, reason=f"pip {number}") for number in range(1, 16)]
    rows += [run(PAST, 16, 20, SKIP, skip=SkipKind.ENVIRONMENT, reason="429"), run(PAST, 17, 21, SKIP), run(PAST, 18, 21, GOOD)]
    lines = section(bisect_summary(view(PAST, rows, FOUND)), "Skipped").splitlines()
    assert lines[0].startswith("- 15 commits: the environment could not be built: ")
    assert "and 3 more; the first one: `pip 1`" in lines[0]
    assert lines[1].startswith("- 1 commit: the machine, the network or the cluster failed")
    assert len(lines) == 2


def test_what_was_changed_comes_with_its_warning() -> None:
    edit = Edit(file="tests/nightly.sh", clauses="s/100/10/")
    plan = PLAN.model_copy(update={"edits": (edit,), "patches": (Patch(source="abc123"),), "extra": ("--max-steps", "10")})
    text = bisect_summary(view(PAST, ROWS, FOUND, plan))
    changed = section(text, "What was changed")
    for words in ("`tests/nightly.sh`", "`s/100/10/`", "`abc123`", "`--max-steps 10`", "Warning: this changes what is measured"):
        assert words in changed
    commands = section(text, "Reproduce")
    assert "sed -i -e s/100/10/ -- tests/nightly.sh" in commands
    assert "git cherry-pick --no-commit abc123" in commands
    assert commands.index("cherry-pick") < commands.index("sed -i")
    assert "## What was changed" not in bisect_summary(view(PAST, ROWS, FOUND))


def test_the_commands_run_that_commit_alone() -> None:
    commit = PAST.points[25].commit
    commands = section(bisect_summary(view(PAST, ROWS, FOUND)), "Reproduce").splitlines()
    assert commands[1:-1] == [
        "cd /src/loop",
        f"git worktree add --detach ../loop-{commit[:12]} {commit}",
        f"cd ../loop-{commit[:12]}",
        "git submodule update --init --recursive",
        "python -m venv .venv && . .venv/bin/activate && pip install -r requirements.lock",
        f"bash tests/nightly.sh --seed {commit}",
    ]
    plan = PLAN.model_copy(update={"trial": True, "command": ("trl",), "environment": EnvironmentPlan(kind="uv", lock="uv.lock")})
    assert view(PAST, ROWS, FOUND, plan).reproduce[-2:] == ("uv sync --frozen && . .venv/bin/activate", "seatrial run trl")


def test_several_repositories_are_named_and_judged() -> None:
    past = history(6, repos=2)
    standings = (
        Standing(repo="loop", verdict="convicted", commit=past.points[3].commit, why="alone it fails"),
        Standing(repo="bridge", verdict="acquitted", why="alone all is well"),
    )
    rows = (*runs(past, (0, GOOD), (5, BAD), (3, BAD), (2, GOOD)), run(past, 5, 3, BAD, stage="conviction", reason="loop alone"))
    text = bisect_summary(view(past, rows, answer(past, 3, standings=standings), TWO))
    assert f"`{past.points[3].commit[:12]}` of `loop`" in text.splitlines()[0]
    assert section(text, "Repositories").splitlines()[1] == "- `bridge`: acquitted: alone all is well"
    assert "`loop alone`" in section(text, "Further runs")
    assert "`loop 0003cccccccc`" in section(text, "Steps")
    assert f"git -C third/bridge checkout --detach {'b' * 40}" in section(text, "Reproduce")
    assert "git alone" not in text


def test_a_commit_inside_a_submodule_is_part_of_the_answer() -> None:
    inside = Standing(repo="third/core", verdict="convicted", commit="d" * 40, subject="Break it", confidence=0.9996, why="good before")
    text = bisect_summary(view(PAST, (*ROWS, run(PAST, 9, 3, BAD, history=1)), answer(PAST, 25, standings=(inside,))))
    assert text.splitlines()[0].endswith(f"which it moves, it is `{'d' * 12}` `Break it`, with a confidence of 99.9 %.")
    assert "## Further runs" in text


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({}, "each commit ran once"),
        ({"notes": ("2 files were not committed",)}, "2 files were not committed"),
        ({"any_failure": True}, "every failure counted as bad"),
        ({"failure": "Assertion.*"}, "by a pattern alone: `Assertion.*`"),
        ({"environment": EnvironmentPlan(kind="none")}, "dependencies were those of the caller"),
        ({"first_parent": True}, "merged branches count as one commit each"),
    ],
)
def test_limitations_are_said(change: dict[str, Any], words: str) -> None:
    assert words in section(bisect_summary(view(PAST, ROWS, FOUND, PLAN.model_copy(update=change))), "Limitations")


def test_marks_that_were_not_run_here_are_said() -> None:
    rows = (run(PAST, 1, 0, GOOD, stage="replay", directory=""), run(PAST, 2, 39, BAD, notes=("marked bad by hand",), by_hand=True))
    said = section(bisect_summary(view(PAST, rows, FOUND)), "Limitations")
    assert "1 mark came from a log that was replayed, and was not run here" in said
    assert "1 row of the journal was changed by hand" in said


def test_environments_are_counted() -> None:
    rows = [row.model_copy(update={"environment": f"e{index // 4}", "built": index % 4 == 0}) for index, row in enumerate(ROWS)]
    assert (
        section(bisect_summary(view(PAST, rows, FOUND)), "Environments")
        == "- 2 environments from `requirements.lock` by pip: 2 built, 6 times reused"
    )


@pytest.mark.parametrize("text", ["a", "a`b", "``", "`a`", "a ``b`` c `d", "|", "x\n\ny"])
def test_code_is_code_again_when_it_is_read(text: str) -> None:
    sentence = f"before {code(text)} after"
    assert [*pieces(sentence)] == [(False, "before "), (True, " ".join(text.split())), (False, " after")]
    assert prose(sentence) == sentence


def test_recorded_text_is_no_markdown() -> None:
    assert prose("by @octocat, [x](http://y) *z* <b>") == "by `@octocat`, \\[x\\](`http://y)` \\*z\\* &lt;b>"
    assert prose("mail a@b.c") == "mail `a@b.c`"
    text = bisect_summary(hostile())
    assert not re.search(r"[\x00\x1b]", text)
    titles = [line for line in text.split("\n") if line.startswith("#")]
    assert len(titles) == len(set(titles)) == 10
    beside = text.replace(section(text, "Reproduce"), "")
    for line in beside.split("\n"):
        for is_code, words in pieces(line.replace("\\`", "")):
            assert is_code or not re.search(r"(?<!\\)<|(?<!\w)@octocat", words)


def test_the_commands_keep_their_lines_and_cannot_leave_their_block() -> None:
    edit = Edit(file="a b", clauses="s/x/y/\n```\n# title\ns/y/z/")
    commands = section(bisect_summary(view(PAST, ROWS, FOUND, PLAN.model_copy(update={"edits": (edit,)}))), "Reproduce")
    assert "sed -i -e 's/x/y/\n```\n# title\ns/y/z/' -- 'a b'\n" in commands
    assert commands.startswith("````sh\n")
    assert commands.endswith("\n````")


def test_the_page_says_what_the_summary_says() -> None:
    made = view(PAST, VALUES, FOUND, CHECK)
    text = plain(Page(page(made)).text)
    for line in bisect_summary(made).splitlines():
        if line.startswith("- "):
            assert plain(re.sub(r"[`\\]", "", line[2:])).rpartition(": ")[2] in text


def test_the_page_needs_nothing_from_outside() -> None:
    text = page(view(PAST, VALUES, FOUND, CHECK))
    made = Page(text)
    links = [value for _, attrs in made.tags for key, value in attrs.items() if key in ("src", "href", "action", "srcset")]
    assert links
    assert all(value is not None and value.startswith("#") for value in links)
    (policy,) = [attrs["content"] for _, attrs in made.tags if attrs.get("http-equiv") == "Content-Security-Policy"]
    assert policy is not None
    assert policy.startswith("default-src 'none'")
    assert "unsafe" not in policy
    assert not re.search(r"url\(|@import", text.partition("</style>")[0])


def test_the_plots_have_every_run_the_limit_and_the_suspects() -> None:
    past = history(100)
    rows = (*runs(past, (0, GOOD, 0.9), (99, BAD, 0.1), (50, SKIP), (51, BAD, 0.2)), run(past, 5, 40, BAD, history=1))
    made = Page(page(view(past, rows, answer(past, 48, 49, 51, confidence=0.9), CHECK)))
    data = made.data()
    assert [entry[:4] for entry in data["runs"]] == [[0, 1, "good", 0.9], [50, 3, "skip", None], [51, 4, "bad", 0.2], [99, 2, "bad", 0.1]]
    assert (data["metric"], data["limit"], data["suspects"]) == (CHECK.check, 0.5, [[48, 49], [51, 51]])
    charts = [(attrs["data-first"], attrs["data-last"]) for tag, attrs in made.tags if attrs.get("class") == "chart"]
    assert charts == [("0", "99"), ("36", "63")]
    plain_marks = Page(page(view(PAST, ROWS, FOUND))).data()
    assert (plain_marks["metric"], plain_marks["limit"]) == (None, None)


def test_hostile_text_stays_text() -> None:
    text = page(hostile())
    made = Page(text)
    assert sum(tag == "script" for tag, _ in made.tags) == 2
    assert not [tag for tag, attrs in made.tags if tag == "img" or any(key.startswith("on") for key in attrs)]
    assert "alert(1)" in made.data()["points"][0][1]
    assert not re.search(r"[\x00\x1b]", text)


def test_all_reports_are_written_without_secrets(tmp_path: Path) -> None:
    past = history(3, subject=f"use {TOKEN} {{}}")
    rows = (
        run(past, 1, 0, GOOD, reason=f"with {TOKEN}", notes=(TOKEN,)),
        run(past, 2, 2, BAD, failure=Failure(kind="exit", cause=TOKEN, shown=TOKEN)),
    )
    found = answer(past, 1, 2, why=TOKEN, notes=(TOKEN,), standings=(Standing(repo="loop", verdict="unknown", subject=TOKEN, why=TOKEN),))
    edit = Edit(file="a", clauses=f"s/x/{TOKEN}/")
    build = EnvironmentPlan(kind="none", build=("make", f"TOKEN={TOKEN}"))
    change = {"variables": {"HF_TOKEN": "short-one"}, "command": ("run", "--token", "s3cr3tvalue99"), "extra": (TOKEN,), "edits": (edit,)}
    plan = PLAN.model_copy(update={**change, "notes": (TOKEN,), "environment": build, "check": f'data["{TOKEN}"] > 1', "failure": TOKEN})
    # A password that is a word of ours must not break the report.
    write_reports(tmp_path, plan, past, rows, found, Redactor({"MY_PASSWORD": "search", "OTHER_PASSWORD": "found!"}))
    names = ("bisect.log", "report.html", "report.json", "summary.md")
    assert sorted(path.name for path in tmp_path.iterdir()) == list(names)
    for name in names:
        text = (tmp_path / name).read_text(encoding="utf-8")
        assert not re.search(f"{TOKEN}|short-one|s3cr3tvalue99", text), name
    report = BisectReport.model_validate_json((tmp_path / "report.json").read_text(encoding="utf-8"))
    assert (report.commits, len(report.runs), report.answer.state) == (2, 2, "range")


def test_a_value_that_is_not_finite_can_be_reported(tmp_path: Path) -> None:
    write_reports(tmp_path, CHECK, PAST, (run(PAST, 1, 39, BAD, value=math.nan),), FOUND, Redactor({}))
    assert json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))["runs"][0]["value"] == "NaN"
    assert "NaN" in section((tmp_path / "summary.md").read_text(encoding="utf-8"), "Steps")


def test_a_bisect_without_rows_can_be_reported(tmp_path: Path) -> None:
    write_reports(tmp_path, PLAN, PAST, (), BisectAnswer(state="open", why="the ends were not verified"), Redactor({}))
    text = (tmp_path / "summary.md").read_text(encoding="utf-8")
    assert text.startswith("Not finished: the first bad commit is not known yet (the ends were not verified).")
    assert "40 not run" in text


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="needs a browser: apt-get install chromium")
@pytest.mark.parametrize("name", ["metric", "marks", "hostile", "empty"])
def test_the_page_draws_its_plots_in_a_browser(tmp_path: Path, name: str) -> None:
    past = history(500)
    made = {
        "metric": view(past, runs(past, (0, GOOD, 0.9), (499, BAD, 0.1), (250, BAD, 0.2), (249, SKIP)), answer(past, 250), CHECK),
        "marks": view(past, runs(past, (0, GOOD), (499, BAD), (250, BAD), (249, SKIP)), answer(past, 249, 250)),
        "hostile": hostile(),
        "empty": view(PAST, (), BisectAnswer(state="open"), CHECK),
    }[name]
    (tmp_path / "report.html").write_text(page(made), encoding="utf-8")
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--enable-logging=stderr"]
    options += ["--virtual-time-budget=4000", f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom"]
    command = [str(CHROMIUM), *options, (tmp_path / "report.html").as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert "CONSOLE" not in done.stderr
    drawn = [canvas for canvas in re.findall(r"<canvas[^>]*>", done.stdout) if 'role="img"' in canvas and "over commits" in canvas]
    assert len(drawn) == page(made).count('class="chart"')
    assert "<img" not in done.stdout
