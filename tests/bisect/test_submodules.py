"""A first bad commit that moves a submodule is followed into it, end to end."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.bisect.repos import Commit, Link, gitmodules, populate, submodule
from tests.bisect.several import Changes, Repository, bisect, line, main_line, repository
from tests.bisect.test_several import BROKEN, assert_report_says_the_same, assert_resumes_anywhere
from tests.bisect.untouched import untouched

pytestmark = pytest.mark.slow


def library(root: Path, name: str = "library", culprit: int = 3, **more: str) -> Repository:
    """Six commits, one of them broken."""
    return repository(root / name, line(6, {culprit: {**BROKEN, **more}}, name="lib"))


def moving(root: Path, library: Repository, changes: dict[int, Commit] | None = None, to: int = 5, path: str = "lib") -> Repository:
    """A superproject whose commit 3 moves the submodule."""
    more = {index: commit.files for index, commit in (changes or {}).items()}
    first = submodule(path, library.path, library.ids[0])
    third = {path: Link(library.ids[to]), **more.get(3, {})}
    made = repository(root / "a", main_line(6, {**more, 0: first, 3: third}))
    populate(made.path)
    return made


def test_the_submodules_own_commit_is_named(tmp_path: Path) -> None:
    lib = library(tmp_path)
    a = moving(tmp_path, lib)
    with untouched(a.path, lib.path):
        done = bisect(tmp_path, {"a": a})
    assert (done.said.code, done.found) == (0, a.ids[3])
    assert done.verdicts == {"lib": ("convicted", lib.ids[3])}
    inside = f"; inside of the submodule `lib`, which it moves, it is `{lib.ids[3][:12]}` `lib commit 3`."
    assert done.headline == f"The first bad commit is `{a.ids[3][:12]}` `a commit 3`{inside}"
    assert done.report.headline == done.headline
    page = (done.path / "report.html").read_text()
    assert f"it is <code>{lib.ids[3][:12]}</code> <code>lib commit 3</code>" in page
    assert f"Inside `lib`: `{lib.ids[3]}` `lib commit 3`" in (done.path / "summary.md").read_text()
    assert_report_says_the_same(done)
    # The submodule is found as in every other run, not by a path of its own.
    scripts = [file.read_text() for file in (done.path / "steps").glob("*/command.sh")]
    assert not any("SEATRIAL_TREE_" in text or "/tree/lib" in text for text in scripts)


def test_a_submodule_with_the_name_of_its_repository(tmp_path: Path) -> None:
    lib = library(tmp_path)
    a = moving(tmp_path, lib)
    done = bisect(tmp_path, {"lib": a})
    assert done.verdicts == {"lib": ("convicted", lib.ids[3])}
    assert lib.ids[3][:12] in done.headline


def test_a_metric_is_followed_into_a_submodule(tmp_path: Path) -> None:
    lib = repository(tmp_path / "library", line(6, {index: {"value": "0.2" if index >= 3 else "0.9"} for index in range(6)}, name="lib"))
    a = moving(tmp_path, lib)
    writes = """printf '{"step": 1, "reward": %s}\\n' "$(cat lib/value)" > "$SEATRIAL_OUTPUT/metrics.jsonl\""""
    done = bisect(tmp_path, {"a": a}, "--check", 'mean(data["reward"]) > 0.5', command=("sh", "-c", writes))
    assert (done.found, done.verdicts) == (a.ids[3], {"lib": ("convicted", lib.ids[3])})
    assert done.report.answer.standings[0].confidence >= 0.99
    assert_report_says_the_same(done)


def test_no_descent_when_told_so(tmp_path: Path) -> None:
    done = bisect(tmp_path, {"a": moving(tmp_path, library(tmp_path))}, "--no-descend")
    assert (done.verdicts, {row.history for row in done.rows}) == ({}, {0})


def test_the_superprojects_own_part_is_guilty(tmp_path: Path) -> None:
    a = moving(tmp_path, library(tmp_path, culprit=0), {3: Commit(BROKEN)})
    done = bisect(tmp_path, {"a": a}, command=("sh", "-c", "rm -f lib/broken; exec sh check.sh"))
    assert (done.found, done.verdicts) == (a.ids[3], {"lib": ("acquitted", None)})
    assert "inside" not in done.headline
    assert_report_says_the_same(done)


