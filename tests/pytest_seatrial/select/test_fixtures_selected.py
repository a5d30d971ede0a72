"""What belongs to several tests at once: fixtures, conftests, classes, modules."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.pytest_seatrial.select.projects import Small

pytestmark = pytest.mark.slow

CODE = """
    def make():
        return [1]

    def close():
        pass

    def inner():
        return 1
    """
CONFTEST = """
    import pytest
    import code_f

    @pytest.fixture(scope="session")
    def value():
        yield code_f.make()
        code_f.close()

    @pytest.fixture(scope="session")
    def behind(request):
        return request.getfixturevalue("value")

    @pytest.fixture(scope="module", params=["x", "y"])
    def letter(request):
        return request.param
    """
TESTS = """
    def test_first(value):
        assert value

    def test_second(value):
        assert value

    def test_dynamic(request):
        assert request.getfixturevalue("value")

    def test_behind(behind):
        assert behind

    def test_letter(letter):
        assert letter

    def test_none():
        pass
    """
USERS = {"test_first", "test_second", "test_dynamic", "test_behind"}


def test_the_code_of_a_session_fixture_reaches_all_its_users(tmp_path: Path) -> None:
    small = Small(tmp_path / "p", {"code_f.py": CODE, "conftest.py": CONFTEST, "test_f.py": TESTS})
    small.settled()
    small.edit("code_f.py", "return [1]", "return [2]")
    assert small.run().ran == USERS
    small.edit("code_f.py", "    pass", "    return None")
    assert small.run().ran == USERS
    small.edit("conftest.py", "return request.param", "return str(request.param)")
    assert {name.partition("[")[0] for name in small.run().ran} == {"test_letter"}


def test_a_conftest_reaches_what_is_below_it_also_when_it_is_new(tmp_path: Path) -> None:
    files = {"a/test_in_a.py": "def test_a():\n    pass\n", "b/test_in_b.py": "def test_b():\n    pass\n"}
    small = Small(tmp_path / "p", files)
    small.settled()
    small.write("a/conftest.py", "X = 1\n")
    assert small.run().ran == {"test_a"}
    small.write("a/conftest.py", "X = 2\n")
    assert small.run().ran == {"test_a"}
    small.write("conftest.py", "def pytest_configure(config):\n    pass\n")
    assert small.run().ran == {"test_a", "test_b"}
    small.write("conftest.py", "def pytest_configure(config):\n    return None\n")
    assert small.run().ran == {"test_a", "test_b"}


def test_classes_modules_and_unittest_have_setups_of_their_own(tmp_path: Path) -> None:
    tests = """
        import unittest
        import code_f

        def setup_module():
            code_f.make()

        class TestPlain:
            @classmethod
            def setup_class(cls):
                code_f.inner()

            def test_one(self):
                pass

            def test_two(self):
                pass

        class Old(unittest.TestCase):
            @classmethod
            def setUpClass(cls):
                code_f.close()

            def test_three(self):
                pass

            def test_four(self):
                pass
        """
    small = Small(tmp_path / "p", {"code_f.py": CODE, "test_c.py": tests, "test_far.py": "def test_far():\n    pass\n"})
    everything = small.settled()
    small.edit("code_f.py", "    pass", "    return None")
    assert small.run().ran == {"Old::test_three", "Old::test_four"}
    small.edit("code_f.py", "return 1\n", "return 2\n")
    assert small.run().ran == {"TestPlain::test_one", "TestPlain::test_two"}
    small.edit("code_f.py", "return [1]", "return [3]")
    assert small.run().ran == everything - {"test_far"}


def test_a_skipped_test_runs_again_each_time_and_an_expected_failure_does_not(tmp_path: Path) -> None:
    tests = """
        import os
        import pytest

        @pytest.mark.skipif("WANTED" not in os.environ, reason="waits")
        def test_waits():
            pass

        @pytest.mark.xfail
        def test_expected():
            assert 0
        """
    small = Small(tmp_path / "p", {"test_s.py": tests})
    small.run()
    again = small.run()
    assert (again.ran, again.skipped, again.code) == (set(), 1, 0), again.out
    assert "seatrial: test_s.py::test_waits: skipped before\nseatrial: 1 of 2 tests selected: 1 skipped before" in again.out
    assert small.run(env={"WANTED": "1"}).ran == {"test_waits"}
    assert "no test is affected by the change (2 known)" in small.run().out, "what passed once stands"


def test_an_option_of_the_project_belongs_to_every_test(tmp_path: Path) -> None:
    conftest = """
        def pytest_addoption(parser):
            parser.addoption("--device", default="cpu")
        """
    small = Small(tmp_path / "p", {"conftest.py": conftest, "test_o.py": "def test_o(request):\n    request.config.getoption('device')\n"})
    small.settled()
    assert small.run("--device", "cuda").ran == {"test_o"}


def test_who_asks_first_for_a_fixture_matters_to_all_that_use_it(tmp_path: Path) -> None:
    files = {
        "machine.py": "state = []\n\ndef start():\n    if state:\n        raise RuntimeError('started twice')\n    state.append(1)\n",
        "conftest.py": """
            import machine
            import pytest

            @pytest.fixture(scope="session")
            def started():
                machine.start()
            """,
        "test_a.py": """
            import machine
            import pytest

            pytestmark = pytest.mark.usefixtures("started")

            def test_a():
                if not machine.state:
                    machine.start()
            """,
        "test_b.py": "def test_b(started):\n    pass\n",
        "test_c.py": "def test_c():\n    pass\n",
    }
    small = Small(tmp_path / "p", files)
    small.settled()
    small.edit("test_a.py", 'pytestmark = pytest.mark.usefixtures("started")', "")
    after = small.run()
    assert after.ran == {"test_a", "test_b"}
    assert after.code == 1
    small.edit("test_a.py", "    if not machine.state:\n        machine.start()", "    pass")
    assert small.run().code == 0
