"""The unchanged side: how it is run or read, what is compared, and that nothing of it stays behind."""

from __future__ import annotations

import hashlib
import os
from dataclasses import replace
from pathlib import Path

import pytest

from seatrial.core.errors import BlockedError, UserError
from seatrial.core.files import LFS_POINTER as POINTER
from seatrial.core.files import read_json, read_model
from seatrial.core.records import Baseline, Comparison, Report, Trial
from seatrial.core.verdict import Verdict
from seatrial.evidence.repos import repo_state
from seatrial.trial import baseline, run_dir, runner
from seatrial.trial.base_worktrees import ahead, discard, ignored, lacks, other_changes, unchanged
from seatrial.trial.progress import Event, Running, SideJudged, Stage
from tests.trial.conftest import Bench, commit, git
from tests.trial.test_pre_tests import WRITES, stand_in

pytestmark = pytest.mark.slow


def word(repo: Path, text: str) -> str:
    """Let the change decide how its levels go."""
    return commit(repo, {"pkg/WORD": text})


def run(bench: Bench, repo: Path, revision: str, *levels: int) -> Trial:
    """A trial of the fake loop, whose levels ask the change, against a revision."""
    bench.changes, bench.words = (repo,), dict.fromkeys(levels, "ask")
    bench.monkeypatch.setattr(baseline, "loop_of", bench._loop)
    bench.baseline = baseline.requested(revision, bench.request(*levels).plan)
    request = bench.request(*levels)
    return baseline.finish(request, runner.start(request, bench._listen), bench._listen)


def again(bench: Bench) -> Trial:
    trial = bench.resume()
    return baseline.finish(runner.request_of(bench.out, trial), trial, bench._listen)


def words(trial: Trial) -> list[tuple[str, str]]:
    assert trial.baseline is not None
    return [(one.deliverable, one.word) for one in trial.baseline.comparisons]


def worktrees(repo: Path) -> int:
    return git(repo, "worktree", "list", "--porcelain").count("worktree ")


def submodule(repo: Path) -> Path:
    """A submodule of the checkout, at its first commit."""
    inner = repo / "third" / "inner"
    inner.mkdir(parents=True)
    git(inner, "init", "-q")
    commit(inner, {"sub.py": "a = 1\n"})
    return inner


def test_a_revision_is_run_beside_the_change_and_nothing_stays(bench: Bench, repo: Path) -> None:
    inner = submodule(repo)
    first, old = git(inner, "rev-parse", "HEAD"), word(repo, "crash")
    commit(inner, {"sub.py": "a = 2\n"})
    word(repo, "fine")
    hook = repo / ".git" / "hooks" / "post-checkout"
    hook.parent.mkdir(exist_ok=True)
    hook.write_text(f"#!/bin/sh\ntouch {bench.out}/hooked\n")
    hook.chmod(0o755)
    config = (repo / ".git" / "config").read_text()
    bench.sides = lambda context: (stand_in(WRITES, Path(context.changes[0].path)),)
    trial = run(bench, repo, "HEAD~1", 0)
    assert (trial.verdict, trial.status) == (Verdict.PASS, "done")
    assert words(trial) == [("Own tests", "pass"), ("level 0 (Fake smoke)", "fixed")]
    assert trial.baseline is not None
    assert trial.baseline.directory == "baseline/trial"
    (state,) = trial.baseline.changes
    assert (state.commit, state.path) == (old, str(bench.out / "baseline" / "src" / "my_checkout_ü"))
    assert [(one.path, one.commit, one.state) for one in state.submodules] == [("third/inner", first, "clean")]
    assert (worktrees(repo), worktrees(inner), git(repo, "status", "--porcelain")) == (1, 1, "")
    assert ((repo / ".git" / "config").read_text(), (bench.out / "hooked").exists()) == (config, False)
    assert not list((bench.out / "baseline" / "src").iterdir())
    assert read_model(bench.out / "trial.json", Trial) == trial
    own = run_dir.load(bench.out / "baseline" / "trial")
    assert (own.verdict, own.baseline, own.reason) == (Verdict.FAIL, None, "level 0: run: exit code 1: RuntimeError: the model is broken")
    report = read_model(bench.out / "report.json", Report)
    assert "; against the baseline HEAD~1: level 0 (Fake smoke) fixed, level 0 differs." in report.answer
    assert [event.result.key for event in bench.events if isinstance(event, SideJudged)] == ["own"]  # not that of the baseline
    assert "baseline" in [event.name for event in bench.events if isinstance(event, Stage)]


