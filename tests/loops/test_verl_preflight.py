"""The preflight of verl on GPUs: what a newcomer gets wrong is said before a GPU is touched, and with its fix."""

from __future__ import annotations

from pathlib import Path

import pytest

from seatrial.core.loop import Context
from seatrial.core.records import Finding
from seatrial.loops.verl import gpu_side as wrapper
from seatrial.loops.verl import verl_checkout
from tests.loops.verl_checkout import PYTHON, Bench, on_gpus


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    return on_gpus(tmp_path, monkeypatch)


def bad(context: Context) -> list[Finding]:
    return [finding for finding in wrapper.findings(context) if not finding.ok]


def test_similar_scripts_are_ranked_and_those_of_other_devices_left_out(bench: Bench) -> None:
    (bench.verl / verl_checkout.WRAPPER).unlink()
    names = ("tests/a/run_megatron.sh", "tests/special_npu/run_ppo_trainer_megatron.sh", "tests/special_e2e/run_ppo_megatron.sh")
    for name in names:
        (bench.verl / name).parent.mkdir(parents=True, exist_ok=True)
        (bench.verl / name).touch()
    (found,) = bad(bench.context())
    assert found.message.endswith(f"similar scripts there: {names[2]}, {names[0]}")


def test_the_own_python_of_seatrial_is_not_that_of_verl(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verl_checkout, "OWN", PYTHON.parents[1])
    monkeypatch.setattr(verl_checkout, "NEEDED", ("json", "no_such_package"))
    (found,) = bad(bench.context())
    assert found.message.endswith("is Seatrial's own Python, which has no no_such_package")
    assert found.fix == "--python /path/to/verl/env/bin/python"
    monkeypatch.setattr(verl_checkout, "NEEDED", ("json",))
    assert bad(bench.context()) == [], "Seatrial may be installed beside verl"


def test_a_model_directory_is_looked_up_nowhere_else(bench: Bench) -> None:
    (bench.root / "model" / "config.json").unlink()
    (found,) = bad(bench.context())
    assert found.message == f"{bench.root / 'model'}: no config.json"
    assert "hf download" not in found.fix


def test_what_is_not_composed_says_why(bench: Bench) -> None:
    for name in ("model/config.json", "train.parquet", "test.parquet"):
        (bench.root / name).unlink()
    last = wrapper.findings(bench.context())[-1]
    assert (last.name, last.message) == ("configuration", "not composed, because this must be right before: model, data")


@pytest.mark.parametrize(
    ("rows", "arguments", "said"), [("15", (), "has 15 rows"), ("16", (), ""), ("15", ("data.train_batch_size=8",), "")]
)
def test_less_data_than_a_batch_is_refused(bench: Bench, rows: str, arguments: tuple[str, ...], said: str) -> None:
    """A Python that counts rows for us: that of the tests has no pyarrow."""
    python = bench.root / "env" / "bin" / "python3"
    python.parent.mkdir(parents=True)
    python.write_text(f"#!/bin/sh\necho {rows}\n")
    python.chmod(0o755)
    found = [finding for finding in wrapper.findings(bench.context(*arguments, python=python)) if finding.name == "data"]
    assert [finding.ok for finding in found] == [not said, True]
    assert said in found[0].message
    assert ("options.train_files=" in found[0].fix) == bool(said)


@pytest.mark.parametrize(
    ("word", "ok"),
    [
        *((word, True) for word in ("a.b=1", "+a=1", "++a.b='x=y'", "~a.b", "~a=1", "a=")),
        *((word, False) for word in ("--foo", "-a=1", "--config-name=x", "word", "+a", "=1", "")),
    ],
)
def test_an_argument_must_be_an_override(bench: Bench, word: str, ok: bool) -> None:
    made = bad(bench.context(word))
    assert any("is no Hydra override" in finding.message for finding in made) is not ok
