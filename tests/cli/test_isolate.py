"""`seatrial isolate`: what it prints and which exit code it ends with. The reruns themselves: tests/trial/test_isolate.py."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from seatrial.core.records import Matrix, Rerun
from seatrial.core.verdict import Verdict
from seatrial.trial import analyses
from tests.cli.command import inside


class FakeCase:
    """A case whose matrix is made."""

    def __init__(self, run: Path) -> None:
        self.run = run

    def place(self) -> Path:
        return self.run


def made(run: Path, complete: bool = True, interrupted: bool = False) -> Matrix:
    rerun = Rerun(
        name="full-transport",
        arguments=(),
        options={"transports": "full"},
        suspect="none",
        directory="d",
        verdict=Verdict.FAIL,
        failure="still there",
    )
    found = Matrix(
        trial="t",
        level=0,
        title="Smoke",
        verdict=Verdict.FAIL,
        reason="missed",
        log="run.log",
        reruns=(rerun,),
        complete=complete,
        interrupted=interrupted,
        conclusion=("the original stays a Fail",),
    )
    (run / analyses.ISOLATE_TEXT).write_text("the table\n")
    return found


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[object, ...]]:
    """What the command asks for; opening a case always works."""
    seen: list[tuple[object, ...]] = []

    def open_case(run: Path, level: int | None, only: tuple[str, ...]) -> FakeCase:
        seen.append((run, level, only))
        return FakeCase(tmp_path)

    monkeypatch.setattr(analyses, "open_case", open_case)
    return seen


@pytest.mark.parametrize(
    ("complete", "interrupted", "code"),
    [(True, False, 0), (False, False, 99), (False, True, 130)],
    ids=["complete", "blocked", "interrupted"],
)
def test_the_exit_code(
    tmp_path: Path, asked: list[tuple[object, ...]], monkeypatch: pytest.MonkeyPatch, complete: bool, interrupted: bool, code: int
) -> None:
    monkeypatch.setattr(analyses, "isolate", lambda *_: made(tmp_path, complete, interrupted))
    answer = inside("isolate", tmp_path, "--level", "2", "--only", "repeat, tp-1,")
    assert answer.code == code, answer.err
    assert asked == [(tmp_path, 2, ("repeat", "tp-1"))]
    assert "the table" in answer.out
    assert f"matrix: {tmp_path / 'isolate.json'}" in answer.out


def test_machines_get_the_matrix(tmp_path: Path, asked: list[tuple[object, ...]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(analyses, "isolate", lambda *_: made(tmp_path))
    answer = inside("isolate", tmp_path, "--json")
    found = json.loads(answer.out)
    assert (found["verdict"], found["reruns"][0]["options"]) == ("Fail", {"transports": "full"})
    assert asked == [(tmp_path, None, ())]


def test_a_dry_run_only_prints(tmp_path: Path, asked: list[tuple[object, ...]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(analyses, "scripts", lambda _, only: [(f"/place/{name}", "echo\n") for name in only])
    answer = inside("isolate", tmp_path, "--dry-run", "--only", "a,b")
    assert (answer.code, answer.out) == (0, "# /place/a\necho\n\n# /place/b\necho\n\n")
    assert list(tmp_path.iterdir()) == []
    assert len(asked) == 1


def test_what_is_no_run_directory_is_2(tmp_path: Path) -> None:
    answer = inside("isolate", tmp_path)
    assert (answer.code, "no trial.json there" in answer.err) == (2, True)


def test_a_list_without_a_name_is_refused(tmp_path: Path, asked: list[tuple[object, ...]]) -> None:
    answer = inside("isolate", tmp_path, "--only", " ,")
    assert (answer.code, asked) == (2, [])
    assert "names no rerun" in answer.err
