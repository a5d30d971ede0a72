"""Our log can be replayed by git, git's log can be read by us, and neither can be misread."""

from __future__ import annotations

import contextlib
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from seatrial.bisect import git_bisect_log
from seatrial.bisect.bisect_records import BisectAnswer, BisectRun, History, Mark, SkipKind
from seatrial.core.errors import UserError
from seatrial.evidence.redact import Redactor
from tests.bisect.bisects import answer, history, run, runs
from tests.bisect.repos import Commit, build, linear, run_git

COUNT = 16
OPEN = BisectAnswer(state="open")


@pytest.fixture(scope="module")
def repo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkout for reading."""
    path = tmp_path_factory.mktemp("gitlog") / "repo"
    build(path, linear(COUNT), checkout=False)
    return path


@pytest.fixture(scope="module")
def ids(repo: Path) -> list[str]:
    return run_git(repo, "rev-list", "--reverse", "main").split()


@pytest.fixture
def scratch(repo: Path, tmp_path: Path) -> Path:
    """A checkout of one's own, for bisecting in."""
    run_git(tmp_path, "clone", "--quiet", str(repo), "scratch")
    return tmp_path / "scratch"


def written(past: History, rows: Sequence[BisectRun], found: BisectAnswer = OPEN) -> str:
    return git_bisect_log.write_git_log(past, rows, found, Redactor({}).text)


class Log(git_bisect_log.EarlierMarks):
    """What a log says, by its marks."""

    def of(self, mark: Mark) -> tuple[str, ...]:
        return tuple(dict.fromkeys(marked.commit for marked in self.marks or () if marked.mark is mark))

    good = property(lambda self: self.of(Mark.GOOD))
    skips = property(lambda self: self.of(Mark.SKIP))
    bad = property(lambda self: next(reversed([one.commit for one in self.marks or () if one.mark is Mark.BAD]), None))


def read(text: str, repo: Path) -> Log:
    found = git_bisect_log.parse_git_log(text, repo, Path("bisect.log"))
    return Log(found.path, found.marks, notes=found.notes)


def state(repo: Path) -> set[str]:
    """What git believes: the marks of a bisect under way."""
    return set(run_git(repo, "for-each-ref", "--format=%(refname) %(objectname)", "refs/bisect").splitlines())


def replayed(repo: Path, text: str) -> set[str]:
    path = repo.parent / "replay.log"
    path.write_text(text, encoding="utf-8")
    with contextlib.suppress(subprocess.CalledProcessError):  # git's way to say that only skipped commits are left
        run_git(repo, "bisect", "replay", str(path))
    return state(repo)


def test_git_replays_our_log_and_comes_to_our_answer(scratch: Path, ids: list[str]) -> None:
    past = history(COUNT, ids, subject='it\'s {} "quoted" $(x) `y`')
    marks = [(0, Mark.GOOD), (15, Mark.BAD), (7, Mark.GOOD), (11, Mark.BAD), (9, Mark.SKIP), (8, Mark.GOOD), (10, Mark.BAD)]
    text = written(past, runs(past, *marks), answer(past, 9, 10))
    expected = {f"refs/bisect/bad {ids[10]}", f"refs/bisect/skip-{ids[9]} {ids[9]}"}
    assert replayed(scratch, text) == expected | {f"refs/bisect/good-{ids[index]} {ids[index]}" for index in (0, 7, 8)}
    log = run_git(scratch, "bisect", "log")
    for index in (9, 10):
        assert re.search(rf"^# possible first bad commit: \[{ids[index]}\]", log, re.MULTILINE)
        assert f"# possible first bad commit: [{ids[index]}] it's {index} " in text
    # And git's own account of it, read by us, is ours again.
    ours, gits = read(text, scratch), read(log, scratch)
    assert (ours.good, ours.bad, ours.skips) == (gits.good, gits.bad, gits.skips)
    assert written(past, git_bisect_log.as_rows(gits, past), answer(past, 9, 10)) == text


