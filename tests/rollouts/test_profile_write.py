"""The files of a profile: strict, whole, and safe against what was recorded."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from seatrial.core.errors import UserError
from seatrial.core.files import read_model
from seatrial.rollouts.results.profile_build import make_profile
from seatrial.rollouts.results.profile_data import Profile, Summary
from seatrial.rollouts.results.profile_writer import share, write_profile
from tests.rollouts.profiled import campaign, collected, failed, ok, questions

FILES = {"tasks.jsonl", "profile.md", "profile.html", "profile.json", "profile.parquet"}


@pytest.fixture
def made(tmp_path: Path) -> Profile:
    place = campaign(tmp_path, {"d": questions(3)}, repeats=2, d={"tags": ["x"]})
    told = ok(1, "a", output_tokens=7, latency_s=0.5, finish="stop<script>|", metrics={"m|<b>": 2.0})
    return make_profile(collected(place, [[told, ok(0, "b")], [failed("http-5xx"), ok(1)], [None, None]]))


def strict(text: str) -> Any:
    """JSON without NaN."""
    return json.loads(text, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))


def test_all_forms_are_written(made: Profile, tmp_path: Path) -> None:
    paths = write_profile(made, tmp_path / "out")
    assert {path.name for path in paths} == FILES == {path.name for path in (tmp_path / "out").iterdir()}
    assert read_model(tmp_path / "out" / "profile.json", Summary) == made.summary
    strict((tmp_path / "out" / "profile.json").read_text())


def test_each_task_is_a_line(made: Profile, tmp_path: Path) -> None:
    write_profile(made, tmp_path)
    first, second, third = [strict(line) for line in (tmp_path / "tasks.jsonl").read_text().splitlines()]
    assert first["id"] == made.tasks[0].id
    assert (first["dataset"], first["tags"], first["pass_at"], first["reward"]["mean"]) == ("d", ["x"], {"1": 0.5, "2": 1.0}, 0.5)
    assert (second["n"], second["failed"], second["coverage"], second["reward"]["std"]) == (1, {"http-5xx": 1}, 0.5, None)
    assert (third["n"], third["missing"], third["reward"], third["pass_at"]) == (0, 2, None, {"1": None, "2": None})


def test_parquet_has_a_row_per_task(made: Profile, tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    write_profile(made, tmp_path)
    rows = parquet.read_table(tmp_path / "profile.parquet").to_pylist()
    assert [(row["id"], row["n"], row["failed/http-5xx"], row["pass_at/2"]) for row in rows] == [
        (task.id, task.n, task.failed.get("http-5xx", 0), task.pass_at[1]) for task in made.tasks
    ]
    assert [row["reward/mean"] for row in rows] == [0.5, 1.0, None]
    assert rows[0]["metrics/m|<b>/mean"] == 2.0


def test_without_pyarrow_the_others_are_written_and_an_old_table_is_not_left(
    made: Profile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "profile.parquet").write_text("of an earlier profile")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(UserError) as raised:
        write_profile(made, tmp_path)
    assert raised.value.fix == 'pip install "seatrial[rollouts]"'
    assert FILES - {"profile.parquet"} <= {path.name for path in tmp_path.iterdir()}
    assert not (tmp_path / "profile.parquet").exists()


def test_markdown_says_first_that_it_is_partial(made: Profile, tmp_path: Path) -> None:
    write_profile(made, tmp_path)
    text = (tmp_path / "profile.md").read_text()
    assert text.splitlines()[2].startswith("Mean reward 0.75 ")
    assert "Partial: 50.0 % of 6 rollouts, 1 failed for good, 2 missing" in text.splitlines()[2]
    assert "| all tasks | 2 of 3 | 3 of 6 | 50.0 % | 1 | 2 |" in text
    assert "[1 tasks]" in text
    assert "## Tasks without a rollout" in text


def test_recorded_text_stays_text(made: Profile, tmp_path: Path) -> None:
    write_profile(made, tmp_path)
    page, text = (tmp_path / "profile.html").read_text(), (tmp_path / "profile.md").read_text()
    assert "<script" not in page
    assert "stop&lt;script&gt;|" in page
    assert "src=" not in page
    assert "http://" not in page.replace("http://www.w3.org", "")
    assert "stop&lt;script>\\|" in text
    lines = [line for line in text.splitlines() if line.startswith("| m\\|&lt;b>")]
    assert len(lines) == 1


def test_a_page_of_nothing(tmp_path: Path) -> None:
    found = make_profile(campaign(tmp_path, {"d": questions(1)}))
    write_profile(found, tmp_path / "out")
    assert "No rollout has worked yet: 4 are expected, 0 failed for good." in (tmp_path / "out" / "profile.html").read_text()


def test_a_share_is_all_only_when_it_is_all() -> None:
    assert [share(value) for value in (0, 0.0001, 0.5, 0.99996, 1, None)] == ["0.0 %", "< 0.1 %", "50.0 %", "> 99.9 %", "100.0 %", ""]
