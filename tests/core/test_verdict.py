"""Verdicts, how they combine, and the exit codes that carry them."""

from __future__ import annotations

import itertools

from seatrial.core.errors import BlockedError, UserError
from seatrial.core.verdict import Boundary, ExitCode, Verdict, exit_code, worst

ORDER = (Verdict.FAIL, Verdict.BLOCKED, Verdict.SKIPPED, Verdict.PASS)


def test_there_are_four_verdicts_and_thirteen_boundaries() -> None:
    assert [v.value for v in Verdict] == ["Pass", "Fail", "Skipped", "Blocked"]
    assert len(Boundary) == 13


COMBINATIONS = [c for n in range(1, 5) for c in itertools.product(ORDER, repeat=n)]


def test_the_worst_of_all_combinations() -> None:
    for verdicts in COMBINATIONS:
        assert worst(verdicts) is min(verdicts, key=ORDER.index), verdicts


def test_nothing_at_all_is_never_a_pass() -> None:
    assert worst([]) is Verdict.SKIPPED


def test_pass_needs_every_verdict_to_be_pass() -> None:
    for verdicts in COMBINATIONS:
        assert (worst(iter(verdicts)) is Verdict.PASS) == (set(verdicts) == {Verdict.PASS})


def test_exit_codes_are_the_documented_contract() -> None:
    assert {v: int(exit_code(v)) for v in Verdict} == {Verdict.PASS: 0, Verdict.FAIL: 1, Verdict.SKIPPED: 77, Verdict.BLOCKED: 99}
    assert (ExitCode.USAGE, ExitCode.INTERNAL, ExitCode.INTERRUPTED) == (2, 3, 130)


def test_only_pass_exits_with_zero() -> None:
    assert [v for v in Verdict if exit_code(v) == 0] == [Verdict.PASS]


def test_errors_carry_their_fix() -> None:
    assert str(UserError("a.toml: wrong", "correct it")) == "a.toml: wrong\n  fix: correct it"
    assert str(UserError("a.toml: wrong")) == "a.toml: wrong"
    error = BlockedError(Boundary.DATA, "no data", "get some")
    assert (error.boundary, error.message, error.fix, str(error)) == (Boundary.DATA, "no data", "get some", "no data")
