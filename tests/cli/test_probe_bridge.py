"""`seatrial probe bridge`: what is refused before anything starts, and what there is to choose from. Nothing here needs Megatron."""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path

import pytest

from seatrial.core.verdict import Verdict
from seatrial.instruments.bridge.faults import FAULTS
from seatrial.instruments.bridge.rungs import FAMILIES, RUNNING, STOPPED, TABLE
from seatrial.probes.bridge_run import BridgeSetup, require_models, require_rungs
from seatrial.probes.bridge_verdict import JudgedBridgeProbe
from tests.cli.command import inside
from tests.probes.tiny_weights import weights


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Directories that are models, and some that are not."""
    for name in ("empty", "bare", "one/whole", "two/whole"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("bare", "one/whole", "two/whole"):
        (tmp_path / name / "config.json").write_text(json.dumps({"architectures": ["Qwen2ForCausalLM"]}))
    for name in ("one", "two"):
        weights(tmp_path / name / "whole" / "model.safetensors")
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "said", "fix"),
    [
        (("--model", "qwen9"), "--model qwen9: no such family or directory", "qwen2, qwen2-odd"),
        (("--model", "empty"), "empty: config.json is missing", "config.json into empty"),
        (("--model", "bare"), "no weights (*.safetensors)", ""),
        (("--model", "qwen2", "--model", "qwen2"), "two models are called qwen2", "one after the other"),
        (("--model", "one/whole", "--model", "two/whole"), "two models are called whole", "one after the other"),
        (("--rungs", "roundtrip,party"), "unknown rung 'party'", "build, import, roundtrip"),
        (("--rungs", " , "), "no rung is named", "choose from build"),
        (("--fault", "gate-up-swaped"), "unknown fault 'gate-up-swaped'", "use gate-up-swapped"),
        (("--fault", "zzz"), "unknown fault 'zzz'", "--fault list"),
        (("--fault", "missing-bias", "--rungs", "nothing"), "unknown rung 'nothing'", "choose from"),
        (("--all", "--model", "llama"), "--all and --model are both given", "leave one out"),
        (("--device", "cuda"), "--device cuda needs an interpreter with CUDA and Megatron", "--python"),
        (("--change", "bridge=nowhere"), "nowhere", ""),
        (("--card", "c.yaml", "--rungs", "build"), "no checkout is under test", "--change bridge=PATH"),
        (("--card", "c.yaml", "--all"), "a card is of one model", "--model"),
        (("--card", "c.yaml", "--model", "qwen2", "--model", "llama"), "a card is of one model, and here are 2", "--model"),
        (("--card", "c.yaml", "--fault", "missing-bias"), "with the fault missing-bias", "leave --fault"),
        (("--change", "bridge=bare"), "bare: not a git repository", ""),
    ],
)
def test_what_cannot_be_meant_is_refused(arguments: tuple[str, ...], said: str, fix: str, place: Path) -> None:
    answer = inside("probe", "bridge", *arguments, cwd=place)
    assert (answer.code, answer.out) == (2, "")
    message, _, advice = answer.err.partition("  fix: ")
    assert said in message
    assert advice.strip()
    assert fix in advice
    assert not (place / "trials").exists(), "nothing was begun"


@pytest.mark.parametrize(("file", "said"), [("src/otherlib/__init__.py", "provides otherlib"), ("notes.md", "provides no package")])
def test_a_change_that_the_ladder_does_not_run_is_refused(file: str, said: str, tmp_path: Path) -> None:
    (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / file).touch()
    for words in (("init", "--quiet"), ("add", "--all"), ("commit", "--quiet", "--message", "one")):
        subprocess.run(["git", "-c", "user.name=t", "-c", "user.email=t@localhost", *words], cwd=tmp_path, check=True)
    answer = inside("probe", "bridge", "--change", tmp_path, cwd=tmp_path)
    assert (answer.code, answer.out) == (2, "")
    assert f"{said}, and the ladder runs none of that" in answer.err
    assert "name a checkout of Megatron-Bridge, Megatron-LM or transformers" in answer.err
    assert not (tmp_path / "trials").exists()


@pytest.mark.parametrize("arguments", [("--engine", "sglang"), ("--device", "tpu"), ("--steps", "2"), ("--deadline", "0")])
def test_values_that_do_not_exist_are_refused(arguments: tuple[str, ...]) -> None:
    assert inside("probe", "bridge", *arguments).code == 2


def test_an_interpreter_that_is_not_there_blocks(tmp_path: Path) -> None:
    answer = inside("probe", "bridge", "--python", tmp_path / "nowhere", cwd=tmp_path)
    assert answer.code == 99
    assert "nowhere: no such interpreter" in answer.err
    assert not (tmp_path / "trials").exists()


def test_vllm_is_opt_in(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.touch()
    words = ("--engine", "vllm", "--rungs", "loop", "--model", "llama", "--python", str(python))
    answer = inside("probe", "bridge", *words, cwd=tmp_path, SEATRIAL_CACHE=str(tmp_path / "cache"))
    assert answer.code == 99
    assert "the environment vllm-cpu is not built" in answer.err
    assert "seatrial env build vllm-cpu" in answer.err


def test_an_earlier_result_is_not_overwritten(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.touch()
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "probe.json").write_text("{}")
    answer = inside("probe", "bridge", "--python", python, "--out", tmp_path / "out", cwd=tmp_path)
    assert answer.code == 2
    assert "is not empty" in answer.err
    assert (tmp_path / "out" / "probe.json").read_text() == "{}"


@pytest.mark.parametrize(("option", "known"), [("--model", FAMILIES), ("--rungs", TABLE), ("--fault", FAULTS)])
def test_what_there_is_is_listed(option: str, known: dict[str, object], tmp_path: Path) -> None:
    answer = inside("probe", "bridge", option, "list", cwd=tmp_path)
    assert (answer.code, answer.err) == (0, "")
    assert [line.split()[0] for line in answer.out.splitlines()] == list(known)
    assert not list(tmp_path.iterdir())


def test_a_listed_family_says_what_it_lacks() -> None:
    lines = {line.split()[0]: line for line in inside("probe", "bridge", "--model", "list").out.splitlines()}
    assert not [name for name in RUNNING if "cannot run here" in lines[name]]
    assert [name for name in STOPPED if f"[cannot run here: {STOPPED[name].needs}]" in lines[name]] == list(STOPPED)


def test_a_listed_fault_says_who_notices_it() -> None:
    lines = {line.split()[0]: line for line in inside("probe", "bridge", "--fault", "list").out.splitlines()}
    assert "[qwen2: import, mapping, roundtrip]" in lines["bias-misnamed"]
    for name, fault in FAULTS.items():
        assert fault.model in RUNNING, f"{name}: a family that cannot run shows nothing"
        assert set(fault.rungs) <= set(TABLE), name
        assert fault.rungs, name
        assert fault.named, name


def bridge(root: Path) -> Path:
    """A checkout that passes for a Bridge."""
    (root / "src" / "megatron" / "bridge").mkdir(parents=True)
    (root / "src" / "megatron" / "bridge" / "__init__.py").touch()
    for words in (("init", "--quiet"), ("add", "--all"), ("commit", "--quiet", "--message", "one")):
        subprocess.run(["git", "-c", "user.name=t", "-c", "user.email=t@localhost", *words], cwd=root, check=True)
    return root


def test_a_card_that_cannot_be_is_refused_before_anything_runs(tmp_path: Path) -> None:
    root = bridge(tmp_path / "b")
    (tmp_path / "file").touch()
    for card, said in (("file/c.yaml", "file/c.yaml: cannot write"), ("b", "is a directory")):
        answer = inside("probe", "bridge", "--change", f"bridge={root}", "--card", card, cwd=tmp_path)
        assert (answer.code, answer.out, said in answer.err) == (2, "", True), answer.err
    (root / "src" / "megatron" / "bridge" / "__init__.py").write_text("a = 1\n")
    answer = inside("probe", "bridge", "--change", f"bridge={root}", "--card", "c.yaml", cwd=tmp_path)
    assert (answer.code, "has uncommitted changes" in answer.err) == (2, True), answer.err
    assert not (tmp_path / "trials").exists()


@pytest.mark.parametrize(("verdict", "code"), [(Verdict.PASS, 2), (Verdict.FAIL, 1)])
def test_a_card_that_proves_impossible_costs_nothing_else(
    verdict: Verdict, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = bridge(tmp_path / "b")
    python = tmp_path / "python"
    python.touch()
    monkeypatch.setattr("seatrial.probes.bridge_run.probe_bridge", lambda *_: JudgedBridgeProbe(verdict=verdict, reason="r"))
    words = ("--python", python, "--change", f"bridge={root}", "--card", "c.yaml", "--out", "o", "--no-tests", "--no-base")
    answer = inside("probe", "bridge", *words, cwd=tmp_path)
    assert (answer.code, "a card is of one model, and here are 0" in answer.err) == (code, True), answer.err
    assert json.loads((tmp_path / "o" / "probe.json").read_text())["judged"]["verdict"] == verdict
    assert (tmp_path / "o" / "summary.md").is_file()
    assert not (tmp_path / "c.yaml").exists()


def test_own_tests_get_what_the_ladder_left_of_the_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python, left = tmp_path / "python", list[float]()
    python.touch()

    def tests(_setup: object, judged: JudgedBridgeProbe, left_s: float, _tell: object) -> JudgedBridgeProbe:
        left.append(left_s)
        return judged

    def prove(setup: BridgeSetup, _tell: object) -> JudgedBridgeProbe:
        time.sleep(0.05)
        left.append(setup.deadline_s)
        return JudgedBridgeProbe(verdict=Verdict.FAIL, reason="r")

    monkeypatch.setattr("seatrial.probes.bridge_run.probe_bridge", prove)
    monkeypatch.setattr("seatrial.probes.bridge_run.run_own_tests", tests)
    assert inside("probe", "bridge", "--python", python, "--deadline", "1", cwd=tmp_path).code == 1
    assert left[0] == 60
    assert 50 < left[1] <= 59.95


def test_rungs_come_in_the_order_of_the_ladder() -> None:
    assert require_rungs("parity, build,parity") == ("build", "parity")


def test_families_and_a_directory_go_together(place: Path) -> None:
    require_models(("qwen2", str(place / "one" / "whole")))
