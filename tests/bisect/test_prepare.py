"""Making a step ready: what a job that outlives its Seatrial is found again by, and what two commits with the same files share."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from seatrial.bisect.bisect_records import BisectPlan, EnvironmentPlan, Mark, Patch, Repo, SkipKind
from seatrial.bisect.bisect_runner import read_histories
from seatrial.bisect.environment_cache import BisectEnvironments
from seatrial.bisect.find_commit import BisectRequest, check_distinct, plan_bisect
from seatrial.bisect.git_stores import Stores
from seatrial.bisect.posterior import known_by_contents
from seatrial.bisect.step_preparer import BisectStep, StepPreparer
from seatrial.core.errors import UserError
from tests.bisect.bisects import runs
from tests.bisect.repos import Commit, build
from tests.bisect.untouched import look, quiet

SAME_AGAIN = [Commit({"a.txt": "1\n"}), Commit({"a.txt": "2\n"}), Commit({"a.txt": "1\n"}), Commit({"a.txt": "3\n"})]


def plan_of(path: Path, ids: list[str], *command: str, build: tuple[str, ...] = (), patches: tuple[Patch, ...] = ()) -> BisectPlan:
    repo = Repo(name="loop", path=str(path), good=ids[0], bad=ids[-1])
    environment = EnvironmentPlan(kind="none", build=build)
    return BisectPlan(created="", repos=(repo,), command=command, environment=environment, patches=patches)


def preparer_of(root: Path, plan: BisectPlan, named: tuple[str, ...] = ()) -> tuple[StepPreparer, BisectStep]:
    """And its step for the bad end."""
    preparer = StepPreparer(
        plan, Stores(root / "stores", plan.repos, quiet), BisectEnvironments(root / "cache"), root / "patches", quiet, named
    )
    point = read_histories(plan).points[-1]
    return preparer, BisectStep(number=1, point=point, stage="search", round=1, directory=root / "steps" / "0001")


@pytest.mark.slow
def test_a_job_that_outlived_its_seatrial_is_found_as_it_was_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = build(tmp_path / "loop", SAME_AGAIN)
    preparer, step = preparer_of(tmp_path, plan_of(tmp_path / "loop", ids, "true", build=("touch", "built")))
    first = preparer.prepare(step)
    assert first.refused is None
    facts = first.facts(0, "exited")
    os.utime(step.command_file, (1, 1))  # whatever happens to it
    before = look(step.directory)
    monkeypatch.setenv("PATH", f"/elsewhere{os.pathsep}{os.environ['PATH']}")
    again = preparer.again(step)
    assert look(step.directory) == before
    assert again.refused is None
    assert again.facts(0, "exited") == facts
    assert again.env["PATH"] == first.env["PATH"]
    assert (again.started, again.began, again.environment) == (first.started, first.began, first.environment)
    assert again.notes[-1] == "its job outlived the Seatrial that began it"


def test_a_job_of_which_nothing_is_known_is_run_anew(tmp_path: Path) -> None:
    ids = build(tmp_path / "loop", SAME_AGAIN)
    preparer, step = preparer_of(tmp_path, plan_of(tmp_path / "loop", ids, "true"))
    lost = preparer.again(step)
    assert lost.refused is not None
    assert (lost.refused.skip, lost.refused.transient) == (SkipKind.ENVIRONMENT, True)


def test_a_word_that_is_no_file_can_be_hidden(tmp_path: Path) -> None:
    ids = build(tmp_path / "loop", SAME_AGAIN)
    preparer, step = preparer_of(tmp_path, plan_of(tmp_path / "loop", ids, "test", "!", "-e", "bad"), ("bad",))
    refused = preparer.prepare(step).refused
    assert refused is not None
    assert refused.skip is SkipKind.ABSENT
    assert refused.reason.startswith("bad does not exist at this commit; ")
    assert "sh -c '…'" in refused.reason


def test_the_same_files_are_not_the_same_tree_when_a_patch_goes_by_history(tmp_path: Path) -> None:
    ids = build(tmp_path / "loop", SAME_AGAIN)
    known = {}
    for name, patch in {
        "since": Patch(source="01-fix.patch", since=ids[1]),
        "commit": Patch(source=ids[3]),
        "file": Patch(source="01-fix.patch"),
    }.items():
        history = read_histories(plan_of(tmp_path / "loop", ids, "true", patches=(patch,)))
        known[name] = [row.commit for row in known_by_contents(history, runs(history, (0, Mark.GOOD)))]
    assert known == {"since": [], "commit": [], "file": [ids[2]]}


def test_two_patches_of_one_name_stay_two(tmp_path: Path) -> None:
    build(tmp_path / "loop", SAME_AGAIN)
    files = [tmp_path / name / "fix.patch" for name in ("a", "b")]
    for file in files:
        file.parent.mkdir()
        file.write_text(file.parent.name, encoding="utf-8")
    asked = BisectRequest(words=("true",), good=["main~3"], repo=[str(tmp_path / "loop")], patch=[*map(str, files)])
    planned = plan_bisect(asked)
    assert [patch.source for patch in planned.plan.patches] == ["01-fix.patch", "02-fix.patch"]
    assert planned.files == dict(zip(("01-fix.patch", "02-fix.patch"), files, strict=True))


def test_two_repositories_at_one_place_are_refused() -> None:
    repos = [Repo(name=name, path="/", good="a", bad="b", place=place) for name, place in (("x", "."), ("y", "third"), ("z", "./third/"))]
    with pytest.raises(UserError, match="y and z are to lie at the same place, third"):
        check_distinct(repos)
