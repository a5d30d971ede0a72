"""What the TOML files of every loop hold: all of it loads, parses and compiles, and a typo is an error that names it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from seatrial.core.errors import UserError
from seatrial.core.loop import Loop, read_tables
from seatrial.core.specs import Concern, Level, Milestone, Signature, matches
from seatrial.core.verdict import Verdict
from seatrial.loops import HERE, get_loop, names
from seatrial.metrics.checks import parse
from seatrial.runtime.venvs import read_lock
from seatrial.triage.signatures import compile_pattern, load_signatures

LOOPS = [get_loop(name) for name in names()]
LEVELS = [(loop, level) for loop in LOOPS for level in loop.levels()]


def test_every_loop_is_found_by_its_name() -> None:
    assert names()
    assert [loop.name for loop in LOOPS] == list(names())
    assert all(loop.title and loop.default_model for loop in LOOPS)


def test_an_unknown_loop_lists_the_known_ones_and_the_nearest() -> None:
    with pytest.raises(UserError, match=r"unknown loop 'tlr'; known: .*trl") as caught:
        get_loop("tlr")
    assert caught.value.fix == "use 'trl'"
    with pytest.raises(UserError, match="known"):
        get_loop("../model")


@pytest.mark.parametrize(("loop", "level"), LEVELS, ids=lambda item: getattr(item, "name", None))
def test_every_level_is_whole(loop: Loop, level: Level) -> None:
    assert level.proves
    assert re.fullmatch(r"[a-z][a-z0-9-]*", level.name)
    rows = [row for row in loop.concerns() if level.number in row.levels]
    assert level.required_when or rows
    for glob in (*level.required_when, *(glob for row in rows for glob in row.globs)):
        assert not matches("", glob)
    for check in level.checks:
        parse(check.expr)
        assert check.why
    if not level.skip:
        assert level.checks or level.name in ("refit", "architecture"), "only where each checkout has other runs: their scripts assert"
        assert level.steps
        assert level.cost.minutes
        assert level.claims_not
        assert level.stall_minutes < level.deadline_minutes


def test_levels_are_numbered_from_zero_with_distinct_names_and_a_default_smoke() -> None:
    for loop in LOOPS:
        assert [level.number for level in loop.levels()] == list(range(len(loop.levels())))
        assert len({level.name for level in loop.levels()}) == len(loop.levels())
        assert loop.levels()[0].default


def test_every_pattern_compiles_and_ids_are_distinct() -> None:
    for loop in LOOPS:
        for milestone in loop.milestones():
            compile_pattern(milestone.id, milestone.pattern)
            assert milestone.verdict in (Verdict.FAIL, Verdict.BLOCKED)
        assert len({milestone.id for milestone in loop.milestones()}) == len(loop.milestones())
    for path in (*HERE.glob("*/signatures.toml"), HERE.parent / "triage" / "signatures.toml"):
        assert load_signatures(path)  # stricter than the loop's own reading: patterns, boundaries, verdicts, ids


def test_milestones_turn_from_blocked_to_fail_once() -> None:
    for loop in LOOPS:
        verdicts = [milestone.verdict for milestone in loop.milestones()]
        assert verdicts == sorted(verdicts, key=[Verdict.BLOCKED, Verdict.FAIL].index)


def test_every_lock_can_be_read_and_instruments_exist() -> None:
    for loop in LOOPS:
        assert all(read_lock(lock).pins for lock in loop.environments().values())
        assert loop.environments() or loop.environment is None


@pytest.mark.parametrize(
    ("table", "kind", "text", "message"),
    [
        ("signature", Signature, '[[signature]]\nid = "a"\npatern = "x"', r"signature 1 \(a\): (pattern: Field required|patern: Extra)"),
        ("signature", Signature, '[[signature]]\nid = "a"\npattern = "x"\nboundary = "disk"', r"signature 1 \(a\): boundary: Input should"),
        ("milestone", Milestone, '[[milestone]]\nid = "b"\npattern = "x"', r"milestone 1 \(b\): boundary: Field required"),
        ("milestone", Milestone, '[[milestone]]\nid = "b"\npattern = 3\nboundary = "data"', r"milestone 1 \(b\): pattern: "),
        ("level", Level, '[[level]]\nname = "c"\nnumber = "x"', r"level 1 \(c\): "),
        ("concern", Concern, '[[concern]]\nname = "d"\nglobs = ["*"]', r"concern 1 \(d\): .*are those of one package"),
        ("level", Level, '[[levle]]\nname = "c"', r"unknown key 'levle'; only \[\[level\]\] entries are read"),
        ("level", Level, "[[level]]", r"level 1 \(\?\): number: Field required"),
        ("level", Level, "[level]\nname = 'c'", r"unknown key 'level'; only \[\[level\]\] entries are read"),
        ("level", Level, "level = [1]", r"unknown key 'level'; only \[\[level\]\] entries are read"),
        ("level", Level, "\n[[level\nx", r"known\.toml: .*line 2"),
    ],
)
def test_a_typo_is_an_error_that_names_file_and_entry(tmp_path: Path, table: str, kind: type, text: str, message: str) -> None:
    path = tmp_path / "known.toml"
    path.write_text(text)
    with pytest.raises(UserError, match=message) as caught:
        read_tables(path, table, kind)
    assert str(path) in caught.value.message


def test_a_typo_inside_a_check_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "levels.toml"
    text = Path(HERE / "trl" / "levels.toml").read_text()
    path.write_text(text.replace('why = "losses', 'wy = "losses', 1))
    with pytest.raises(UserError, match=r"level 1 \(smoke\): checks\.0\.w"):
        read_tables(path, "level", Level)


def test_an_absent_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"none\.toml"):
        read_tables(tmp_path / "none.toml", "level", Level)
