"""Exports: the guide's one-liner, CSV, Parquet."""

from __future__ import annotations

import csv
import io
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from seatrial.history.store import Store, point
from tests.history.histories import COMMIT, TEST, history, points, results, run

pytestmark = pytest.mark.slow

ONE_LINER = f'[.start_time, .git_commit, .metrics["{TEST}"].avg_prob_mult_error] | @tsv'


@pytest.fixture
def store(tmp_path: Path) -> Path:
    path = tmp_path / "h.sqlite"
    answer = history("import", str(results(tmp_path / "unit_results.json")), store=path, cwd=tmp_path)
    assert answer.returncode == 0, answer.stderr
    return path


def test_the_guides_one_liner_reads_the_export(tmp_path: Path, store: Path) -> None:
    out = tmp_path / "all.json"
    assert history("export", "--out", str(out), store=store, cwd=tmp_path).returncode == 0
    if shutil.which("jq"):
        line = subprocess.run(["jq", "-r", ONE_LINER, str(out)], capture_output=True, text=True, timeout=60, check=True).stdout
    else:  # the same by json
        data = json.loads(out.read_text(encoding="utf-8"))
        line = "\t".join(map(str, (data["start_time"], data["git_commit"], data["metrics"][TEST]["avg_prob_mult_error"])))
    assert line.split() == ["2025-03-24", "23:34:12", COMMIT, "1.0000039339065552"]


def test_parameters_and_slashes_do_not_break_the_nesting(tmp_path: Path) -> None:
    with Store(tmp_path / "h.sqlite", write=True) as kept:
        kept.add(run(1), [point("t::f[a/b]/mem/where", "gpu 0"), point("t::f[a/b]/mem", 2), point("coverage", float("nan"))])
    data = json.loads(history("export", store=tmp_path / "h.sqlite", cwd=tmp_path).stdout)
    assert data["metrics"] == {"t::f[a/b]": {"mem/where": None, "mem": 2.0}, "coverage": "NaN"}
    assert data["marks"] == {"t::f[a/b]/mem/where": "text", "coverage": "nan"}


def test_csv_has_a_row_per_metric_or_per_step(tmp_path: Path) -> None:
    with Store(tmp_path / "h.sqlite", write=True) as kept:
        kept.add(run(1), points("loss", 0.1, float("inf"), 0.3))
    whole = list(csv.DictReader(io.StringIO(history("export", "--format", "csv", store=kept.path, cwd=tmp_path).stdout)))
    steps = list(csv.DictReader(io.StringIO(history("export", "--format", "csv", "--points", store=kept.path, cwd=tmp_path).stdout)))
    assert [(row["value"], row["mark"], row["points"]) for row in whole] == [("0.3", "inf", "3")]
    assert [(row["step"], row["value"], row["mark"]) for row in steps] == [("1", "0.1", ""), ("2", "", "inf"), ("3", "0.3", "")]


def test_parquet_has_the_same_rows(tmp_path: Path, store: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    out = tmp_path / "all.parquet"
    assert history("export", "--out", str(out), store=store, cwd=tmp_path).returncode == 0
    rows = parquet.read_table(out).to_pylist()
    assert {row["metric"]: row["value"] for row in rows} == {f"{TEST}/avg_prob_mult_error": 1.0000039339065552, f"{TEST}/_elapsed": 3.1}


def test_without_pyarrow_the_way_to_get_it_is_told(tmp_path: Path, store: Path) -> None:
    hidden = "import sys; sys.modules['pyarrow'] = None; from seatrial.cli.main import run; run()"
    words = ["history", "export", "--out", str(tmp_path / "x.parquet"), "--store", str(store)]
    answer = subprocess.run([sys.executable, "-c", hidden, *words], capture_output=True, text=True, timeout=60, check=False)
    assert answer.returncode == 2
    assert "pip install 'seatrial[rollouts]'" in answer.stderr
    assert not (tmp_path / "x.parquet").exists()


@pytest.mark.parametrize(
    ("words", "told"), [(("--format", "xml"), "no such format"), (("--points",), "without steps"), (("nothing*",), "no metric")]
)
def test_what_cannot_be_exported_is_refused(tmp_path: Path, store: Path, words: tuple[str, ...], told: str) -> None:
    answer = history("export", *words, store=store, cwd=tmp_path)
    assert answer.returncode == 2
    assert told in answer.stderr
