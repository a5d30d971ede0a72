"""unit_results.json, trust, and what a person may state."""

from __future__ import annotations

from pathlib import Path

import pytest

from seatrial.core.errors import UserError
from seatrial.core.verdict import Verdict
from seatrial.history import importing
from seatrial.history.auto_import import TRUSTED
from seatrial.history.importing import Added, Stated, add
from seatrial.history.metric_gate import Gate
from seatrial.history.store import Store
from tests.history.histories import COMMIT, TEST, history, results

OURS = {"git_branch": "main", "git_dirty": False, "project": "p", "outcomes": {TEST: "passed"}}


def imported(tmp_path: Path, path: Path, **stated: object) -> list[Added]:
    with Store(tmp_path / "h.sqlite", write=True) as store:
        return list(add(store, path, Stated(**stated), TRUSTED))  # type: ignore[arg-type]


def test_the_guides_file_is_kept_with_commit_time_and_values_but_is_no_baseline(tmp_path: Path) -> None:
    (one,) = imported(tmp_path, results(tmp_path / "unit_results.json"))
    assert one.run is not None
    assert one.run.commit == COMMIT
    assert not one.run.trusted
    assert "clean" in one.run.why_untrusted
    with Store(tmp_path / "h.sqlite", write=False) as store:
        assert store.values(f"{TEST}/avg_prob_mult_error")[0].value == 1.0000039339065552
        assert store.metrics() == [f"{TEST}/_elapsed", f"{TEST}/avg_prob_mult_error"]


def test_ours_from_a_clean_main_is_a_baseline(tmp_path: Path) -> None:
    (one,) = imported(tmp_path, results(tmp_path / "unit_results.json", **OURS, coverage=81.5))
    assert one.run is not None
    assert one.run.baseline
    with Store(tmp_path / "h.sqlite", write=False) as store:
        assert store.values("coverage")[0].value == 81.5


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        ({"git_branch": "my-fix"}, "branch my-fix"),
        ({"git_branch": None}, "no branch"),
        ({"git_dirty": True}, "not clean"),
        ({"git_commit": "unknown"}, "no commit"),
        ({"exit_status": 1}, "did not pass"),
        ({"exit_status": "killed"}, "did not pass"),
        ({"exit_status": False}, "did not pass"),
    ],
)
def test_whatever_is_not_known_or_not_good_is_kept_and_never_a_baseline(tmp_path: Path, other: dict[str, object], reason: str) -> None:
    (one,) = imported(tmp_path, results(tmp_path / "unit_results.json", **(OURS | other)))
    assert one.run is not None
    assert reason in one.run.why_untrusted
    with Store(tmp_path / "h.sqlite", write=False) as store:
        assert store.values(f"{TEST}/_elapsed", trusted=True) == []
        assert len(store.values(f"{TEST}/_elapsed")) == 1


def test_the_dated_copy_is_the_same_run(tmp_path: Path) -> None:
    results(tmp_path / "r" / "unit_results.json", **OURS)
    results(tmp_path / "r" / "unit_results" / "20250324_233412.json", **OURS)
    assert [one.new for one in imported(tmp_path, tmp_path / "r")] == [True, False]
    assert [one.new for one in imported(tmp_path, tmp_path / "r")] == [False, False]


def test_nan_null_and_text_are_kept_with_marks(tmp_path: Path) -> None:
    table = {TEST: {"a": float("nan"), "b": None, "c": "node 1 gpu 0", "d": [1, 2]}}
    imported(tmp_path, results(tmp_path / "unit_results.json", metrics=table))
    with Store(tmp_path / "h.sqlite", write=False) as store:
        marks = {name: one.mark for name, one in store.of_run(1).items()}
    assert marks == {f"{TEST}/a": "nan", f"{TEST}/b": "null", f"{TEST}/c": "text", f"{TEST}/d": "text"}


def test_a_torn_file_is_told_and_stops_none_of_the_others(tmp_path: Path) -> None:
    results(tmp_path / "r" / "20250324_233412.json")
    torn = results(tmp_path / "r" / "20250324_233413.json", start_time="2025-03-24 23:34:13")
    torn.write_text(torn.read_text(encoding="utf-8")[:-20], encoding="utf-8")
    answer = history("import", str(tmp_path / "r"), store=tmp_path / "h.sqlite", cwd=tmp_path)
    assert answer.returncode == 2
    assert "run 1" in answer.stdout
    assert "20250324_233413.json: not imported" in answer.stderr


