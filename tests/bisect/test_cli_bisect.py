"""`seatrial bisect` on the command line: what is refused before anything runs, what a dry run says, and that neither leaves a trace."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.bisect.repos import Commit, build, linear, run_git
from tests.bisect.untouched import look
from tests.cli.command import Answer, inside

HISTORY = [*linear(6, {"check.py": "import sys\n"}), Commit({"side.txt": "1\n"}, parents=(2,), tag="side"), Commit({}, parents=(5,))]


@pytest.fixture(scope="module")
def repo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six commits in a row, a branch off the third, and a file that is not committed."""
    path = tmp_path_factory.mktemp("cli") / "loop"
    ids = build(path, HISTORY)
    assert len(ids) == len(HISTORY)
    (path / "number.txt").write_text("changed\n", encoding="utf-8")
    return path


@pytest.fixture(autouse=True)
def nothing_written(repo: Path) -> Iterator[None]:
    """Neither a wrong question nor a dry run leaves anything behind."""
    before = look(repo)
    yield
    assert look(repo) == before


def ask(repo: Path, *words: str | Path, command: tuple[str, ...] = ("true",)) -> Answer:
    """`seatrial bisect` in the checkout."""
    return inside("bisect", *words, *(("--", *command) if command else ()), cwd=repo)


@pytest.mark.parametrize(
    ("words", "said", "fix"),
    [
        ((), "no good commit is named", "--good REV"),
        (("--good", "nope"), "--good nope: names no commit in ", "log --oneline"),
        (("--good", "main~2", "--bad", "nope"), "--bad nope: names no commit in ", "log --oneline"),
        (("--good", "main", "--bad", "main~2"), "the ends are swapped", "--bad "),
        (("--good", "main", "--bad", "main"), "name the same commit", "an older --good"),
        (("--good", "side"), "is not an ancestor of", "--good "),
        (("--good", "main~2", "--good", "main~1"), "--good names two values", "--good NAME=VALUE"),
        (("--good", "main~2", "--check", "mean("), "not an expression", "docs/checks.md"),
        (("--good", "main~2", "--edit", "check.py", "s/a"), "sed does not accept 's/a'", "correct the clauses"),
        (("--good", "main~2", "--edit", "check.py", "e touch /tmp/x"), "sed does not accept", "correct the clauses"),
        (("--good", "main~2", "--edit", "check.py"), "takes two words", "--edit tests/run.sh"),
        (("--good", "main~2", "--metrics", "/tmp/m.json"), "all runs would share it", "{output}"),
        (("--good", "main~2", "--metrics", "~/m.json"), "all runs would share it", "{output}"),
        (("--good", "main~2", "--metrics", "{output}/../m.json"), "leads out of the files of a run", "{output}"),
        (("--good", "main~2", "--metrics", "m/{commit}.json"), "{commit} is no place of a run", "{output}"),
        (("--good", "main~2", "--metrics", "{python}"), "{python} is no place of a run", "{output}"),
        (("--good", "main~2", "--place", "third"), "takes the name of a repository and a path", "--place NAME=PATH"),
        (("--good", "main~2", "--place", "loop=third"), "loop is the first repository", "none"),
        (("--good", "main~2", "--place", "lop=third"), "no repository is called lop", "--repo lop=PATH"),
        (("--good", "main~2", "--failure", "("), "is not a regular expression", "backslash"),
        (("--good", "main~2", "--patch", "nope.patch"), "--patch nope.patch: names no commit", "log --oneline"),
        (("--good", "main~2", "--env", "conda"), "--env: unknown way `conda`", "use none, pip:PATH"),
        (("--good", "main~2", "--repo", "/"), "not a git repository", "path of a checkout"),
        (("--good", "main~2", "--any-failure", "--failure", "x"), "--any-failure and --failure contradict", "give one"),
        (("--good", "main~2", "--python", "abc"), "--python abc: not a version of Python", "such as 3.12"),
        (("--good", "main~2", "--env", "pip:check.py", "--python", "3.99"), "no working python3.99", "install Python 3.99"),
        (("--good", "main~2", "--with", "pytest"), "no environment is built", "--env pip:LOCKFILE"),
        (("--good", "main~2", "--env", "pip:check.py", "--with", "./here"), "--with ./here: not a requirement by name", "--build"),
        (("--good", "main~2", "--env", "pip:check.py", "--with", "--pre"), "--with --pre: not a requirement by name", "such as pytest"),
        (("--good", "other=main~2"), "no repository is called other; there are loop", "--repo other=PATH"),
        (("--good", "main~2", "--replay", "nope.log"), "nope.log: cannot read", "runs.jsonl"),
    ],
)
def test_wrong_question_is_refused_with_the_fix(repo: Path, words: tuple[str, ...], said: str, fix: str) -> None:
    done = ask(repo, *words)
    assert (done.code, done.out) == (2, "")
    message, _, help_ = done.err.partition("  fix: ")
    assert said in message
    assert fix in help_


