"""Choosing levels: by number, and by what a diff requires."""

from __future__ import annotations

import pytest

from seatrial.core.errors import UserError
from seatrial.core.loop import Loop
from seatrial.evidence.changes import ChangedLine
from seatrial.loops import get_loop
from seatrial.trial.plan import Diff, make_plan, parse_levels, requested, required, totals
from tests.trial.fake import FakeLoop

TRL = get_loop("trl")


@pytest.fixture
def loop() -> Loop:
    return FakeLoop()


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("0", (0,)),
        ("0,1,4-6", (0, 1, 4, 5, 6)),
        (" 2 , 1 ", (2, 1)),
        ("0 - 2", (0, 1, 2)),
        ("1,1,0-1", (1, 0)),
        ("all", (0, 1, 2, 3, 4, 5, 6)),
        (" all ", (0, 1, 2, 3, 4, 5, 6)),
        ("3-3", (3,)),
    ],
)
def test_levels_are_numbers_and_ranges(text: str, numbers: tuple[int, ...]) -> None:
    assert parse_levels(text, TRL) == numbers


@pytest.mark.parametrize("text", ["", " ", ",", "0,", "x", "1.5", "-1", "0--1", "0-", "ALL", "0;1", "¹"])
def test_what_is_no_level_is_an_error(text: str) -> None:
    with pytest.raises(UserError, match="is not a level") as caught:
        parse_levels(text, TRL)
    assert "0,1,6" in caught.value.fix


def test_an_unknown_level_lists_the_known_ones() -> None:
    with pytest.raises(UserError, match=r"unknown level 7: TRL has 0 GRPO smoke; 1 LoRA") as caught:
        parse_levels("0,5-7", TRL)
    assert caught.value.fix == "choose from 0, 1, 2, 3, 4, 5, 6"


def test_a_range_that_runs_backwards_says_how_to_turn_it() -> None:
    with pytest.raises(UserError, match="'6-4' runs backwards") as caught:
        parse_levels("0,6-4", TRL)
    assert caught.value.fix == "use 4-6"


def test_levels_run_in_the_order_of_the_ladder_whatever_was_asked(loop: Loop) -> None:
    assert [level.number for level in requested(loop, (2, 0))] == [0, 2]


def test_without_numbers_the_defaults_are_taken(loop: Loop) -> None:
    assert [(level.number, level.reasons) for level in requested(loop, None)] == [(0, ("default level",)), (1, ("default level",))]


def test_a_level_that_cannot_run_yet_stays_in_the_plan_with_its_reason(loop: Loop) -> None:
    (level,) = requested(loop, (3,))
    assert level.skip == "not part of this release"


def said(text: str, path: str = "smoke.py") -> tuple[ChangedLine, ...]:
    return (ChangedLine(path, 7, text),)


def numbers(loop: Loop, *diffs: Diff) -> list[int]:
    return [level.number for level in required(loop, diffs).levels]


def test_a_path_requires_the_levels_that_name_it_and_the_smoke_first(loop: Loop) -> None:
    found = required(loop, [Diff("r", "b", ("src/third.py",))])
    levels, unmatched = found.levels, found.unmatched
    assert [level.number for level in levels] == [0, 2]
    assert levels[0].reasons == ("the smoke comes first",)
    assert levels[1].reasons == ("r: src/third.py matches **/third*",)
    assert unmatched == ()


def test_both_names_of_a_renamed_file_count(loop: Loop) -> None:
    assert numbers(loop, Diff("r", "b", ("second.py", "third.py"))) == [0, 1, 2]


def test_a_word_in_a_changed_line_requires_its_level(loop: Loop) -> None:
    levels = required(loop, [Diff("r", "b", ("smoke.py",), said("x = WORD_third(1)"))]).levels
    assert [level.number for level in levels] == [0, 2]
    assert levels[1].reasons == ("r: smoke.py:7 says 'word_third'",)


def test_a_word_inside_another_word_does_not_count(loop: Loop) -> None:
    assert numbers(loop, Diff("r", "b", ("smoke.py",), said("sword_third"))) == [0]


def test_a_path_that_no_level_names_fans_out_to_the_defaults(loop: Loop) -> None:
    found = required(loop, [Diff("r", "b", ("third.py", "setup.cfg"))])
    levels, unmatched = found.levels, found.unmatched
    assert [level.number for level in levels] == [0, 1, 2]
    assert unmatched == ("r: setup.cfg",)
    assert "1 changed paths match no level (r: setup.cfg)" in levels[1].reasons[0]


@pytest.mark.parametrize("diffs", [[], [Diff("r", "b", ())]])
def test_an_empty_diff_fans_out_to_the_defaults(loop: Loop, diffs: list[Diff]) -> None:
    found = required(loop, diffs)
    levels, unmatched = found.levels, found.unmatched
    assert [level.number for level in levels] == [0, 1]
    assert "no changed path was found" in levels[0].reasons[0]
    assert unmatched == ()


def test_a_diff_that_was_not_read_whole_fans_out(loop: Loop) -> None:
    found = required(loop, [Diff("r", "b", ("third.py",), (), complete=False)])
    levels, unmatched = found.levels, found.unmatched
    assert [level.number for level in levels] == [0, 1, 2]
    assert unmatched == ("r: lines beyond what is read of a diff",)


def test_several_repositories_add_up(loop: Loop) -> None:
    assert numbers(loop, Diff("a", "b", ("second.py",)), Diff("c", "b", ("third.py",))) == [0, 1, 2]


def test_many_reasons_are_cut_short(loop: Loop) -> None:
    levels = required(loop, [Diff("r", "b", tuple(f"third{index}.py" for index in range(9)))]).levels
    assert len(levels[1].reasons) == 5
    assert levels[1].reasons[-1] == "5 more such reasons"


def test_no_diff_of_the_real_ladder_plans_nothing() -> None:
    for path in ("README.md", "src/x.cu", "a b/ü.py", "src/transformers/models/qwen2/modeling_qwen2.py", "peft/tuners/lora/layer.py"):
        assert 0 in numbers(TRL, Diff("r", "b", (path,)))


def test_the_plan_carries_everything(loop: Loop) -> None:
    plan = make_plan(loop, requested(loop, None), None, arguments=("--a", "b"))
    assert (plan.loop, plan.model, plan.arguments) == ("fake", "tiny", ("--a", "b"))
    assert make_plan(loop, (), "/my/model").model == "/my/model"


def test_costs_add_up_without_what_is_skipped() -> None:
    first, second, third = requested(TRL, (0, 1, 3))
    whole = totals(make_plan(TRL, (first, second, third.model_copy(update={"skip": "not here"})), None))
    costs = {level.number: level.cost for level in TRL.levels()}
    assert whole["minutes"] == pytest.approx(costs[0].minutes + costs[1].minutes)
    assert whole["disk_mb"] == costs[0].disk_mb + costs[1].disk_mb
    assert whole["memory_mb"] == max(costs[0].memory_mb, costs[1].memory_mb)
    assert totals(make_plan(TRL, (), None))["gpus"] == 0
