from collections.abc import Iterator

import pytest
import ray
from fleet.learner import Learner


@pytest.fixture(scope="session")
def cluster() -> Iterator[None]:
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=100_000_000)
    yield
    ray.shutdown()


@pytest.fixture(scope="session")
def shared_learner(cluster: None) -> object:  # noqa: ARG001
    return Learner.remote()


@pytest.fixture
def learner(shared_learner: object) -> object:
    ray.get(shared_learner.reset.remote(), timeout=30)
    return shared_learner
