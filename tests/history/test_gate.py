"""The gate, as a sceptic tries to get past it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from seatrial.core.errors import UserError
from seatrial.core.verdict import Verdict
from seatrial.history.metric_gate import Gate, JudgedMetric
from seatrial.history.store import Kind, Store, StoredRun, point
from tests.history.histories import gate

CALM = [10.0, 10.2, 9.8, 10.1, 9.9, 10.3, 9.7, 10.0]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store(tmp_path / "history.sqlite", write=True) as opened:
        yield opened


def add(store: Store, time: float, values: Mapping[str, object], *, trusted: bool = True, machine: str = "m", name: str = "n") -> int:
    run = StoredRun(
        project="p",
        kind=Kind.METRICS,
        name=name,
        time=time,
        machine=machine,
        passed=True,
        trusted=trusted,
        digest=f"{time} {machine} {name}",
    )
    assert store.add(run, [point(metric, value, 1) for metric, value in values.items()])
    key = store.runs()[-1].id if store.runs()[-1].time == time else next(run.id for run in store.runs() if run.time == time)
    assert key is not None
    return key


def calm(store: Store, values: list[float] = CALM) -> None:
    for time, value in enumerate(values):
        add(store, float(time), {"loss": value})


def only(found: Gate) -> JudgedMetric:
    (judged,) = found.judged
    return judged


def test_a_value_like_the_others_passes(store: Store) -> None:
    calm(store)
    found = gate(store, add(store, 100, {"loss": 10.05}))
    assert found.verdict is Verdict.PASS
    assert found.lines()[-1].startswith("Pass")


@pytest.mark.parametrize(("value", "direction"), [(20.0, "above"), (1.0, "below")])
def test_both_directions_fail_and_say_which(store: Store, value: float, direction: str) -> None:
    calm(store)
    judged = only(gate(store, add(store, 100, {"loss": value})))
    assert (judged.verdict, judged.direction) == (Verdict.FAIL, direction)
    assert direction in judged.line()


def test_a_run_is_no_part_of_its_own_reference(store: Store) -> None:
    calm(store)
    key = add(store, 100, {"loss": 1e6})
    judged = only(gate(store, key))
    assert judged.band is not None
    assert (judged.verdict, judged.band.count) == (Verdict.FAIL, len(CALM))


def test_runs_after_it_are_no_reference_either(store: Store) -> None:
    key = add(store, -1, {"loss": 10.0})
    calm(store)
    assert gate(store, key).verdict is Verdict.BLOCKED


def test_untrusted_runs_cannot_widen_the_band(store: Store) -> None:
    calm(store)
    for time in range(50, 80):
        add(store, float(time), {"loss": 20.0}, trusted=False)
    assert gate(store, add(store, 100, {"loss": 20.0})).verdict is Verdict.FAIL


def test_runs_of_another_machine_or_name_are_no_reference(store: Store) -> None:
    calm(store)
    assert gate(store, add(store, 100, {"loss": 10.0}, machine="other")).verdict is Verdict.BLOCKED
    assert gate(store, add(store, 101, {"loss": 10.0}, name="other")).verdict is Verdict.BLOCKED


def test_one_wild_baseline_does_not_open_the_gate(store: Store) -> None:
    calm(store, [*CALM, 1e9])
    assert gate(store, add(store, 100, {"loss": 20.0})).verdict is Verdict.FAIL


def test_a_poisoned_run_is_no_reference(store: Store) -> None:
    calm(store, [10.0, 10.1, 9.9, 10.0, 30.0])
    assert store.mark(store.runs()[-1].id or 0, "wrong seed")
    judged = only(gate(store, add(store, 100, {"loss": 10.0})))
    assert (judged.verdict, judged.why) == (Verdict.BLOCKED, "4 trusted runs, 5 are needed")


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_a_reference_that_is_not_finite_is_blocked_until_it_is_marked(store: Store, wrong: float) -> None:
    calm(store)
    bad = add(store, 50, {"loss": wrong})
    key = add(store, 100, {"loss": 10.0})
    judged = only(gate(store, key))
    assert judged.verdict is Verdict.BLOCKED
    assert f"history mark {bad}" in judged.why
    store.mark(bad, "broken")
    assert gate(store, key).verdict is Verdict.PASS


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf, None, "fast"])
def test_a_value_that_is_no_finite_number_fails(store: Store, wrong: object) -> None:
    calm(store)
    judged = only(gate(store, add(store, 100, {"loss": wrong})))
    assert (judged.verdict, "no finite number" in judged.why) == (Verdict.FAIL, True)


def test_a_value_that_is_no_finite_number_fails_without_a_baseline_too(store: Store) -> None:
    assert gate(store, add(store, 100, {"loss": math.nan})).verdict is Verdict.FAIL


def test_a_nan_before_a_fine_last_point_fails(store: Store) -> None:
    calm(store)
    run = StoredRun(project="p", kind=Kind.METRICS, name="n", time=100.0, machine="m", passed=True, trusted=True, digest="x")
    assert store.add(run, [point("loss", math.nan, 1), point("loss", 10.0, 2)])
    assert gate(store, store.runs()[-1].id or 0).verdict is Verdict.FAIL


def test_a_metric_that_is_missing_fails(store: Store) -> None:
    calm(store)
    found = gate(store, add(store, 100, {"other": 1.0}))
    assert {judged.metric: judged.verdict for judged in found.judged} == {"loss": Verdict.FAIL, "other": Verdict.SKIPPED}
    assert found.verdict is Verdict.FAIL


def test_a_new_metric_is_told_and_does_not_stop_the_others(store: Store) -> None:
    calm(store)
    found = gate(store, add(store, 100, {"loss": 10.0, "new": 1.0}))
    assert found.verdict is Verdict.PASS
    assert any("new: no baseline" in line for line in found.lines())


def test_a_new_metric_that_was_asked_for_is_blocked(store: Store) -> None:
    calm(store)
    assert gate(store, add(store, 100, {"loss": 10.0, "new": 1.0}), patterns=["new"]).verdict is Verdict.BLOCKED


def test_nothing_but_new_metrics_is_no_pass(store: Store) -> None:
    assert gate(store, add(store, 100, {"new": 1.0})).verdict is Verdict.BLOCKED


def test_a_run_without_metrics_is_no_pass(store: Store) -> None:
    assert gate(store, add(store, 100, {})).verdict is Verdict.BLOCKED


def test_a_pattern_that_takes_nothing_is_an_error(store: Store) -> None:
    calm(store)
    with pytest.raises(UserError, match="typo"):
        gate(store, add(store, 100, {"loss": 10.0}), patterns=["typo*"])


def test_only_the_last_runs_count(store: Store) -> None:
    calm(store, [value + 100 for value in CALM] * 3 + CALM)
    assert gate(store, add(store, 100, {"loss": 10.0}), last=8).verdict is Verdict.PASS
    assert gate(store, add(store, 101, {"loss": 110.0}), last=8).verdict is Verdict.FAIL


@pytest.mark.parametrize("option", [{"last": 4}, {"sigmas": math.inf}, {"relative": math.nan}, {"absolute": -1.0}])
def test_an_option_that_disarms_the_gate_is_refused(store: Store, option: dict[str, float]) -> None:
    calm(store)
    with pytest.raises(UserError):
        gate(store, add(store, 100, {"loss": 10.0}), **option)  # type: ignore[arg-type]


def test_the_gate_writes_nothing(store: Store) -> None:
    calm(store)
    key = add(store, 100, {"loss": 99.0})
    before = store.path.read_bytes(), len(store.runs())
    gate(store, key)
    assert (store.path.read_bytes(), len(store.runs())) == before


def test_a_run_that_failed_does_not_pass_whatever_its_metrics_say(store: Store) -> None:
    calm(store)
    for passed, verdict in ((False, Verdict.FAIL), (None, Verdict.PASS), (True, Verdict.PASS)):
        run = StoredRun(project="p", kind=Kind.METRICS, name="n", time=100, machine="m", passed=passed, digest=f"under test {passed}")
        assert store.add(run, [point("loss", 10.05, 1)])
        key = next(kept.id for kept in store.runs() if kept.digest == run.digest)
        assert key is not None
        found = gate(store, key)
        assert only(found).verdict is Verdict.PASS
        assert found.verdict is verdict
        text = "\n".join(found.lines())
        assert ("the run itself failed" in text) == (passed is False)
        assert ("outcome unknown" in text) == (passed is None)


def test_a_run_that_failed_and_has_no_baseline_fails(store: Store) -> None:
    store.add(StoredRun(project="p", kind=Kind.METRICS, name="n", time=1, passed=False, digest="d"), [point("loss", 1.0, 1)])
    found = gate(store, 1)
    assert found.verdict is Verdict.FAIL
    assert found.lines()[-1].startswith("Fail: ")


def timed(store: Store, **last: object) -> Gate:
    """Eight runs of a test with its time, then one whose time is wild, with `last` instead of its metrics."""
    for time, value in enumerate(CALM):
        add(store, float(time), {"t::a/loss": value, "t::a/_elapsed": 0.001})
    return gate(store, add(store, 100, last or {"t::a/loss": 10.0, "t::a/_elapsed": 9.0}))


def test_times_are_not_judged_unless_they_are_asked_for(store: Store) -> None:
    found = timed(store)
    assert found.verdict is Verdict.PASS
    assert [judged.metric for judged in found.judged] == ["t::a/loss"]
    assert "not judged: 1 time of tests; to judge them: --metric '*/_elapsed'" in found.lines()
    asked = gate(store, found.run.id or 0, patterns=["*/_elapsed"])
    assert (asked.verdict, asked.left_out) == (Verdict.FAIL, ())


def test_a_time_that_is_missing_fails_since_the_test_did_not_run(store: Store) -> None:
    found = timed(store, **{"t::a/loss": 10.0})
    assert [judged.metric for judged in found.judged if judged.verdict is Verdict.FAIL] == ["t::a/_elapsed"]


def test_nothing_but_times_is_no_pass(store: Store) -> None:
    for time in range(8):
        add(store, float(time), {"t::a/_elapsed": 1.0})
    found = gate(store, add(store, 100, {"t::a/_elapsed": 1.0}))
    assert found.verdict is Verdict.BLOCKED
    assert found.lines()[-2:] == ["not judged: 1 time of tests; to judge them: --metric '*/_elapsed'", "Blocked: no metric to compare"]


def test_what_is_excluded_is_counted_and_all_of_it_is_no_pass(store: Store) -> None:
    calm(store)
    key = add(store, 100, {"loss": 99.0, "new": 1.0})
    some = gate(store, key, exclude=["lo?s", "typo"])
    assert [judged.metric for judged in some.judged] == ["new"]
    assert some.left_out == ("left out by --exclude 'lo?s': 1 metric", "left out by --exclude 'typo': 0 metrics")
    assert gate(store, key, patterns=["loss"], exclude=["loss"]).verdict is Verdict.BLOCKED
    assert gate(store, key, exclude=["*"]).verdict is Verdict.BLOCKED


def test_outliers_of_the_reference_are_told_only_of_a_value_that_they_let_in(store: Store) -> None:
    wild = dict(zip((3, 8, 13, 17), (5.0, 15.0, 5.0, 15.0), strict=True))
    calm(store, [wild.get(place, CALM[place % 8]) for place in range(20)])
    let_in, outside = (only(gate(store, add(store, 100 + value, {"loss": value}, trusted=False))) for value in (11.07, 50.0))
    assert (let_in.verdict, "only outliers make the band so wide" in let_in.why) == (Verdict.BLOCKED, True)
    assert (outside.verdict, "outliers" in outside.why) == (Verdict.FAIL, False)


def test_few_runs_are_doubted_only_for_a_value_that_is_inside(store: Store) -> None:
    calm(store, [10.0, 10.01, 9.99, 10.0, 10.01, 12.0])
    outside = only(gate(store, add(store, 100, {"loss": 50.0})))
    assert (outside.verdict, "first 5" in outside.why) == (Verdict.FAIL, False)


def test_texts_are_one_line(store: Store) -> None:
    words = {f"where{number}": "node 1" for number in range(5)}
    for time, value in enumerate(CALM):
        add(store, float(time), {"loss": value, **words})
    lines = gate(store, add(store, 100, {"loss": 10.0, **words})).lines()
    assert [line for line in lines if "text" in line] == [
        "Skipped 5 metrics are text, not numbers: nothing to compare: where0, where1, where2, …"
    ]
    assert lines[-1] == "Pass: 0 Fail, 0 Blocked, 5 Skipped, 1 Pass"


def test_a_text_that_is_missing_fails_since_nothing_else_may_tell(store: Store) -> None:
    for time, value in enumerate(CALM):
        add(store, float(time), {"loss": value, "where": "node 1"})
    found = gate(store, add(store, 100, {"loss": 10.0}))
    assert found.verdict is Verdict.FAIL
    assert "Fail    where: missing: text of 8 reference runs, not of this run" in found.lines()
