"""Several repositories, end to end: the right commit, and the right verdict on each of them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.bisect.repos import populate, submodule
from tests.bisect.several import Bisect, Repository, bisect, line, main_line, repository
from tests.bisect.untouched import untouched

pytestmark = pytest.mark.slow
BROKEN = {"broken": ""}
THREE = ("a", "b", "c")
FAILED = (1, "AssertionError: the answer is wrong")


def three(root: Path, culprits: dict[str, int], count: int = 5) -> dict[str, Repository]:
    """Repositories whose commits are interleaved in time."""
    changes = {name: {culprits[name]: BROKEN} if name in culprits else {} for name in THREE}
    return {
        "a": repository(root / "a", main_line(count, changes["a"])),
        "b": repository(root / "b", line(count, changes["b"], 20, "b")),
        "c": repository(root / "c", line(count, changes["c"], 40, "c")),
    }


@pytest.mark.parametrize("culprit", THREE)
def test_the_culprit_of_three(tmp_path: Path, culprit: str) -> None:
    repos = three(tmp_path, {culprit: 3})
    with untouched(*(repo.path for repo in repos.values())):
        done = bisect(tmp_path, repos)
    assert done.said.code == 0, done.said
    assert done.found == repos[culprit].ids[3]
    assert done.verdicts == {name: ("convicted", repos[name].ids[3]) if name == culprit else ("acquitted", None) for name in THREE}
    assert done.headline == f"The first bad commit is `{done.found[:12]}` of `{culprit}` `{culprit} commit 3`."
    assert_report_says_the_same(done)


def test_two_repositories_that_break_it_independently_are_both_convicted(tmp_path: Path) -> None:
    repos = three(tmp_path, {"b": 2, "a": 3})
    del repos["c"]
    done = bisect(tmp_path, repos)
    assert done.verdicts == {"b": ("convicted", repos["b"].ids[2]), "a": ("convicted", None)}
    assert done.headline.endswith("; `a` fails without it, too.")


@pytest.mark.parametrize(("uses", "other"), [("two", "acquitted"), ("three", "unknown")])
def test_a_commit_that_needs_another_repository(tmp_path: Path, uses: str, other: str) -> None:
    a = repository(tmp_path / "a", main_line(5, {3: {"uses": uses + "\n"}}))
    b = repository(tmp_path / "b", line(5, {1: {"renamed": ""}}, 20, "b"))
    c = repository(tmp_path / "c", line(5, {1: {"third": ""}}, 40, "c"))
    done = bisect(tmp_path, {"a": a, "b": b, "c": c})
    assert done.found == a.ids[3]
    # With `three` neither of the others is enough, and neither is innocent.
    of_b = "accomplice" if uses == "two" else "unknown"
    assert done.verdicts == {"a": ("accomplice", a.ids[3]), "b": (of_b, None), "c": (other, None)}
    assert done.headline.endswith("; it fails only together with `b`.") is (uses == "two")
    assert_report_says_the_same(done)


def test_an_accomplice_is_judged_as_it_was_then(tmp_path: Path) -> None:
    """The second repository goes back on what it did, and then the first one breaks by itself: the bad end is of no use."""
    a = repository(tmp_path / "a", main_line(6, {3: {"uses": "two\n"}, 5: BROKEN}))
    b = repository(tmp_path / "b", line(6, {1: {"renamed": ""}, 5: {"renamed": None}}, 20, "b"))
    done = bisect(tmp_path, {"a": a, "b": b})
    assert done.found == a.ids[3]
    assert done.verdicts == {"a": ("accomplice", a.ids[3]), "b": ("accomplice", None)}


def test_a_submodule_of_the_first_is_laid_over_what_is_recorded(tmp_path: Path) -> None:
    library = repository(tmp_path / "library", line(6, {3: BROKEN}, 20, "lib"))
    a = repository(tmp_path / "a", main_line(4, {0: submodule("lib", tmp_path / "library", library.ids[0])}))
    populate(a.path)
    lib = Repository(a.path / "lib", library.ids)
    with untouched(a.path):
        done = bisect(tmp_path, {"a": a, "lib": lib})
    assert (done.report.plan.repos[1].place, done.found) == ("lib", library.ids[3])
    assert done.verdicts == {"lib": ("convicted", library.ids[3]), "a": ("acquitted", None)}
    assert done.reproduced() == FAILED


def test_a_repository_at_a_place_that_was_named(tmp_path: Path) -> None:
    a = repository(tmp_path / "a", main_line(4))
    b = repository(tmp_path / "b", line(4, {2: BROKEN}, 20, "b"))
    done = bisect(tmp_path, {"a": a, "b-1.x": b}, "--place", "b-1.x=plugins/b")
    assert done.verdicts == {"b-1.x": ("convicted", b.ids[2]), "a": ("acquitted", None)}
    script = next((done.path / "steps").glob("*/command.sh")).read_text()
    assert "export SEATRIAL_TREE_B_1_X=" in script
    assert done.reproduced() == FAILED


def test_a_repository_beside_is_imported_from_its_commit(tmp_path: Path) -> None:
    a = repository(tmp_path / "a", main_line(3))
    b = repository(tmp_path / "b", line(4, {0: {"src/thing/__init__.py": "fine = True\n"}, 2: {"src/thing/__init__.py": ""}}, 20, "b"))
    done = bisect(tmp_path, {"a": a, "b": b}, command=(sys.executable, "-c", "import thing; thing.fine"))
    assert done.verdicts == {"b": ("convicted", b.ids[2]), "a": ("acquitted", None)}
    assert done.reproduced() == (1, "AttributeError: module 'thing' has no attribute 'fine'")


def test_a_repository_that_cannot_be_tested_alone_convicts_nobody_else(tmp_path: Path) -> None:
    """The first repository is guilty, but does not run without the newer second one; that does not make the second one guilty."""
    a = repository(tmp_path / "a", main_line(4, {3: BROKEN}))
    b = repository(tmp_path / "b", line(4, {1: {"new": ""}}, 20, "b"))
    needs = 'if [ -e broken ] && [ ! -e "$SEATRIAL_TREE_B/new" ]; then exit 125; fi; exec sh check.sh'
    done = bisect(tmp_path, {"a": a, "b": b}, command=("sh", "-c", needs))
    assert done.verdicts == {"a": ("unknown", a.ids[3]), "b": ("unknown", None)}
    assert_report_says_the_same(done)
    count = len(done.rows)
    assert (done.again("resume").verdicts, len(done.rows)) == (done.verdicts, count)


def test_a_conviction_goes_on_where_it_was(tmp_path: Path) -> None:
    repos = three(tmp_path, {"b": 2, "a": 3}, 4)
    assert_resumes_anywhere(bisect(tmp_path, repos), "conviction")


def assert_report_says_the_same(done: Bisect) -> None:
    """`seatrial bisect report` gives the same answer from the journal alone."""
    before, rows = done.report, done.rows
    assert done.again("report").said.code == done.said.code
    assert (done.report, done.rows) == (before, rows)


def assert_resumes_anywhere(done: Bisect, stage: str) -> None:
    """Killed after any row since the search was over: the same answer, and no row is run again."""
    journal, before = done.path / "runs.jsonl", done.report
    rows, lines = done.rows, journal.read_text().splitlines(keepends=True)
    first = next(place for place, row in enumerate(rows) if row.stage == stage)
    assert first < len(rows) - 2
    for kept in range(first, len(rows)):
        journal.write_text("".join(lines[:kept]))
        assert done.again("report").report.answer.suspects == before.answer.suspects
        again = done.again("resume")
        assert again.said.code == 0, again.said
        assert again.report.answer == before.answer
        assert "".join(lines[:kept]) == journal.read_text()[: len("".join(lines[:kept]))]
        key = [(row.stage, row.history, row.point, row.mark) for row in again.rows]
        assert sorted(key) == sorted((row.stage, row.history, row.point, row.mark) for row in rows)