@pytest.mark.parametrize(
    ("words", "said", "fix"),
    [
        (("nosuchloop",), "unknown loop 'nosuchloop'", "use "),
        (("trl", "--level", "77"), "unknown level 77", "choose from 0"),
        (("trl", "--level", "x"), "'x' is not a level", "use numbers"),
        (("trl", "--lvl", "0"), "No such option: --lvl", "seatrial run --help"),
        (("trl", "--out", "here"), "--out is chosen for each commit", "leave it out"),
    ],
)
def test_trial_that_cannot_run_is_refused_before_anything_runs(repo: Path, words: tuple[str, ...], said: str, fix: str) -> None:
    done = ask(repo, "--good", "main~2", "--trial", command=words)
    assert (done.code, done.out) == (2, "")
    assert said in done.err
    assert fix in done.err.partition("  fix: ")[2]


def test_words_of_a_trial_may_name_the_tree_and_pass_arguments_on(repo: Path) -> None:
    words = ("verl", "--device", "cpu", "--level", "0", "--change", "lib={tree}", "--", "--lvl", "3")
    assert ask(repo, "--good", "main~2", "--trial", "--dry-run", command=words).code == 0


def test_command_without_two_dashes(repo: Path) -> None:
    done = inside("bisect", "--good", "main~2", "pytest", "-x", "tests", cwd=repo)
    assert done.code == 2
    assert "put -- before it: seatrial bisect --good REV -- pytest -x tests" in done.err


def test_dry_run_warns_of_a_program_that_is_nowhere(repo: Path) -> None:
    def err(*words: str, command: str) -> str:
        return ask(repo, "--good", "main~2", "--dry-run", *words, command=(command,)).err

    assert "no-such-program is neither on PATH nor a file of the repository\n" in err(command="no-such-program")
    assert "; it may be in the environments\n" in err("--env", "pip:check.py", command="no-such-program")
    assert "neither" not in err(command="./check.py") + err(command="true") + err(command="{python}")


def test_python_without_an_environment_is_idle(repo: Path) -> None:
    done = ask(repo, "--good", "main~2", "--python", "3.99", "--dry-run")
    assert done.code == 0
    assert "--python 3.99 changes nothing: no environment is built" in done.err


def test_revision_with_an_equals_sign_is_no_name(repo: Path) -> None:
    assert ask(repo, "--good", "main^{/^.*=?}~2", "--dry-run").code == 0


def test_log_whose_ends_are_one_commit(repo: Path, tmp_path: Path) -> None:
    log, commit = tmp_path / "my.log", run_git(repo, "rev-parse", "main").strip()
    log.write_text(f"git bisect start\ngit bisect good {commit}\ngit bisect bad {commit}\n", encoding="utf-8")
    done = ask(repo, "--replay", log)
    assert done.code == 2
    assert "my.log" in done.err
    assert commit[:12] in done.err


def test_replay_announces_what_is_left(repo: Path, tmp_path: Path) -> None:
    log = tmp_path / "my.log"
    good, middle, bad = (run_git(repo, "rev-parse", f"main~{back}").strip() for back in (5, 3, 1))
    log.write_text(f"git bisect start\ngit bisect bad {bad}\ngit bisect good {good}\ngit bisect good {middle}\n", encoding="utf-8")
    done = ask(repo, "--replay", log, "--dry-run")
    assert "2 of 4 commits are left, 1 at a time: both ends, then about 1 rounds" in done.out


def test_clean_without_bisects(repo: Path, tmp_path: Path) -> None:
    done = inside("bisect", "clean", cwd=tmp_path)
    assert (done.code, done.out.partition(" below ")[0]) == (0, "there are no bisects")


def test_no_command(repo: Path) -> None:
    done = ask(repo, "--good", "main~2", command=())
    assert done.code == 2
    assert "no command to run" in done.err


