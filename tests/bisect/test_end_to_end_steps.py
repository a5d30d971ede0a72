"""`seatrial bisect` from the command line to the answer: what a step is made of, what is changed in it, nightlies and reports."""

from __future__ import annotations

from pathlib import Path

import pytest

from seatrial.bisect.bisect_records import SkipKind
from tests.bisect.calls import CHECK, Place, numbers
from tests.bisect.repos import Commit, Entry, Link, Script, build, linear, populate, run_git, submodule
from tests.bisect.untouched import Seen, look, untouched
from tests.cli.command import SEATRIAL

pytestmark = pytest.mark.slow


def test_edit_reaches_the_trees_and_not_the_checkout(tmp_path: Path) -> None:
    place = Place(tmp_path, numbers(8, CHECK.format(first=100), at_2={"check.py": "# Moved.\n" + CHECK.format(first=100)}))
    with untouched(place.repo):
        done = place.bisect("--edit", "check.py", "s/< 100/< 5/\ns/Moved/Edited/")
    assert done.found(5)
    assert "s/< 100/< 5/" in done.summary
    assert "this changes what is measured" in done.summary


def test_edit_that_matches_nothing_is_noted_and_one_of_no_file_is_refused(tmp_path: Path) -> None:
    place = Place(tmp_path, numbers(4, CHECK.format(first=2)))
    done = place.bisect("--edit", "check.py", "s/no such text/x/")
    assert done.found(2)
    assert all("check.py" in " ".join(row.notes) for row in done.rows)
    lost = place.bisect("--edit", "nope.py", "s/a/b/", out="lost")
    assert lost.code == 2
    assert "nope.py" in lost.err


def broken_otherwise() -> list[Commit]:
    """Bad from commit 5 on; commits 2 to 7 cannot be tested, until commit 8 mends them."""
    commits = linear(10, {"check.py": "import tool\n" + CHECK.format(first=5), "tool.py": "A = 1\n"})
    commits[2] = Commit({"number.txt": "2\n", "tool.py": "raise SystemError('no such driver')\n"})
    commits[8] = Commit({"tool.py": "A = 1\n"}, subject="Mend the tool")
    return commits


def contents(repo: Path) -> Seen:
    """A repository without the times of its objects: git marks an object that it would have written as used anew, also in a repository
    that it only borrows from."""
    return {name: (mode, 0 if "/.git/objects/" in name else time, data) for name, (mode, time, data) in look(repo).items()}


def test_patch_mends_a_range_that_is_broken_otherwise(tmp_path: Path) -> None:
    place = Place(tmp_path, broken_otherwise())
    without = place.bisect(out="without")
    assert (without.code, without.suspects) == (99, list(range(2, 9)))
    before = contents(place.repo)
    done = place.bisect("--patch", place.ids[8], out="commit")
    assert contents(place.repo) == before
    assert done.found(5)
    assert place.ids[8][:12] in done.summary
    file = tmp_path / "mend.patch"
    file.write_text(run_git(place.repo, "diff", place.ids[7], place.ids[8]) + "\n", encoding="utf-8")
    assert place.bisect("--patch", file, out="file").found(5)


def test_patch_of_a_file(tmp_path: Path) -> None:
    """What is broken from before the good end on, and mended by a patch that no commit has."""
    commits = linear(8, {"check.py": "import tool\n" + CHECK.format(first=5), "tool.py": "raise SystemError('no such driver')\n"})
    place, file = Place(tmp_path, commits), tmp_path / "mend.patch"
    file.write_text("--- a/tool.py\n+++ b/tool.py\n@@ -1 +1 @@\n-raise SystemError('no such driver')\n+A = 1\n", encoding="utf-8")
    with untouched(place.repo):
        done = place.bisect("--patch", file)
    assert done.found(5)
    assert "mend.patch" in done.summary
    file.write_text("no patch\n", encoding="utf-8")
    garbage = place.bisect("--patch", file, out="garbage")
    assert garbage.code == 2
    assert "mend.patch" in garbage.err


def test_patch_that_does_not_apply_is_said_in_one_line(tmp_path: Path) -> None:
    commits = [*linear(4, {"check.py": CHECK.format(first=2), "a.txt": "1\n"}), Commit({"a.txt": "2\n"}), Commit({"a.txt": "3\n"})]
    place = Place(tmp_path, commits)
    done = place.bisect("--patch", place.ids[5])
    assert done.code == 2
    assert f"--patch {place.ids[5]}: does not apply to {place.ids[0][:12]}" in done.err
    assert "hint:" not in done.err


def test_patch_from_a_commit_on(tmp_path: Path) -> None:
    """A mend that does not restore what was there before the break: before it, the patch has nothing to apply to."""
    commits = linear(8, {"check.py": "import tool\n" + CHECK.format(first=4), "tool.py": "A = 1\nB = 2\n"})
    commits[2] = Commit({**commits[2].files, "tool.py": "raise SystemError('no such driver')\n"})
    commits[7] = Commit({"tool.py": "A = 3\n"}, subject="Mend the tool")
    place = Place(tmp_path, commits)
    done = place.bisect("--patch", f"{place.ids[7]}@{place.ids[2]}")
    assert done.found(4)
    assert f"to commits from `{place.ids[2][:12]}` on" in done.summary


