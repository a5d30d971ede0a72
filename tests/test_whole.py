"""The order in which `make test` runs everything, and what gets a second chance."""

from __future__ import annotations

import subprocess

import pytest

import whole


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
def test_a_quick_test_that_failed_has_failed(code: int, monkeypatch: pytest.MonkeyPatch, calls: list[tuple[str, ...]]) -> None:
    answer(monkeypatch, calls, {whole.QUICK: code}, ("tests/a.py::b",))
    assert whole.main() == code
    assert calls == [whole.QUICK]


@pytest.mark.parametrize("alone", [0, 1])
def test_what_a_crowd_failed_is_run_alone_and_named(
    alone: int, monkeypatch: pytest.MonkeyPatch, calls: list[tuple[str, ...]], capsys: pytest.CaptureFixture[str]
) -> None:
    answer(monkeypatch, calls, {whole.OTHERS: 1, (*whole.AGAIN, *whole.KEPT): alone}, ("tests/a.py::b",))
    assert whole.main() == alone
    assert calls[-1] == (*whole.AGAIN, *whole.KEPT)
    said = capsys.readouterr().out
    assert "alone, since they drive real loops beside other tests: tests/a.py::b" in said
    assert ("PASSED ONLY ALONE, a race to mend: tests/a.py::b" in said) == (alone == 0)


@pytest.mark.parametrize(("code", "failed"), [(1, whole.MOST + 1), (1, 0), (2, 1)])
def test_many_failures_and_other_ends_have_no_second_chance(
    code: int, failed: int, monkeypatch: pytest.MonkeyPatch, calls: list[tuple[str, ...]]
) -> None:
    answer(monkeypatch, calls, {whole.OTHERS: code}, tuple(f"tests/a.py::{number}" for number in range(failed)))
    assert whole.main() == code
    assert (*whole.AGAIN, *whole.KEPT) not in calls
