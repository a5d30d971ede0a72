"""Reading signature files, and searching a log for patterns."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from seatrial.core.errors import UserError
from seatrial.core.specs import Milestone, Signature
from seatrial.core.verdict import Boundary, Verdict
from seatrial.triage.log import read_log
from seatrial.triage.signatures import GENERAL, Scan, load_signatures

GOOD = '[[signature]]\nid = "a"\npattern = "x"\nboundary = "data"\n'


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "signatures.toml"
    path.write_text(text)
    return path


def test_good_file(tmp_path: Path) -> None:
    (signature,) = load_signatures(write(tmp_path, GOOD))
    assert (signature.id, signature.boundary, signature.verdict) == ("a", Boundary.DATA, Verdict.FAIL)
    assert load_signatures(write(tmp_path, "")) == ()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (GOOD + 'patern = "y"\n', r"signature 1 \(a\): patern: "),
        (GOOD.replace('"x"', '"(x"'), r"signature 1 \(a\): pattern '\(x': "),
        (GOOD + "also = ['ok', '[']\n", r"signature 1 \(a\): pattern '\['"),
        (GOOD.replace('"x"', '""'), "can never match"),
        (GOOD.replace('"x"', r"'\Ax'"), "can never match"),
        (GOOD.replace('boundary = "data"\n', ""), r"\(a\): boundary: missing"),
        (GOOD.replace('"data"', '"somewhere"'), r"\(a\): boundary: "),
        (GOOD + 'verdict = "Pass"\n', r"\(a\): verdict: Pass"),
        (GOOD + 'verdict = "Pass"\nsilent = true\n', r"\(a\): verdict: Pass"),
        (GOOD + 'verdict = "Skipped"\n', r"\(a\): verdict: Skipped"),
        (GOOD + "harmless = true\nsilent = true\n", "exclude each other"),
        (GOOD + "frame = true\nsilent = true\n", "frame excludes"),
        (GOOD + GOOD, r"signature 2 \(a\): id is used twice"),
        (GOOD.replace("[[signature]]", "[[signatures]]"), "unknown key signatures"),
        ("signature = 3\n", r"\[\[signature\]\]"),
        ("signature = [3]\n", r"signature 1 \(not a table\)"),
        ('[[signature]]\npattern = "x"\n', r"signature 1 \(no id\): id: "),
        ("[[signature\n", "not valid TOML"),
    ],
)
def test_bad_file_names_the_entry(text: str, message: str, tmp_path: Path) -> None:
    path = write(tmp_path, text)
    with pytest.raises(UserError, match=message) as caught:
        load_signatures(path)
    assert str(path) in caught.value.message
    assert caught.value.fix


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="absent"):
        load_signatures(tmp_path / "absent.toml")


def test_general_signatures_have_advice_and_name_no_loop() -> None:
    signatures = load_signatures(GENERAL)
    assert all(s.advice and s.seen_in for s in signatures)
    loops = ("tr" + "l", "ver" + "l", "nem" + "o", "nem" + "o_rl", "nem" + "o_gym")
    assert not set(re.findall(r"\w+", GENERAL.read_text().lower())) & set(loops)


def scan(tmp_path: Path, text: str, milestones: tuple[Milestone, ...], signatures: tuple[Signature, ...]) -> Scan:
    path = tmp_path / "run.log"
    path.write_text(text)
    result = Scan(milestones, signatures)
    for line in read_log(path):
        result.feed(line)
    result.finish()
    return result


def test_every_milestone_and_the_first_hit(tmp_path: Path) -> None:
    step = Milestone(id="step", pattern=r"^step:\d+", boundary=Boundary.OPTIMIZER)
    ready = Milestone(id="ready", pattern="ready", boundary=Boundary.ROLLOUT)
    noise = Signature(id="n", pattern=r"^warn\s+x$", harmless=True)
    text = "step:1 ready\n(Runner pid=1) step:2\nno step:3\nwarn\nx\nbar\rstep:4\nwarn x\nwarn x\n" + "filler\n" * 5000 + "step:5\n"
    found = scan(tmp_path, text, (step, ready), (noise,))
    assert [(r.line, r.id) for r in found.reached] == [(1, "step"), (1, "ready"), (2, "step"), (6, "step"), (5009, "step")]
    assert found.reached[2].process == "(Runner pid=1)"
    assert found.hits[noise.pattern] == (7, "warn x"), "a match across lines is none"


def test_also_and_unless(tmp_path: Path) -> None:
    pair = Signature(id="p", pattern="a", also=("b",), unless=("c",), boundary=Boundary.DATA)
    assert scan(tmp_path, "a\nb\n", (), (pair,)).counts(pair)
    assert not scan(tmp_path, "a\n", (), (pair,)).counts(pair)
    assert not scan(tmp_path, "a\nb\nc\n", (), (pair,)).counts(pair)


def test_bad_milestone_is_named() -> None:
    with pytest.raises(UserError, match="milestone m: pattern"):
        Scan((Milestone(id="m", pattern="(", boundary=Boundary.DATA),), ())
