"""The base of a change: which it is, that it runs beside the change, and that a level of it runs only once."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from seatrial.core.errors import UserError
from seatrial.core.files import read_json, read_model, write_json
from seatrial.core.records import Baseline, EnvironmentRecord, Plan, Report, Trial
from seatrial.core.verdict import Boundary, Verdict
from seatrial.trial import base_cache, baseline, run_dir, runner
from seatrial.trial import baseline as settling
from seatrial.trial.base_worktrees import base_of
from seatrial.trial.progress import Compared, Event, Judged, Running
from seatrial.trial.trial_request import checkouts
from tests.trial.conftest import Bench, asked_once, commit, git
from tests.trial.test_baseline import again, word, words, worktrees
from tests.trial.test_pre_tests import WRITES, stand_in


def plan(bench: Bench, *paths: Path, levels: tuple[int, ...] = (0,), base: str | None = None) -> Plan:
    states, _ = checkouts([str(path) for path in paths], base)
    return bench.request(*levels).plan.model_copy(update={"changes": states})


def run(bench: Bench, repo: Path, *levels: int, base: str | None = None, expect: str | None = None, fault: bool = False) -> Trial:
    """A trial of the fake loop, whose levels ask the change, beside its base."""
    bench.words = dict.fromkeys(levels, "ask")
    bench.monkeypatch.setattr(baseline, "loop_of", bench._loop)
    made = plan(bench, repo, levels=levels, base=base)
    beside = base_of(made, run=True, here=True, fault=fault)
    assert beside is not None
    beside = Baseline.model_validate(beside.model_dump() | {"expect": expect})
    request = replace(bench.request(*levels), plan=made, baseline=beside, options={"fault": "crash"} if fault else {})
    return baseline.finish(request, runner.start(request, bench._listen), bench._listen)


def bits(trial: Trial) -> list[tuple[int, str]]:
    assert trial.baseline is not None
    return [(one.level, one.outcome) for one in trial.baseline.bits]


def second(bench: Bench, name: str = "second") -> None:
    bench.out = bench.out.with_name(name)
    bench.out.mkdir()
    bench.events.clear()


def test_the_base_is_the_state_before_the_change(bench: Bench, repo: Path) -> None:
    first = git(repo, "rev-parse", "HEAD")
    git(repo, "checkout", "-q", "-b", "topic")
    commit(repo, {"pkg/smoke.py": "a = 2\n"})
    found = base_of(plan(bench, repo), run=True, here=True, fault=False)
    assert found is not None
    assert (found.origin, found.absent, found.source) == ("base", None, f"my_checkout_ü {first[:12]}")
    assert [(one.name, one.commit) for one in found.changes] == [("my_checkout_ü", first)]
    git(repo, "checkout", "-q", "main")
    (repo / "pkg" / "smoke.py").write_text("a = 3\n")
    dirty = base_of(plan(bench, repo), run=True, here=True, fault=False)
    assert dirty is not None
    assert dirty.changes[0].commit == first


def test_why_there_is_no_base(bench: Bench, repo: Path) -> None:
    def absent(made: Plan, run: bool = True, here: bool = True, fault: bool = False) -> str | None:
        found = base_of(made, run=run, here=here, fault=fault)
        assert found is not None
        assert bool(found.notes) is (found.absent is not None)
        return found.absent

    assert base_of(bench.request(0).plan, run=True, here=True, fault=False) is None
    assert absent(plan(bench, repo)) == "unknown"
    assert absent(plan(bench, repo, base="HEAD")) == "same files"
    commit(repo, {})
    assert absent(plan(bench, repo, base="HEAD~1")) == "same files"  # another commit with the same files
    assert absent(plan(bench, repo, base="HEAD~1"), run=False) == "switched off"
    commit(repo, {"pkg/smoke.py": "a = 2\n"})
    assert absent(plan(bench, repo, base="HEAD~1")) is None
    assert absent(plan(bench, repo, base="HEAD~1"), here=False) == "cluster"
    assert absent(plan(bench, repo, base="HEAD~1"), fault=True) == "fault"


def test_a_repository_without_a_base_stays_as_it_is(bench: Bench, repo: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(repo, other)
    (repo / "pkg" / "smoke.py").write_text("a = 2\n")
    found = base_of(plan(bench, repo, other), run=True, here=True, fault=False)
    assert found is not None
    assert [one.commit for one in found.changes] == [git(repo, "rev-parse", "HEAD"), git(other, "rev-parse", "HEAD")]
    assert found.notes == ("other is the same on both sides: its base is not known",)


@pytest.mark.slow
def test_both_sides_pass_and_are_identical(bench: Bench, repo: Path) -> None:
    word(repo, "fine")
    (repo / "pkg" / "smoke.py").write_text("a = 2\n")
    trial = run(bench, repo, 0, 1, expect="identical")
    assert (trial.verdict, bits(trial)) == (Verdict.PASS, [(0, "identical"), (1, "identical")])
    assert words(trial) == [("level 0 (Fake smoke)", "pass"), ("level 1 (Fake second)", "pass")]
    assert [event.level for event in bench.events if isinstance(event, Compared)] == [0, 1]
    report = read_model(bench.out / "report.json", Report)
    assert "pass on both sides, level 0 identical, level 1 identical" in report.answer
    assert any("identical to the base (6 values; the metrics alone were compared)" in line.proof for line in report.deliverables)
    assert any("only logged metrics were compared" in line for line in report.limitations)
    for name in ("summary.md", "report.html"):
        assert "identical to the base" in (bench.out / name).read_text(encoding="utf-8")
    assert worktrees(repo) == 1
    assert again(bench) == trial


@pytest.mark.slow
def test_a_failure_of_both_sides_is_blocked_and_resume_keeps_it(bench: Bench, repo: Path) -> None:
    word(repo, "crash")
    (repo / "pkg" / "smoke.py").write_text("a = 2\n")
    trial = run(bench, repo, 0)
    assert (trial.verdict, words(trial)) == (Verdict.BLOCKED, [("level 0 (Fake smoke)", "fail (pre-existing)")])
    assert read_json(bench.level(0) / "result.json")["verdict"] == "Blocked"
    report = read_model(bench.out / "report.json", Report)
    assert report.result is Verdict.BLOCKED
    assert "fails in the same way" in report.answer
    stored = (bench.out / "trial.json").stat().st_mtime_ns
    assert again(bench) == trial
    assert (bench.out / "trial.json").stat().st_mtime_ns == stored


@pytest.mark.slow
def test_what_the_change_broke_is_a_fail(bench: Bench, repo: Path) -> None:
    word(repo, "fine")
    (repo / "pkg" / "WORD").write_text("crash")
    trial = run(bench, repo, 0)
    assert (trial.verdict, words(trial)) == (Verdict.FAIL, [("level 0 (Fake smoke)", "newly broken")])


@pytest.mark.slow
def test_a_run_that_is_not_identical_fails_where_that_is_expected(bench: Bench, repo: Path) -> None:
    word(repo, "fine")
    (repo / "pkg" / "WORD").write_text("twice")  # a metric more: a Fail by itself
    trial = run(bench, repo, 0)
    assert bits(trial) == [(0, "differs")]
    second(bench)
    (repo / "pkg" / "WORD").write_text("other")
    trial = run(bench, repo, 0, expect="identical")
    (level,) = trial.levels
    assert (trial.verdict, level.boundary) == (Verdict.FAIL, Boundary.METRICS)
    assert level.own is not None
    assert level.own.verdict is Verdict.PASS
    assert "first differs at step 3, in train/loss: 0.25, on the base 0.3333" in level.reason
    assert [event.result.verdict for event in bench.events if isinstance(event, Judged)] == [Verdict.PASS, Verdict.FAIL]
    report = read_model(bench.out / "report.json", Report)
    assert (report.result, run_dir.load(bench.out).levels) == (Verdict.FAIL, trial.levels)


@pytest.mark.slow
@pytest.mark.parametrize(("text", "verdict"), [("crash", Verdict.BLOCKED), ("stuck", Verdict.FAIL), ("fine", Verdict.PASS)])
def test_without_a_base_only_a_failure_in_training_is_held_against_the_change(
    bench: Bench, repo: Path, text: str, verdict: Verdict
) -> None:
    word(repo, text)
    trial = run(bench, repo, 0)
    assert (trial.verdict, not (bench.out / "baseline").exists()) == (verdict, True)
    report = read_model(bench.out / "report.json", Report)
    assert any(line.startswith("base: the base is not known") for line in report.limitations)
    assert "Base: none (unknown)" in report.evidence
    assert any("--base REV" in line for line in report.follow_ups) is (verdict is Verdict.BLOCKED)


@pytest.mark.slow
def test_an_injected_fault_is_a_fail(bench: Bench, repo: Path) -> None:
    word(repo, "crash")
    assert run(bench, repo, 0, fault=True).verdict is Verdict.FAIL


@pytest.mark.slow
def test_only_tests_that_failed_run_on_the_base(bench: Bench, repo: Path) -> None:
    word(repo, "fine")
    (repo / "pkg" / "smoke.py").write_text("a = 2\n")
    bench.sides = lambda context: (stand_in(WRITES, Path(context.changes[0].path)),)
    trial = run(bench, repo, 0)
    assert (trial.verdict, words(trial)) == (Verdict.PASS, [("level 0 (Fake smoke)", "pass")])
    assert run_dir.load(bench.out / "baseline" / "trial").sides == ()


@pytest.mark.slow
def test_a_base_that_uses_none_of_the_changed_files_is_a_base(bench: Bench, repo: Path) -> None:
    word(repo, "half")  # loads pkg/__init__.py alone
    (repo / "pkg" / "WORD").write_text("fine")
    (repo / "pkg" / "smoke.py").write_text("a = 2\n")
    git(repo, "update-index", "--assume-unchanged", "pkg/WORD")
    assert words(run(bench, repo, 0)) == [("level 0 (Fake smoke)", "pass")]


def locked_environment(bench: Bench) -> None:
    """Let the environment of the fake loop look like one that Seatrial built."""

    def record(python: Path, lock: str | None = None) -> EnvironmentRecord:
        return asked_once(python, lock).model_copy(update={"lock": "0" * 64})

    bench.monkeypatch.setattr(runner, "environment_record", record)


@pytest.fixture
def kept(bench: Bench, tmp_path: Path) -> Path:
    """A cache of its own."""
    locked_environment(bench)
    bench.monkeypatch.setenv("SEATRIAL_BASE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.mark.slow
def test_a_level_of_a_base_runs_once(bench: Bench, repo: Path, kept: Path) -> None:
    word(repo, "fine")
    (repo / "pkg" / "smoke.py").write_text("a = 2\n")
    first = run(bench, repo, 0)
    assert first.baseline is not None
    assert (first.baseline.reused, len(list(kept.iterdir()))) == ((), 1)
    second(bench)
    (repo / "pkg" / "smoke.py").write_text("a = 3\n")
    trial = run(bench, repo, 0, 1)
    assert trial.baseline is not None
    assert (trial.verdict, bits(trial), trial.baseline.reused) == (Verdict.PASS, [(0, "identical"), (1, "identical")], (0,))
    logs = [place / "baseline/trial/levels/0-smoke/run.log" for place in (bench.out.with_name("run"), bench.out)]
    assert logs[0].read_bytes() == logs[1].read_bytes(), "with the times of the first run"
    own = run_dir.load(bench.out / "baseline" / "trial")
    assert [level.verdict for level in own.levels] == [Verdict.PASS, Verdict.PASS]
    assert all(str(bench.out) in str(proof.expected) for proof in own.imports if proof.expected), "places are those of this trial"
    assert len(list(kept.iterdir())) == 2


@pytest.mark.slow
@pytest.mark.parametrize("what", ["edited", "lost", "more", "marker", "other arguments", "other variables", "other commit"])
def test_what_is_damaged_or_of_other_conditions_is_not_reused(bench: Bench, repo: Path, kept: Path, what: str) -> None:
    word(repo, "fine")
    (repo / "pkg" / "smoke.py").write_text("a = 2\n")
    run(bench, repo, 0)
    (entry,) = kept.iterdir()
    second(bench)
    match what:
        case "edited":
            metrics = entry / "level" / "run" / "metrics.jsonl"
            metrics.write_text(metrics.read_text().replace("0.5", "0.6"))
        case "lost":
            (entry / "level" / "run.log").unlink()
        case "more":
            (entry / "level" / "run" / "record.jsonl").write_text("{}\n")
        case "marker":
            (entry / "complete.json").write_text("{")
        case "other arguments":
            bench.arguments = ("--more",)
        case "other variables":
            bench.monkeypatch.setenv("TORCH_SOMETHING", "1")
        case "other commit":
            commit(repo, {})
            (repo / "pkg" / "smoke.py").write_text("a = 3\n")
    trial = run(bench, repo, 0)
    assert trial.baseline is not None
    assert (bits(trial), trial.baseline.reused) == ([(0, "identical")], ())
    second(bench, "third")
    trial = run(bench, repo, 0)
    assert trial.baseline is not None
    assert trial.baseline.reused == (0,), "the whole one replaced it"


@pytest.mark.slow
def test_only_a_base_that_passed_to_its_own_end_is_kept(bench: Bench, repo: Path, kept: Path) -> None:
    word(repo, "crash")
    (repo / "pkg" / "smoke.py").write_text("a = 2\n")
    trial = run(bench, repo, 0)
    assert (trial.verdict, kept.exists()) == (Verdict.BLOCKED, False)
    failed, level = settling.own(trial).levels[0], bench.level(0)
    passed = failed.model_copy(update={"verdict": Verdict.PASS})
    cut = passed.model_copy(update={"phases": (passed.phases[0].model_copy(update={"ended": "stalled"}),)})
    for result, key in ((failed, "b"), (cut, "b"), (passed, ""), (trial.levels[0], "b")):
        assert not base_cache.store(base_cache.Key(key * 40), result, level, trial.plan.changes)
    assert not kept.exists()
    assert base_cache.store(base_cache.Key("a" * 40), passed, level, trial.plan.changes)


def test_what_a_key_cannot_cover_is_not_kept(bench: Bench, repo: Path, tmp_path: Path) -> None:
    (repo / "pkg" / "smoke.py").write_text("a = 2\n")
    made = plan(bench, repo)
    beside = base_of(made, run=True, here=True, fault=False)
    assert beside is not None
    environment = EnvironmentRecord(python="p", python_version="3", packages={}, lock="l", fingerprint="f")
    trial = Trial(id="t", seatrial="0", created="", plan=made, command=(), status="done", environment=environment)

    def key(text: Plan, of: Trial = trial) -> base_cache.Key:
        return base_cache.level_key(text, of, beside.changes, made.levels[0], tmp_path)

    known = key(made)
    assert (len(known.text), known.reason, key(made) == known) == (40, "", True)
    model = tmp_path / "model"
    model.mkdir()
    keys = {known.text}
    for content in ("1", "2"):
        (model / "config.json").write_text(content)
        keys.add(key(made.model_copy(update={"model": str(model)})).text)
        keys.add(key(made.model_copy(update={"arguments": (f"--data={model}/config.json",)})).text)
    assert len(keys) == 5
    for update in (
        {"model": "org/name"},
        {"arguments": ("[redacted:KEY]",)},
        {"arguments": (f"--file={repo}/pkg/smoke.py",)},
        {"options": {"python": shutil.which("git") or ""}},
    ):
        assert key(made.model_copy(update=update)).text == "", update
    assert key(made.model_copy(update={"options": {"checkout": str(repo)}})).text
    assert key(made, trial.model_copy(update={"environment": environment.model_copy(update={"lock": None})})).reason
    driven = made.changes[0].model_copy(update={"name": "driven", "path": "/driven", "companion": True, "dirty": ("x",)})
    for patch, text in (("driven.patch", "a"), ("driven.patch", "b")):
        (tmp_path / patch).write_text(text)
        both = made.model_copy(update={"changes": (*made.changes, driven.model_copy(update={"patch": patch}))})
        keys.add(key(made, trial.model_copy(update={"plan": both})).text)
    assert len(keys) == 7


def test_old_entries_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base_cache, "KEPT", 2)
    for number in range(4):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "complete.json").touch()
        os.utime(tmp_path / str(number) / "complete.json", (number, number))
    base_cache._prune(tmp_path)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["2", "3"]


@pytest.mark.slow
def test_an_interrupted_base_is_finished_by_resume(bench: Bench, repo: Path, kept: Path) -> None:
    word(repo, "hang")
    (repo / "pkg" / "WORD").write_text("fine")

    def interrupt(event: Event) -> None:
        if isinstance(event, Running) and event.title.endswith(", base"):
            os.kill(os.getpid(), 15)

    bench.meddle = interrupt
    trial = run(bench, repo, 0)
    assert (trial.status, trial.verdict, worktrees(repo), kept.exists()) == ("running", Verdict.PASS, 1, False)
    bench.meddle = None
    bench.words = {0: "fine"}
    trial = again(bench)
    assert (trial.status, trial.verdict, bits(trial)) == ("done", Verdict.PASS, [(0, "identical")])
    assert json.loads((bench.out / "baseline" / "trial" / "reused.json").read_text()) == []


@pytest.mark.slow
def test_a_kill_while_a_trial_is_settled_loses_nothing(bench: Bench, repo: Path, kept: Path) -> None:
    word(repo, "crash")
    (repo / "pkg" / "smoke.py").write_text("a = 2\n")
    trial = run(bench, repo, 0)
    write_json(bench.level(0) / "result.json", settling.own(trial).levels[0])  # the other record was written already
    assert run_dir.load(bench.out) == trial
    assert again(bench).verdict is Verdict.BLOCKED
    better = trial.levels[0].model_copy(update={"verdict": Verdict.PASS})
    write_json(bench.out / "trial.json", trial.model_copy(update={"levels": (better,)}))
    with pytest.raises(UserError, match="was edited"):
        run_dir.load(bench.out)
    run_dir.save(bench.out, trial)
    shutil.rmtree(bench.out / "baseline" / "trial")
    (bench.out / "baseline" / "trial" / "levels").mkdir(parents=True)  # killed while a level was copied from the cache
    assert trial.baseline is not None
    begun = trial.model_copy(update={"baseline": trial.baseline.model_copy(update={"comparisons": (), "bits": ()})})
    run_dir.save(bench.out, begun)
    assert words(again(bench)) == [("level 0 (Fake smoke)", "fail (pre-existing)")]


@pytest.mark.slow
def test_an_interrupted_base_leaves_no_pass_where_the_same_is_expected(bench: Bench, repo: Path) -> None:
    word(repo, "hang")
    (repo / "pkg" / "WORD").write_text("fine")
    seen: list[str | None] = []

    def interrupt(event: Event) -> None:
        if isinstance(event, Running) and event.title.endswith(", base"):
            seen.append(run_dir.load(bench.out).verdict)
            os.kill(os.getpid(), 15)

    bench.meddle = interrupt
    trial = run(bench, repo, 0, expect="identical")
    assert (trial.status, trial.verdict, seen[0]) == ("running", Verdict.BLOCKED, Verdict.BLOCKED)
    assert read_model(bench.out / "report.json", Report).result is Verdict.BLOCKED
    bench.meddle = None
    bench.words = {0: "fine"}
    trial = again(bench)
    assert (trial.status, trial.verdict, bits(trial)) == ("done", Verdict.PASS, [(0, "identical")])