@pytest.mark.slow
def test_git_goes_on_from_an_unfinished_log(scratch: Path, ids: list[str]) -> None:
    past = history(COUNT, ids)
    # Two ran at once, and the one that says more ended first: git must not forget it.
    replayed(scratch, written(past, runs(past, (0, Mark.GOOD), (15, Mark.BAD), (5, Mark.BAD), (10, Mark.BAD))))
    assert f"refs/bisect/bad {ids[5]}" in state(scratch)
    said = run_git(scratch, "bisect", "run", "sh", "-c", "test $(cat number.txt) -lt 3")
    assert f"{ids[3]} is the first bad commit" in said


@pytest.mark.slow
def test_what_git_could_not_bear_is_a_comment(scratch: Path, ids: list[str]) -> None:
    past = history(COUNT, ids)
    # It came at 2 and went before 5, and then came again: git would refuse the whole log.
    rows = runs(past, (0, Mark.GOOD), (15, Mark.BAD), (2, Mark.BAD), (5, Mark.GOOD), (9, Mark.BAD))
    for found in (OPEN, answer(past, 6, 7, 8, 9)):
        text = written(past, rows, found)
        assert f"# bad: [{ids[2]}]" in text
        assert f"git bisect bad {ids[2]}" not in text
        assert {f"refs/bisect/bad {ids[9]}", f"refs/bisect/good-{ids[5]} {ids[5]}"} <= replayed(scratch, text)


def test_of_runs_that_disagree_git_is_told_to_skip(repo: Path, ids: list[str]) -> None:
    past = history(COUNT, ids)
    marks = [(0, Mark.GOOD), (15, Mark.BAD), (15, Mark.GOOD), (8, Mark.BAD), (8, Mark.GOOD), (4, Mark.SKIP), (4, Mark.GOOD)]
    found = read(written(past, runs(past, *marks)), repo)
    assert (found.good, found.bad, found.skips) == ((ids[0], ids[4]), ids[15], (ids[8],))


def test_a_stray_run_does_not_contradict_the_answer_in_git(repo: Path, ids: list[str]) -> None:
    past = history(COUNT, ids)
    rows = runs(past, (0, Mark.GOOD), (15, Mark.BAD), (3, Mark.BAD), (6, Mark.GOOD), (7, Mark.BAD), (12, Mark.GOOD))
    found = read(written(past, rows, answer(past, 7, confidence=0.99, model="noise")), repo)
    assert (found.good, found.bad) == ((ids[0], ids[6]), ids[7])


def test_runs_beside_the_history_are_not_in_it(repo: Path, ids: list[str]) -> None:
    past = history(COUNT, ids)
    rows = (
        *runs(past, (0, Mark.GOOD), (15, Mark.BAD)),
        run(past, 3, 4, Mark.BAD, stage="conviction"),
        run(past, 4, 5, Mark.BAD, history=1),
    )
    assert read(written(past, rows), repo).bad == ids[15]


def test_several_repositories_are_comments_only() -> None:
    past = history(4, repos=2)
    text = written(past, runs(past, (0, Mark.GOOD), (3, Mark.BAD)), answer(past, 1, 2, 3))
    assert all(line.startswith("#") for line in text.splitlines())
    assert f"# bad: [{past.points[3].commit}] loop: commit 3" in text


def test_subjects_are_cleared_and_stay_on_their_line() -> None:
    past = history(3, subject="x\ngit bisect bad {}\x1b[31m hf_" + "a" * 34)
    text = written(past, runs(past, (0, Mark.GOOD), (2, Mark.BAD)))
    assert "\x1b" not in text
    assert "[redacted:hf-token]" in text
    assert [line for line in text.splitlines() if not line.startswith("#")] == [
        "git bisect start",
        f"git bisect bad {past.points[2].commit}",
        f"git bisect good {past.points[0].commit}",
    ]


