from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from seatrial.core.series import Damage, Metrics, Series
from seatrial.core.verdict import Boundary
from seatrial.metrics.checks import CheckSyntaxError, evaluate, undamaged
from seatrial.metrics.read import read_metrics

DATA = Path(__file__).parent.parent / "data" / "metrics"
CASES: dict[str, Any] = json.loads((DATA / "check_metrics_cases.json").read_text())
REFUSED = None

# What a strict checker must say: (passed, value), or REFUSED for a usage error.
EXPECTED: dict[str, tuple[bool, float | str | None] | None] = {
    "nan hidden by max": (False, "NaN"),
    "nan first max": (False, "NaN"),
    "nan mean": (False, "NaN"),
    "nan median first": (False, "NaN"),
    "inf max": (False, "Infinity"),
    "inf ignore_top_p": (False, "Infinity"),
    "empty ratio": (False, None),
    "empty max": (False, None),
    "neg range contiguous": (True, 1.03),
    "neg range -6,-1 resumed": REFUSED,
    "sparse last three": (True, 0.3),
    "gappy -2": (True, 100.0),
    "range start past end": (False, None),
    "key with >": (True, 1.0),
    "chained": (True, 1.02),
    "and": (True, 1.04),
    "parenthesised": (True, 1.04),
    "all()": REFUSED,
    "abs diff": (True, 0.020000000000000018),
    "le": (True, 1.04),
    "in": (True, "True"),
    "forgotten comparison": REFUSED,
    "value zero falsy": REFUSED,
    "assignment typo": REFUSED,
    "missing metric": (False, None),
    "int step": REFUSED,
    "code execution": REFUSED,
    "nested scope uses mean()": REFUSED,
    "builtin max of two": REFUSED,
    "scalar": (True, 0.15),
}


@pytest.fixture(scope="module")
def metrics(tmp_path_factory: pytest.TempPathFactory) -> Metrics:
    path = tmp_path_factory.mktemp("cases") / "metrics.json"
    path.write_text(json.dumps({**CASES["data"], "word": "yes", "nothing": None, "flag": True, "bad": math.nan}))
    return read_metrics([path])


@pytest.mark.parametrize("case", CASES["cases"], ids=lambda case: case["name"])
def test_the_known_cases(case: dict[str, str], metrics: Metrics) -> None:
    expected = EXPECTED[case["name"]]
    if expected is REFUSED:
        with pytest.raises(CheckSyntaxError):
            evaluate(case["expr"], metrics)
        return
    result = evaluate(case["expr"], metrics)
    assert (result.passed, result.value) == expected
    assert bool(result.message) is not result.passed


def series(*values: float, first: int = 1) -> Metrics:
    return Metrics({"x": Series("x", tuple(range(first, first + len(values))), values)})


@pytest.mark.parametrize(
    ("expr", "value"),
    [
        ('mean(data["x"]) > 0', 5.5),
        ('mean(data["x"], 3) > 0', 6.5),
        ('mean(data["x"], 3, 7) > 0', 4.5),
        ('mean(data["x"], -3) > 0', 9.0),
        ('mean(data["x"], -3, 0) > 0', 9.0),
        ('mean(data["x"], -6, -1) > 0', 7.0),
        ('mean(data["x"], range_start=-6, range_end=-1) > 0', 7.0),
        ('mean(data["x"], range_end=3) > 0', 1.5),
        ('mean(data["x"], ignore_top_p=0.2) > 0', 4.5),
        ('mean(data["x"], 3, 7, 0.25) > 0', 4.0),
        ('mean(data["x"], ignore_top_p=1) > 0', 1.0),
        ('median(data["x"]) > 0', 5.5),
        ('median(data["x"], -3, -1) > 0', 8.5),
        ('ratio_above(data["x"], 3) > 0', 0.8),
        ('ratio_above(data["x"], threshold=11) >= 0', 0.0),
        ('len(data["x"]) == 10', 10.0),
        ('min(data["x"]) > -1', 1.0),
        ('-max(data["x"]) < 0', -10.0),
        ('abs(-max(data["x"])) > 0', 10.0),
        ('(data["x"]["1"] - mean(data["x"], -6, -1)) / data["x"]["2"] < 0', -3.0),
        ('2 * data["x"]["3"] + 1 == 7', 7.0),
        ('std(data["x"]) > 3', pytest.approx(3.0276503540974917)),
        ('t_pvalue(data["x"]) < 0.01', pytest.approx(0.000278, rel=1e-2)),
        ('all_finite(data["x"])', 10.0),
    ],
)
def test_functions(expr: str, value: float) -> None:
    result = evaluate(expr, series(*map(float, range(1, 11))))
    assert result.passed, result.message
    assert result.value == value


