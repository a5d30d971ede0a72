"""The order in which `make test` runs everything, and what gets a second chance."""

from __future__ import annotations

import subprocess

import pytest

from tests import whole


def alone(words: tuple[str, ...]) -> tuple[str, ...]:
    """The second run of this part."""
    return (*words[:2], *whole.AGAIN, *whole.KEPT)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """Every call of pytest, as `answer` notes them."""
    monkeypatch.setattr(whole, "limit_instructions", lambda: None)
    return []


def answer(
    monkeypatch: pytest.MonkeyPatch, calls: list[tuple[str, ...]], codes: dict[tuple[str, ...], int], failed: tuple[str, ...] = ()
) -> None:
    """pytest as if its runs ended with these codes, and the last one failed these tests."""

    def ran(*words: str, quiet: bool = False) -> subprocess.CompletedProcess[str]:
        del quiet
        calls.append(words)
        return subprocess.CompletedProcess(words, codes.get(words, 0), "\n".join((*failed, f"{len(failed)} tests collected")))

    monkeypatch.setattr(whole, "pytest", ran)


def test_all_pass(monkeypatch: pytest.MonkeyPatch, calls: list[tuple[str, ...]]) -> None:
    answer(monkeypatch, calls, {})
    assert whole.main() == 0
    assert calls == [whole.QUICK, whole.OTHERS]


def test_every_test_is_in_one_of_the_two() -> None:
    assert (whole.QUICK[:2], whole.OTHERS[:2]) == (("-m", "not real and not slow"), ("-m", "real or slow"))


@pytest.mark.parametrize("code", [1, 2, 3, 5])
def test_quick_tests_that_fail_twice_end_it(code: int, monkeypatch: pytest.MonkeyPatch, calls: list[tuple[str, ...]]) -> None:
    answer(monkeypatch, calls, {whole.QUICK: code, alone(whole.QUICK): code}, ("tests/a.py::b",))
    assert whole.main() == code
    assert whole.OTHERS not in calls


@pytest.mark.parametrize("words", [whole.QUICK, whole.OTHERS])
@pytest.mark.parametrize("second", [0, 1])
def test_what_a_crowd_failed_is_run_alone_and_named(
    words: tuple[str, ...], second: int, monkeypatch: pytest.MonkeyPatch, calls: list[tuple[str, ...]], capsys: pytest.CaptureFixture[str]
) -> None:
    answer(monkeypatch, calls, {words: 1, alone(words): second}, ("tests/a.py::b",))
    assert whole.main() == second
    assert alone(words) in calls
    said = capsys.readouterr().out
    assert "run once more, alone: tests/a.py::b" in said
    assert ("PASSED ONLY ALONE, a race to mend: tests/a.py::b" in said) == (second == 0)


@pytest.mark.parametrize(("code", "failed"), [(1, whole.MOST + 1), (1, 0), (2, 1)])
def test_many_failures_and_other_ends_have_no_second_chance(
    code: int, failed: int, monkeypatch: pytest.MonkeyPatch, calls: list[tuple[str, ...]]
) -> None:
    answer(monkeypatch, calls, {whole.OTHERS: code}, tuple(f"tests/a.py::{number}" for number in range(failed)))
    assert whole.main() == code
    assert alone(whole.OTHERS) not in calls
