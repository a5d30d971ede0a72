"""Cases of test_rollout.py: both sides of a refit in one process, without an engine. Needs torch and transformers."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from real.plain import Plain, raised
from seatrial.loops.trl.drive.served import ServedRollouts
from seatrial.probes.engines.transformers_cover import Covered
from seatrial.probes.engines.transformers_generator import Generator, serve
from seatrial.probes.engines.transformers_loop import Loop, Policy
from seatrial.probes.engines.transformers_remote import Remote


def table_of(module: Any) -> Any:
    module.register_buffer("table", torch.zeros(2), persistent=False)
    return module.table


def case_a_buffer_of_the_generator_that_moves_is_in_its_hashes() -> None:
    module = Plain(a=torch.zeros(3))
    table = table_of(module)
    covered = Covered(module)
    assert covered.map()["restored"]
    assert list(covered.hashes()) == ["a"]
    table.add_(1)
    assert covered.hashes()["table"].startswith("moved-")
    assert list(covered.cover()["moved"]) == ["table"]
    table.sub_(1)
    assert list(covered.hashes()) == ["a"]
    assert list(covered.cover()["moved"]) == ["table"], "it was not what it is, once"


def case_a_loader_that_raises_is_a_fact_before_the_run_ends(tmp: Path) -> None:
    class Failing(Generator):
        def load(self, pairs: Any) -> None:
            raise KeyError("no such weight")

    module = Plain(a=torch.zeros(3))
    generator = Failing(module, None)
    answers: list[Any] = []
    asked = [{"do": "map", "arguments": ()}]

    def receive() -> Any:
        if not asked:
            raise EOFError
        return asked.pop()

    serve(SimpleNamespace(recv=receive, send=answers.append), generator)  # type: ignore[arg-type]
    remote = Remote.__new__(Remote)
    remote.connection = SimpleNamespace(send=lambda _: None, poll=lambda _: True, recv=lambda: answers[0])  # type: ignore[assignment]
    policy = Policy.__new__(Policy)
    policy.model = Plain(a=torch.zeros(3))
    assert "no such weight" in str(raised(lambda: Loop(policy, remote, tmp, ("full",), None).run(1), RuntimeError))
    (row,) = [json.loads(line) for line in (tmp / "facts.jsonl").read_text().splitlines()]
    assert (row["fact"], row["where"]) == ("probe_error", "map")
    assert "no such weight" in row["error"]


def case_a_tensor_without_a_method_is_named(tmp: Path) -> None:
    verified = {"wrong": {"table": {"runtime": "table", "count": 0, "total": 0}}}
    engine = SimpleNamespace(methods={"w": "read"}, reference=tmp, facts=tmp / "facts.jsonl", ask=lambda *_, **__: verified)
    rollouts = ServedRollouts(engine, tmp, (), tmp / "metrics.jsonl", 0)  # type: ignore[arg-type]
    seen = rollouts.seen({"w": "1", "table": "moved-2"}, ["table"])
    assert (seen["methods"], seen["unproven"], list(seen["wrong"])) == ({"read": 1}, ["table"], ["table"])


def case_a_policy_without_a_buffer_cannot_have_the_fault() -> None:
    policy = Policy.__new__(Policy)
    policy.model = Plain(a=torch.zeros(3))
    assert "unsynced-buffer" in str(raised(policy.drift, ValueError))
    table = table_of(policy.model)
    table.add_(1)
    policy.drift()
    assert table.tolist() != [1, 1]