def test_a_failure_that_was_there_before_is_blocked_and_no_pass(bench: Bench, repo: Path) -> None:
    word(repo, "stuck")
    commit(repo, {"new.py": "x = 1\n"})
    trial = run(bench, repo, "HEAD~1", 0)
    assert (trial.verdict, words(trial)) == (Verdict.BLOCKED, [("level 0 (Fake smoke)", "fail (pre-existing)")])
    (level,) = trial.levels
    assert level.own is not None
    assert (level.verdict, level.own.verdict) == (Verdict.BLOCKED, Verdict.FAIL)
    assert level.reason == f"the base (HEAD~1) fails in the same way, so this says nothing about the change: {level.own.reason}"
    assert run_dir.load(bench.out).levels == trial.levels
    report = read_model(bench.out / "report.json", Report)
    assert report.result is Verdict.BLOCKED
    assert "against the baseline HEAD~1: level 0 (Fake smoke) fail (pre-existing)" in report.answer
    assert any("pre-existing: not evidence against the change (weights changed, as on the baseline)" in line for line in report.follow_ups)


def test_an_interrupted_baseline_is_finished_by_resume(bench: Bench, repo: Path) -> None:
    word(repo, "hang")
    word(repo, "fine")

    def interrupt(event: Event) -> None:
        if isinstance(event, Running) and event.title.endswith(", baseline"):
            os.kill(os.getpid(), 15)

    bench.meddle = interrupt
    trial = run(bench, repo, "HEAD~1", 0)
    assert (trial.status, trial.verdict, words(trial)) == ("running", Verdict.PASS, [])
    assert worktrees(repo) == 1
    assert read_model(bench.out / "trial.json", Trial) == trial
    bench.meddle = None
    bench.words = {0: "fine"}
    trial = again(bench)
    assert (trial.status, trial.verdict, words(trial)) == ("done", Verdict.PASS, [("level 0 (Fake smoke)", "pass")])
    assert worktrees(repo) == 1
    stored = (bench.out / "trial.json").stat().st_mtime_ns
    assert again(bench) == trial  # nothing is left to do, nothing is written
    assert (bench.out / "trial.json").stat().st_mtime_ns == stored


def test_levels_without_a_verdict_are_not_run_again(bench: Bench, repo: Path) -> None:
    word(repo, "fine")
    word(repo, "flat")
    trial = run(bench, repo, "HEAD~1", 0)
    assert words(trial) == [("level 0 (Fake smoke)", "not comparable")]
    assert trial.baseline is not None
    assert trial.baseline.notes == (
        "the baseline is Blocked: nothing of the trial itself came to a verdict, so there is nothing to compare",
    )
    assert not (bench.out / "baseline").exists()


@pytest.mark.parametrize("gone", [False, True])
def test_a_submodule_that_cannot_be_had_blocks_the_baseline_with_the_command(repo: Path, tmp_path: Path, gone: bool) -> None:
    inner, missing = submodule(repo), "1" * 40
    git(repo, "update-index", "--add", "--cacheinfo", f"160000,{missing},third/inner")
    git(repo, "commit", "-q", "-m", "a submodule")
    old = git(repo, "rev-parse", "HEAD")
    if gone:
        git(repo, "rm", "-q", "--cached", "third/inner")
        inner.rename(tmp_path / "elsewhere")
    commit(repo, {})
    with pytest.raises(BlockedError) as caught, unchanged([(repo_state(repo), old)], tmp_path / "src"):
        raise AssertionError("nothing can be made of it")
    assert ("is not part of the change" if gone else f"does not hold {missing}") in caught.value.message
    assert ("give its run directory" if gone else f"fetch origin {missing}") in caught.value.fix
    assert worktrees(repo) == 1