def test_lost_commit_of_a_submodule_is_a_skip_with_the_fix(tmp_path: Path) -> None:
    library = tmp_path / "library"
    known = build(library, linear(2))
    first: dict[str, Entry] = {"check.py": "open('third/number.txt')\n" + CHECK.format(first=6), **submodule("third", library, known[0])}
    commits = linear(8, first)
    for index, commit in ((3, "d" * 40), (5, known[1])):
        commits[index] = Commit({**commits[index].files, "third": Link(commit)})
    place = Place(tmp_path, commits)
    populate(place.repo)
    with untouched(place.repo, library):
        done = place.bisect()
    assert done.found(6)
    assert set(done.skips().values()) == {SkipKind.TREE}
    assert f"fetch origin {'d' * 40}" in done.summary


def test_uncommitted_changes_are_not_tested_and_that_is_said(tmp_path: Path) -> None:
    place = Place(tmp_path, numbers(4, CHECK.format(first=2)))
    (place.repo / "check.py").write_text("raise ValueError('not committed')\n", encoding="utf-8")
    run_git(place.repo, "stash")
    (place.repo / "check.py").write_text("raise ValueError('not committed')\n", encoding="utf-8")
    run_git(place.repo, "add", "check.py")
    (place.repo / "new.txt").write_text("1\n", encoding="utf-8")
    with untouched(place.repo):
        done = place.bisect()
    assert done.found(2)
    assert "uncommitted changes are not tested, only commits are: check.py" in done.err
    assert "uncommitted changes are not tested" in done.summary


def test_no_run_sees_what_another_one_left(tmp_path: Path) -> None:
    """Not in its tree, its output or its checkpoints; and the variables name them."""
    program = (
        "import os, pathlib\n"
        "tree, output, kept = (pathlib.Path(os.environ['SEATRIAL_' + name]) for name in ('TREE', 'OUTPUT', 'CHECKPOINTS'))\n"
        "assert tree == pathlib.Path.cwd() and os.environ['SEATRIAL_COMMIT']\n"
        "for place in (tree, output, kept):\n"
        "    assert not (place / 'left').exists(), 'not isolated'\n"
        "    (place / 'left').touch()\n"
        "(tree / 'number.txt').write_text(str(100)) if int(open('number.txt').read()) < 3 else None\n"
    )
    place = Place(tmp_path, numbers(6, CHECK.format(first=3) + program))
    with untouched(place.repo):
        done = place.bisect("--jobs", "2")
    assert done.found(3)
    assert len({row.directory for row in done.rows}) == len(done.rows)
    assert not list(done.directory.glob("steps/*/tree"))
    assert all((done.directory / row.directory / "output/left").is_file() for row in done.rows if row.mark == "good")


def test_commit_that_does_not_build_is_a_skip(tmp_path: Path) -> None:
    built = Script("#!/bin/sh\ncase $(cat number.txt) in 3|4) echo no compiler here; exit 2;; esac\ntouch built\n")
    place = Place(tmp_path, numbers(8, "open('built')\n" + CHECK.format(first=6), at_0={"build.sh": built}))
    done = place.bisect("--build", "./build.sh")
    assert done.found(6)
    assert set(done.skips().values()) == {SkipKind.BUILD_COMMAND}


def test_nightly_begins_where_its_script_was_added_and_passes_arguments_on(tmp_path: Path) -> None:
    script = Script('#!/bin/bash\nset -eu\n[ "$1" = --steps ]\nexec python check.py\n')
    commits = numbers(8, "raise KeyError('long ago')\n", at_2={"tests/nightly.sh": script, "check.py": CHECK.format(first=5)})
    place = Place(tmp_path, commits)
    words = [str(SEATRIAL), "bisect", "nightly", "tests/nightly.sh", "--out", str(tmp_path / "out"), "--", "--steps", "3"]
    with untouched(place.repo):
        done = place.call(words, "out", {})
    assert done.found(5)
    assert done.report["plan"]["repos"][0]["good"] == place.ids[2]
    assert "--steps 3" in done.summary
    assert "this changes what is measured" in done.summary


NIGHTLY = """#!/bin/bash
# ===== BEGIN CONFIG =====
NUM_NODES=1
STEPS_PER_RUN=3
MAX_STEPS=3
NUM_RUNS=1
NUM_MINUTES=5
# ===== END CONFIG =====
python check.py "${NRL_MEGATRON_CHECKPOINT_DIR:?}"
"""


def test_nightly_that_ends_with_0_before_its_last_step_is_not_good(tmp_path: Path) -> None:
    """As upstream's scripts do when the job was cut short: no metric table, exit 0."""
    place = Place(tmp_path, numbers(4, "", at_0={"tests/suite.sh": Script(NIGHTLY)}))
    words = [str(SEATRIAL), "bisect", "nightly", "tests/suite.sh", "--out", str(tmp_path / "out")]
    done = place.call(words, "out", {})
    assert done.code == 2
    assert "the good end" in done.err
    assert "incomplete" in done.err


def test_reports_say_how_to_repeat_it_and_can_be_written_anew(tmp_path: Path) -> None:
    place = Place(tmp_path, numbers(6, CHECK.format(first=3)))
    done = place.bisect("--json", command=("python", "check.py", "two words"))
    assert done.found(3)
    assert done.out.lstrip().startswith("{")
    script = "\n".join(done.report["reproduce"])
    assert "python check.py 'two words'" in script
    assert place.ids[3] in script
    written = {name: (done.directory / name).read_bytes() for name in ("summary.md", "report.html", "report.json", "bisect.log")}
    for name in written:
        (done.directory / name).unlink()
    with untouched(place.repo):
        again = place.go_on("report")
    assert again.found(3)
    assert {name: (done.directory / name).read_bytes() for name in written} == written
