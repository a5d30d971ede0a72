"""What a run of verl's wrapper proves: configuration in force, imports, a resume, a learning signal; and what must not pass."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path

import pytest

from seatrial.core.records import CheckResult
from seatrial.core.series import Metrics, Series
from seatrial.evidence.imports import judge_imports, read_imports, read_loaded, unused
from seatrial.loops.verl import gpu_side
from seatrial.loops.verl import gpu_side as wrapper
from seatrial.loops.verl.gpu_runs import phases
from seatrial.loops.verl.verl_log import in_force
from seatrial.metrics.checks import evaluate
from seatrial.metrics.read import read_metrics
from tests.loops.verl_checkout import PYTHON, Bench, level, on_gpus, run_level, run_phase
from tests.loops.verl_logs import DATA

pytestmark = pytest.mark.slow  # processes that are waited for; `make check` has two minutes


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    return on_gpus(tmp_path, monkeypatch)


def metrics_of(directory: Path) -> Metrics:
    series: dict[str, Series] = {}
    for path in sorted(directory.glob("*/metrics.jsonl")):
        series |= read_metrics((path,), "" if path.parent.name == "run" else f"{path.parent.name}/").series
    return Metrics(series=series)


def proven(name: str, directory: Path) -> list[CheckResult]:
    """Everything that the level asserts."""
    metrics = metrics_of(directory)
    return [*wrapper.proofs(level(name), directory, metrics), *(evaluate(spec.expr, metrics, spec.boundary) for spec in level(name).checks)]


def missed(name: str, directory: Path) -> list[str]:
    return [check.name for check in proven(name, directory) if not check.passed]


def test_a_run_of_the_stand_in_proves_configuration_and_imports(bench: Bench) -> None:
    context = bench.context()
    directory = run_level(bench, "smoke", context)
    assert missed("smoke", directory) == []
    kinds = ("driver", "worker", "imports-driver", "imports-worker")
    assert judge_imports(read_imports(directory / "imports.jsonl"), context.changes, kinds) == ()
    loaded = read_loaded([directory / "loaded.jsonl"])
    assert all(unused(change, loaded) is None for change in context.changes)
    assert str(bench.verl / "verl" / "trainer" / "main_ppo.py") in loaded, "the main module is used, too"


UV = """#!/bin/sh
while [ "$1" != python3 ] && [ "$1" != "${1%default_worker.py}default_worker.py" ]; do shift; done
[ "$1" = python3 ] && shift
exec PYTHON "$@"
"""


def test_with_uv_driver_and_workers_run_through_it(bench: Bench) -> None:
    uv = bench.root / "bin" / "uv"
    uv.write_text(UV.replace("PYTHON", str(PYTHON)))
    uv.chmod(0o755)
    context = bench.context(launcher="uv")
    assert all(finding.ok for finding in wrapper.findings(context))
    directory = run_level(bench, "smoke", context)
    assert missed("smoke", directory) == []
    assert "uv -v run --frozen" in (directory / "run" / "run.log").read_text()


def test_a_run_that_fell_back_is_not_a_pass(bench: Bench) -> None:
    directory = run_level(bench, "smoke", bench.context("actor_rollout_ref.model.lora.rank=0", "critic.megatron.vanilla_mbridge=True"))
    found, adapter = [check for check in proven("smoke", directory) if not check.passed]
    assert (found.name, adapter.name) == ("configuration in force (run)", "adapters were built (run)")
    assert "actor_rollout_ref.model.lora.rank fell back to 0 (claimed: > 0)" in found.message
    assert "critic.megatron.vanilla_mbridge fell back to True" in found.message
    log = directory / "run" / "run.log"
    log.write_text(log.read_text().split("'trainer'")[0])
    assert "no whole configuration" in str(in_force("run", {"trainer.nnodes": 1}, log).value)
    (directory / "imports" / "facts.jsonl").unlink()
    assert "what the level claims was recorded" in missed("smoke", directory)


def test_a_rank_that_wrapped_nothing_is_not_a_pass(bench: Bench) -> None:
    directory = run_level(bench, "smoke", bench.context())
    log = directory / "run" / "run.log"
    for text in ("Adapter parameters:   0", ""):
        log.write_text(re.sub(r"Adapter parameters:.*", text, log.read_text()))
        (found,) = [check for check in proven("smoke", directory) if not check.passed]
        assert (found.name, found.boundary) == ("adapters were built (run)", "peft")


def test_every_configuration_in_a_log_must_be_as_claimed(bench: Bench) -> None:
    directory = run_level(bench, "smoke", bench.context())
    log = directory / "run" / "run.log"
    once = log.read_text()
    log.write_text(once.replace("'vanilla_mbridge': False", "'vanilla_mbridge': True") + once)
    assert missed("smoke", directory) == ["configuration in force (run)"], "the first of two runs may have written the metrics"
    log.write_text(once + once)
    assert missed("smoke", directory) == []


def test_what_only_the_driver_imported_was_not_trained_with(bench: Bench) -> None:
    directory = run_level(bench, "smoke", bench.context())
    path = directory / "imports.jsonl"
    rows = [json.loads(row) for row in path.read_text().splitlines()]
    for row in rows:
        if row["process"] == "worker" and row["package"] == "megatron.bridge":
            row["method"] = "found"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + "{torn")
    (found,) = [check for check in proven("smoke", directory) if not check.passed]
    assert (found.name, found.message) == (
        "Ray workers used Megatron-Core and Megatron-Bridge",
        "no Ray worker imported megatron.bridge",
    )
    path.unlink()
    assert missed("smoke", directory) == [found.name]


def test_claims_of_one_phase_do_not_stand_for_the_other(bench: Bench) -> None:
    directory = run_level(bench, "save-resume", bench.context())
    facts = directory / "imports" / "facts.jsonl"
    facts.write_text("".join(row for row in facts.read_text().splitlines(keepends=True) if '"resume"' not in row[:60]))
    (found,) = [check for check in proven("save-resume", directory) if not check.passed]
    assert (found.name, found.value) == ("what the level claims was recorded", "no facts of resume")


def test_a_step_that_was_not_logged_is_not_a_pass() -> None:
    steps = Series("actor/pg_loss", (1, 2, 4), (0.1, 0.2, 0.3))
    assert "not logged at step 3" in gpu_side.every_step(Metrics(series={steps.tag: steps})).message
    assert gpu_side.every_step(Metrics(series={"actor/pg_loss": Series("actor/pg_loss", (3, 4), (0.1, 0.2))})).passed, "resumed"


def test_save_and_resume_are_proven_from_log_and_files(bench: Bench) -> None:
    directory = run_level(bench, "save-resume", bench.context())
    assert missed("save-resume", directory) == []
    place = directory / "save" / "checkpoints"
    (place / "global_step_2" / "data.pt").unlink()
    (place / "latest_checkpointed_iteration.txt").write_text("1")
    assert missed("save-resume", directory) == ["the last checkpoint is that of step 2", "checkpoint global_step_2 is complete"]
    log = directory / "resume" / "run.log"
    log.write_text(log.read_text().replace(str(place / "global_step_1"), "/elsewhere/global_step_1"))
    assert "resumed from the checkpoint of this level" in missed("save-resume", directory)


def test_a_resume_without_a_checkpoint_is_not_a_resume(bench: Bench) -> None:
    context, directory = bench.context(), bench.level_directory("save-resume")
    made = phases(level("save-resume"), context, directory)
    (directory / "save").mkdir(parents=True)
    (directory / "save" / "metrics.jsonl").write_text("")
    for phase in (made[0], made[2]):
        assert run_phase(phase, context, directory) == 0
    found = {check.name: check for check in proven("save-resume", directory)}
    assert found["resumed from the checkpoint of this level"].value == "trained from scratch"
    assert found["the resumed run trains step 2 only"].value == "steps [1, 2]"


def scores(folder: Path, step: int, values: list[float]) -> None:
    folder.mkdir(exist_ok=True)
    (folder / f"{step}.jsonl").write_text("".join(json.dumps({"input": f"p{i}", "score": value}) + "\n" for i, value in enumerate(values)))


def test_a_learning_signal_is_a_gain_over_the_same_prompts(tmp_path: Path) -> None:
    folder = tmp_path / "validation"
    scores(folder, 0, [0.0] * 40)
    assert not gpu_side.validation_rose(folder).passed, "validated once"
    scores(folder, 20, [float(i % 2) for i in range(40)])
    assert gpu_side.validation_rose(folder).passed
    scores(folder, 20, [float(i == 3) for i in range(40)])
    assert not gpu_side.validation_rose(folder).passed, "one prompt of forty is noise"
    scores(folder, 20, [0.0] * 40)
    assert not gpu_side.validation_rose(folder).passed, "nothing moved"
    scores(folder, 20, [1.0] * 20)
    assert not gpu_side.validation_rose(folder).passed, "other prompts"
    scores(folder, 20, [float("nan")] * 40)
    assert not gpu_side.validation_rose(folder).passed


@pytest.mark.parametrize(("name", "caught"), [("stale_adapters", True), ("fresh_adapters", False)])
def test_level_5_sees_adapters_that_never_reach_the_rollout_engine(name: str, caught: bool, tmp_path: Path) -> None:
    """Metrics of two real runs on a GPU; every other check of the refit is met by both."""
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(gzip.decompress((DATA / "h200" / f"{name}.jsonl.gz").read_bytes()))
    metrics = read_metrics([path])
    missed = [spec.expr for spec in level("learning").checks if spec.boundary == "refit" and not evaluate(spec.expr, metrics).passed]
    assert [("k3_kl" in expr) for expr in missed] == ([True] if caught else [])
