import pytest
import ray
from fleet import tasks

pytestmark = pytest.mark.usefixtures("cluster")


def test_a_summary():
    assert ray.get(tasks.summarise.remote([1.0, 3.0])) == {"mean": 2.0, "spread": 1.0}


def test_a_summary_of_nothing():
    assert ray.get(tasks.summarise.remote([]))["mean"] == 0.0


def test_the_longest_chain():
    assert ray.get(tasks.longest.remote([6, 7, 8])) == 7


def test_tasks_within_tasks():
    assert ray.get(tasks.nested.remote([1.0, 3.0, 5.0, 7.0])) == 80.0


@pytest.mark.parametrize(("kind", "error"), [("value", ValueError), ("other", KeyError)])
def test_a_task_that_fails(kind, error):
    with pytest.raises(error):
        ray.get(tasks.fails.remote(kind))
