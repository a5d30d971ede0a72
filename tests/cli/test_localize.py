"""`seatrial localize` on a run directory: files, text, and what it says when there is nothing to look at."""

from __future__ import annotations

import json
from pathlib import Path
from typing import ClassVar

import pytest

from seatrial.core.loop import Measures
from seatrial.core.records import Cost, LevelResult, Plan, PlannedLevel, Trial
from seatrial.core.series import TokenRow
from seatrial.core.verdict import Verdict
from seatrial.trial import analyses
from tests.cli.command import inside
from tests.triage.token_rows import row, rows
from tests.trial.fake import FakeLoop

NAMES = {0: "smoke", 1: "second"}


class Logged(FakeLoop):
    """A loop that logs tokens; which levels have some is in `given`."""

    given: ClassVar[dict[int, list[TokenRow]]] = {}
    measures = Measures(tokens=lambda directory: iter(Logged.given.get(int(directory.name.partition("-")[0]), [])))


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A trial whose level 1 failed."""
    monkeypatch.setattr(analyses, "loop_of", lambda _: Logged())
    planned = tuple(PlannedLevel(number=n, name=name, title=name, reasons=(), cost=Cost(minutes=1)) for n, name in NAMES.items())
    verdicts = {0: Verdict.PASS, 1: Verdict.FAIL}
    results = tuple(LevelResult(number=n, name=name, title=name, verdict=verdicts[n], reason="") for n, name in NAMES.items())
    plan = Plan(loop="fake", levels=planned, model="m")
    trial = Trial(id="t", seatrial="0", created="", plan=plan, command=(), status="done", levels=results)
    (tmp_path / "trial.json").write_text(trial.model_dump_json())
    return tmp_path


def give(monkeypatch: pytest.MonkeyPatch, **levels: list[TokenRow]) -> None:
    monkeypatch.setattr(Logged, "given", {int(name.removeprefix("level")): given for name, given in levels.items()})


def test_the_failed_level_is_looked_at_and_the_answer_stored(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    give(monkeypatch, level0=[row([0.0])], level1=rows(lambda chance, _, along: chance.gauss(0, 0.01 + along)))
    before = (run / "trial.json").read_bytes()
    answer = inside("localize", run)
    assert (answer.code, answer.err) == (0, "")
    assert answer.out.startswith("level 1 (second): 16 sequences of 4 prompts")
    assert "- the error grows with position: mean Spearman" in answer.out
    assert "worst sequences:\n  train_data_step1.jsonl:" in answer.out
    assert f"report: {run / 'localize' / 'localize.html'}" in answer.out
    stored = json.loads((run / "localize" / "localize.json").read_text())
    assert (stored["level"], stored["schema_version"], len(stored["worst"])) == (1, 1, 16)
    assert (run / "trial.json").read_bytes() == before
    chosen = inside("localize", run, "--level", "0", "--json")
    assert json.loads(chosen.out) == json.loads((run / "localize" / "localize.json").read_text())
    assert json.loads(chosen.out)["level"] == 0


def test_the_page_stands_alone_and_escapes_everything(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hostile = row([0.5, float("nan")], prompt="<script>alert(1)</script>", source='<b onclick="x">:1')
    give(monkeypatch, level1=[hostile, *rows(lambda *_: 0.3)])
    assert inside("localize", run).code == 0
    page = (run / "localize" / "localize.html").read_text()
    assert "<script" not in page
    assert "<b onclick" not in page
    assert "src=" not in page
    assert "http://" not in page
    assert "default-src &#39;none&#39;" in page
    assert page.count("<svg") == 5
    assert 'class="bad"' in page
    assert "position 4: generator -1.0, trainer nan" in page


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "no token logs in "),
        (("--level", "0"), "0-smoke: looked for sequences with the log-probabilities of generator and trainer"),
        (("--level", "4"), "level 4 is not part of this trial"),
    ],
)
def test_a_trial_without_token_logs_is_2(run: Path, words: tuple[str, ...], message: str) -> None:
    answer = inside("localize", run, *words)
    assert answer.code == 2
    assert message in answer.err
    assert "fix: " in answer.err
    assert not (run / "localize").exists()


def test_what_is_no_run_directory_is_2(tmp_path: Path) -> None:
    answer = inside("localize", tmp_path)
    assert (answer.code, "no trial.json there" in answer.err) == (2, True)
