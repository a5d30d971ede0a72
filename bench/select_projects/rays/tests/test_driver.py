import pytest
from fleet import VERSION, prices, registry, schedule
from fleet.config import limits


def test_the_version():
    assert VERSION == "1.0"


def test_warm_up_and_decay():
    assert schedule.rate(1) == 0.5
    assert schedule.rate(6) == 0.5


def test_all_steps():
    assert len(schedule.steps()) == 11
    assert schedule.steps()[-1] == 0.0


def test_a_price():
    assert prices.price("Apple") == 3


def test_a_total():
    assert prices.total(["bread", "cheese"]) == 16


def test_limits():
    assert limits() == (1, 9)


@pytest.mark.parametrize(("name", "result"), [("twice", 8), ("power", 16), ("shift", 5)])
def test_plugins_are_found_by_name(name, result):
    assert registry.plugin(name)(4) == result


def test_a_chain():
    assert registry.chain(["double", "square", "shift"], 3) == 9
