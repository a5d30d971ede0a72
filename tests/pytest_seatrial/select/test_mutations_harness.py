"""The pure parts of bench/select_mutations.py: mutators and what counts as missed."""

from __future__ import annotations

import ast
import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

BENCH = Path(__file__).resolve().parents[3] / "bench"
SOURCE = '''"""Prose."""

LIMIT = 3


def small(value, name="a"):
    """More prose."""
    if value < LIMIT:
        return value + 1
    total = f"{value + 1} and {name}"
    raise ValueError(
        total
    )
'''


def part(name: str) -> Any:
    if str(BENCH) not in sys.path:
        sys.path.append(str(BENCH))
    return importlib.import_module(f"select_projects.{name}")


def after(kind: str, source: str = SOURCE) -> list[str]:
    return [one.after.strip() for one in part("mutators").mutations(source) if one.kind == kind]


@pytest.mark.parametrize(
    ("kind", "line"),
    [
        ("comparison", "if value >= LIMIT:"),
        ("negate", "if not (value < LIMIT):"),
        ("arithmetic", "return value - 1"),
        ("return None", "return None"),
        ("constant", "LIMIT = 4"),
        ("constant", "def small(value, name='ax'):"),
        ("delete", "pass"),
        ("raise", 'raise RuntimeError("mutated")'),
    ],
)
def test_each_mutator_changes_its_line(kind: str, line: str) -> None:
    assert line in after(kind)


def test_every_mutation_is_one_line_parses_and_means_something_else() -> None:
    for one in part("mutators").mutations(SOURCE):
        text = one.applied(SOURCE)
        differing = [
            number for number, pair in enumerate(zip(SOURCE.splitlines(), text.splitlines(), strict=True), 1) if pair[0] != pair[1]
        ]
        assert differing == [one.line]
        assert ast.dump(ast.parse(text)) != ast.dump(ast.parse(SOURCE))


def test_prose_and_what_spans_lines_are_left_alone() -> None:
    lines = {one.line for one in part("mutators").mutations(SOURCE)}
    assert lines == {3, 6, 8, 9, 10}
    assert all(
        line in ("pass", 'raise RuntimeError("mutated")')
        for line in [one.after.strip() for one in part("mutators").mutations(SOURCE) if one.line == 10]
    )


def test_words_as_operators_are_turned_round() -> None:
    assert after("comparison", "x = a not in b\n") == ["x = a in b"]
    assert after("comparison", "x = a is None\n") == ["x = a is not None"]
    assert after("comparison", "x = (inner) in b\n") == ["x = (inner) not in b"]


def test_letters_beyond_ascii_do_not_shift_the_edit() -> None:
    assert after("arithmetic", 'x = "ä" + y\n') == ['x = "ä" - y']


def test_a_mutation_is_not_put_on_another_line() -> None:
    one = part("mutators").mutations("x = 1\n")[0]
    with pytest.raises(ValueError, match="not the line that was drawn"):
        one.applied("y = 1\n")


def test_a_mutation_keeps_the_line_ending() -> None:
    one = part("mutators").mutations("x = 1\r\ny = z\r\n")[0]
    assert one.applied("x = 1\r\ny = z\r\n").endswith("\r\ny = z\r\n")


def test_data_lines_change_by_one_character() -> None:
    found = part("mutators").data_mutations("# note\nrate: 0.5\nname: az\n\n")
    assert [one.after for one in found] == ["rate: 0.6", "name: aa"]


def test_the_draw_is_the_same_for_a_seed_and_has_no_mutation_twice() -> None:
    mutators = part("mutators")
    files = {"m.py": mutators.mutations(SOURCE, "m.py")}
    first, again = (mutators.draw([(0.7, files), (0.3, {})], 8, 5) for _ in range(2))
    assert first == again
    assert len({one.key for one in first}) == 8
    assert mutators.draw([(1.0, files)], 8, 6) != first


def clean() -> Any:
    run = {
        "outcomes": {"t.py::a": "passed", "t.py::b": "passed", "u.py::c": "passed"},
        "seconds": {"t.py::a": 1, "t.py::b": 1, "u.py::c": 2},
    }
    return part("judging").baseline([run, run])


def tally(selected: list[str], full: dict[str, Any], **row: Any) -> Any:
    judging = part("judging")
    found, base = judging.Tally("x"), clean()
    whole = {"aborted": False, "broken": [], **full}
    differs = judging.changed(base, whole["outcomes"], whole["broken"], whole["aborted"])
    judging.add(found, base, "m", differs, whole, {"selected": selected, "broken": [], "aborted": False, **row})
    return found


def test_a_changed_test_that_is_not_selected_is_missed() -> None:
    got = tally(["t.py::a"], {"outcomes": {"t.py::a": "failed", "t.py::b": "timeout", "u.py::c": "passed"}})
    assert (got.changed, got.missed, got.recall) == (2, 1, 0.5)
    assert got.misses == [("m", ["t.py::b (passed → timeout)"])]


def test_what_skips_itself_on_the_clean_tree_counts_as_a_test_and_not_as_one_that_passes() -> None:
    judging, found = part("judging"), part("judging").Tally("x")
    run = {"outcomes": {"a": "passed", "b": "passed", "c": "skipped", "d": "skipped"}, "seconds": {}}
    judging.add(found, judging.baseline([run]), "m", {}, {"aborted": False}, {"selected": ["a", "c", "d"], "broken": [], "aborted": False})
    assert (found.tests, found.passing) == (0.75, 0.5)


def test_flaky_tests_are_left_out() -> None:
    judging = part("judging")
    base = judging.baseline([{"outcomes": {"a": "passed"}, "seconds": {}}, {"outcomes": {"a": "failed"}, "seconds": {}}])
    assert base.flaky == {"a"}
    assert judging.changed(base, {"a": "failed"}, [], False) == {}


def test_tests_of_a_file_that_cannot_be_collected_are_seen_only_by_a_session_that_stumbles_too() -> None:
    full = {"outcomes": {"u.py::c": "passed"}, "broken": ["t.py"]}
    assert tally([], full, broken=["t.py"]).missed == 0
    assert tally([], full).missed == 2


def test_a_test_that_is_gone_can_be_missed_by_nobody() -> None:
    assert tally([], {"outcomes": {"t.py::a": "passed", "u.py::c": "passed"}}).changed == 0


def test_a_new_test_has_to_be_selected() -> None:
    full = {"outcomes": {"t.py::a": "passed", "t.py::b": "passed", "u.py::c": "passed", "u.py::new": "passed"}}
    assert tally([], full).missed == 1
    assert tally(["u.py::new"], full).missed == 0


def test_a_selector_that_crashes_saw_nothing_unless_the_suite_cannot_start_either() -> None:
    one = tally([], {"outcomes": {"t.py::a": "failed", "t.py::b": "passed", "u.py::c": "passed"}}, aborted=True)
    assert (one.missed, one.crashes) == (1, ["m"])
    both = tally([], {"outcomes": {}, "aborted": True}, aborted=True)
    assert (both.changed, both.missed, both.crashes) == (3, 0, [])


def test_share_and_time_come_from_the_clean_tree() -> None:
    got = tally(["u.py::c"], {"outcomes": dict(clean().outcomes)})
    assert (round(got.tests, 2), got.seconds) == (0.33, 0.5)
