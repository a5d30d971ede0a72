import pytest
import ray
from fleet.crew import Crew

pytestmark = pytest.mark.usefixtures("cluster")


def test_members_greet():
    crew = Crew.remote()
    assert ray.get(crew.roll_call.remote()) == ["good day Ant", "good day Bee"]