def test_pointers_of_git_lfs_are_no_contents(repo: Path, tmp_path: Path) -> None:
    name = hashlib.sha256(b"weights\n").hexdigest()
    git(repo, "config", "filter.lfs.clean", f"cat > /dev/null; printf '{POINTER}\\noid sha256:{name}\\nsize 8\\n'")
    git(repo, "config", "filter.lfs.smudge", f"touch {tmp_path}/smudged")
    old = commit(repo, {".gitattributes": "*.bin filter=lfs\n", "model.bin": "weights\n"})
    commit(repo, {"pkg/smoke.py": "a = 2\n"})
    words = r"1 files of Git LFS are pointers in a worktree of .*, such as model\.bin"
    with pytest.raises(BlockedError, match=words), unchanged([(repo_state(repo), old)], tmp_path / "src"):
        raise AssertionError("nothing can be made of it")
    held = repo / ".git/lfs/objects" / name[:2] / name[2:4] / name  # as `git lfs fetch` leaves it
    held.parent.mkdir(parents=True)
    held.write_text("weights\n")
    with unchanged([(repo_state(repo), old)], tmp_path / "src") as (made,):
        assert (Path(made.path, "model.bin").read_text(), made.dirty) == ("weights\n", ())
    assert (worktrees(repo), (tmp_path / "smudged").exists()) == (1, False)


def test_a_tree_behind_another_filter_is_refused(repo: Path, tmp_path: Path) -> None:
    old = commit(repo, {".gitattributes": "*.key filter=crypt\n*.ipynb filter=strip\n", "a.key": "k\n", "a.ipynb": "{}\n"})
    git(repo, "config", "filter.strip.smudge", "cat")  # changes nothing on its way out
    with unchanged([(repo_state(repo), old)], tmp_path / "src") as (made,):
        assert made.dirty == ()
    git(repo, "config", "filter.crypt.smudge", f"touch {tmp_path}/smudged; cat")
    with (
        pytest.raises(BlockedError, match=r"1 files of .* need the filter crypt, such as a\.key"),
        unchanged([(repo_state(repo), old)], tmp_path / "src"),
    ):
        raise AssertionError("nothing can be made of it")
    assert (worktrees(repo), (tmp_path / "smudged").exists()) == (1, False)


def test_what_a_killed_seatrial_left_is_taken_over(repo: Path, tmp_path: Path) -> None:
    old = git(repo, "rev-parse", "HEAD")
    state = repo_state(repo)
    place = tmp_path / "src" / state.name
    git(repo, "worktree", "add", "-q", "--detach", str(place), old)
    git(repo, "worktree", "lock", str(place))  # as git leaves it when it is killed, too
    (place / "left.py").touch()
    with unchanged([(state.model_copy(update={"changed": ("pkg/smoke.py", "gone.py")}), old)], tmp_path / "src") as (made,):
        assert (made.dirty, made.commit, made.branch, made.changed) == ((), old, None, ("pkg/smoke.py",))
    assert (worktrees(repo), place.exists()) == (1, False)


def test_what_a_killed_seatrial_left_is_discarded_when_nothing_is_to_be_run(repo: Path, tmp_path: Path) -> None:
    inner = submodule(repo)
    old = commit(repo, {})
    place = tmp_path / "src" / repo_state(repo).name
    git(repo, "worktree", "add", "-q", "--detach", str(place), old)
    git(inner, "worktree", "add", "-q", "--detach", str(place / "third" / "inner"), "HEAD")
    discard([repo_state(repo)], tmp_path / "src")
    discard([repo_state(repo)], tmp_path / "src")
    assert (worktrees(repo), worktrees(inner), place.exists()) == (1, 1, False)


def test_a_recorded_trial_is_read_and_what_differs_is_noted(bench: Bench, repo: Path) -> None:
    recorded = bench.out
    bench.words = {0: "stuck"}
    bench.start(0)
    trial = read_json(recorded / "trial.json")
    trial["plan"]["model"] = "another"
    trial["environment"]["fingerprint"] = "0" * 64
    trial["seatrial"] = "0.0.0"
    run_dir.save(recorded, Trial.model_validate(trial))
    before = {path: path.stat().st_mtime_ns for path in recorded.rglob("*")}
    bench.out = recorded.with_name("second")
    bench.out.mkdir()
    bench.arguments = ("--more",)
    word(repo, "stuck")
    done = run(bench, repo, str(recorded), 0, 1)
    assert words(done) == [("level 0 (Fake smoke)", "fail (pre-existing)"), ("level 1 (Fake second)", "not comparable")]
    assert done.baseline is not None
    assert done.baseline.notes[0] == "another model: another, here tiny"
    assert done.baseline.notes[1] == "other loop arguments: none, here --more"
    assert done.baseline.notes[2].startswith("another environment: 000000000000, here ")
    assert done.baseline.notes[3].startswith("judged by Seatrial 0.0.0, here ")
    assert done.baseline.notes[4:] == ("other repositories under test: none, here my_checkout_ü",)
    assert done.baseline.directory == str(recorded)
    assert {path: path.stat().st_mtime_ns for path in recorded.rglob("*")} == before
    assert any(line == "baseline: another model: another, here tiny" for line in read_model(bench.out / "report.json", Report).limitations)


