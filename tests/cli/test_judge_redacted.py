"""`seatrial judge` on a raw log shows no secret whose name stands on an earlier line."""

from __future__ import annotations

from pathlib import Path

from seatrial.cli.judge import redacted
from seatrial.evidence.redact import Redactor
from seatrial.loops import get_loop
from seatrial.trial.files_judge import judge_files

REDACTOR = Redactor({})
_DASH = "-" * 5
_LAST = "UfvKq/i/TNejabedVsrWAAAAEHVzZXJA" + "bGFwdG9wAQIDBAU="
_ROWS = (f"{_DASH}BEGIN OPENSSH PRIVATE KEY{_DASH}", "b3BlbnNzaC1rZXktdjEAAAAABG5vbmUAAAAEbm9uZQ" + "AAAAAAAAABAAAAMwAAAAtzc2gtZW")


def judged(log: Path, text: str) -> str:
    log.write_text(text)
    return redacted(judge_files(get_loop("trl"), log, [], None, None), REDACTOR).model_dump_json()


def test_the_decisive_line_is_read_behind_the_lines_before_it(tmp_path: Path) -> None:
    shown = judged(tmp_path / "run.log", "\n".join(["start", *_ROWS, f"ValueError: {_LAST}", ""]))
    assert _LAST[:20] not in shown
    assert "redacted" in shown


def test_a_decisive_line_without_a_secret_stays(tmp_path: Path) -> None:
    assert "ValueError: step 3 has 12 tokens" in judged(
        tmp_path / "run.log", "password: velvetmountain\nValueError: step 3 has 12 tokens\n"
    )
