"""A user's own model directory, and loop arguments after `--`."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

import seatrial
from seatrial.core.errors import FindingCode
from seatrial.core.files import read_text
from seatrial.core.loop import Context
from seatrial.core.verdict import Boundary, ExitCode, Verdict
from seatrial.loops.host_findings import ModelUse, model_findings
from seatrial.runtime.environments import Environment
from tests.real.drive import environ, run

pytestmark = pytest.mark.real

MAKE = "import sys, pathlib\n"
MAKE += "from seatrial.instruments.trl.models_on_disk import ensure_model; ensure_model('dense', pathlib.Path(sys.argv[1]))"


@pytest.fixture(scope="module")
def model(environment: Environment, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with weights and tokenizer at a path with blanks."""
    place = tmp_path_factory.mktemp("model") / "my tiny módel"
    source = str(Path(seatrial.__file__).parent.parent)
    subprocess.run(
        [environment.python, "-c", MAKE, place], env={**environ(), "PYTHONPATH": source, "PYTHONDONTWRITEBYTECODE": "1"}, check=True
    )
    return place


def test_own_model_passes(model: Path) -> None:
    """Named from where the user stands, although the loop works in the run directory."""
    done = run(model.parent, "trl", "--level", "0", "--model", model.name)
    assert done.code == ExitCode.PASS, done.output
    assert done.trial.plan.model == str(model)
    (finding,) = [finding for finding in done.trial.findings if finding.name == "model"]
    assert "Qwen2Config" in finding.message
    assert "loaded offline" in finding.message
    assert not (done.directory / "models").exists(), "no model was made: the given one was used"
    assert not any("tiny model with random weights" in text for text in done.level(0).limitations)


@pytest.mark.parametrize(
    ("broken", "message", "fix"),
    [
        ("tokenizer*", "no tokenizer files", "copy tokenizer.json and tokenizer_config.json into "),
        ("*.safetensors", "no weights (*.safetensors)", "copy the model's weights into "),
        ("config.json", "config.json is missing", "copy the model's config.json into "),
        ("*", "no such model directory", "--model DIRECTORY"),
    ],
    ids=["no tokenizer", "no weights", "no config", "no directory"],
)
def test_incomplete_model_is_blocked_before_anything_runs(model: Path, tmp_path: Path, broken: str, message: str, fix: str) -> None:
    place = tmp_path / "incomplete model"
    if broken != "*":
        shutil.copytree(model, place, ignore=shutil.ignore_patterns(broken))
    done = run(tmp_path, "trl", "--level", "0", "--model", place)
    result = done.level(0)
    assert (done.code, result.verdict, result.boundary) == (ExitCode.BLOCKED, Verdict.BLOCKED, Boundary.DATA), done.output
    assert message in result.reason
    assert str(place) in result.reason
    assert any(fix in follow for follow in result.follow_ups)
    assert f"  fix: {fix}" in done.output
    assert not (done.place(0) / "run.log").exists()


def test_tokenizer_that_does_not_load_is_blocked(model: Path, tmp_path: Path) -> None:
    place = tmp_path / "torn model"
    shutil.copytree(model, place)
    (place / "tokenizer.json").write_text((place / "tokenizer.json").read_text(encoding="utf-8")[:100], encoding="utf-8")
    done = run(tmp_path, "trl", "--level", "0", "--model", place)
    assert (done.code, done.level(0).boundary) == (ExitCode.BLOCKED, Boundary.DATA)
    assert "the file is torn" in done.level(0).reason


def spoil(place: Path, name: str, **values: object) -> None:
    stored = json.loads((place / name).read_text(encoding="utf-8"))
    (place / name).write_text(json.dumps({**stored, **values}), encoding="utf-8")


def test_configuration_and_tokenizer_are_loaded_for_real(environment: Environment, model: Path, tmp_path: Path) -> None:
    """Every answer comes from the transformers of the loop's own environment."""

    def look(name: str, *files: str, use: ModelUse = ModelUse(build="x", own=True), **values: object) -> list[FindingCode]:  # noqa: B008 - frozen
        place = tmp_path / name
        shutil.copytree(model, place)
        for file in files:
            spoil(place, file, **values)
        found = model_findings(place, Context(run_dir=tmp_path, python=environment.python, model=str(place)), use)
        return [item.code for item in found]

    assert look("whole") == [FindingCode.MODEL]
    assert look("unknown", "config.json", model_type="no-such-model") == [FindingCode.MODEL_TYPE_UNKNOWN]
    assert look("small", "config.json", vocab_size=7) == [FindingCode.VOCABULARY]
    assert look("lost words", "tokenizer.json", model={"type": "BPE"}) == [FindingCode.TOKENIZER_EMPTY]
    whole = (model / "chat_template.jinja").read_text(encoding="utf-8")
    (model / "chat_template.jinja").unlink()
    try:
        assert look("no template", use=ModelUse(build="x", template=True)) == [FindingCode.CHAT_TEMPLATE]
    finally:
        (model / "chat_template.jinja").write_text(whole, encoding="utf-8")


def test_torn_weights_are_never_a_pass(model: Path, tmp_path: Path) -> None:
    place = tmp_path / "torn weights"
    shutil.copytree(model, place)
    weights = place / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    done = run(tmp_path, "trl", "--level", "0", "--model", place)
    assert done.code in (ExitCode.FAIL, ExitCode.BLOCKED)
    assert "safetensor" in done.level(0).reason.lower()


def test_arguments_are_passed_verbatim(tmp_path: Path) -> None:
    done = run(tmp_path, "trl", "--level", "0", "--", "--max_steps", "3")
    assert done.code == ExitCode.PASS, done.output
    result = done.level(0)
    assert (result.steps_reached, result.steps_expected) == (3, 3)
    assert done.trial.plan.arguments == ("--max_steps", "3")
    assert "loop arguments override the level's own settings: --max_steps 3" in result.limitations
    assert read_text(done.place(0) / "command.sh").rstrip(")\n").endswith("--max_steps 3")
    assert "level 0: loop arguments override the level's own settings: --max_steps 3" in read_text(done.directory / "summary.md")


def test_learning_rate_of_zero_is_vacuous(tmp_path: Path) -> None:
    done = run(tmp_path, "trl", "--level", "0", "--", "--learning_rate", "0")
    result = done.level(0)
    assert (done.code, result.verdict, result.vacuous) == (ExitCode.BLOCKED, Verdict.BLOCKED, True), result.reason
    assert "vacuous: the learning rate was 0 at every step" in result.reason
    assert [(phase.ended, phase.exit_code) for phase in result.phases] == [("exited", 0)] * 2


def test_unknown_argument_is_blocked_as_configuration(tmp_path: Path) -> None:
    done = run(tmp_path, "trl", "--level", "0", "--", "--no_such_flag", "1")
    result = done.level(0)
    assert (done.code, result.verdict, result.boundary) == (ExitCode.BLOCKED, Verdict.BLOCKED, Boundary.CONFIG), result.reason
    assert "--no_such_flag" in result.reason
    assert result.diagnosis is not None
    assert result.diagnosis.signature == "trl-unknown-argument"
