"""The isolation matrix: which reruns run, what they say of the original failure, and what is never touched."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from seatrial.core.errors import UserError
from seatrial.core.files import read_json, read_model
from seatrial.core.loop import Context, Isolation, Phase
from seatrial.core.records import CheckResult, Diagnosis, EnvironmentRecord, Failure, LevelResult, Matrix, PhaseOutcome, Plan, Rerun, Trial
from seatrial.core.specs import Level
from seatrial.core.verdict import Boundary, Verdict
from seatrial.report.markdown import matrix_md
from seatrial.trial import analyses, runner
from seatrial.trial.progress import Event, Running
from tests.trial.conftest import Bench, commit, git
from tests.trial.fake import FakeLoop

ONLY_FINE = Isolation("only-fine", (), "the other transports", options={"word": "fine"})
MADE = (Isolation("fused-off", ("word=fine",), "the fused kernel", reduced=True), Isolation("short", ("word=stuck",), "long sequences"))


class Separable(FakeLoop):
    """A fake loop whose argument `word=…`, or else its option, says how its process goes, and whose failures have reruns."""

    made: tuple[Isolation, ...] = MADE

    def levels(self) -> tuple[Level, ...]:
        word = self.chosen.get("word")
        return tuple(level.model_copy(update={"title": f"{level.title} ({word})"}) if word else level for level in super().levels())

    def isolations(self, result: LevelResult) -> tuple[Isolation, ...]:
        return self.made if result.number == 0 else ()

    def phases(self, level: Level, context: Context, directory: Path) -> tuple[Phase, ...]:
        words = [word.partition("=")[2] for word in context.arguments if word.startswith("word=")]
        word = words[-1] if words else context.options.get("word", self.words.get(level.number, "fine"))
        return FakeLoop({level.number: word}).phases(level, context, directory)


@pytest.fixture
def failed(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> Bench:
    """A trial whose level 0 missed a check."""

    def loop(plan: Plan) -> Separable:
        made = Separable(bench.words, bench.finding)
        made.chosen = plan.options
        return made

    monkeypatch.setattr(bench, "_loop", loop)
    monkeypatch.setattr(analyses, "loop_of", loop)
    bench.words = {0: "stuck"}
    bench.start(0)
    return bench


def isolated(bench: Bench, only: Sequence[str] = ()) -> Matrix:
    def listen(event: Event) -> None:
        bench.events.append(event)
        if bench.meddle:
            bench.meddle(event)

    return analyses.isolate(analyses.open_case(bench.out, only=only), listen, only)


def failures(found: Matrix) -> dict[str, str]:
    return {item.name: item.failure for item in found.reruns}


def test_the_whole_matrix(failed: Bench) -> None:
    before = {path: path.read_bytes() for path in (failed.out / "trial.json", failed.out / "report.json", failed.out / "summary.md")}
    found = isolated(failed)
    assert failures(found) == {"repeat": "still there", "fused-off": "gone", "short": "still there"}
    assert [item.verdict for item in found.reruns] == [Verdict.FAIL, Verdict.PASS, Verdict.FAIL]
    assert found.suspects == ("the fused kernel",)
    assert found.conclusion[0] == "fused-off: reduced-optimization pass; it points to the fused kernel"
    assert found.conclusion[-1] == "the original stays a Fail"
    assert (found.verdict, found.complete) == (Verdict.FAIL, True)
    assert found.measured is not None
    assert found.measured.name == "weights changed"
    place = failed.out / "isolate" / "0-smoke"
    assert read_model(place / "isolate.json", Matrix) == found
    table = (place / "isolate.md").read_text()
    assert "| fused-off | word=fine | reduced-optimization pass | gone |" in table
    for log in (found.log, *(item.log for item in found.reruns)):  # the original's and each rerun's are kept
        assert (failed.out / log).stat().st_size
        assert log in table
    request = read_json(place / "1-fused-off" / "evidence" / "request.json")
    assert request["options"] == {"isolation": "word=fine"}
    assert {path: path.read_bytes() for path in before} == before
    failed.events.clear()
    assert isolated(failed) == found
    assert not failed.events  # finished reruns are not run again


def test_a_rerun_may_change_options_of_the_loop(failed: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Separable, "made", (ONLY_FINE,))
    ((_, repeated), (_, script)) = analyses.scripts(analyses.open_case(failed.out))
    assert "level 0, Fake smoke; set on top: nothing" in repeated
    assert "only-fine: level 0, Fake smoke (fine); set on top: options.word=fine" in script
    found = isolated(failed)
    assert failures(found) == {"repeat": "still there", "only-fine": "gone"}
    assert (found.reruns[0].options, found.reruns[1].options) == ({}, {"word": "fine"})
    place = failed.out / "isolate" / "0-smoke"
    assert read_model(place / "isolate.json", Matrix) == found
    assert "| only-fine | options.word=fine | Pass | gone |" in (place / "isolate.md").read_text()
    rerun = read_model(place / "1-only-fine" / "trial.json", Trial)
    assert rerun.plan.options == {"word": "fine"}
    assert rerun.plan.levels[0].title == rerun.levels[0].title == "Fake smoke (fine)"
    failed.events.clear()
    assert isolated(failed) == found
    assert not failed.events


def test_the_options_of_the_trial_stay_in_force(failed: Bench) -> None:
    case = analyses.open_case(failed.out)
    trial = case.trial.model_copy(update={"plan": case.trial.plan.model_copy(update={"options": {"word": "stuck", "gpus": "2"}})})
    case = replace(case, trial=trial)
    assert case.plan(ONLY_FINE).options == {"word": "fine", "gpus": "2"}
    assert case.plan(MADE[0]).options == trial.plan.options


def test_loops_can_read_the_arguments_of_a_trial_from_a_result(failed: Bench) -> None:
    isolated(failed, ["short"])
    rerun = read_model(failed.out / "isolate" / "0-smoke" / "2-short" / "trial.json", Trial)
    assert "word=stuck" in rerun.levels[0].arguments


def test_what_is_not_asked_for_is_not_run(failed: Bench) -> None:
    found = isolated(failed, ["fused-off"])
    assert failures(found) == {"repeat": "not run", "fused-off": "gone", "short": "not run"}
    assert found.complete
    assert "the unchanged rerun was not run: that the failure comes and goes is not excluded" in found.conclusion
    assert "not run: repeat, short" in found.conclusion
    assert [path.name for path in sorted((failed.out / "isolate" / "0-smoke").iterdir()) if path.is_dir()] == ["1-fused-off"]


def test_an_interrupted_rerun_is_finished_later(failed: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Separable, "made", (Isolation("hang", ("word=hang",), "nothing"),))
    failed.meddle = lambda event: os.kill(os.getpid(), 2) if isinstance(event, Running) else None
    found = isolated(failed, ["hang"])
    assert (found.interrupted, found.complete, failures(found)["hang"]) == (True, False, "no evidence")
    failed.meddle = lambda event: _go(failed, event)
    found = isolated(failed, ["hang"])
    assert (found.interrupted, found.complete, failures(found)["hang"]) == (False, True, "gone")


def _go(bench: Bench, event: Event) -> None:
    if isinstance(event, Running):
        for waiting in bench.out.glob("isolate/**/waiting"):
            waiting.with_name("go").touch()


def test_a_change_that_moved_is_refused(bench: Bench, repo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.changes = (repo,)
    bench.words = {0: "stuck"}
    monkeypatch.setattr(analyses, "loop_of", lambda _: Separable(bench.words))
    bench.start(0)
    commit(repo, {"pkg/smoke.py": "a = 2\n"})
    with pytest.raises(UserError, match="another commit since this trial began"):
        isolated(bench)
    assert not (bench.out / "isolate").exists()


def test_the_commands_can_be_read_first(failed: Bench) -> None:
    case = analyses.open_case(failed.out)
    shown = analyses.scripts(case)
    assert [Path(place).name for place, _ in shown] == ["0-repeat", "1-fused-off", "2-short"]
    assert "word=fine" in shown[1][1]
    assert "word=" not in shown[0][1]
    assert len(analyses.scripts(case, ["short"])) == 1
    assert not (failed.out / "isolate").exists()


def test_what_cannot_be_isolated_is_refused(failed: Bench) -> None:
    with pytest.raises(UserError, match="level 0 has no such rerun") as caught:
        analyses.open_case(failed.out, only=["fuse"])
    assert caught.value.fix == "choose from repeat, fused-off, short"
    with pytest.raises(UserError, match="level 7 has no result in this trial"):
        analyses.open_case(failed.out, 7)
    trial = read_model(failed.out / "trial.json", Trial)
    for verdict, message in ((Verdict.PASS, "level 0 is Pass"), (Verdict.BLOCKED, "level 0 is Blocked")):
        _edit(failed.out, trial, verdict)
        with pytest.raises(UserError, match=message):
            analyses.open_case(failed.out, 0)
        with pytest.raises(UserError, match="no level failed in a way that reruns could separate"):
            analyses.open_case(failed.out)


def _edit(out: Path, trial: Trial, verdict: Verdict) -> None:
    level = trial.levels[0].model_copy(update={"verdict": verdict})
    (out / level.directory / "result.json").write_text(level.model_dump_json())
    (out / "trial.json").write_text(trial.model_copy(update={"levels": (level,)}).model_dump_json())


def test_a_rerun_with_other_settings_is_not_taken_for_ours(failed: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "start", lambda request, _: _stored(request))
    isolated(failed, ["short"])
    for other in (Isolation("short", ("word=flat",), "x"), replace(MADE[1], options={"word": "fine"})):
        monkeypatch.setattr(Separable, "made", (MADE[0], other))
        with pytest.raises(UserError, match="holds a rerun with other settings: word=stuck"):
            isolated(failed)


def _stored(request: runner.Request) -> Trial:
    trial = Trial(id="x", seatrial="0", created="", plan=request.plan, command=(), status="done", verdict=Verdict.FAIL)
    (request.out / "trial.json").write_text(trial.model_dump_json())
    return trial


CRASH = Diagnosis(boundary=Boundary.CHECKPOINT, verdict=Verdict.FAIL, cause="RuntimeError: save", signature="x.save")
EXITED = PhaseOutcome(name="run", exit_code=0, ended="exited", seconds=1)
DIED = EXITED.model_copy(update={"exit_code": 1})


def level(verdict: Verdict = Verdict.FAIL, checks: dict[str, bool] | None = None, died: bool = False, **fields: object) -> LevelResult:
    made = tuple(CheckResult(name=name, passed=passed) for name, passed in (checks or {}).items())
    base = LevelResult(number=0, name="smoke", title="Smoke", verdict=verdict, reason="why", checks=made, steps_reached=2, steps_expected=2)
    return base.model_copy(update={"phases": (DIED if died else EXITED,), **fields})


def unknown(cause: str) -> LevelResult:
    return level(died=True, diagnosis=CRASH.model_copy(update={"signature": None, "cause": cause}))


MISSED = level(checks={"a": False, "b": True})
CRASHED = level(died=True, diagnosis=CRASH)
CASES: list[tuple[str, LevelResult, LevelResult, Failure]] = [
    ("a Pass", MISSED, level(Verdict.PASS, {"a": True}), "gone"),
    ("met, but something else fails", MISSED, level(checks={"a": True, "claims": False}), "gone"),
    ("missed again", MISSED, level(checks={"a": False}), "still there"),
    ("not measured", MISSED, level(died=True), "another failure"),
    ("not all steps", MISSED, level(checks={"a": True}, steps_reached=1), "another failure"),
    ("blocked", MISSED, level(Verdict.BLOCKED, {"a": True}), "no evidence"),
    ("vacuous", CRASHED, level(Verdict.BLOCKED, vacuous=True), "no evidence"),
    ("no crash", CRASHED, level(checks={"x": False}), "gone"),
    ("the same crash", CRASHED, CRASHED, "still there"),
    (
        "the same known failure",
        CRASHED,
        level(died=True, diagnosis=CRASH.model_copy(update={"cause": "RuntimeError: load"})),
        "still there",
    ),
    (
        "another crash",
        CRASHED,
        level(died=True, diagnosis=CRASH.model_copy(update={"signature": "gpu.oom", "cause": "OOM"})),
        "another failure",
    ),
    ("a crash that nothing explains", CRASHED, level(died=True), "another failure"),
    ("the same cause elsewhere", unknown("E: /a/b/x.pt in 1234"), unknown("E: /c/x.pt in 98765"), "still there"),
    ("another cause", unknown("E: /a/x.pt"), unknown("E: /a/y.pt"), "another failure"),
    ("no cause, the same end", level(died=True), level(died=True), "still there"),
    ("no cause, another end", level(died=True), level(phases=(DIED.model_copy(update={"ended": "stalled"}),)), "another failure"),
]


@pytest.mark.parametrize(("failed", "result", "failure"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_what_became_of_the_failure(failed: LevelResult, result: LevelResult, failure: Failure) -> None:
    assert _compared(failed, result).failure == failure


def _compared(failed: LevelResult, *results: LevelResult, fingerprints: tuple[str, str] = ("a", "a")) -> Rerun:
    plan = Plan(loop="fake", levels=(), model="m")
    made = [
        Trial(id="t", seatrial="0", created="", plan=plan, command=(), status="done", levels=levels, environment=_environment(mark))
        for levels, mark in zip(((failed,), results), fingerprints, strict=True)
    ]
    return analyses.compared(Rerun(name="r", arguments=(), suspect="s", directory="d"), made[0], failed, made[1])


def _environment(mark: str) -> EnvironmentRecord:
    return EnvironmentRecord(python="p", python_version="3", packages={}, fingerprint=mark)


def test_another_environment_is_no_evidence() -> None:
    found = _compared(MISSED, level(Verdict.PASS), fingerprints=("a", "b"))
    assert (found.failure, found.note) == ("no evidence", "it ran in another environment than the original")
    assert _compared(MISSED).failure == "no evidence"  # a rerun without any level


def reruns(*found: tuple[str, Failure]) -> tuple[Rerun, ...]:
    return tuple(
        Rerun(name=name, arguments=(), suspect=f"suspect {name}", directory="d", failure=failure, reason="why", verdict=Verdict.PASS)
        for name, failure in found
    )


@pytest.mark.parametrize("control", ["gone", "another failure"])
def test_a_failure_that_does_not_repeat_has_no_suspects(control: Failure) -> None:
    suspects, lines = analyses.conclude(reruns(("repeat", control), ("a", "gone")), crashed=False)
    assert suspects == ()
    assert lines[0].startswith("the failure does not repeat")


@pytest.mark.parametrize(("control", "stops"), [("gone", True), ("another failure", True), ("still there", False), ("no evidence", False)])
def test_nothing_more_is_run_when_the_failure_does_not_repeat(failed: Bench, control: Failure, stops: bool) -> None:
    found = analyses._matrix(analyses.open_case(failed.out), {}, ())
    assert analyses._does_not_repeat(found.model_copy(update={"reruns": reruns(("repeat", control), ("a", "not run"))})) is stops


@pytest.mark.parametrize(("crashed", "advice"), [(False, analyses.PARITY), (True, "read its first cause in the log again")])
def test_when_no_rerun_helps(crashed: bool, advice: str) -> None:
    suspects, lines = analyses.conclude(reruns(("repeat", "still there"), ("a", "still there"), ("b", "still there")), crashed)
    assert suspects == ()
    assert lines[0] == f"the failure is not in any of these: {advice}"


def test_what_is_no_evidence_is_said() -> None:
    _, lines = analyses.conclude(reruns(("repeat", "still there"), ("a", "no evidence"), ("b", "another failure")), crashed=False)
    assert lines[:3] == ("no rerun took the failure away so far", "a is no evidence: why", "b failed in another way: why")


def test_no_text_can_break_the_table(failed: Bench) -> None:
    found = analyses._matrix(analyses.open_case(failed.out), {}, ())
    hostile = found.model_copy(update={"reason": "a | b\n| c \x1b[31m"})
    rows = [line for line in matrix_md(hostile).splitlines() if line.startswith("| original")]
    assert len(rows) == 1
    assert r"a \| b \| c" in rows[0]
    assert not found.complete


def test_no_secret_reaches_a_rerun(bench: Bench, repo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    token, password, known = "ghp_" + "aB3dE5gH7jK9mN1pQ3sT5vW7yZ2bC4dF6hJ8", "Mango7" + "Tango8Out", "xylo-phone-7731"
    monkeypatch.setenv("PLANTED_API_KEY", known)
    made = (Isolation("fused-off", ("word=fine", f"password={password}"), f"the fused kernel {token}"),)

    def loop(plan: Plan) -> Separable:
        found = Separable(bench.words, bench.finding)
        found.chosen, found.made = plan.options, made
        return found

    monkeypatch.setattr(bench, "_loop", loop)
    monkeypatch.setattr(analyses, "loop_of", loop)
    git(repo, "checkout", "-q", "-b", f"fix-{token}")
    git(repo, "remote", "add", "origin", f"https://bob:{password}@example.org/x.git")
    (repo / f"{token}.py").write_text(f"password = '{password}'\nkey = '{known}'\n")
    bench.changes, bench.words = (repo,), {0: "stuck"}
    bench.start(0)
    isolated(bench)
    scripts = analyses.scripts(analyses.open_case(bench.out))
    texts = [(path.name, path.read_bytes().decode("utf-8", "replace") + path.name) for path in bench.out.rglob("*") if path.is_file()]
    assert [(name, secret) for name, text in (*texts, *scripts) for secret in (token, password, known) if secret in text] == []
