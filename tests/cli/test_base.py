"""`--base`, `--no-base` and `--expect` of `seatrial run`: what cannot be meant is refused before anything runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.command import inside
from tests.trial.conftest import commit, git


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    root = tmp_path / "trl"
    root.mkdir()
    git(root, "init", "-q")
    commit(root, {"trl/__init__.py": "a = 1\n"})
    return root


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--expect", "identical"), "--expect needs a change"),
        (("--expect", "identical", "--no-base", "--change", "trl"), "--no-base switches the base off"),
        (("--expect", "identical", "--set", "change.run_base=false", "--change", "trl"), "--no-base switches the base off"),
        (("--expect", "nothing", "--change", "trl"), "nothing"),
        (("--base", "no-such-revision", "--change", "trl"), "unknown base 'no-such-revision'"),
    ],
)
def test_what_cannot_be_meant_is_refused(repo: Path, words: tuple[str, ...], message: str) -> None:
    answer = inside("run", "trl", "--level", "0", *words, cwd=repo.parent)
    assert (answer.code, message in answer.err) == (2, True), answer.err
    assert not (repo.parent / "trials").exists()