@pytest.mark.parametrize("words", [("--jobs", "0"), ("--confidence", "2")])
def test_numbers_out_of_range(repo: Path, words: tuple[str, str]) -> None:
    done = ask(repo, "--good", "main~2", *words)
    assert done.code == 2
    assert f"Invalid value for '{words[0]}'" in done.err


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("garbage\n", "log:1: not a line of a bisect log: 'garbage'"),
        ("git bisect start\nrm -rf /\n", "log:2: not a line of a bisect log"),
        ('{"number": 1}\n', "log:1"),
        ("{garbage\n", "log:1"),
        ("", "log: marks no commit"),
        ("\x00\xff\n", "log:1: not a line of a bisect log"),
    ],
)
def test_replay_of_garbage(repo: Path, tmp_path: Path, text: str, said: str) -> None:
    log = tmp_path / "log"
    log.write_text(text, encoding="latin-1")
    done = ask(repo, "--replay", log)
    assert done.code == 2
    assert said in done.err
    assert "  fix: " in done.err


@pytest.mark.parametrize("command", ["resume", "report", "clean"])
def test_directory_that_is_no_bisect(repo: Path, tmp_path: Path, command: str) -> None:
    for directory in (tmp_path, tmp_path / "nowhere"):
        done = inside("bisect", command, directory, cwd=repo)
        assert done.code == 2
        assert f"{directory}: no bisect.json there" in done.err
        assert "that `seatrial bisect` made" in done.err
    assert not list(tmp_path.iterdir())


def test_out_that_holds_something(repo: Path, tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("1", encoding="utf-8")
    done = ask(repo, "--good", "main~2", "--out", tmp_path)
    assert done.code == 2
    assert "is not empty" in done.err
    assert [path.name for path in tmp_path.iterdir()] == ["precious"]


def test_secret_in_the_command_is_refused_and_not_repeated(repo: Path, tmp_path: Path) -> None:
    secret = "hf_" + "qZ7Lw2Xv9Rk4Tn6Bs8Dm1Fc3Gh5J"
    done = ask(repo, "--good", "main~2", "--out", tmp_path / "out", command=("train", "--token", secret))
    assert done.code == 2
    assert "holds a secret" in done.err
    assert "let a shell put it in" in done.err
    assert secret not in done.err
    assert not (tmp_path / "out").exists()


def test_nightly_whose_script_is_not_there(repo: Path) -> None:
    done = inside("bisect", "nightly", "tests/nope.sh", cwd=repo)
    assert done.code == 2
    assert "there is no tests/nope.sh at " in done.err


def test_dry_run_says_what_would_run_and_that_changes_are_not_tested(repo: Path, tmp_path: Path) -> None:
    done = ask(repo, "--good", "main~4", "--jobs", "2", "--dry-run", "--out", tmp_path / "out", command=("python", "check.py", "a b"))
    assert done.code == 0
    assert "4 commits, 2 at a time: both ends, then about 2 rounds" in done.out
    assert "command: python check.py 'a b'" in done.out
    assert "judged by: the exit code" in done.out
    assert "uncommitted changes are not tested, only commits are: number.txt" in done.err
    assert not (tmp_path / "out").exists()


def test_dry_run_of_a_check_and_of_a_trial(repo: Path) -> None:
    checked = ask(repo, "--good", "main~4", "--dry-run", "--check", 'mean(data["x"]) > 1')
    assert 'judged by: mean(data["x"]) > 1' in checked.out
    tried = ask(repo, "--good", "main~4", "--dry-run", "--trial", command=("trl", "--level", "0"))
    assert "command: seatrial run trl --level 0" in tried.out
    assert "judged by: the verdict of the trial" in tried.out


def test_dry_run_of_a_nightly_begins_where_its_script_was_added(repo: Path) -> None:
    done = inside("bisect", "nightly", "check.py", "--dry-run", "--", "--steps", "3", cwd=repo)
    assert done.code == 0
    assert "6 commits, 1 at a time" in done.out
    assert "command: bash check.py --steps 3" in done.out


@pytest.mark.parametrize("words", [("--help",), ("nightly", "--help")])
def test_help(repo: Path, words: tuple[str, ...]) -> None:
    done = inside("bisect", *words, cwd=repo)
    assert done.code == 0
    assert done.out.startswith("Usage: seatrial bisect")
    assert words[0] != "--help" or all(flag in done.out for flag in ("--good", "--check", "--edit", "--patch", "--replay", "nightly"))
