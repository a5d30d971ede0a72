"""Two revisions beside each other."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from seatrial.core.errors import UserError
from seatrial.history.compare import compare_revisions, resolve_revision
from seatrial.history.store import Store, point
from tests.history.histories import filled, history, run

A, B = "a" * 40, "b" * 40


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """Ten baselines with the values 0 to 9, then a run of each side."""
    kept = filled(tmp_path / "h.sqlite")
    kept.add(run(20, commit=A, trusted=False), [point("loss", 4.0), point("old", 1)])
    kept.add(run(21, commit=B, trusted=False), [point("loss", 9.0), point("new", 1)])
    return kept


def test_the_difference_is_told_in_spreads_of_the_baselines(store: Store) -> None:
    found = compare_revisions(store, A, B)
    (row,) = found.rows
    assert (row.before, row.after) == (4, 9)
    assert row.sigmas == pytest.approx(5 / (1.4826 * 2.5))
    assert "+5 (+125.00 %)" in "\n".join(found.lines())


def test_metrics_of_one_side_are_listed(store: Store) -> None:
    lines = compare_revisions(store, A, B).lines()
    assert any(line.startswith("only aaaaaaaaaaaa: old") for line in lines)
    assert any(line.startswith("only bbbbbbbbbbbb: new") for line in lines)


def test_a_nan_in_one_of_several_runs_is_not_hidden(store: Store) -> None:
    store.add(run(22, commit=B), [point("loss", math.nan)])
    (row,) = compare_revisions(store, A, B).rows
    assert (row.before, row.after, row.mark) == (4, None, "nan")


def test_too_few_baselines_are_told(tmp_path: Path) -> None:
    with Store(tmp_path / "h.sqlite", write=True) as kept:
        kept.add(run(1, commit=A), [point("loss", 1)])
        kept.add(run(2, commit=B), [point("loss", 2)])
        assert "too few baselines" in "\n".join(compare_revisions(kept, A, B).lines())


def test_the_beginning_of_a_commit_must_be_of_one_commit(store: Store) -> None:
    assert resolve_revision(store, "aaaa", None) == A
    with pytest.raises(UserError, match="10 commits begin so"):
        resolve_revision(store, "0000", None)
    with pytest.raises(UserError, match="no run of it"):
        resolve_revision(store, "cccc", None)
    with pytest.raises(UserError, match="git does not know it"):
        resolve_revision(store, "v1.0", None)


def test_revisions_are_resolved_by_git(tmp_path: Path) -> None:
    from seatrial.evidence.git import git, line

    git(tmp_path, "init", "-q", "-b", "main")
    for word in ("one", "two"):
        git(tmp_path, "-c", "user.name=a", "-c", "user.email=a@b", "commit", "-q", "--allow-empty", "-m", word)
    commits = [line(git(tmp_path, "rev-parse", revision)) for revision in ("HEAD~1", "HEAD")]
    with Store(tmp_path / "h.sqlite", write=True) as kept:
        for number, commit in enumerate(commits):
            kept.add(run(number, commit=commit), [point("loss", number)])
    answer = history("compare", "HEAD~1", "main", store=kept.path, cwd=tmp_path)
    assert answer.returncode == 0, answer.stderr
    assert commits[0][:12] in answer.stdout


def test_nothing_in_common_is_told_and_is_no_success(tmp_path: Path) -> None:
    with Store(tmp_path / "h.sqlite", write=True) as kept:
        kept.add(run(1, commit=A), [point("old", 1)])
        kept.add(run(2, commit=B), [point("new", 2)])
    answer = history("compare", "aaaa", "bbbb", store=kept.path, cwd=tmp_path)
    assert answer.returncode == 2
    assert "no metric is on both sides" in answer.stdout
    assert "old" in answer.stdout
    assert "new" in answer.stdout
