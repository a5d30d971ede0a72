"""What driver and Ray worker say before training, and what is written down of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from seatrial.evidence.imports import read_imports
from seatrial.instruments import ray_imports
from seatrial.instruments.ray_imports import DRIVER, WORKER, Places, problems

CORE = "/a/megatron/core/__init__.py"


def test_driver_and_worker_must_agree() -> None:
    same: Places = {"megatron.core": CORE, "loop": "/v/loop/__init__.py"}
    assert problems(same, same, {"loop": "/v"}) == []
    assert problems(same, {**same, "megatron.core": "/b/megatron/core/__init__.py"}, {}) == [
        f"imports-worker: megatron.core would come from /b/megatron/core/__init__.py, in the driver from {CORE}"
    ]
    (elsewhere,) = problems(same, same, {"loop": "/w"})
    assert "expected from /w" in elsewhere
    (absent,) = problems({"loop": None}, {"loop": None}, {})
    assert "not installed" in absent


@pytest.mark.parametrize(
    ("driver", "worker", "may_lack", "said"),
    [
        (None, CORE, (DRIVER,), None),
        (None, CORE, (), "imports-worker: megatron.core would come from /a"),
        (None, "/b/megatron/core/__init__.py", (DRIVER,), "imports-worker: megatron.core would come from /b"),
        ("/b/megatron/core/__init__.py", CORE, (DRIVER,), "in the driver from /b"),
        (None, None, (DRIVER,), "not installed"),
        (None, None, (DRIVER, WORKER), None),
        (CORE, None, (DRIVER, WORKER), None),
        (CORE, None, (DRIVER,), "would come from None"),
        ("/b/megatron/core/__init__.py", None, (DRIVER, WORKER), "imports-driver: megatron.core would come from /b"),
    ],
)
def test_one_of_them_may_lack_a_package(driver: str | None, worker: str | None, may_lack: tuple[str, ...], said: str | None) -> None:
    found = problems({"megatron.core": driver}, {"megatron.core": worker}, {"megatron.core": "/a"}, may_lack)
    assert not found if said is None else said in found[0]


def call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, worker: str | None, *more: str) -> int:
    """The check with a worker that gives this answer for the one package."""
    monkeypatch.setattr(ray_imports, "ask_worker", lambda packages, _: dict.fromkeys(packages, worker))
    monkeypatch.setenv("SEATRIAL_UNDER_TEST", "nowhere.pkg=/repo")
    (tmp_path / "imports").mkdir()
    places = ("--out", str(tmp_path), "--phase-dir", str(tmp_path / "imports"))
    return ray_imports.main([*places, "--packages", "nowhere.pkg", "--claims", '{"run": {"a.b": "> 0"}}', *more])


def test_everything_is_written_down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    said = '{"run": {"script": "x.sh", "expressions": ["max(data[\\"a\\"]) < 1"]}}'
    assert call(tmp_path, monkeypatch, "/repo/nowhere/pkg/__init__.py", "--assertions", said, "--may-lack", DRIVER) == 0
    assert [json.loads(line) for line in (tmp_path / "imports" / "facts.jsonl").read_text().splitlines()] == [
        {"fact": "claims", "phase": "run", "values": {"a.b": "> 0"}},
        {"fact": "assertions", "phase": "run", "script": "x.sh", "expressions": ['max(data["a"]) < 1']},
    ]
    assert [(row.process, row.file, row.ok) for row in read_imports(tmp_path / "imports.jsonl")] == [
        (DRIVER, None, False),
        (WORKER, "/repo/nowhere/pkg/__init__.py", True),
    ]
    assert all(line.startswith("seatrial: ") for line in capsys.readouterr().out.splitlines())


def test_a_mismatch_has_its_own_exit_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(tmp_path, monkeypatch, "/image/nowhere/pkg/__init__.py", "--may-lack", DRIVER) == 90
    assert "seatrial: wrong import in imports-worker: nowhere.pkg would come from /image/" in capsys.readouterr().out
    assert [row.ok for row in read_imports(tmp_path / "imports.jsonl")] == [False, False]