@pytest.mark.slow
def test_a_log_of_a_real_run_is_read(scratch: Path, ids: list[str]) -> None:
    run_git(scratch, "bisect", "start", "HEAD", "HEAD~15", "--", "number.txt")
    run_git(scratch, "bisect", "run", "sh", "-c", "n=$(cat number.txt); test $n = 7 && exit 125; test $n -lt 9")
    found = read(run_git(scratch, "bisect", "log"), scratch)
    run_git(scratch, "bisect", "reset")
    assert found.bad == ids[9]
    assert {ids[0], ids[8]} <= set(found.good)
    assert (found.marks or ())[0] == git_bisect_log.Marked(Mark.BAD, ids[15], 3)
    assert found.skips == (ids[7],)
    assert "number.txt" in found.notes[0]


def test_names_of_the_start_are_what_they_were_when_it_started(scratch: Path, ids: list[str]) -> None:
    run_git(scratch, "bisect", "start", "HEAD", "HEAD~7")
    log = run_git(scratch, "bisect", "log")
    run_git(scratch, "bisect", "reset")
    run_git(scratch, "commit", "--quiet", "--allow-empty", "-m", "one more")
    found = read(log, scratch)
    assert (found.bad, found.good) == (ids[15], (ids[8],))
    bare = "\n".join(line for line in log.splitlines() if not line.startswith("#"))
    with pytest.raises(UserError, match="HEAD: a name that may move") as raised:
        read(bare, scratch)
    assert run_git(scratch, "rev-parse", "HEAD") in raised.value.fix


@pytest.mark.slow
def test_terms_of_ones_own_and_ranges_of_a_real_bisect(scratch: Path, ids: list[str]) -> None:
    run_git(scratch, "bisect", "start", "--term-old", "fast", "--term-new=slow", "--first-parent")
    run_git(scratch, "bisect", "slow", "HEAD")
    run_git(scratch, "bisect", "fast", "HEAD~15", "HEAD~14")
    run_git(scratch, "bisect", "skip", "main~4..main~2")
    found = read(run_git(scratch, "bisect", "log"), scratch)
    run_git(scratch, "bisect", "reset")
    assert (found.bad, set(found.good), set(found.skips)) == (ids[15], {ids[0], ids[1]}, {ids[12], ids[13]})


@pytest.mark.parametrize(
    "lines",
    [
        "git bisect start\ngit bisect bad {15}\ngit bisect good {0}",
        "git bisect start '{15}' '{0}'",
        "git-bisect start\r\n\r\n# hello\r\ngit-bisect bad {15}\r\ngit-bisect good {0}\r\n",
        "git bisect new {15}\ngit bisect old {0}",
        "git bisect start --no-checkout 'number.txt'\ngit bisect bad {15}\ngit bisect good {0}",
        "# bad: [{15}] x\ngit bisect start 'HEAD' 'HEAD~99' 'f'\ngit bisect good {0}",
        "# bad: [{3}] an edited line wins over its comment\n# good: [{2}] x\ngit bisect start '{15}' '{0}'",
    ],
)
def test_ways_to_say_the_same(repo: Path, ids: list[str], lines: str) -> None:
    text = re.sub(r"\{(\d+)\}", lambda found: ids[int(found[1])], lines)
    found = read(text, repo)
    assert (found.bad, found.good, found.skips) == (ids[15], (ids[0],), ())