def test_step_zero_is_outside_the_default_window() -> None:
    metrics = series(100.0, 1.0, 2.0, first=0)
    assert evaluate('mean(data["x"]) < 2', metrics).value == 1.5
    assert evaluate('mean(data["x"], 0) > 2', metrics).steps == (0, 1, 2)
    assert not evaluate('max(data["x"]) < 99', metrics).passed


def test_a_window_ends_at_the_last_step_of_a_resumed_series() -> None:
    result = evaluate(
        'mean(data["resumed"], -3, -1) == 103.5',
        Metrics({"resumed": Series("resumed", (101, 102, 103, 104, 105), (101.0, 102.0, 103.0, 104.0, 105.0))}),
    )
    assert result.passed
    assert result.steps == (103, 104)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    "expr",
    [
        'max(data["x"]) < 1e9',
        'min(data["x"]) > -1e9',
        'mean(data["x"]) != 7',
        'median(data["x"]) != 7',
        'mean(data["x"], ignore_top_p=0.9) < 1e9',
        'ratio_above(data["x"], 5) < 1',
        'len(data["x"]) == 3',
        'std(data["x"]) != 0',
        't_pvalue(data["x"]) >= 0',
        'data["x"]["2"] != 7',
        '"2" in data["x"]',
        'not (max(data["x"]) > 1e9)',
        'all_finite(data["x"])',
        'not all_finite(data["x"])',
        'data["x"]["1"] == 1 or max(data["x"]) > 0',
    ],
)
def test_a_point_that_is_not_finite_never_passes(expr: str, bad: float) -> None:
    result = evaluate(expr, series(1.0, bad, 1.0))
    assert not result.passed
    assert result.missing == (2,)
    assert "not finite at step 2" in result.message


def test_points_outside_the_window_are_not_used() -> None:
    result = evaluate('mean(data["x"], 2) == 2', series(math.nan, 1.0, 3.0))
    assert result.passed
    assert result.steps == (2, 3)


def test_many_bad_steps_are_summed_up() -> None:
    result = evaluate('max(data["x"]) < 1', series(*[math.nan] * 20))
    assert "… (20 in all)" in result.message
    assert len(result.missing) == 20


@pytest.mark.parametrize(
    ("expr", "message"),
    [
        ('max(data["nope"]) < 1', "no metric 'nope' among"),
        ('max(data["resume"]) < 1', "no metric 'resume'; did you mean resumed?"),
        ('not (max(data["nope"]) > 1)', "no metric 'nope'"),
        ('data["a"]["1"] < 9 or data["nope"]["1"] < 1', "no metric 'nope'"),
        ('data["a"]["7"] < 1', "a has no point at step 7; it has steps 1 to 3"),
        ('data["empty"]["7"] < 1', "empty has no point at step 7; it has no points"),
        ('"7" in data["a"]', 'measured False, wanted step "7" in data["a"]'),
        ('"3" not in data["a"]', "measured True"),
        ('"3" not in data["empty"]', "empty has no points"),
        ('"3" in data["scalar"]', "scalar is a single value, not a series"),
        ('"last" in data["a"]', "'last' is not a step number"),
        ('"last" not in data["a"]', "'last' is not a step number"),
        ('data["a"]["$MAX_STEPS"] < 1', "a shell variable that was not expanded"),
        ('mean(data["a"], 10) < 1', "a has no points with 10 <= step < 4; it has steps 1 to 3"),
        ('mean(data["empty"]) < 1', "empty has no points"),
        ('len(data["empty"]) == 0', "empty has no points"),
        ('data["a"] < 1', "a is a series: name a step"),
        ('mean(data["scalar"]) < 1', "scalar is a single value, not a series"),
        ('data["nothing"] != 1', "nothing is not finite: None"),
        ('data["bad"] != 1', "bad is not finite: nan"),
        ('data["word"] == 1', "text cannot be compared with a number: 'yes' and 1.0"),
        ('data["word"] == "no"', 'measured yes, wanted == "no"'),
        ('data["word"] < 1', "text cannot be compared with a number"),
        ('data["word"] + 1 < 3', "text is not a number"),
        ('1 / data["zero"]["1"] < 1', 'division by zero: 1 / data["zero"]["1"]'),
        ('1e300 * 1e300 * data["a"]["1"] > 1', "not a finite number: 1e300 * 1e300"),
        ('std(data["zero"]) < 1', "std of zero: "),
        ('t_pvalue(data["zero"]) < 1', "t_pvalue of zero: a t-test needs at least 3 points, not 1"),
        ('max(data["a"]) < 1.03', "measured 1.04, wanted < 1.03"),
        ('not (max(data["a"]) > 1.03)', "measured 1.04, wanted not > 1.03"),
    ],
)
def test_a_miss_says_why(expr: str, message: str, metrics: Metrics) -> None:
    result = evaluate(expr, metrics)
    assert not result.passed
    assert message in result.message


