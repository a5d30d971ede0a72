"""Groups as a pytest session shows them: options, markers, errors before anything runs, what is counted."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from tests.pytest_seatrial.tracker.guarded import GUIDE, project, pytest_in

pytestmark = pytest.mark.slow

EXCLUSIVE = """
[groups.mcore]
mode = "only"
[groups.vllm]
mode = "only"
"""


def test_a_test_that_was_not_asked_for_is_skipped_with_the_reason_and_counted(tmp_path: Path) -> None:
    ran = pytest_in(project(tmp_path), "-rs", "--junitxml=junit.xml")
    assert "seatrial: group hf_gated: needs access to gated models; give --hf-gated" in ran.text
    assert "= seatrial =" in ran.text
    assert "3 skipped by seatrial: 1 hf_gated (give --hf-gated), 1 mcore (give --mcore-only)," in ran.text
    assert "1 hf_gated + mcore (give --hf-gated --mcore-only)" in ran.text
    suite = ElementTree.parse(tmp_path / "junit.xml").getroot()[0]
    assert (suite.get("tests"), suite.get("skipped"), suite.get("failures"), suite.get("errors")) == ("4", "3", "0", "0")
    messages = {case.get("name"): case[0].get("message") for case in suite if len(case)}
    assert messages["test_gated"] == "seatrial: group hf_gated: needs access to gated models; give --hf-gated"
    assert set(messages) == {"test_gated", "test_mcore", "test_both"}


def test_the_summary_is_printed_once_under_xdist(tmp_path: Path) -> None:
    ran = pytest_in(project(tmp_path), "-n2", "--junitxml=junit.xml")
    assert ran.text.count("skipped by seatrial") == 1
    assert ElementTree.parse(tmp_path / "junit.xml").getroot()[0].get("skipped") == "3"


def test_a_project_without_groups_sees_nothing_of_us(tmp_path: Path) -> None:
    ran = pytest_in(project(tmp_path, "", "def test_plain(): pass\n"))
    assert ran.code == 0
    assert "seatrial =" not in ran.text


def test_a_skip_of_the_tests_own_is_not_counted_as_ours(tmp_path: Path) -> None:
    tests = "import pytest\n@pytest.mark.skip(reason='mine')\n@pytest.mark.hf_gated\ndef test_gated(): pass\n"
    ran = pytest_in(project(tmp_path, tests=tests), "-rs")
    assert "mine" in ran.text
    assert "skipped by seatrial" not in ran.text


def test_marks_of_a_class_a_module_and_a_conftest_count(tmp_path: Path) -> None:
    tests = (
        "import pytest\n@pytest.mark.hf_gated\nclass TestIt:\n    def test_a(self): pass\ndef test_late(): pass\ndef test_plain(): pass\n"
    )
    conftest = (
        "import pytest\n@pytest.hookimpl(trylast=True)\ndef pytest_collection_modifyitems(items):\n"
        "    [item.add_marker('mcore') for item in items if 'late' in item.name]\n"
    )
    module = "import pytest\npytestmark = pytest.mark.mcore\ndef test_module(): pass\n"
    folder = project(tmp_path, tests=tests, conftest=conftest, test_module=module)
    assert pytest_in(folder).tests("PASSED") == {"test_plain"}
    assert pytest_in(folder, "--mcore-only").tests("PASSED") == {"test_late", "test_module"}


@pytest.mark.parametrize("workers", ["-n0", "-n2"])
def test_an_expression_of_markers_bypasses_the_groups(tmp_path: Path, workers: str) -> None:
    ran = pytest_in(project(tmp_path), "-m", "mcore", workers)
    assert ran.tests("PASSED") == {"test_mcore", "test_both"}
    assert "-m was given: groups filter nothing" in ran.text


def test_help_and_markers_list_what_is_declared(tmp_path: Path) -> None:
    folder = project(tmp_path, GUIDE + "needs = { env = ['NOT_THERE'] }\n")
    shown = pytest_in(folder, "--help")
    assert shown.code == 0
    assert "--hf-gated" in shown.text
    assert "run only the tests of group mcore" in shown.text
    assert pytest_in(folder, "--help", "--mcore-only").code == 0
    markers = pytest_in(folder, "--markers").text
    assert "@pytest.mark.hf_gated: group hf_gated: needs access to gated models" in markers
    assert "@pytest.mark.gpu_hours(hours, gpus=, minutes=)" in markers


def test_help_lists_them_beside_a_conftest_that_breaks(tmp_path: Path) -> None:
    folder = project(tmp_path, conftest="raise RuntimeError('broken')\n")
    assert "--hf-gated" in pytest_in(folder, "--help").text
    assert "broken" in pytest_in(folder).text


@pytest.mark.parametrize("args", [["sub"], ["--rootdir=.", "sub"], ["-c", "pytest.ini", "sub"], ["-c", "ci/pytest.ini", "sub"]])
def test_options_come_from_the_configuration_of_the_rootdir(tmp_path: Path, args: list[str]) -> None:
    folder = project(tmp_path, sub__test_sub="import pytest\n@pytest.mark.hf_gated\ndef test_sub(): pass\n")
    (folder / "ci").mkdir()
    (folder / "ci/pytest.ini").write_text("[pytest]\n")
    assert pytest_in(folder, *args).tests("SKIPPED") == {"test_sub"}
    assert pytest_in(folder, *args, "--hf-gated").tests("PASSED") == {"test_sub"}


@pytest.mark.parametrize(
    "args", [["--hf-gated"], ["--hf-gated", "-n1"], ["--hf-gated", "--rootdir=.."], ["--hf-gated", "-c", "../pytest.ini"]]
)
@pytest.mark.parametrize("ini", [True, False])
def test_they_are_there_in_a_subdirectory(tmp_path: Path, args: list[str], ini: bool) -> None:
    folder = project(tmp_path, sub__test_sub="import pytest\n@pytest.mark.hf_gated\ndef test_sub(): pass\n")
    if not ini and "../pytest.ini" not in args:
        (folder / "pytest.ini").unlink()
    ran = pytest_in(folder / "sub", *args, "." if "-c" in args else "test_sub.py")
    assert ran.tests("PASSED") == {"test_sub"}, ran.text


def test_another_rootdir_has_other_options(tmp_path: Path) -> None:
    folder = project(tmp_path / "one")
    project(tmp_path / "two", "[groups.slow_ones]\n")
    ran = pytest_in(folder, "--rootdir=../two", "--hf-gated")
    assert ran.code == 4
    assert "unrecognized arguments: --hf-gated" in ran.text


def test_the_option_may_stand_in_addopts(tmp_path: Path) -> None:
    folder = project(tmp_path)
    (folder / "pytest.ini").write_text("[pytest]\naddopts = --hf-gated\n")
    assert pytest_in(folder, "--hf-gated").tests("PASSED") == {"test_plain", "test_gated"}


DECLARES = "def pytest_addoption(parser):\n    parser.addoption('--hf-gated', action='store_true')\n"


@pytest.mark.parametrize(("name", "args"), [("conftest", []), ("other", ["-p", "other"]), ("conftest", ["-n2"])])
def test_an_option_that_somebody_has_already_is_a_clear_error(tmp_path: Path, name: str, args: list[str]) -> None:
    folder = project(tmp_path, **{name: DECLARES})
    ran = pytest_in(folder, *args)
    assert ran.code == 4
    assert (
        f"seatrial.toml: groups.hf_gated.option: --hf-gated is declared already by {folder / name}.py; give the group another" in ran.text
    )
    assert "Traceback" not in ran.text


def test_an_option_of_pytests_own_is_a_clear_error(tmp_path: Path) -> None:
    ran = pytest_in(project(tmp_path, "[groups.slow]\noption = '--maxfail'\n"))
    assert ran.code == 4
    assert "groups.slow.option: --maxfail is declared already by " in ran.text


def test_a_conftest_found_while_collecting_gets_the_same_words(tmp_path: Path) -> None:
    ran = pytest_in(project(tmp_path, a__b__conftest=DECLARES, a__b__test_deep="def test_deep(): pass\n"))
    assert ran.code == 2
    assert f"--hf-gated is declared already by {tmp_path}/a/b/conftest.py" in ran.text
    assert "argparse.py" not in ran.text


def test_a_misspelt_key_is_an_error_before_anything_runs(tmp_path: Path) -> None:
    ran = pytest_in(project(tmp_path, "[groups.hf_gated]\noptoin = '--x'\n"))
    assert ran.code == 4
    assert f"ERROR: {tmp_path}/seatrial.toml: groups.hf_gated.optoin: unknown key; did you mean option?" in ran.text


def test_two_only_groups_exclude_each_other(tmp_path: Path) -> None:
    tests = "import pytest\n@pytest.mark.mcore\ndef test_mcore(): pass\n@pytest.mark.mcore\n@pytest.mark.vllm\ndef test_two(): pass\n"
    folder = project(tmp_path, EXCLUSIVE, tests)
    ran = pytest_in(folder, "--mcore-only", "--vllm-only")
    assert ran.code == 4
    assert "ERROR: --mcore-only and --vllm-only exclude each other; give one of them" in ran.text
    twice = pytest_in(folder, "--mcore-only", "--mcore-only", "-rs")
    assert (twice.code, twice.tests("PASSED")) == (0, {"test_mcore"})
    assert "seatrial: groups mcore and vllm exclude each other; give -m 'mcore and vllm'" in twice.text


BOTH = "import pytest\n@pytest.mark.mcore\n@pytest.mark.hf_gated\ndef test_both(): pass\n"
OWN = BOTH + "@pytest.mark.mcore\ndef test_own(): pytest.skip('mine')\n"
EXPECTED = BOTH + "@pytest.mark.mcore\n@pytest.mark.xfail\ndef test_expected(): assert False\n"


@pytest.mark.parametrize("workers", ["-n0", "-n2"])
@pytest.mark.parametrize(
    ("tests", "args", "code"),
    [
        (BOTH, ["--mcore-only"], 5),
        (BOTH, [], 5),
        (OWN, ["--mcore-only"], 5),
        ("import pytest\n@pytest.mark.needs(env=['NOT_THERE'])\ndef test_it(): pass\n", [], 5),
        (EXPECTED, ["--mcore-only"], 0),
        (BOTH + "def test_plain(): pass\n", [], 0),
        ("import pytest\n@pytest.mark.skip\ndef test_it(): pass\n", [], 0),
        (BOTH + "def test_broken(): assert False\n", [], 1),
    ],
    ids=["only", "no option", "own skip beside", "needs", "xfail ran", "one ran", "own skip alone", "failed"],
)
def test_a_session_in_which_we_skipped_and_nothing_ran_is_no_success(
    tmp_path: Path, tests: str, args: list[str], code: int, workers: str
) -> None:
    ran = pytest_in(project(tmp_path, tests=tests), *args, workers)
    assert ran.code == code, ran.text
    assert ran.text.count("nothing ran, which is no success: exit status 5") == (code == 5)


def test_passes_that_stand_by_the_selection_are_a_success_beside_our_skips(tmp_path: Path) -> None:
    folder = project(tmp_path, tests=BOTH + "def test_plain(): pass\n")
    assert pytest_in(folder, "--seatrial-select").tests("PASSED") == {"test_plain"}
    again = pytest_in(folder, "--seatrial-select")
    assert (again.code, again.tests("PASSED"), again.tests("SKIPPED")) == (0, set(), {"test_both"}), again.text
    assert pytest_in(folder, "--seatrial-select", "--mcore-only").code == 5, "what stands is not of the group"


@pytest.mark.parametrize("workers", ["-n0", "-n2"])
def test_passes_of_the_only_group_that_stand_are_a_success_when_all_else_is_outside_of_it(tmp_path: Path, workers: str) -> None:
    args, told = ("--seatrial-select", "--mcore-only", workers), "no test of group mcore is affected by the change (1 known)"
    folder = project(tmp_path, tests="import pytest\n@pytest.mark.mcore\ndef test_mcore(): pass\ndef test_plain(): pass\n")
    first = pytest_in(folder, *args)
    assert (first.code, first.tests("PASSED"), told in first.text) == (0, {"test_mcore"}, False), first.text
    again = pytest_in(folder, *args)
    assert (again.code, again.tests("PASSED"), told in again.text) == (0, set(), True), again.text
    assert "1 deselected by seatrial: not in group mcore (--mcore-only)" in again.text
    other = pytest_in(folder, *args, "--deselect", "test_it.py::test_mcore")
    assert (other.code, "is affected by the change" in other.text) == (5, False), "it is the caller who left it out"


@pytest.mark.parametrize("workers", ["-n0", "-n2"])
@pytest.mark.parametrize(
    ("tests", "args"),
    [(OWN + "def test_plain(): pass\n", ["--mcore-only"]), (BOTH + "def test_own(): pytest.skip('mine')\n", [])],
    ids=["only", "no option"],
)
def test_a_test_that_skipped_itself_is_no_success_beside_our_skips_the_next_time_either(
    tmp_path: Path, tests: str, args: list[str], workers: str
) -> None:
    folder = project(tmp_path, tests=tests)
    for _ in range(2):
        ran = pytest_in(folder, "--seatrial-select", *args, workers)
        assert (ran.code, ran.tests("SKIPPED")) == (5, {"test_both", "test_own"}), ran.text


def test_a_pass_of_the_only_group_that_stands_is_a_success_beside_our_skips(tmp_path: Path) -> None:
    folder = project(tmp_path, tests=BOTH + "@pytest.mark.mcore\ndef test_mcore(): pass\n")
    for passed in ({"test_mcore"}, set()):
        ran = pytest_in(folder, "--seatrial-select", "--mcore-only")
        assert (ran.code, ran.tests("PASSED"), ran.tests("SKIPPED")) == (0, passed, {"test_both"}), ran.text


def test_passes_of_tests_that_the_groups_would_not_run_now_are_no_success(tmp_path: Path) -> None:
    folder = project(tmp_path, tests="import pytest\n@pytest.mark.hf_gated\ndef test_gated(): pass\n")
    for args, code in ((["--hf-gated"], 0), ([], 5), (["--mcore-only"], 5), ([], 5), (["--hf-gated"], 0)):
        ran = pytest_in(folder, "--seatrial-select", *args)
        assert ran.code == code, ran.text


@pytest.mark.parametrize("option", ["--collect-only", "--setup-only", "--setup-plan"])
def test_a_session_that_was_to_run_nothing_is_as_it_was(tmp_path: Path, option: str) -> None:
    assert pytest_in(project(tmp_path, tests=BOTH), option).code == 0


def test_nothing_in_the_only_group_is_no_success(tmp_path: Path) -> None:
    assert pytest_in(project(tmp_path, tests="def test_plain(): pass\n"), "--mcore-only").code == 5


@pytest.mark.parametrize(
    ("needs", "missing"),
    [
        ("env = ['HF_TOKEN']", "variable HF_TOKEN"),
        ("modules = ['no_such.core', 'json']", "module no_such.core"),
        ("programs = ['no-such-program', 'sh']", "program no-such-program"),
        ("files = ['pytest.ini', 'data/x']", "file data/x"),
        ("gpus = 512", "512 GPUs (0 here)"),
    ],
)
def test_a_group_that_was_asked_for_without_its_needs_is_an_error(tmp_path: Path, needs: str, missing: str) -> None:
    folder = project(tmp_path, f"[groups.hf_gated]\nneeds = {{ {needs} }}\n[groups.mcore]\n")
    ran = pytest_in(folder, "--hf-gated", env={"CUDA_VISIBLE_DEVICES": ""})
    assert ran.code == 4
    assert f"--hf-gated was given, but group hf_gated needs {missing} ({folder}/seatrial.toml: groups.hf_gated.needs)" in ran.text
    assert not ran.tests("PASSED")
    assert pytest_in(folder).tests("PASSED") == {"test_plain"}


def test_a_need_that_is_there_lets_the_group_run_and_its_value_is_not_shown(tmp_path: Path) -> None:
    folder = project(tmp_path, GUIDE.replace("[groups.mcore]", "needs = { env = ['HF_TOKEN'] }\n[groups.mcore]"))
    ran = pytest_in(folder, "--hf-gated", env={"HF_TOKEN": "hf_secret_word"})
    assert ran.tests("PASSED") == {"test_plain", "test_gated"}
    assert "hf_secret_word" not in ran.text
    assert pytest_in(folder, "--hf-gated", env={"HF_TOKEN": ""}).code == 4


def test_the_plugin_can_be_turned_off(tmp_path: Path) -> None:
    ran = pytest_in(project(tmp_path), "-p", "no:seatrial_guards", "-o", "addopts=")
    assert ran.tests("PASSED") == {"test_plain", "test_gated", "test_mcore", "test_both"}
