"""`seatrial judge` on a raw log shows no secret whose name stands on an earlier line."""

from __future__ import annotations

from pathlib import Path

from tests.evidence.shapes import OPENSSH, ROWS

from seatrial.cli.judge import redacted
from seatrial.evidence.redact import Redactor
from seatrial.loops import get_loop
from seatrial.trial.files_judge import judge_files

REDACTOR = Redactor({})


def judged(log: Path, text: str) -> str:
    log.write_text(text)
    return redacted(judge_files(get_loop("trl"), log, [], None, None), REDACTOR).model_dump_json()


def test_the_decisive_line_is_read_behind_the_lines_before_it(tmp_path: Path) -> None:
    *rows, last = OPENSSH.split("\n")[:-1]
    shown = judged(tmp_path / "run.log", "\n".join(["start", *rows, f"ValueError: {last}", ""]))
    assert ROWS[-1][:20] not in shown
    assert "redacted" in shown


def test_a_decisive_line_without_a_secret_stays(tmp_path: Path) -> None:
    assert "ValueError: step 3 has 12 tokens" in judged(
        tmp_path / "run.log", "password: velvetmountain\nValueError: step 3 has 12 tokens\n"
    )