@pytest.mark.parametrize(
    "expr", ['data["word"] == "yes"', 'data["word"] != "no"', 'data["flag"] == True', 'data["scalar"] * 2 == 0.3', '"7" not in data["a"]']
)
def test_values_without_steps(expr: str, metrics: Metrics) -> None:
    assert evaluate(expr, metrics).passed


@pytest.mark.parametrize("expr", ['data["flag"] == 1', 'data["flag"] > 0', 'data["flag"] * 2 == 2'])
def test_true_is_no_number(expr: str, metrics: Metrics) -> None:
    result = evaluate(expr, metrics)
    assert not result.passed
    assert "flag is true, which is not a number" in result.message


@pytest.mark.parametrize(
    ("expr", "value", "threshold"),
    [
        ('max(data["a"]) < 1.05', 1.04, "< 1.05"),
        ('1.05 > max(data["a"])', 1.04, "< 1.05"),
        ('0.9 < mean(data["a"]) <= 1.1', 1.02, "> 0.9 and <= 1.1"),
        ('mean(data["a"]) > -1', 1.02, "> -1"),
        ('data["a"]["1"] < 2 * data["a"]["2"]', 1.0, '< 2 * data["a"]["2"] (= 2.04)'),
        ('not data["a"]["1"] > 2', 1.0, "not > 2"),
        ('data["a"]["1"] < 2 and data["a"]["2"] < 1', 1.02, "< 1"),
        ('data["a"]["1"] > 2 or data["a"]["2"] < 3', 1.02, "< 3"),
        ('max(data["nope"]) < 1.05', None, "< 1.05"),
        ('data["word"] == "yes"', "yes", '== "yes"'),
        ('"3" in data["a"]', "True", 'step "3" in data["a"]'),
        ('all_finite(data["a"])', 3.0, "all finite"),
    ],
)
def test_value_and_threshold(expr: str, value: float | str | None, threshold: str, metrics: Metrics) -> None:
    result = evaluate(expr, metrics)
    assert (result.value, result.threshold) == (value, threshold)


def test_the_steps_used_are_those_of_all_parts(metrics: Metrics) -> None:
    assert evaluate('data["a"]["1"] < 2 and data["resumed"]["103"] > 1', metrics).steps == (1, 103)
    assert evaluate('mean(data["a"], -2) < 9', metrics).steps == (2, 3)


def test_the_result_keeps_expression_and_boundary(metrics: Metrics) -> None:
    result = evaluate('  max(data["a"])\n < 1  ', metrics, Boundary.REFIT)
    assert result.name == 'max(data["a"])  < 1'
    assert result.boundary is Boundary.REFIT
    assert result.kind == "expression"
    assert json.loads(json.dumps(result.model_dump(mode="json"), allow_nan=False))["passed"] is False


def test_undamaged() -> None:
    assert undamaged(Metrics()).passed
    result = undamaged(Metrics(damage=(Damage("run/metrics.jsonl", "line 3", 1, "the last line is torn"),)))
    assert not result.passed
    assert result.kind == "proof"
    assert "run/metrics.jsonl: line 3: the last line is torn (1 lost)" in result.message