def test_a_baseline_that_cannot_be_meant_is_refused(bench: Bench, repo: Path, tmp_path: Path) -> None:
    plan = bench.request(0).plan
    with pytest.raises(UserError, match="a revision needs a change"):
        baseline.requested("main", plan)
    bench.changes = (repo,)
    plan = bench.request(0).plan
    for text in ("no-such-revision", str(tmp_path)):
        with pytest.raises(UserError, match="neither a run directory nor a revision of"):
            baseline.requested(text, plan)
    with pytest.raises(UserError, match="that is what is under test"):
        baseline.requested("HEAD", plan)
    with pytest.raises(UserError, match="with --on only a recorded trial") as caught:
        baseline.requested("HEAD", plan, here=False)
    assert "run the baseline as a trial of its own" in caught.value.fix
    (repo / "pkg" / "smoke.py").write_text("a = 2\n")
    assert baseline.requested("HEAD", bench.request(0).plan).changes[0].commit == git(repo, "rev-parse", "HEAD")


def test_a_trial_of_another_loop_is_refused(bench: Bench) -> None:
    bench.start(0)
    plan = bench.request(0).plan
    assert baseline.requested(str(bench.out), plan, here=False).source == str(bench.out)
    with pytest.raises(UserError, match="a trial of fake, this one is of other"):
        baseline.requested(str(bench.out), plan.model_copy(update={"loop": "other"}))


def test_a_trial_of_the_same_change_excuses_nothing(bench: Bench, repo: Path) -> None:
    bench.changes = (repo,)
    bench.start(0)
    with pytest.raises(UserError, match="a trial of what is under test"):
        baseline.requested(str(bench.out), bench.request(0).plan)
    commit(repo, {})
    with pytest.raises(UserError, match="a trial of what is under test"):  # another commit, the same files
        baseline.requested(str(bench.out), bench.request(0).plan)
    with pytest.raises(UserError, match="that is what is under test"):
        baseline.requested("HEAD~1", bench.request(0).plan)
    git(repo, "reset", "-q", "--hard", "HEAD~1")
    (repo / "pkg" / "smoke.py").write_text("a = 2\n")
    plan = bench.request(0).plan
    assert baseline.requested(str(bench.out), plan).source == str(bench.out)
    name = "my_checkout_ü is at the same commit, only uncommitted work differs"
    assert other_changes(run_dir.load(bench.out).plan.changes, plan.changes) == [name]
    commit(repo, {})
    assert other_changes(run_dir.load(bench.out).plan.changes, bench.request(0).plan.changes) == []


def test_a_trial_of_the_same_uncommitted_work_excuses_nothing(bench: Bench, repo: Path) -> None:
    (repo / "pkg" / "smoke.py").write_text("a = 2\n")
    bench.changes = (repo,)
    bench.start(0)
    with pytest.raises(UserError, match="a trial of what is under test"):
        baseline.requested(str(bench.out), bench.request(0).plan)
    (repo / "pkg" / "smoke.py").write_text("a = 3\n")
    assert baseline.requested(str(bench.out), bench.request(0).plan).source == str(bench.out)


def test_a_trial_with_an_injected_fault_excuses_nothing(bench: Bench) -> None:
    request = replace(bench.request(0), options={"fault": "crash"})
    runner.start(request, bench._listen)
    with pytest.raises(UserError, match=r"a fault was injected into that trial \(crash\)"):
        baseline.requested(str(bench.out), request.plan)


def test_what_was_compared_stays_when_the_recorded_trial_is_gone(bench: Bench, repo: Path, tmp_path: Path) -> None:
    recorded = bench.out
    bench.start(0)
    bench.out = recorded.with_name("second")
    bench.out.mkdir()
    word(repo, "stuck")
    trial = run(bench, repo, str(recorded), 0)
    assert words(trial) == [("level 0 (Fake smoke)", "newly broken")]
    recorded.rename(tmp_path / "moved away")
    assert again(bench) == trial
    other = trial.model_copy(update={"levels": (trial.levels[0].model_copy(update={"verdict": Verdict.PASS}),)})
    assert words(baseline.finish(runner.request_of(bench.out, other), other, bench._listen)) == [("level 0 (Fake smoke)", "not comparable")]