def test_a_key_that_stands_twice_is_told(tmp_path: Path) -> None:
    path = results(tmp_path / "unit_results.json")
    path.write_text(path.read_text(encoding="utf-8").replace('"_elapsed"', '"avg_prob_mult_error"'), encoding="utf-8")
    (one,) = imported(tmp_path, path)
    assert one.error is not None
    assert "stands twice" in one.error.message


def test_what_is_stated_fills_gaps_and_never_overrules(tmp_path: Path) -> None:
    path = results(tmp_path / "unit_results.json")
    (one,) = imported(tmp_path, path, branch="main", clean=True)
    assert one.run is not None
    assert one.run.trusted
    (other,) = imported(tmp_path, results(tmp_path / "2" / "unit_results.json", **(OURS | {"git_branch": "my-fix"})), branch="main")
    assert other.error is not None
    assert "my-fix" in other.error.message


def test_what_is_stated_later_reaches_a_run_that_is_there(tmp_path: Path) -> None:
    path, store = results(tmp_path / "unit_results.json"), tmp_path / "h.sqlite"
    assert "not trusted" in history("import", str(path), store=store, cwd=tmp_path).stdout
    answer = history("import", str(path), "--branch", "main", "--clean", store=store, cwd=tmp_path)
    assert "there already as run 1" in answer.stdout
    assert answer.stdout.rstrip().endswith(", trusted")


def test_a_commit_that_is_not_on_main_here_is_not_trusted(tmp_path: Path) -> None:
    from seatrial.evidence.git import git, line

    repo = tmp_path / "repo"
    repo.mkdir()
    who = ("-c", "user.name=a", "-c", "user.email=a@b")
    git(repo, "init", "-q", "-b", "main")
    git(repo, *who, "commit", "-q", "--allow-empty", "-m", "one")
    first = line(git(repo, "rev-parse", "HEAD"))
    git(repo, "checkout", "-q", "-b", "aside")
    git(repo, *who, "commit", "-q", "--allow-empty", "-m", "two")
    aside = line(git(repo, "rev-parse", "HEAD"))
    (good,) = imported(tmp_path, results(repo / "unit_results.json", **(OURS | {"git_commit": first})))
    (bad,) = imported(tmp_path, results(repo / "unit_results.json", **(OURS | {"git_commit": aside})))
    assert good.run is not None
    assert good.run.trusted
    assert bad.run is not None
    assert "is not on the branch main" in bad.run.why_untrusted


