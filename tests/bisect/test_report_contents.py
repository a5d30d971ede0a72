"""What a newcomer must find in the reports of a bisect: why, what did not take effect, counts that agree, commands that work."""

from __future__ import annotations

import re
from typing import Any

import pytest

from seatrial.bisect.bisect_records import Edit, EnvironmentPlan, Failure, Mark, Standing
from seatrial.bisect.bisect_report import bisect_summary, page
from seatrial.bisect.noise_models import Threshold
from seatrial.bisect.posterior import SearchSettings, answer, assess
from seatrial.bisect.search_loop import progress
from seatrial.bisect.worktrees import unchanged
from tests.bisect.bisects import PLAN, history, run, runs, view
from tests.bisect.bisects import answer as told
from tests.bisect.test_report import CHECK, FOUND, PAST, ROWS, VALUES, plain, section

GOOD, BAD, SKIP = Mark.GOOD, Mark.BAD, Mark.SKIP
ASSERTION = Failure(kind="exit", cause="AssertionError: assert # == #", shown="AssertionError: assert 4 == 3", exit_code=1)


def missed(value: float) -> Failure:
    return Failure(kind="check", missed=True, cause="the check is missed", shown=f"{CHECK.check}: measured {value}, wanted > 0.5")


@pytest.mark.parametrize(
    ("change", "lines"),
    [
        ({"command": ("python", "train.py", "--logdir", "{output}")}, ["mkdir -p output", "python train.py --logdir output"]),
        ({"command": ("sh", "-c", "train $SEATRIAL_OUTPUT")}, ["mkdir -p output", 'export SEATRIAL_OUTPUT="$PWD"/output']),
        ({"command": ("make",)}, ["mkdir -p output", 'export SEATRIAL_OUTPUT="$PWD"/output', "make"]),
        ({"variables": {"CKPT": "{checkpoints}"}, "metrics": "logs"}, ["mkdir -p checkpoints", "export CKPT=checkpoints"]),
    ],
)
def test_the_commands_make_their_directories_and_end_with_the_check(change: dict[str, Any], lines: list[str]) -> None:
    plan = CHECK.model_copy(update={"environment": EnvironmentPlan(kind="none"), **change})
    commands = view(PAST, VALUES, FOUND, plan).reproduce
    assert list(commands[4 : 4 + len(lines)]) == lines
    assert commands[-1] == f"seatrial check {change.get('metrics', 'output')} '{CHECK.check}'"


def test_the_commands_make_nothing_that_is_not_used() -> None:
    assert not [line for line in view(PAST, ROWS, FOUND).reproduce if "mkdir" in line or "check" in line.split()]


def test_the_commands_go_to_the_commit_inside_of_the_submodule() -> None:
    inside = tuple(
        Standing(repo=repo, verdict="convicted", commit=letter * 40, why="x")
        for repo, letter in (("lib", "d"), ("lib/core", "e"), ("z", "f"))
    )
    commands = "\n".join(view(PAST, ROWS, told(PAST, 25, standings=inside)).reproduce)
    assert f"update --init --recursive\ngit -C lib checkout --detach {'d' * 40} && " in commands
    assert commands.index("git -C lib ") < commands.index(f"git -C lib/core checkout --detach {'e' * 40}")
    assert "f" * 40 not in commands  # never tried together with the other


def test_an_edit_that_matched_nothing_is_said() -> None:
    plan = PLAN.model_copy(update={"edits": (Edit(file="run.sh", clauses="s/a/b/"),)})
    idle = {"notes": (unchanged("run.sh"),), "unedited": ("run.sh",)}
    rows = [row.model_copy(update=idle) if row.number in (1, 3) else row for row in ROWS]
    text = bisect_summary(view(PAST, rows, FOUND, plan))
    assert "an edit of `run.sh` changed nothing at 2 of the 7 commits that were run and judged" in section(text, "What was changed")
    assert "changed nothing" not in section(text, "Limitations")
    assert section(text, "Notes on runs") == f"- 2 commits: `{unchanged('run.sh')}`"
    rows = [row.model_copy(update={"notes": (unchanged("run.sh"),), "unedited": ("run.sh",)}) if row.number == 5 else row for row in ROWS]
    made = view(PAST, rows, FOUND, plan)
    said = "an edit of `run.sh` changed nothing at the first bad commit, `0025cccccccc` `commit 25`"
    assert said in section(bisect_summary(made), "Limitations")
    assert unchanged("run.sh") in page(made).partition("All runs")[2].partition("</table>")[0]


def test_notes_that_name_their_commit_are_counted_together() -> None:
    rows = [row.model_copy(update={"notes": (f"--patch x: is in already at {row.commit[:12]}",)}) for row in ROWS[:3]]
    assert section(bisect_summary(view(PAST, rows, FOUND)), "Notes on runs") == "- 3 commits: `--patch x: is in already at this commit`"