def test_nobody_takes_the_worktrees_of_a_baseline_away(bench: Bench, repo: Path) -> None:
    word(repo, "fine")
    word(repo, "stuck")
    seen: list[str] = []

    def meddle(event: Event) -> None:
        if isinstance(event, Stage) and event.name == "baseline" and not seen:
            trial = run_dir.load(bench.out)
            with pytest.raises(UserError, match="another seatrial") as caught:
                baseline.finish(runner.request_of(bench.out, trial), trial, bench._listen)
            seen.append(caught.value.message)

    bench.meddle = meddle
    assert words(run(bench, repo, "HEAD~1", 0)) == [("level 0 (Fake smoke)", "newly broken")]
    assert len(seen) == 1


def test_git_that_a_terminal_interrupts_is_no_blocked_baseline(bench: Bench, repo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    word(repo, "fine")
    word(repo, "stuck")

    def interrupted(*_: object) -> None:
        os.kill(os.getpid(), 2)
        raise UserError("`git worktree` failed with exit code -2", "")

    with monkeypatch.context() as patch:
        patch.setattr("seatrial.trial.base_worktrees.git", interrupted)
        trial = run(bench, repo, "HEAD~1", 0)
    assert (trial.status, words(trial)) == ("running", [])
    assert words(again(bench)) == [("level 0 (Fake smoke)", "newly broken")]


def test_a_baseline_that_a_build_would_complete_fixes_nothing(bench: Bench, repo: Path) -> None:
    old = commit(repo, {".gitignore": "ignored\n_version.py\n"})
    (repo / "pkg" / "_version.py").touch()
    (repo / "ignored").touch()
    assert ignored(repo_state(repo), old) == ("pkg/_version.py",)
    bench.changes, bench.words = (repo,), {0: "crash"}
    before = bench.start(0)
    wanted = Baseline(source="HEAD~1", changes=before.plan.changes)
    assert "holds 1 files that git ignores and that the baseline lacks, such as pkg/_version.py" in lacks(before, wanted)[0]
    fixed = Comparison(deliverable="level 0 (Fake smoke)", before=Verdict.FAIL, after=Verdict.PASS, word="fixed", note="why")
    found = baseline._not_built(fixed, before)
    assert (found.word, found.note) == (
        "not comparable",
        "the baseline lacks files that a build makes, and never came to a step there; why",
    )
    trained = before.model_copy(update={"levels": (before.levels[0].model_copy(update={"steps_reached": 2}),)})
    assert baseline._not_built(fixed, trained) == fixed


def test_a_baseline_that_has_moved_on_is_noted(bench: Bench, repo: Path) -> None:
    bench.changes = (repo,)
    (change,) = bench.request(0).plan.changes
    newer = change.model_copy(update={"commit": commit(repo, {"other.py": "x = 1\n"})})
    trial = Trial(id="t", seatrial="0", created="", plan=bench.request(0).plan, command=(), status="done")
    assert ahead(trial, Baseline(source="main", changes=(change,))) == []
    before = trial.model_copy(update={"plan": trial.plan.model_copy(update={"changes": (change,)})})
    (note,) = ahead(before, Baseline(source="main", changes=(newer,)))
    assert note.startswith("main holds commits that my_checkout_ü does not: a difference may be theirs")


def test_options_that_name_the_change_mean_the_unchanged_one(bench: Bench, repo: Path, tmp_path: Path) -> None:
    bench.changes = (repo,)
    bench.monkeypatch.setattr(baseline, "loop_of", bench._loop)
    plan = bench.request(0, 1).plan
    driven = plan.changes[0].model_copy(update={"name": "driven", "path": "/driven", "companion": True})
    plan = plan.model_copy(update={"changes": (*plan.changes, driven), "options": {"checkout": str(repo), "gpus": "2"}})
    state = plan.changes[0].model_copy(update={"path": str(tmp_path / "old")})
    made = baseline._plan(plan, plan.levels[:1], (state,))
    assert (made.options, made.changes) == ({"checkout": str(tmp_path / "old"), "gpus": "2"}, (state, driven))
    assert [level.number for level in made.levels] == [0]
