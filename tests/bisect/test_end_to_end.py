"""`seatrial bisect` from the command line to the answer: how runs are judged, and ends that do not hold."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from seatrial.bisect.bisect_records import SkipKind
from tests.bisect.calls import CHECK, Place, numbers
from tests.bisect.repos import Commit, linear, run_git
from tests.bisect.untouched import untouched

pytestmark = pytest.mark.slow

LIMIT = Path(__file__).parents[1] / "data" / "bisect" / "hub_429.log"
METRICS = """import json, os, sys
number = int(open("number.txt").read())
with open(os.environ["SEATRIAL_OUTPUT"] + "/metrics.jsonl", "w") as file:
    for step in range(1, 4):
        file.write(json.dumps({"step": step, "loss": LOSSES[number] + step / 1000}) + "\\n")
"""
BELOW = 'mean(data["loss"]) < 1.0'


def losses(*values: float | str) -> str:
    """A program that measures this at the commits."""
    return f"LOSSES = [{', '.join(map(str, values))}]\n" + METRICS


def test_exit_codes(tmp_path: Path) -> None:
    """0 good, 125 skip, else bad: the skip in the middle costs nothing."""
    place = Place(tmp_path, numbers(9, "import sys\nif int(open('number.txt').read()) in (3, 4): sys.exit(125)\n" + CHECK.format(first=6)))
    with untouched(place.repo):
        done = place.bisect()
    assert done.found(6)
    assert set(done.skips().values()) == {SkipKind.COMMAND}
    assert done.row(8).exit_code == 1
    assert {index: mark for index, mark in done.marks.items() if mark != "skip"}.items() <= {
        **dict.fromkeys(range(6), "good"),
        **dict.fromkeys(range(6, 9), "bad"),
    }.items()


def test_skips_beside_the_culprit_leave_a_range_and_never_one_commit(tmp_path: Path) -> None:
    place = Place(tmp_path, numbers(8, "import sys\nif int(open('number.txt').read()) in (3, 4): sys.exit(125)\n" + CHECK.format(first=4)))
    done = place.bisect()
    assert (done.code, done.suspects, done.report["answer"]["state"]) == (99, [3, 4, 5], "range")
    assert "# possible first bad commit:" in (done.directory / "bisect.log").read_text(encoding="utf-8")


@pytest.mark.parametrize("end", ["sys.exit(200)", "os.kill(os.getpid(), 11)"])
def test_128_and_above_end_the_bisect_without_a_row(tmp_path: Path, end: str) -> None:
    place = Place(tmp_path, numbers(8, f"import os, sys\nif int(open('number.txt').read()) in (3, 4): {end}\n" + CHECK.format(first=6)))
    done = place.bisect()
    assert done.code == 99
    assert "128 and up end a bisect" in done.err
    assert f"seatrial bisect resume {done.directory}" in done.err
    assert done.marks == {0: "good", 7: "bad"}


def test_metric_decides_and_its_values_are_reported(tmp_path: Path) -> None:
    place = Place(tmp_path, numbers(8, losses(0.5, 0.52, 0.49, 0.51, 0.5, 2.0, 2.1, 2.05)))
    done = place.bisect("--check", BELOW, "--repeat", "3")
    assert done.found(5)
    assert done.row(0).value == pytest.approx(0.502)
    assert "0.502" in done.summary
    page = (done.directory / "report.html").read_text(encoding="utf-8")
    assert "uPlot" in page
    assert "0.502" in page


def test_metric_that_is_not_finite_in_the_middle_is_a_skip(tmp_path: Path) -> None:
    nan = "float('nan')"
    place = Place(tmp_path, numbers(8, losses(0.5, 0.5, 0.5, nan, nan, 0.5, 2.0, 2.0)))
    done = place.bisect("--check", BELOW, "--repeat", "1")
    assert done.found(6)
    assert set(done.skips().values()) == {SkipKind.METRIC}


def test_metric_missing_is_said_after_one_run_of_the_good_end(tmp_path: Path) -> None:
    place = Place(tmp_path, numbers(3, losses(0.5, 0.5, 2.0)))
    done = place.bisect("--check", 'mean(data["reward"]) > 1')
    assert done.code == 2
    assert "the good end" in done.err
    assert "cannot be judged" in done.err
    assert "reward" in done.err
    assert "fix: correct the check, or say with --metrics" in done.err
    assert len(done.rows) == 1


def test_metrics_that_are_committed_are_not_those_of_the_run(tmp_path: Path) -> None:
    place = Place(tmp_path, numbers(3, "", at_0={"logs/metrics.jsonl": '{"step": 1, "loss": 0.5}\n'}))
    done = place.bisect("--check", BELOW, "--metrics", "logs")
    assert done.code == 2
    assert "older than this run" in done.err


def test_failure_for_another_reason_is_skipped(tmp_path: Path) -> None:
    """Plain git blames the first of them; `--any-failure` does as git does."""
    other = "if number in (3, 4): raise KeyError('another bug')\n"
    first, rest = CHECK.format(first=6).splitlines(keepends=True)
    place = Place(tmp_path, numbers(8, first + other + rest))
    done = place.bisect()
    assert done.found(6)
    assert set(done.skips().values()) == {SkipKind.OTHER_FAILURE}
    assert "; the bad end fails in another way (AssertionError: the loss is not finite)" in done.summary
    assert place.bisect("--any-failure", out="any").suspects == [3]
    assert place.bisect("--failure", "loss is not finite", out="pattern").found(6)


def limited(first: int, always: bool) -> str:
    """A program that a download limit ends at commits 3 and 4: the first time, or always."""
    return (
        "import os, pathlib, sys\n"
        f"{CHECK.format(first=first)}"
        "seen = pathlib.Path(os.environ['LEDGER'], str(number))\n"
        f"if number in (3, 4) and ({always} or not seen.exists()):\n"
        "    seen.touch()\n"
        f"    sys.exit(pathlib.Path({str(LIMIT)!r}).read_text())\n"
    )


def test_download_limit_at_a_good_commit_is_tried_again(tmp_path: Path) -> None:
    place = Place(tmp_path, numbers(8, limited(6, always=False)))
    (tmp_path / "ledger").mkdir()
    done = place.bisect(LEDGER=str(tmp_path / "ledger"))
    assert done.found(6)
    assert done.skips() == {}
    assert any("tried 2 times" in note for row in done.rows for note in row.notes)


def test_download_limit_that_stays_is_a_skip_where_git_blames_an_innocent_commit(tmp_path: Path) -> None:
    place = Place(tmp_path, numbers(8, limited(6, always=True)))
    (tmp_path / "ledger").mkdir()
    done = place.bisect("--retries", "0", LEDGER=str(tmp_path / "ledger"))
    assert done.found(6)
    assert set(done.skips().values()) == {SkipKind.ENVIRONMENT}

    plain = tmp_path / "plain"
    run_git(tmp_path, "clone", "--quiet", str(place.repo), str(plain))
    run_git(plain, "bisect", "start", place.ids[-1], place.ids[0])
    told = run_git(plain, "bisect", "run", "env", f"LEDGER={tmp_path / 'ledger'}", "python3", "check.py")
    assert re.search(f"({place.ids[3]}|{place.ids[4]}) is the first bad commit", told)


def test_script_that_is_missing_in_the_middle_is_a_skip(tmp_path: Path) -> None:
    check = CHECK.format(first=6)
    done = Place(tmp_path, numbers(8, check, at_3={"check.py": None}, at_5={"check.py": check})).bisect()
    assert done.found(6)
    assert set(done.skips().values()) == {SkipKind.ABSENT}


def test_script_that_appears_after_the_good_end_is_brought_by_a_patch(tmp_path: Path) -> None:
    """As one does with a new test for an old bug."""
    commits = linear(8)
    commits[5] = Commit({"check.py": CHECK.format(first=3)}, subject="Test it")
    place = Place(tmp_path, commits)
    without = place.bisect()
    assert without.code == 2
    assert "check.py does not exist at this commit" in without.err
    assert "name another commit with --good" in without.err
    assert place.bisect("--patch", place.ids[5], out="patched").found(3)


def test_ends_swapped_by_the_results(tmp_path: Path) -> None:
    done = Place(tmp_path, numbers(4, "assert int(open('number.txt').read()) > 1, 'too small'\n")).bisect()
    assert done.code == 2
    assert "the ends are swapped" in done.err
    assert "swap --good and --bad" in done.err
    assert done.marks == {0: "bad", 3: "good"}


@pytest.mark.parametrize(
    ("check", "said", "fix"),
    [
        ("raise ValueError('always')\n", "is not good: exit 1: ValueError: always", "name an older commit with --good"),
        ("", "is not bad: its run passed", "name a commit that fails with --bad"),
        ("import sys\nsys.exit(125)\n", "cannot be judged: exit 125", "name another commit with --good"),
    ],
)
def test_ends_that_do_not_hold(tmp_path: Path, check: str, said: str, fix: str) -> None:
    done = Place(tmp_path, numbers(4, check)).bisect()
    assert done.code == 2
    assert said in done.err
    assert fix in done.err
    assert "run.log" in done.err or done.marks.get(0) != "bad"


def test_command_not_found_is_named(tmp_path: Path) -> None:
    done = Place(tmp_path, numbers(3, "")).bisect(command=("no-such-command", "--flag"))
    assert done.code == 2
    assert "exit 127: no-such-command, or a command that it calls, was not found" in done.err
    assert len(done.rows) == 1
