"""`seatrial bisect` that is interrupted, killed, resumed or replayed: nothing is lost, nothing runs twice, nothing of the user's changes.

The program under test notes each of its runs in a ledger, and waits at commits 3 and 4 until it may go on.
"""

from __future__ import annotations

import json
import signal
from collections import Counter
from pathlib import Path

import pytest

from seatrial.bisect.bisect_records import Mark
from tests.bisect.calls import CHECK, DEADLINE_S, Bisected, Place, numbers, wait_for
from tests.bisect.repos import run_git
from tests.bisect.untouched import untouched

pytestmark = pytest.mark.slow

WAITS = (
    "import os, pathlib, time\n"
    "ledger = pathlib.Path(os.environ['LEDGER'])\n"
    "number = open('number.txt').read().strip()\n"
    "with (ledger / 'runs').open('a') as file:\n"
    "    file.write(number + '\\n')\n"
    "while number in ('3', '4') and not (ledger / 'go').exists():\n"
    "    time.sleep(0.02)\n"
)
SECRET = "hf_" + "qZ7Lw2Xv9Rk4Tn6Bs8Dm1Fc3Gh5J"


class Waiting(Place):
    """A repository whose program waits, and its ledger."""

    def __init__(self, root: Path) -> None:
        super().__init__(root, numbers(8, WAITS + CHECK.format(first=6)))
        self.ledger = root / "ledger"
        self.ledger.mkdir()

    def runs(self) -> Counter[int]:
        """How often each commit was run."""
        file = self.ledger / "runs"
        return Counter(map(int, file.read_text(encoding="utf-8").split())) if file.exists() else Counter()

    def stop_in_the_middle(self, by: signal.Signals) -> int:
        """Begin a bisect, and end it while it waits; its exit code."""
        process = self.start(self.words(), LEDGER=str(self.ledger))
        try:
            wait_for("the program waits", lambda: bool({3, 4} & set(self.runs())))
            process.send_signal(by)
            return process.wait(DEADLINE_S)
        finally:
            process.kill()
            process.wait()

    def may_go(self) -> None:
        """Nothing waits any more."""
        (self.ledger / "go").touch()


@pytest.mark.parametrize("by", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=lambda by: by.name)
def test_stopped_bisect_goes_on_where_it_was(tmp_path: Path, by: signal.Signals) -> None:
    place = Waiting(tmp_path)
    with untouched(place.repo):
        code = place.stop_in_the_middle(by)
        stopped = Bisected(place.ids, code, "", "", tmp_path / "out")
        before = stopped.rows
        known = stopped.marks.keys()
        place.may_go()
        done = place.go_on(LEDGER=str(place.ledger))
    assert code == (-by if by is signal.SIGKILL else 130)
    assert known == {0, 7}
    assert done.found(6)
    assert done.rows[: len(before)] == before
    cut = place.runs() - Counter(place.ids.index(row.commit) for row in done.rows)
    assert cut.total() == 1, "only the run that was cut is run again"
    assert cut.keys() <= {3, 4}
    with untouched(place.repo):
        assert place.go_on("clean").code == 0
    assert not list((tmp_path / "out").glob("steps/*/tree"))
    assert not (tmp_path / "out/stores").exists()


def test_interrupted_bisect_has_ended_its_command_and_says_how_to_go_on(tmp_path: Path) -> None:
    place = Waiting(tmp_path)
    assert place.stop_in_the_middle(signal.SIGINT) == 130
    out = tmp_path / "out"
    assert f"seatrial bisect resume {out}" in (out / "summary.md").read_text(encoding="utf-8")
    assert not list(out.glob("steps/*/tree")), "its trees are gone, so nothing runs there"


def test_resume_of_a_finished_bisect_runs_nothing(tmp_path: Path) -> None:
    place = Waiting(tmp_path)
    place.may_go()
    done = place.bisect(LEDGER=str(place.ledger))
    runs = place.runs()
    again = place.go_on(LEDGER=str(place.ledger))
    assert again.found(6)
    assert again.rows == done.rows
    assert place.runs() == runs


def test_two_at_once_in_one_directory_are_refused(tmp_path: Path) -> None:
    place = Waiting(tmp_path)
    process = place.start(place.words(), LEDGER=str(place.ledger))
    try:
        wait_for("the program waits", lambda: bool({3, 4} & set(place.runs())))
        second = place.go_on()
        place.may_go()
        assert process.wait(DEADLINE_S) == 0
    finally:
        process.kill()
        process.wait()
    assert second.code not in (0, 3)
    assert str(tmp_path / "out") in second.err


