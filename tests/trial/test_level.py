"""Parts of running a level: what the display reads, what is staged, which interpreter, and how a log is diagnosed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from seatrial.core.errors import BlockedError
from seatrial.core.loop import Measures
from seatrial.core.series import Metrics, Series
from seatrial.core.specs import Signature
from seatrial.core.verdict import Boundary, Verdict
from seatrial.trial.level import read_diagnosis, read_level_metrics, write_level_metrics
from seatrial.trial.progress import newest
from seatrial.trial.staging import find_interpreter, stage
from tests.trial.fake import FakeLoop


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", (None, None)),
        ('{"step": 1, "train/reward": 0.5}\n', (1, 0.5)),
        ('{"step": 1, "train/reward": 0.5}\n{"step": 2, "train/rew', (1, 0.5)),
        ('{"step": 1, "train/reward": 0.5}\n{"step": 2, "refit/x": 1}\n', (1, 0.5)),
        ('{"step": 1, "train/reward": "NaN"}\n', (None, None)),
        ('{"train/reward": 1}\n', (None, 1.0)),
        ("[1]\n", (None, None)),
        ("torn\n", (None, None)),
        ('{"step": 1, "train/reward": 0.5}\n' + '{"step": 2, "x": "' + "y" * 9000 + '"}\n', (None, None)),
    ],
)
def test_the_newest_reward_is_read_from_whole_rows(tmp_path: Path, text: str, expected: tuple[int | None, float | None]) -> None:
    (tmp_path / "m").write_text(text)
    assert newest(tmp_path / "m") == expected


def test_metrics_that_are_not_there_yet_are_none(tmp_path: Path) -> None:
    assert newest(tmp_path / "none") == (None, None)


def test_metrics_of_a_level_are_stored_with_what_is_not_finite(tmp_path: Path) -> None:
    series = {"a": Series("a", (1, 3), (0.1 + 0.2, float("nan"))), "b": Series("b", (3,), (float("-inf"),))}
    write_level_metrics(Metrics(series=series), tmp_path / "metrics.jsonl")
    rows = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert rows == ['{"step": 1, "a": 0.30000000000000004}', '{"step": 3, "a": "NaN", "b": "-Infinity"}']


def test_a_metrics_file_without_metrics_is_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "x.json").write_text("not json")
    monkeypatch.setattr(FakeLoop, "measures", Measures(metric_files=lambda _: {"p/": (tmp_path / "x.json",)}))
    found = read_level_metrics(FakeLoop(), tmp_path)
    assert found.damage[0].path == str(tmp_path / "x.json")


def test_the_staged_instruments_import_without_seatrials_dependencies(tmp_path: Path) -> None:
    target = stage(tmp_path, "trl")
    code = "import sys, seatrial.instruments.facts, seatrial.instruments.trl.fault_names as f; print(f.__file__, 'pydantic' in sys.modules)"
    done = subprocess.run([sys.executable, "-E", "-c", code], env={"PATH": ""}, cwd=target, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(str(target))
    assert done.stdout.endswith(" False\n")
    stage(tmp_path, "trl")  # a resumed trial stages again
    assert (target / "seatrial" / "instruments" / "bits" / "bits.c").is_file(), "kernels are compiled where they run"
    assert not (target / "seatrial" / "model").exists()
    assert not (target / "seatrial" / "loops" / "trl" / "loop.py").exists()


def test_an_interpreter_of_ones_own_must_exist(tmp_path: Path) -> None:
    assert find_interpreter(FakeLoop(), Path(sys.executable), print).lock is None
    with pytest.raises(BlockedError, match="no such interpreter"):
        find_interpreter(FakeLoop(), tmp_path / "python", print)


TRACE = """fake: model
[rank1]: Traceback (most recent call last):
Traceback (most recent call last):
[rank1]:   File "/a.py", line 1, in other
  File "/a.py", line 1, in _score
  File "/b.py", line 2, in helper
[rank1]: ValueError: two
ValueError: one
"""


def test_a_failure_may_be_known_by_the_frame_that_called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "run.log"
    log.write_text(TRACE)
    known = Signature(id="score", pattern="in _score$", boundary=Boundary.REWARD, verdict=Verdict.FAIL, advice="look")
    assert read_diagnosis(FakeLoop(), log).boundary is Boundary.PROVIDER
    monkeypatch.setattr(FakeLoop, "signatures", lambda _: (known,))
    found = read_diagnosis(FakeLoop(), log)
    assert (found.boundary, found.signature, found.advice, found.line) == (Boundary.REWARD, "score", "look", 8)
    monkeypatch.setattr(FakeLoop, "signatures", lambda _: (known.model_copy(update={"pattern": "in other$"}),))
    assert read_diagnosis(FakeLoop(), log).signature is None  # another process's frame


def test_a_frame_of_a_traceback_that_was_survived_is_no_cause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "run.log"
    head = 'Traceback (most recent call last):\n  File "/a.py", line 1, in _score\nValueError: harmless\n'
    log.write_text(f'{head}fake: model\nTraceback (most recent call last):\n  File "/b.py", line 1, in run\nValueError: real\n')
    known = Signature(id="score", pattern="in _score$", boundary=Boundary.REWARD)
    monkeypatch.setattr(FakeLoop, "signatures", lambda _: (known,))
    found = read_diagnosis(FakeLoop(), log)
    assert (found.cause, found.signature) == ("ValueError: real", None)