def test_short_hashes_and_ranges_added_by_hand(repo: Path, ids: list[str]) -> None:
    start = f"git bisect start\ngit bisect bad {ids[15]}\ngit bisect good {ids[0]}\n"
    found = read(start + f"git bisect skip {ids[5][:12]} {ids[6][:9]}..{ids[8][:9]}\ngit bisect good {ids[3][:10]}\n", repo)
    assert set(found.skips) == {ids[5], ids[7], ids[8]}
    assert found.good == (ids[0], ids[3])


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("git bisect reset", "unknown mark 'reset'"),
        ("git bisect worse {1}", "unknown mark 'worse'"),
        ("git bisect new {1}", "unknown mark 'new'"),
        ("rm -rf /", "not a line of a bisect log"),
        ("git bisect", "not a line of a bisect log"),
        ("git bisect good", "without a commit"),
        ("git bisect good HEAD~3", "a name that may move"),
        ("git bisect good main", "a name that may move"),
        ("git bisect good 0123456789", "names no single commit"),
        ("git bisect good --all", "a name that may move"),
        ("git bisect skip {9}..{2}", "no commit lies in this range"),
        ("git bisect skip {2}...{9}", "a range is written with two dots"),
        ("git bisect skip main~3..{9}", "a name that may move"),
        ("git bisect good 'x", "No closing quotation"),
        ("git bisect good {15}", "is good here and bad in line 2"),
        ("git bisect start", "a second bisect starts here"),
    ],
)
def test_what_is_not_understood_is_refused_with_its_line(repo: Path, ids: list[str], line: str, words: str) -> None:
    line = re.sub(r"\{(\d+)\}", lambda found: ids[int(found[1])], line)
    with pytest.raises(UserError) as raised:
        read(f"git bisect start\ngit bisect bad {ids[15]}\n\n{line}\n", repo)
    assert raised.value.message.startswith("bisect.log:4: ")
    assert words in raised.value.message
    assert raised.value.fix


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--sideways", "unknown option --sideways"),
        ("--term-old", "--term-old without a word"),
        ("--term-old x --term-new x", "two names"),
        ("--term-old skip", "two names"),
    ],
)
def test_a_start_that_is_not_understood_is_refused(repo: Path, arguments: str, words: str) -> None:
    with pytest.raises(UserError, match=re.escape(words)):
        read(f"git bisect start {arguments}\n", repo)


@pytest.mark.parametrize("end", ["\u2028", "\x0b", "\x0c", "\x85", "\x1e", "\r"])
def test_a_subject_cannot_add_a_mark(repo: Path, ids: list[str], end: str) -> None:
    found = read(f"git bisect start\n# bad: [{ids[15]}] x{end}git bisect good {ids[3]}\ngit bisect bad {ids[15]}\n", repo)
    assert (found.bad, found.good) == (ids[15], ())


@pytest.mark.parametrize("text", ["", "# nothing\n", "git bisect start\n"])
def test_a_log_without_marks_is_refused(repo: Path, text: str) -> None:
    with pytest.raises(UserError, match="marks no commit"):
        read(text, repo)


def test_a_branch_that_looks_like_a_hash_is_a_name(tmp_path: Path) -> None:
    ids = build(tmp_path / "repo", [Commit({"a": "1"}, tag="beef"), Commit({"a": "2"}, tag="feed")], checkout=False)
    with pytest.raises(UserError, match="beef names no single commit"):
        read("git bisect good beef\n", tmp_path / "repo")
    assert read(f"git bisect good {ids[0][:8]}\n", tmp_path / "repo").good == (ids[0],)


def test_rows_of_a_log(repo: Path, ids: list[str]) -> None:
    text = f"git bisect start\ngit bisect bad {ids[15]}\ngit bisect good {ids[0]}\ngit bisect skip {ids[4]}\ngit bisect skip {ids[4]}\n"
    past = history(COUNT, ids)
    rows = git_bisect_log.as_rows(read(text, repo), past)
    assert [(row.number, row.point, row.mark, row.stage) for row in rows] == [
        (1, ids[15], Mark.BAD, "replay"),
        (2, ids[0], Mark.GOOD, "replay"),
        (3, ids[4], Mark.SKIP, "replay"),
    ]
    assert rows[2].skip is SkipKind.HAND
    assert rows[2].reason == "bisect.log:4 says so"
    assert not any(row.directory for row in rows)
    with pytest.raises(UserError, match="speaks of one repository"):
        git_bisect_log.as_rows(read(text, repo), history(3, repos=2))
