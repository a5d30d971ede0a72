"""Placement of copies: GPUs are never shared, the widest component makes the allocation."""

from __future__ import annotations

from typing import Any

import pytest

from seatrial.core.errors import UserError
from seatrial.core.jobs import Component, Job
from seatrial.runtime.jobdir import layout


def part(name: str, **more: Any) -> Component:
    return Component(name=name, command=("true",), **more)


CLIENT = part("client", role="client")


def places(*parts: Component, gpus: int = 8) -> dict[str, tuple[int, int, tuple[int, ...]]]:
    """Group, node and GPUs of every copy."""
    return {step.name: (step.group, step.node, step.gpus) for step in layout(Job(name="job", components=parts), gpus).steps}


def test_copies_fill_a_node_before_they_take_the_next() -> None:
    assert places(part("server", replicas=3, gpus=4), CLIENT) == {
        "server.0": (0, 0, (0, 1, 2, 3)),
        "server.1": (0, 0, (4, 5, 6, 7)),
        "server.2": (0, 1, (0, 1, 2, 3)),
        "client.0": (0, 0, ()),
    }


def test_per_node_spreads_copies() -> None:
    found = places(part("server", replicas=3, gpus=1, per_node=1), part("agent", replicas=2, per_node=1), CLIENT)
    assert [found[f"server.{copy}"][1] for copy in range(3)] == [0, 1, 2]
    assert [found[f"agent.{copy}"][1] for copy in range(2)] == [0, 1]


def test_two_services_never_share_a_gpu() -> None:
    found = places(part("policy", gpus=6), part("judge", gpus=4), part("small", gpus=2), CLIENT)
    assert found["policy.0"] == (0, 0, (0, 1, 2, 3, 4, 5))
    assert found["judge.0"] == (0, 1, (0, 1, 2, 3))
    assert found["small.0"] == (0, 0, (6, 7))


def test_a_copy_that_spans_nodes_has_the_same_gpus_on_each() -> None:
    found = places(part("small", gpus=2), part("wide", nodes=2, tasks=2, gpus=4), CLIENT)
    assert found["wide.0"] == (0, 1, (0, 1, 2, 3))


def test_the_allocation_holds_what_the_fullest_node_needs() -> None:
    job = Job(name="job", components=(part("server", replicas=3, gpus=4, cpus=8), part("sandbox", cpus=2), CLIENT))
    (group,) = layout(job, 8).groups
    assert (group.nodes, group.gpus, group.cpus, group.memory_mb) == (2, 8, 19, None)


def test_memory_is_asked_for_when_every_component_says_how_much() -> None:
    parts = (part("server", memory_mb=1000, replicas=2), part("client", role="client", memory_mb=500))
    (group,) = layout(Job(name="job", components=parts), 8).groups
    assert group.memory_mb == 2500


def test_groups_are_allocations_of_their_own() -> None:
    job = Job(name="job", components=(part("server", group="gpu", gpus=8), part("client", role="client", group="cpu", cpus=4)))
    plan = layout(job, 8)
    assert [(group.name, group.nodes, group.gpus, group.cpus) for group in plan.groups] == [("gpu", 1, 8, 1), ("cpu", 1, 0, 4)]
    assert plan.spans_nodes
    assert [step.group for step in plan.steps] == [0, 1]


def test_one_node_needs_loopback_only() -> None:
    assert not layout(Job(name="job", components=(part("server", gpus=8), CLIENT)), 8).spans_nodes
    assert layout(Job(name="job", components=(part("server", gpus=8, replicas=2), CLIENT)), 8).spans_nodes


def test_the_client_stands_last_and_on_the_first_node() -> None:
    steps = layout(Job(name="job", components=(CLIENT, part("server", gpus=8, replicas=2))), 8).steps
    assert [step.name for step in steps] == ["server.0", "server.1", "client.0"]
    assert steps[-1].node == 0


def test_a_copy_larger_than_a_node_is_refused_with_both_numbers() -> None:
    with pytest.raises(UserError, match=r"component server: a copy needs 8 GPUs on one node, which has 4"):
        places(part("server", gpus=8), CLIENT, gpus=4)
