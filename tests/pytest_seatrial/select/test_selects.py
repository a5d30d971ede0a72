"""Which tests run after which change, in one process."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.pytest_seatrial.select.projects import Small

pytestmark = pytest.mark.slow

CODE = """
    import functools

    LIMIT = 3

    def double(x):
        return 2 * x

    def triple(x):
        return 3 * x

    @functools.lru_cache
    def table():
        return build()

    def build():
        return {1: "one"}
    """
TESTS = """
    import code_a

    def test_double():
        assert code_a.double(2) == 4

    def test_triple():
        assert code_a.triple(2) == 6

    def test_table():
        assert code_a.table()[1] == "one"

    def test_table_again():
        assert code_a.table()[1].startswith("o")
    """
OTHER = """
    def test_other():
        assert True
    """
ALL = {"test_double", "test_triple", "test_table", "test_table_again", "test_other"}


@pytest.fixture
def small(tmp_path: Path) -> Small:
    return Small(tmp_path / "p", {"code_a.py": CODE, "test_a.py": TESTS, "test_other.py": OTHER})


def test_nothing_recorded_means_everything_runs_and_then_nothing(small: Small) -> None:
    first = small.run()
    assert first.ran == ALL
    assert "nothing recorded yet" in first.out
    again = small.run()
    assert (again.ran, again.code) == (set(), 0)


def test_a_function_body_selects_its_tests_and_says_why(small: Small) -> None:
    small.settled()
    small.edit("code_a.py", "return 2 * x", "return x + x")
    session = small.run()
    assert session.ran == {"test_double"}
    assert "seatrial: test_a.py::test_double: affected: code_a.py: double" in session.out
    assert "seatrial: 1 of 5 tests selected: 1 affected (1 changed file)" in session.out


def test_comments_and_layout_select_nothing(small: Small) -> None:
    small.settled()
    small.edit("code_a.py", "LIMIT = 3", "# a comment\n\nLIMIT    = (3)")
    assert small.run().ran == set()


def test_a_module_constant_selects_the_importers(small: Small) -> None:
    small.settled()
    small.edit("code_a.py", "LIMIT = 3", "LIMIT = 4")
    assert small.run().ran == ALL - {"test_other"}


def test_a_cached_helper_reaches_every_user_and_not_only_the_first(small: Small) -> None:
    small.settled()
    small.edit("code_a.py", '{1: "one"}', '{1: "one", 2: "two"}')
    assert small.run().ran == {"test_table", "test_table_again"}


def test_a_failing_test_runs_until_it_passes(small: Small) -> None:
    small.settled()
    small.edit("code_a.py", "return 2 * x", "return 5 * x")
    assert small.run().code == 1
    again = small.run()
    assert (again.ran, again.code) == ({"test_double"}, 1)
    assert "failed before" in again.out
    small.edit("code_a.py", "return 5 * x", "return x * 2")
    assert small.run().code == 0
    assert small.run().ran == set()


def test_a_keyword_or_a_node_id_wins(small: Small) -> None:
    small.settled()
    assert small.run("-k", "double").ran == {"test_double"}
    assert small.run("test_a.py::test_triple").ran == {"test_triple"}


def test_a_deleted_or_broken_module_selects_its_importers(small: Small) -> None:
    small.settled()
    (small.root / "code_a.py").unlink()
    assert small.run().code != 0
    small.write("code_a.py", CODE)
    assert "test_other" not in small.run().ran
    small.write("code_a.py", "def broken(:\n")
    assert small.run().code != 0


def test_recording_runs_everything(small: Small) -> None:
    small.settled()
    assert small.pytest("--seatrial-record").ran == ALL
    assert small.run().ran == set()


def test_without_its_options_or_turned_off_it_does_nothing(small: Small) -> None:
    assert small.pytest().ran == ALL
    assert small.pytest("-p", "no:seatrial_select").ran == ALL
    assert not list(small.root.glob(".seatrial-select*"))
    assert small.pytest("-p", "no:seatrial_select", "--seatrial-select").code == 4


def test_the_order_of_recording_does_not_matter(small: Small) -> None:
    conftest = """
        def pytest_collection_modifyitems(items):
            items.reverse()
        """
    small.write("conftest.py", conftest)
    small.settled()
    small.edit("code_a.py", '{1: "one"}', '{1: "one", 2: "two"}')
    assert small.run().ran == {"test_table", "test_table_again"}
    small.edit("code_a.py", "return 2 * x", "return x + x")
    assert small.run().ran == {"test_double"}


def test_new_tests_and_parameters_run_alone(small: Small) -> None:
    parametrised = """
        import json
        from pathlib import Path
        import pytest

        CASES = json.loads(Path(__file__).with_name("cases.json").read_text())

        @pytest.mark.parametrize("name", CASES)
        def test_case(name):
            assert name
        """
    small.write("cases.json", '["a", "b c"]')
    small.write("test_p.py", parametrised)
    assert "test_case[b" in " ".join(small.settled())
    small.write("test_new.py", "def test_new():\n    pass\n")
    session = small.run()
    assert session.ran == {"test_new"}
    assert "1 new" in session.out
    small.write("cases.json", '["a", "b c", "d"]')
    assert {name.partition("[")[0] for name in small.run().ran} == {"test_case"}


def test_functions_called_at_import_belong_to_the_importers(small: Small) -> None:
    small.write("test_import.py", "import code_a\nVALUE = code_a.triple(1)\n\ndef test_value():\n    assert VALUE\n")
    small.settled()
    small.edit("code_a.py", "return 3 * x", "return x * 3")
    assert small.run().ran == {"test_triple", "test_value"}
