"""The Bridge's own tests: chosen by the diff, compared with the base, and never taken for passed when they did not run."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from seatrial.core.errors import BlockedError, UserError
from seatrial.core.records import RepoState
from seatrial.core.verdict import Verdict
from seatrial.evidence.git import git, line
from seatrial.evidence.repos import repo_state
from seatrial.probes import own_tests as own_tests_base
from seatrial.probes import own_tests as own_tests_module
from seatrial.probes.own_tests import (
    OwnTests,
    OwnTestsRun,
    Selection,
    dead_paths,
    judge_own_tests,
    lacking,
    own_tests,
    select_own_tests,
    signatures,
)
from seatrial.runtime.process import Outcome
from seatrial.trial.pre_tests import JUnitCase

TEST = "tests/unit_tests/models/test_param_mapping.py"
NAME = "tests.unit_tests.models.test_param_mapping"
CUDA = "AssertionError: Torch not compiled with CUDA enabled"
PICKED = Selection((TEST,), (), ())


def put(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


@pytest.fixture
def bridge(tmp_path: Path) -> Path:
    root = tmp_path / "bridge"
    put(root, {"src/megatron/bridge/__init__.py": "WIDTH = 4\n", "skills/x/SKILL.md": "", TEST: "", "pyproject.toml": ""})
    return root


def ran(
    root: Path,
    *cases: JUnitCase,
    code: int | None = None,
    said: str = "collected 9 items\n\nend",
    imported: dict[str, str | None] | None = None,
) -> OwnTestsRun:
    bad = any(case.outcome in ("failed", "error") for case in cases)
    files = imported or {"megatron.bridge": str(root / "src/megatron/bridge/__init__.py")}
    return OwnTestsRun(Outcome(int(bad) if code is None else code, None, "exited", 1.0), cases, said, files)


def judged(root: Path, cases: list[JUnitCase], before: list[JUnitCase] | None = None) -> OwnTests:
    return judge_own_tests(ran(root, *cases), root, PICKED, "b" * 40, before)


GOOD = JUnitCase("a", "passed")


@pytest.mark.parametrize(
    ("now", "before", "verdict", "counts"),
    [
        ([GOOD], None, Verdict.PASS, (0, 0, 0)),
        ([GOOD, JUnitCase("b", "failed", "ValueError: 1")], None, Verdict.BLOCKED, (1, 0, 0)),
        ([GOOD, JUnitCase("b", "failed", CUDA)], None, Verdict.PASS, (0, 1, 0)),
        ([GOOD, JUnitCase("b", "failed", CUDA)], [GOOD, JUnitCase("b", "passed")], Verdict.FAIL, (1, 0, 0)),
        ([GOOD, JUnitCase("b", "failed", "ValueError: 1")], [JUnitCase("b", "failed", "ValueError: 2")], Verdict.PASS, (0, 0, 1)),
        ([GOOD, JUnitCase("b", "failed", "ValueError: 1")], [JUnitCase("b", "failed", "KeyError: 'x'")], Verdict.FAIL, (1, 0, 0)),
        ([GOOD, JUnitCase("b", "failed", "ValueError: 1")], [JUnitCase("b", "skipped", "no GPU")], Verdict.FAIL, (1, 0, 0)),
        ([GOOD, JUnitCase("new", "failed", "ValueError: 1")], [GOOD], Verdict.FAIL, (1, 0, 0)),
        ([JUnitCase("b", "failed", CUDA), JUnitCase("c", "skipped")], None, Verdict.BLOCKED, (0, 1, 0)),
        ([GOOD, JUnitCase("a", "error", "ValueError: at its end")], [GOOD], Verdict.FAIL, (1, 0, 0)),
    ],
)
def test_what_a_failure_is_put_down_to(
    bridge: Path, now: list[JUnitCase], before: list[JUnitCase] | None, verdict: Verdict, counts: tuple[int, int, int]
) -> None:
    result = judged(bridge, now, before)
    assert result.verdict is verdict, result.reason
    assert (result.failed, result.not_run, result.pre_existing) == counts


def test_a_file_that_no_longer_collects_is_the_changes_whatever_it_lacks(bridge: Path) -> None:
    error = JUnitCase(NAME, "error", "ModuleNotFoundError: No module named 'requests'")
    assert judged(bridge, [GOOD, error]).needs == {"needs the package requests (package)": 1}
    result = judged(bridge, [GOOD, error], [GOOD, JUnitCase(f"{NAME}.TestX::test_y", "passed")])
    assert result.verdict is Verdict.FAIL
    assert "1 tests of this file passed at the base" in result.reason


def test_a_test_that_is_gone_or_skipped_now_is_a_note(bridge: Path) -> None:
    result = judged(bridge, [GOOD, JUnitCase("b", "skipped")], [GOOD, JUnitCase("b", "passed"), JUnitCase("c", "passed")])
    assert result.verdict is Verdict.PASS
    assert result.notes == ("2 tests that passed at the base did not run now: c, b",)


def test_an_ambiguous_message_counts_as_missing_only_where_the_base_said_the_same(bridge: Path) -> None:
    case = JUnitCase("b", "failed", "TypeError: isinstance() arg 2 must be a type, a tuple of types, or a union")
    assert (judged(bridge, [GOOD, case]).failed, judged(bridge, [GOOD, case]).verdict) == (1, Verdict.BLOCKED)
    assert judged(bridge, [GOOD, case], [GOOD, case]).needs == {"needs Transformer Engine (te-class)": 1}


@pytest.mark.parametrize(
    ("message", "found"),
    [
        (CUDA, "cuda"),
        ("RuntimeError: Cannot access accelerator device when none is available.", "accelerator"),
        ("AttributeError: <module 'torch._C' from 'x.so'> does not have the attribute '_cuda_setDevice'", "cuda-binding"),
        ("RuntimeError: Distributed package doesn't have NCCL built in", "nccl"),
        ("megatron.bridge.utils.import_utils.UnavailableError: transformer_engine.pytorch.X could not be imported", "te-unavailable"),
        ("RuntimeError: --use-x requires FusedAdam from TransformerEngine, but not found.", "te-unavailable"),
        ("ValueError: apply_rope_fusion is not available. Please install TE >= 1.4.", "rope-fusion"),
        ("ModuleNotFoundError: No module named 'megatron.energon'", "energon"),
        ("ImportError: import error in megatron.bridge.training.checkpointing: No module named 'requests'", "package"),
        ("ModuleNotFoundError: No module named 'megatron.bridge.models.gone'", None),
        ("ModuleNotFoundError: No module named 'tests.helpers'", None),
        ("ImportError: cannot import name 'TEDotProduct' from 'transformer_engine'", None),
        (f"AssertionError: assert '{CUDA}' == 'x'", None),
        ("Failed: Timeout (>300.0s) from pytest-timeout.", None),
        ("AssertionError", None),
    ],
)
def test_what_a_message_says_is_lacking(message: str, found: str | None) -> None:
    need = lacking(message, {"megatron", "tests"})
    assert (need.id if need else None) == found


def test_signatures_have_ids_of_their_own() -> None:
    assert len({signature.id for signature in signatures()}) == len(signatures()) > 5


def test_an_end_that_does_not_fit_and_megatron_from_elsewhere_are_no_pass(bridge: Path) -> None:
    def verdict(made: OwnTestsRun) -> tuple[Verdict, str]:
        result = judge_own_tests(made, bridge, PICKED, None, None)
        return result.verdict, result.reason

    assert verdict(ran(bridge, GOOD, code=3))[0] is Verdict.FAIL
    assert verdict(ran(bridge, GOOD, said="collected 9 items\n!!!!!!!! Interrupted: x !!!!!!!!\nend"))[0] is Verdict.FAIL
    elsewhere = ran(bridge, GOOD, imported={"megatron.bridge": "/usr/lib/megatron/bridge/__init__.py"})
    assert verdict(elsewhere)[0] is Verdict.BLOCKED
    assert "not from" in verdict(elsewhere)[1]
    assert verdict(ran(bridge, GOOD, imported={"megatron.core": None}))[0] is Verdict.BLOCKED
    late = OwnTestsRun(Outcome(None, 9, "deadline", 9.0), None, "collected 9 items", {})
    assert verdict(late) == (Verdict.BLOCKED, "no end within the 9 s that were left for them")


def test_no_test_at_all_is_the_changes_only_when_it_can_be(bridge: Path) -> None:
    def verdict(said: str, before: list[JUnitCase] | None = None) -> Verdict:
        return judge_own_tests(OwnTestsRun(Outcome(4, None, "exited", 1.0), None, said, {}), bridge, PICKED, None, before).verdict

    assert verdict("\n\nE   ModuleNotFoundError: No module named 'triton'") is Verdict.BLOCKED
    assert verdict("\n\nE   ModuleNotFoundError: No module named 'megatron.bridge.models.gone'") is Verdict.FAIL
    assert verdict("\n\nE   ImportError: cannot import name 'x' from 'torch'") is Verdict.FAIL
    assert verdict("\n\nE   ModuleNotFoundError: No module named 'triton'", [GOOD]) is Verdict.FAIL
    assert verdict("") is Verdict.BLOCKED


def test_dead_paths_of_guides(bridge: Path) -> None:
    (bridge / "tests/unit_tests/training").mkdir()
    guide = (
        f"run `{TEST}` and ./{TEST}::TestX\n`tests/unit_tests/training/test_integration.py`,\n"
        "again tests/unit_tests/training/test_integration.py.\n"
        "tests/unit_tests/<model>/test_x.py tests/unit_tests/*/x.py tests/unit_tests/test_foo.py $ROOT/tests/unit_tests/none.py\n"
        "tests/functional/other_repository.sh scripts/beside.py examples/gone.py\n"
    )
    put(bridge, {"skills/x/SKILL.md": guide, "skills/x/scripts/beside.py": ""})
    found = dead_paths(bridge)
    assert found.dead == ("skills/x/SKILL.md:2: tests/unit_tests/training/test_integration.py",)
    assert found.elsewhere == 2


TESTS = """import importlib.util
import megatron.bridge
def test_width(): assert megatron.bridge.WIDTH == 4
def test_cuda(): raise AssertionError("Torch not compiled with CUDA enabled")
def test_old(): raise ValueError("was there before")
"""


def commit(root: Path) -> str:
    git(root, "add", "-A")
    git(root, "-c", "user.name=x", "-c", "user.email=x@x", "-c", "commit.gpgsign=false", "commit", "-q", "-m", "x")
    return line(git(root, "rev-parse", "HEAD"))


def test_a_change_is_blamed_for_what_it_broke_and_the_base_runs_once(bridge: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SEATRIAL_CACHE", str(tmp_path / "cache"))
    put(bridge, {TEST: TESTS})
    git(bridge, "init", "-q")
    base = commit(bridge)
    put(bridge, {"src/megatron/bridge/__init__.py": "WIDTH = 5\n"})
    repo = repo_state(bridge, "bridge").model_copy(update={"changed": ("src/megatron/bridge/__init__.py",)})
    python, said = Path(sys.executable), list[str]()

    result = own_tests(python, repo, tmp_path / "out", 60, base, said.append)
    assert result.verdict is Verdict.FAIL, result.reason
    assert [one.name for one in result.failures] == [f"{NAME}::test_width"]
    assert (result.failures[0].why, result.base) == ("it passed at the base", base)
    assert (result.not_run, result.pre_existing, result.passed) == (1, 1, 0)
    assert line(git(bridge, "worktree", "list", "--porcelain")).count("worktree ") == 1
    assert repo_state(bridge, "bridge").dirty == repo.dirty

    def never(*_: object) -> OwnTestsRun:
        raise AssertionError("the base ran again")

    monkeypatch.setattr(own_tests_base, "run_pytest", never)
    place = own_tests_base.BaseRun(python=python, instruments=tmp_path, out=tmp_path / "again", deadline_s=60, tell=said.append)
    kept = own_tests_base.baseline(place, repo, base, result.files)
    assert {case.name.rpartition("::")[2]: case.outcome for case in kept} == {
        "test_width": "passed",
        "test_cuda": "failed",
        "test_old": "failed",
    }
    assert sum("once" in text for text in said) == 1
    with pytest.raises(BlockedError, match="none of the test files exists"):
        own_tests_base.baseline(place, repo, base, ("tests/unit_tests/new.py",))
    clean = repo.model_copy(update={"dirty": ()})
    with pytest.raises(UserError, match="excuse every failure"):
        own_tests_base.commit_to_compare(clean, "HEAD")
    with pytest.raises(UserError, match="no revision"):
        own_tests_base.commit_to_compare(repo, "nowhere")


def test_without_test_files_nothing_is_run_and_what_is_not_known_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repo, said = RepoState(name="bridge", path=str(tmp_path), commit="0" * 40, branch=None), list[str]()
    result = own_tests(Path("none"), repo, tmp_path / "out", 60, None, said.append)
    assert (result.verdict, result.files) == (Verdict.SKIPPED, ())
    assert any("not populated" in note for note in select_own_tests(repo).notes)
    put(tmp_path, {TEST: ""})
    monkeypatch.setattr(own_tests_module, "stage", lambda out: out)
    result = own_tests(tmp_path / "no-python", repo, tmp_path / "out", 60, "HEAD", said.append)
    assert result.verdict is Verdict.BLOCKED
    assert any("there is no baseline" in note for note in result.notes)
    result = own_tests(tmp_path / "no-python", repo, tmp_path / "out", 60, None, said.append)
    assert any("no base is known" in note for note in result.notes)
