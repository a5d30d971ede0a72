"""Several histories become one line in which every repository keeps its own order."""

from __future__ import annotations

import random

import pytest

from seatrial.bisect.bisect_records import History, Pin, Point, Repo
from seatrial.bisect.commit_history import aligned
from seatrial.core.errors import UserError


def line(name: str, times: list[int], place: str = ".") -> tuple[Repo, History]:
    """A history in a row; commit i of repository `a` is `a0`, `a1`, ..."""
    repo = Repo(name=name, path=f"/{name}", good=f"{name}0", bad=f"{name}{len(times) - 1}", place=place)
    points = [
        Point(
            repo=name,
            commit=f"{name}{index}",
            subject=f"{name} {index}",
            time=time,
            parents=(index - 1,) if index else (),
            pins=(Pin(repo=name, commit=f"{name}{index}", place=place),),
            contents=f"tree-{name}{index}",
        )
        for index, time in enumerate(times)
    ]
    return repo, History(tuple(points))


def states(history: History) -> list[str]:
    return [" ".join(pin.commit for pin in point.pins) for point in history.points]


def test_the_newest_of_each_at_every_time() -> None:
    found = aligned([line("a", [10, 20, 40]), line("b", [15, 30, 50], place="third/b")])
    assert states(found) == ["a0 b0", "a1 b0", "a1 b1", "a2 b1", "a2 b2"]
    assert [point.commit for point in found.points] == ["a0", "a1", "b1", "a2", "b2"]
    assert [point.repo for point in found.points] == ["a", "a", "b", "a", "b"]
    assert [point.parents for point in found.points] == [(), (0,), (1,), (2,), (3,)]
    assert found.points[2].subject == "b 1"
    assert found.points[2].time == 30
    assert [pin.place for pin in found.points[2].pins] == [".", "third/b"]
    assert found.points[2].contents == "tree-a1+tree-b1"
    assert len(found.by_id) == 5


def test_the_main_repository_moves_first_at_equal_times() -> None:
    assert states(aligned([line("b", [1, 2]), line("a", [1, 2])])) == ["b0 a0", "b1 a0", "b1 a1"]


def test_a_wrong_clock_does_not_change_the_order_of_a_repository() -> None:
    found = aligned([line("a", [10, 90, 20, 30]), line("b", [0, 50, 95])])
    assert states(found) == ["a0 b0", "a0 b1", "a1 b1", "a2 b1", "a3 b1", "a3 b2"]


def test_ranges_that_do_not_overlap() -> None:
    assert states(aligned([line("a", [100, 110]), line("b", [1, 2])])) == ["a0 b0", "a0 b1", "a1 b1"]


def test_one_repository_stays_as_it_is() -> None:
    only = line("a", [1, 2, 3])
    assert aligned([only]) == only[1]


@pytest.mark.parametrize("seed", range(5))
def test_any_clocks(seed: int) -> None:
    chance = random.Random(seed)
    lines = [line(name, [chance.randrange(50) for _ in range(chance.randrange(2, 9))]) for name in "abc"]
    found = aligned(lines)
    assert [pin.commit for pin in found.points[0].pins] == [repo.good for repo, _ in lines]
    assert [pin.commit for pin in found.points[-1].pins] == [repo.bad for repo, _ in lines]
    assert len(found.points) == 1 + sum(len(history.points) - 1 for _, history in lines)
    for before, after in zip(found.points, found.points[1:], strict=False):
        moved = [new for old, new in zip(before.pins, after.pins, strict=True) if old != new]
        assert [(pin.repo, pin.commit) for pin in moved] == [(after.repo, after.commit)]
    for repo, history in lines:
        own = [point.commit for point in found.points[1:] if point.repo == repo.name]
        assert own == [point.commit for point in history.points[1:]]


def test_a_line_beside_its_good_end() -> None:
    repo, history = line("a", [1, 2, 3])
    beside = History((history.points[0], history.points[1].model_copy(update={"parents": ()}), history.points[2]))
    assert aligned([(repo, beside)]) == history


def test_side_branches_are_refused() -> None:
    repo, history = line("a", [1, 2, 3])
    branched = History((*history.points[:2], history.points[2].model_copy(update={"parents": (0,)})))
    with pytest.raises(ValueError, match="not a line at a2"):
        aligned([(repo, branched), line("b", [1, 2])])


def test_names_are_unique() -> None:
    with pytest.raises(UserError, match="two repositories have the name a"):
        aligned([line("a", [1, 2]), line("a", [1, 2])])
