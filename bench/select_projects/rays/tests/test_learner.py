import pytest
import ray


def test_a_step_goes_against_the_gradient(learner):
    assert ray.get(learner.learn.remote([1.0])) == -0.5


def test_momentum_adds_up(learner):
    assert ray.get(learner.learn.remote([1.0, 1.0])) == pytest.approx(-1.45)


def test_a_large_gradient_is_clipped(learner):
    assert ray.get(learner.learn.remote([100.0])) == -2.0


def test_status_names_the_learner(learner):
    ray.get(learner.learn.remote([0.0, 0.0]))
    assert ray.get(learner.status.remote()) == {"weight": 0.0, "seen": 2, "name": "learner-4"}
