"""What `seatrial bisect` says, from end to end, when an end cannot be judged."""

from __future__ import annotations

from pathlib import Path

import pytest

from seatrial.bisect.bisect_records import Mark, SkipKind
from tests.bisect.calls import CHECK, Place, numbers
from tests.runtime.wheels import make_wheel

pytestmark = pytest.mark.slow

SOME = "import os\nif {}: open(os.environ['SEATRIAL_OUTPUT'] + '/metrics.jsonl', 'w').write('{{\"step\": 1, \"loss\": 0.5}}\\n')\n"
NUMBER = "int(open('number.txt').read())"
BELOW = 'mean(data["loss"]) < 1.0'


def test_program_of_another_environment_is_refused_and_with_brings_it(tmp_path: Path) -> None:
    """The caller's own program must not stand in for the one that the commit's environment lacks."""
    bins, wheels = tmp_path / "bin", tmp_path / "wheels"
    bins.mkdir()
    (bins / "pytool").write_text("#!/opt/other/bin/python3\n")
    (bins / "pytool").chmod(0o755)
    make_wheel(wheels, "tiny", "1.0")
    place = Place(tmp_path, numbers(6, CHECK.format(first=3), at_0={"requirements.txt": "\n"}))
    settings = {
        "PATH": f"{bins}:/usr/bin:/bin",
        "SEATRIAL_CACHE": str(tmp_path / "cache"),
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(wheels),
    }
    done = place.bisect(command=("pytool", "check.py"), **settings)
    assert (done.code, done.skips()) == (2, {0: SkipKind.BUILD})
    assert f"pytool is not in the environment of requirements.txt, and {bins}/pytool on PATH" in done.err
    assert "fix: add it with --with pytool, or use your own environment for all commits: --env none" in done.err
    assert f"what ran is kept, with its logs, in {done.directory}" in done.err
    code = "import tiny, runpy; assert tiny.VERSION == '1.0'; runpy.run_path('check.py')"
    lacking = place.bisect(command=("python", "-c", code), out="lacking", **settings)
    assert lacking.code == 2
    assert "with --with tiny" in lacking.err
    assert place.bisect("--with", "tiny", command=("python", "-c", code), out="with", **settings).found(3)


def test_good_end_without_its_metric_is_not_called_bad(tmp_path: Path) -> None:
    done = Place(tmp_path, numbers(3, SOME.format(False))).bisect("--check", BELOW)
    assert done.code == 2
    assert "cannot be judged" in done.err
    assert "fix: correct the check, or say with --metrics" in done.err
    assert [(row.mark, row.skip) for row in done.rows] == [(Mark.SKIP, SkipKind.METRIC)]
    assert " bad" not in done.err.partition("cannot be judged")[0].partition("about")[2]


def test_bad_end_without_its_metric_is_what_is_searched_for(tmp_path: Path) -> None:
    assert Place(tmp_path, numbers(6, SOME.format(f"{NUMBER} < 4"))).bisect("--check", BELOW, "--repeat", "1").found(4)


def test_abort_says_its_last_lines_and_how_to_start_again(tmp_path: Path) -> None:
    place = Place(
        tmp_path, numbers(6, f"import sys\nif {NUMBER} in (2, 3):\n    print('no such flag')\n    sys.exit(200)\n" + CHECK.format(first=4))
    )
    done = place.bisect()
    assert done.code == 99
    assert "its last lines: no such flag" in done.err
    assert f"--replay {done.directory / 'runs.jsonl'}" in done.err


def test_patch_that_does_not_apply_to_an_end_offers_since(tmp_path: Path) -> None:
    place = Place(tmp_path, numbers(4, CHECK.format(first=2)))
    done = place.bisect("--patch", place.ids[2])
    assert done.code == 2
    assert "does not apply" in done.err
    assert "--patch REV@SINCE" in done.err.partition("fix: ")[2]