def test_what_is_of_no_known_kind_says_what_was_looked_for(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("words", encoding="utf-8")
    (one,) = imported(tmp_path / "s", tmp_path / "notes.txt")
    assert one.error is not None
    assert "unit_results.json" in one.error.fix
    for path in (tmp_path / "absent", tmp_path):
        with pytest.raises(UserError) as caught:
            importing.detect_runs(path)
        assert "unit_results.json" in caught.value.fix


def test_a_repository_at_hand_that_lacks_the_commit_vouches_for_nothing(tmp_path: Path) -> None:
    from seatrial.evidence.git import git

    repo = tmp_path / "repo"
    repo.mkdir()
    git(repo, "init", "-q", "-b", "main")
    git(repo, "-c", "user.name=a", "-c", "user.email=a@b.c", "commit", "-q", "--allow-empty", "-m", "one")
    (one,) = imported(tmp_path, results(repo / "unit_results.json", **OURS))
    assert one.run is not None
    assert "is not known in" in one.run.why_untrusted


def test_a_repository_that_git_cannot_read_vouches_for_nothing(tmp_path: Path) -> None:
    (tmp_path / "repo").mkdir()
    (tmp_path / "repo" / ".git").write_text("gitdir: /nowhere\n", encoding="utf-8")
    (one,) = imported(tmp_path, results(tmp_path / "repo" / "unit_results.json", **OURS))
    assert one.run is not None
    assert "git cannot tell" in one.run.why_untrusted


@pytest.mark.parametrize(
    ("other", "machine"),
    [
        ({"gpu_types": ["H100", "H100"]}, "2 x H100"),
        ({"gpu_types": []}, "unknown machine"),
        ({"gpu_types": [], "machine": "x86_64, 8 CPUs"}, "x86_64, 8 CPUs"),
    ],
)
def test_the_machine_is_what_the_file_says_and_never_this_one(tmp_path: Path, other: dict[str, object], machine: str) -> None:
    (one,) = imported(tmp_path, results(tmp_path / "unit_results.json", **(OURS | other)))
    assert one.run is not None
    assert one.run.machine == machine


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"outcomes": {TEST: "failed"}}, f"exit_status is 0, but outcomes say otherwise: {TEST} (failed)"),
        ({"outcomes": {TEST: "error"}}, f"exit_status is 0, but outcomes say otherwise: {TEST} (error)"),
        ({"outcomes": {TEST: "crashed"}}, f"{TEST} (crashed)"),
        ({"tests": {"passed": 3, "failed": 1}}, "exit_status is 0, but tests say otherwise: 1 failed"),
    ],
)
def test_results_with_a_failed_test_did_not_pass_whatever_the_exit_status_says(tmp_path: Path, other: dict[str, object], said: str) -> None:
    path, store = results(tmp_path / "unit_results.json", **(OURS | other)), tmp_path / "h.sqlite"
    (one,) = imported(tmp_path, path)
    assert one.run is not None
    assert (one.run.passed, one.run.trusted) == (False, False)
    assert said in one.run.why_untrusted
    found = Gate(run=one.run, judged=())
    assert found.verdict is Verdict.FAIL
    assert said in found.lines()[0]
    answer = history("gate", str(path), store=store, cwd=tmp_path)
    assert (answer.returncode, said in answer.stdout) == (1, True), answer.stdout + answer.stderr


def test_skipped_and_xfailed_tests_are_no_failures(tmp_path: Path) -> None:
    fine = {"outcomes": {TEST: "passed", "t::b": "skipped"}, "tests": {"passed": 1, "skipped": 1, "xfailed": 1, "xpassed": 1, "failed": 0}}
    (one,) = imported(tmp_path, results(tmp_path / "unit_results.json", **(OURS | fine)))
    assert one.run is not None
    assert one.run.trusted


@pytest.mark.parametrize("key", ["outcomes", "tests"])
def test_outcomes_that_cannot_be_read_are_an_error(tmp_path: Path, key: str) -> None:
    (one,) = imported(tmp_path, results(tmp_path / "unit_results.json", **(OURS | {key: ["failed"]})))
    assert one.error is not None
    assert f"{key}: is no table" in one.error.message


def dated(place: Path) -> list[Path]:
    """Eleven runs of one second, in the order of their making; unit_results.json is the last one."""
    files = []
    for number in range(1, 12):
        name = "20250324_233412" + (f"-{number}" if number > 1 else "")
        files.append(results(place / "unit_results" / f"{name}.json", **(OURS | {"metrics": {TEST: {"loss": number}}})))
    results(place / "unit_results.json", **(OURS | {"metrics": {TEST: {"loss": 11}}}))
    return files


def losses(tmp_path: Path) -> list[float | None]:
    with Store(tmp_path / "h.sqlite", write=False) as store:
        return [one.value for one in store.values(f"{TEST}/loss")]


@pytest.mark.parametrize("where", [".", "unit_results"])
def test_runs_of_one_second_keep_the_order_in_which_they_were_made(tmp_path: Path, where: str) -> None:
    dated(tmp_path / "r")
    imported(tmp_path, tmp_path / "r" / where)
    assert losses(tmp_path) == list(range(1, 12))


def test_so_do_those_that_a_shell_lists(tmp_path: Path) -> None:
    files = sorted(dated(tmp_path / "r"))
    assert files[0].name == "20250324_233412-10.json"
    assert history("import", *map(str, files), store=tmp_path / "h.sqlite", cwd=tmp_path).returncode == 0
    assert losses(tmp_path) == list(range(1, 12))


def test_other_paths_are_imported_in_the_order_given() -> None:
    given = [Path("z.json"), Path("r/20250324_233412-2.json"), Path("a"), Path("r/20250324_233412.json")]
    assert importing.in_order(given) == [given[0], given[3], given[2], given[1]]