def test_a_submodule_that_was_moved_back(tmp_path: Path) -> None:
    lib = repository(tmp_path / "library", line(6, {3: {"fix": ""}}, name="lib"))
    changes: Changes = {0: {**submodule("lib", lib.path, lib.ids[5]), "needs-fix": ""}, 3: {"lib": Link(lib.ids[1])}}
    a = repository(tmp_path / "a", main_line(5, changes))
    done = bisect(tmp_path, {"a": a})
    assert (done.found, done.verdicts) == (a.ids[3], {"lib": ("convicted", None)})
    assert "moved back" in done.report.answer.standings[0].why
    assert done.headline.endswith("; the cause is that it moves the submodule `lib`.")
    assert_report_says_the_same(done)


def test_a_new_submodule_has_nothing_to_compare_with(tmp_path: Path) -> None:
    lib = library(tmp_path)
    a = repository(tmp_path / "a", main_line(5, {3: submodule("lib", lib.path, lib.ids[5])}))
    done = bisect(tmp_path, {"a": a})
    assert (done.found, done.verdicts) == (a.ids[3], {})
    assert any("adds the submodule lib" in note for note in done.report.answer.notes)


def nested(root: Path) -> tuple[Repository, Repository, Repository]:
    """A superproject that moves `lib`, one of whose commits moves `core`, one of whose commits is broken."""
    core = repository(root / "core", line(4, {2: BROKEN}, name="core"))
    lib = repository(root / "library", line(5, {0: submodule("core", core.path, core.ids[0]), 2: {"core": Link(core.ids[3])}}, name="lib"))
    return moving(root, lib, to=4), lib, core


def test_a_submodule_of_a_submodule(tmp_path: Path) -> None:
    a, lib, core = nested(tmp_path)
    done = bisect(tmp_path, {"a": a})
    assert done.found == a.ids[3]
    assert done.verdicts == {"lib": ("convicted", lib.ids[2]), "lib/core": ("convicted", core.ids[2])}
    assert f"`{core.ids[2][:12]}` `core commit 2`" in done.headline
    assert {row.history for row in done.rows} == {0, 1, 101}
    assert_report_says_the_same(done)


def test_a_descent_goes_on_where_it_was(tmp_path: Path) -> None:
    a, _, _ = nested(tmp_path)
    assert_resumes_anywhere(bisect(tmp_path, {"a": a}, "--jobs", "1"), "conviction")


@pytest.mark.parametrize(
    ("culprits", "own", "verdicts"),
    [
        ((3, 9), False, ("convicted", "acquitted")),
        ((3, 3), False, ("unknown", "unknown")),
        ((9, 9), True, ("acquitted", "acquitted")),
    ],
    ids=["one of them", "each of them alone", "none of them"],
)
def test_two_submodules_that_move_at_once(tmp_path: Path, culprits: tuple[int, int], own: bool, verdicts: tuple[str, str]) -> None:
    one, two = (repository(tmp_path / f"r{place}", line(6, {culprit: BROKEN})) for place, culprit in enumerate(culprits))
    paths = {"lib": one, "other": two}
    first = {".gitmodules": gitmodules({path: repo.path for path, repo in paths.items()})}
    a = repository(
        tmp_path / "a",
        main_line(
            5,
            {
                0: {**first, **{path: Link(repo.ids[0]) for path, repo in paths.items()}},
                3: {**{path: Link(repo.ids[5]) for path, repo in paths.items()}, **(BROKEN if own else {})},
            },
        ),
    )
    done = bisect(tmp_path, {"a": a})
    assert done.found == a.ids[3]
    assert tuple(verdict for verdict, _ in done.verdicts.values()) == verdicts
    assert_report_says_the_same(done)


def test_a_lost_commit_of_a_submodule_is_a_skip_with_the_fix(tmp_path: Path) -> None:
    lib = library(tmp_path, culprit=9)
    lost = "d" * 40
    changes: Changes = {0: submodule("lib", lib.path, lib.ids[0]), 1: {"lib": Link(lost)}, 2: {"lib": Link(lib.ids[1]), **BROKEN}}
    a = repository(tmp_path / "a", main_line(3, changes))
    populate(a.path)
    done = bisect(tmp_path, {"a": a})
    assert (done.said.code, done.report.answer.state) == (99, "range")
    assert {one.commit for one in done.report.answer.suspects} == {a.ids[1], a.ids[2]}
    [row] = [row for row in done.rows if row.skip]
    assert (row.skip, row.commit) == ("tree", a.ids[1])
    assert f"git -C {a.path / 'lib'} fetch origin {lost}" in row.reason
    assert f"fetch origin {lost}" in (done.path / "summary.md").read_text()
