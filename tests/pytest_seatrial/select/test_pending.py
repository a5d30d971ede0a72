"""Tests that did not run, and options of the command line: nothing is left out that was never seen to pass so."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.pytest_seatrial.select.projects import Small

pytestmark = pytest.mark.slow

GROUPED = """
    import pytest

    def test_plain():
        pass

    @pytest.mark.mcore
    def test_mcore():
        assert False

    @pytest.mark.needs(programs=["no-such-program-at-all"])
    def test_needs():
        assert False
    """
GROUP = '[groups.heavy]\nmarker = "mcore"\n'
INI = "[pytest]\npythonpath = .\nmarkers =\n    mcore: m\n    other: o\n"


@pytest.fixture
def grouped(tmp_path: Path) -> Small:
    return Small(tmp_path / "p", {"test_g.py": GROUPED, "seatrial.toml": GROUP, "pytest.ini": INI})


def test_a_test_that_its_group_left_out_is_owed_to_a_marker_expression(grouped: Small) -> None:
    first = grouped.run()
    assert (first.ran, first.skipped, first.code) == ({"test_plain"}, 2, 0), first.out
    asked = grouped.run("-m", "mcore")
    assert (asked.ran, asked.code) == ({"test_mcore"}, 1), asked.out


def test_a_test_that_a_guard_left_out_is_skipped_again_and_the_others_are_not_run(grouped: Small) -> None:
    grouped.run()
    again = grouped.run()
    assert (again.ran, again.skipped, again.code) == (set(), 2, 0), again.out
    assert "2 of 3 tests selected: 2 new" in again.out


def test_a_group_with_another_marker_gives_its_tests_back(grouped: Small) -> None:
    grouped.run()
    grouped.write("seatrial.toml", '[groups.heavy]\nmarker = "other"\n')
    session = grouped.run()
    assert (session.ran, session.code) == ({"test_mcore"}, 1), session.out


def test_a_guard_takes_nothing_from_a_record_or_a_failure(grouped: Small) -> None:
    assert grouped.run("--heavy").code == 1
    grouped.run()
    assert "test_g.py::test_mcore: failed before" in grouped.run().out
    grouped.edit("test_g.py", "def test_mcore():\n    assert False", "def test_mcore():\n    assert True")
    assert grouped.run("--heavy").ran >= {"test_mcore"}
    assert grouped.run().skipped == 2
    assert "test_mcore" not in grouped.run("--heavy").ran


def test_workers_record_nothing_of_a_test_that_its_group_left_out(grouped: Small) -> None:
    assert grouped.run("-n", "2").ran == {"test_plain"}
    assert grouped.run("-n", "2", "-m", "mcore").ran == {"test_mcore"}


SKIPS = """
    def pytest_collection_modifyitems(config, items):
        import pytest
        for item in items:
            if "slow" in item.keywords and "slow" not in (config.option.markexpr + config.option.keyword):
                item.add_marker(pytest.mark.skip(reason="slow"))
    """
SLOW = """
    import pytest

    def test_quick():
        pass

    @pytest.mark.slow
    def test_slow():
        assert False
    """


def test_a_skip_of_the_project_never_holds(tmp_path: Path) -> None:
    ini = "[pytest]\nmarkers = slow: s\n"
    small = Small(tmp_path / "p", {"conftest.py": SKIPS, "test_s.py": SLOW, "pytest.ini": ini})
    assert (small.run().skipped, small.run().skipped) == (1, 1)
    session = small.run("-m", "slow")
    assert (session.ran, session.code) == ({"test_slow"}, 1), session.out


WARNS = """
    import warnings
    import pytest

    def test_warns():
        warnings.warn("old", UserWarning)

    @pytest.mark.xfail
    def test_expected():
        assert False

    @pytest.mark.xfail
    def test_unexpected():
        pass
    """


@pytest.mark.parametrize(
    ("given", "breaks"),
    [(["-W", "error"], {"test_warns"}), (["--runxfail"], {"test_expected"}), (["-o", "xfail_strict=true"], {"test_unexpected"})],
    ids=["-W", "--runxfail", "-o"],
)
def test_a_pass_holds_only_for_the_same_options_of_pytest(tmp_path: Path, given: list[str], breaks: set[str]) -> None:
    small = Small(tmp_path / "p", {"test_w.py": WARNS})
    small.settled()
    session = small.run(*given)
    assert session.code == 1, session.out
    assert session.ran >= breaks
    assert small.run(*given).ran == breaks