def test_the_reason_leaves_out_the_check() -> None:
    rows = [row.model_copy(update={"reason": f"{CHECK.check}: measured {row.value}, > 0.5"}) for row in VALUES]
    made = view(PAST, rows, FOUND, CHECK)
    assert "`measured 0.9, > 0.5`" in section(bisect_summary(made), "Steps")
    assert page(made).count("measured 0.3, &gt; 0.5") == 2


def test_why_stands_below_the_headline() -> None:
    rows = [row.model_copy(update={"failure": ASSERTION}) if row.mark is BAD else row for row in ROWS]
    found = view(PAST, rows, FOUND)
    assert bisect_summary(found).splitlines()[2] == "It fails: `AssertionError: assert 4 == 3`."
    assert '<p class="why">It fails: <code>AssertionError: assert 4 == 3</code>.</p>' in page(found)
    between = bisect_summary(view(PAST, rows, told(PAST, 24, 25, why="x"))).splitlines()[2]
    assert between == "The first commit that was seen to be bad fails: `AssertionError: assert 4 == 3`."
    values = [row.model_copy(update={"failure": missed(0.3)}) if row.mark is BAD else row for row in VALUES]
    measured = bisect_summary(view(PAST, values, FOUND, CHECK)).splitlines()[2]
    assert measured == "`0.85 (0.8 to 0.9)` at the last good commit, `0.3` here, wanted `> 0.5`."
    assert view(PAST, ROWS, FOUND.model_copy(update={"state": "open"})).why == ""


def test_runs_and_commits_are_counted_alike_everywhere() -> None:
    rows = (*ROWS, run(PAST, 9, 3, BAD, history=1), run(PAST, 10, 3, GOOD, history=1, stage="ends", directory=""))
    made = view(PAST, rows, FOUND)
    text, html = bisect_summary(made), plain(page(made))
    effort = (
        "9 runs of 18 s in all (1 of them further runs), 9 rounds of search, 1 row taken over without a run, 39 commits after the good end"
    )
    assert f"- Effort: {effort}" in text
    assert "All runs (9, and 1 row taken over)" in html
    assert "39 commits and the good end; point at one" in html
    assert "Known without a run of its own: 1." in section(text, "Further runs")


def test_further_runs_name_the_submodule_and_the_subject() -> None:
    point = f"loop@{'a' * 40}+loop/third/lib@{'d' * 40}"
    inner = run(PAST, 9, 3, BAD, history=1).model_copy(update={"point": point, "commit": "d" * 40, "subject": "Break it"})
    made = view(PAST, (*ROWS, inner), FOUND)
    assert re.search(r"\| `third/lib` +\| `d{12}` \| bad +\| `Break it`", section(bisect_summary(made), "Further runs"))
    assert '<span class="stat">inside third/lib</span>' in page(made)
    assert f"<code>{'d' * 12}</code> Break it" in page(made)


def test_labels_of_the_page_have_no_backticks() -> None:
    inside = Standing(repo="third/lib", verdict="convicted", commit="d" * 40, subject="x", why="y")
    assert "<dt>Inside <code>third/lib</code></dt>" in page(view(PAST, ROWS, told(PAST, 25, standings=(inside,))))


def test_single_runs_claim_no_confidence() -> None:
    text = bisect_summary(view(PAST, ROWS, FOUND))
    assert "- Confidence: each commit ran once, without noise handling\n" in text
    assert "100 %" not in text
    assert "- Confidence: 99.5 %" in bisect_summary(view(PAST, VALUES, told(PAST, 25, confidence=0.995), CHECK))


def test_sections_that_say_nothing_are_left_out() -> None:
    titles = re.findall("^## (.*)", bisect_summary(view(PAST, [row for row in ROWS if row.mark is not SKIP], FOUND)), re.MULTILINE)
    assert titles == ["Answer", "Reproduce", "Steps", "Environments", "Limitations", "How to go on"]


def test_progress_names_the_leading_commit_with_noise() -> None:
    past = history(9)
    how = SearchSettings(10, 0.99, Threshold(0.5, False))
    rows = runs(past, (0, GOOD, 0.9), (8, BAD, 0.1))
    state = assess(past, rows, how)
    assert progress(state, answer(state)) == "most likely one of 8 commits with 12.5 % each"
    near = runs(past, (0, GOOD, 0.9), (0, GOOD, 0.7), (8, BAD, 0.1), (8, BAD, 0.3), (3, GOOD, 0.8), (4, BAD, 0.4))
    state = assess(past, near, how)
    assert re.fullmatch(r"most likely 0004c{8} with \d\d(\.\d)? %( \(\d more for 99 %\))?", progress(state, answer(state)))
    exact = assess(past, rows, SearchSettings(1, 0.99, None))
    assert progress(exact, answer(exact)) == "8 suspects left"


def test_the_first_bad_commit_has_a_label_on_the_chart() -> None:
    assert "splits: ticks" in page(view(PAST, ROWS, FOUND))