@pytest.fixture
def plain(tmp_path: Path) -> Place:
    """Eight commits, bad from the sixth on; what each run did is in the ledger."""
    place = Waiting(tmp_path)
    place.may_go()
    return place


def replay(place: Place, log: Path, *words: str, out: str) -> Bisected:
    """A new bisect with the marks of a log; the ends are those of the log."""
    given = place.words("--replay", log, *words, out=out)
    where = given.index("--good")
    return place.call(given[:where] + given[where + 2 :], out, {"LEDGER": str(place.root / "ledger")})


def test_log_of_plain_git_is_taken_on(plain: Waiting, tmp_path: Path) -> None:
    """Its marks are believed; only the ends are run again, for how the bad one fails."""
    clone, log = tmp_path / "clone", tmp_path / "git.log"
    run_git(tmp_path, "clone", "--quiet", str(plain.repo), str(clone))
    run_git(clone, "bisect", "start", "HEAD", "HEAD~7")
    run_git(clone, "bisect", "good", plain.ids[2])
    run_git(clone, "bisect", "skip", plain.ids[4])
    log.write_text(run_git(clone, "bisect", "log") + "\n", encoding="utf-8")
    with untouched(plain.repo):
        done = replay(plain, log, out="replayed")
    assert done.found(6)
    assert plain.runs()[0] == plain.runs()[7] == 1
    assert not {1, 2, 4} & plain.runs().keys()


def test_log_of_ours_is_taken_on_by_plain_git(plain: Waiting, tmp_path: Path) -> None:
    done = plain.bisect(LEDGER=str(plain.ledger))
    clone = tmp_path / "clone"
    run_git(tmp_path, "clone", "--quiet", str(plain.repo), str(clone))
    told = run_git(clone, "bisect", "replay", str(done.directory / "bisect.log"))
    assert f"{plain.ids[6]} is the first bad commit" in told
    before = plain.runs()
    again = replay(plain, done.directory / "bisect.log", out="again")
    assert again.found(6)
    assert (plain.runs() - before).keys() <= {0, 7}


def test_journal_that_was_edited_by_hand(plain: Waiting, tmp_path: Path) -> None:
    """bad to skip: in a copy for --replay, and in place for report."""
    done = plain.bisect(LEDGER=str(plain.ledger))
    lines = [json.loads(line) for line in (done.directory / "runs.jsonl").read_text(encoding="utf-8").splitlines()]
    for line in lines:
        if line["commit"] == plain.ids[6]:
            line["mark"] = Mark.SKIP.value
    edited = tmp_path / "edited.jsonl"
    edited.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    before = plain.runs()
    again = replay(plain, edited, out="edited")
    assert (again.code, again.suspects) == (99, [6, 7])
    # Without the plan beside it nobody knows which question it answers: the ends are run, and nothing else.
    assert (plain.runs() - before).keys() <= {0, 7}

    before = plain.runs()
    (done.directory / "runs.jsonl").write_bytes(edited.read_bytes())
    told = plain.go_on("report")
    assert (told.code, told.suspects) == (99, [6, 7])
    same = replay(plain, done.directory / "runs.jsonl", out="same")
    assert (same.code, same.suspects) == (99, [6, 7])
    assert plain.runs() == before, "everything was known already"


def test_secrets_reach_no_artifact(tmp_path: Path) -> None:
    """Of the environment, and as a shell puts them into the command; the program prints and raises them."""
    check = "import os, sys\nprint('token', os.environ['HF_TOKEN'], sys.argv)\n" + CHECK.format(first=3).replace("the loss", "{sys.argv}")
    place = Place(tmp_path, numbers(5, check.replace("'{sys.argv}", "f'{sys.argv}")))
    done = place.bisect(command=("sh", "-c", 'exec python check.py --token "$HF_TOKEN"'), HF_TOKEN=SECRET)
    assert done.found(3)
    logs = [(done.directory / row.directory / "run.log").read_text(encoding="utf-8") for row in done.rows]
    assert all("[redacted" in log for log in logs), "the program had it"
    holders = [path for path in done.directory.rglob("*") if path.is_file() and SECRET.encode() in path.read_bytes()]
    assert holders == []
    assert SECRET not in done.out + done.err
