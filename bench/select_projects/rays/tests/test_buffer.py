import pytest
import ray
from fleet.buffer import Buffer

pytestmark = pytest.mark.usefixtures("cluster")


@pytest.fixture(scope="module")
def buffer():
    return Buffer.remote(3)


def test_an_empty_buffer_has_no_oldest(buffer):
    with pytest.raises(LookupError):
        ray.get(buffer.oldest.remote())


def test_the_buffer_keeps_its_size(buffer):
    assert ray.get(buffer.add.remote(1, 2, 3, 4)) == 3


def test_the_newest_are_last():
    own = Buffer.remote(2)
    ray.get(own.add.remote(5, 6, 7))
    assert ray.get(own.newest.remote(2)) == [6, 7]
    assert ray.get(own.oldest.remote()) == 6
