"""Exit codes that could be anybody's, secrets in words, and pid files that are nobody's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from seatrial.functional.hermetic import Box, end_earlier, run_words
from tests.functional.test_fresh_environment import call, project

__all__ = ["project"]

pytestmark = pytest.mark.slow

SECRET = "hf_" + "a1B2" * 9


@pytest.mark.parametrize("code", [2, 77, 99])
def test_an_exit_code_that_could_be_ours_is_told_to_be_the_commands(project: Path, code: int) -> None:
    done = call(project, "--", "sh", "-c", f"exit {code}")
    assert done.returncode == code
    assert done.stderr.splitlines()[-1] == f"seatrial: the command itself exited with {code}"


def test_a_command_that_cannot_be_started_does_not_look_like_one_that_exited(project: Path) -> None:
    done = call(project, "--", "no-such-program")
    assert (done.returncode, "itself exited" in done.stderr) == (99, False)
    assert "Blocked (environment)" in done.stderr


def test_a_tool_that_the_project_does_not_name_is_told_once_with_the_option_that_adds_it(project: Path) -> None:
    done = call(project, "--", "pytest", "-q")
    assert done.returncode == 99
    said = (done.stdout + done.stderr).splitlines()
    assert [line for line in said if "pytest" in line and not line.startswith("seatrial: pytest")] == [
        "seatrial: Blocked (environment): pytest is not in the fresh environment",
        "  fix: add it with `--with pytest` (or the package that has it), or name it among the project's dependencies",
    ]


def test_no_secret_of_the_command_line_is_printed(project: Path) -> None:
    done = call(project, "--show", "--", "echo", "--api-key", "9Zq8yY7xX6wW5vV4", SECRET)
    assert done.returncode == 0
    assert not [word for word in ("9Zq8", SECRET) if word in done.stderr + done.stdout]


def test_words_with_quotes_reach_the_container_as_they_are() -> None:
    words = ("sh", "-c", """echo "it's" 'a b' $HOME""", "")
    made = run_words(Box(engine="docker", image="image", mounts=()), "name", words, Path("/work"))
    assert made[-5:] == ("image", *words)


@pytest.mark.parametrize("text", ["", "no json", json.dumps({"run_id": "x"})])
def test_a_pid_file_that_is_not_ours_is_left_alone(tmp_path: Path, text: str) -> None:
    file, said = tmp_path / "run.log.pids", list[str]()
    file.write_text(text)
    (tmp_path / "link.pids").symlink_to(file)
    end_earlier([file, tmp_path / "link.pids", tmp_path / "gone.pids"], said.append)
    assert (said, file.exists()) == ([], True)
