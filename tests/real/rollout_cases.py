"""Cases of test_rollout.py: both sides of a refit in one process, without an engine. Needs torch and transformers."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from seatrial.instruments.engines.transformers_generator import Covered, Generator, Remote, serve
from seatrial.instruments.engines.transformers_loop import Loop, TrainedPolicy
from seatrial.instruments.refit.refit_driver import RefitDriver
from tests.real.plain import Plain, raised


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
    policy = TrainedPolicy.__new__(TrainedPolicy)
    policy.model = Plain(a=torch.zeros(3))
    assert "no such weight" in str(raised(lambda: Loop(policy, remote, tmp, ("full",), None).run(1), RuntimeError))
    (row,) = [json.loads(line) for line in (tmp / "facts.jsonl").read_text().splitlines()]
    assert (row["fact"], row["where"]) == ("probe_error", "map")
    assert "no such weight" in row["error"]


class InProcess:
    """A generator in this process."""

    def __init__(self, module: Any, place: Path, fault: str | None = None) -> None:
        self.generator, self.payload = Generator(module, fault), place / "payload"

    def expect(self, export: dict[str, Any]) -> None: ...

    def close(self) -> None: ...

    def ask(self, do: str, *arguments: Any) -> Any:
        return self.generator.answer({"do": do, "arguments": arguments})


def facts_of(tmp: Path, fact: str) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (tmp / "facts.jsonl").read_text().splitlines()]
    return [row for row in rows if row["fact"] == fact]


class Layers(torch.nn.Module):  # type: ignore[misc]
    """Two layers with one matrix each."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.ModuleDict({"q_proj": torch.nn.Linear(3, 2, bias=False)}) for _ in range(2))
        for index, value in enumerate(self.parameters()):
            value.requires_grad_(False).copy_(torch.arange(6.0).view(2, 3) + 10 * index)


def driven(tmp: Path, fault: str | None, refits: int) -> tuple[RefitDriver, list[str | None]]:
    """Refits of a plain module, with other weights each time; why each was refused."""
    policy, generator = Layers(), InProcess(Layers(), tmp, fault)
    driver = RefitDriver(generator, tmp / "facts.jsonl", dict(policy.named_parameters()), ("full", "packed", "sparse"), fault)
    driver.begin(dict(policy.named_parameters()))
    said = []
    for step in range(refits):
        _, refused = driver.refit(step, policy, {name: value.detach() for name, value in policy.named_parameters()}, lambda: None)
        said.append(refused.reason if refused else None)
        for value in policy.parameters():
            value.data.add_(1)
    driver.end()
    return driver, said


def case_a_tensor_without_a_method_is_named(tmp: Path) -> None:
    module = Plain(a=torch.zeros(3))
    table, generator = table_of(module), InProcess(module, tmp)
    driver = RefitDriver(generator, tmp / "facts.jsonl", {"a": torch.zeros(3)}, ("full",), None)
    driver.begin({"a": torch.zeros(3)})
    table.add_(1)
    row, refused = driver.refit(0, Plain(a=torch.zeros(3)), {"a": torch.zeros(3)}, lambda: None)
    assert refused is None
    assert (row["methods"], row["unproven"], list(row["wrong"])) == ({"read": 1}, ["table"], ["table"])
    assert (row["wrong_names"], row["committed"]) == (["table"], False)


def case_a_clean_run_commits_every_refit(tmp: Path) -> None:
    driver, said = driven(tmp, None, 5)
    rows = facts_of(tmp, "refit")
    assert said == [None] * 5
    assert [row["committed"] for row in rows] == [True] * 5
    assert [(row["transport"], row["kind"]) for row in rows[:3]] == [
        ("full", "overwrite"),
        ("packed", "overwrite"),
        ("sparse", "difference"),
    ]
    assert [row["version"] for row in rows] == [1, 2, 3, 4, 5]
    assert [row["hashes"] for row in facts_of(tmp, "hashes") if row["side"] == "sent"] == [
        row["hashes"] for row in facts_of(tmp, "hashes") if row["side"] == "live"
    ]
    assert driver.producer.acknowledged == rows[-1]["produced"]
    assert len(facts_of(tmp, "coverage")) == 1


def case_what_was_read_back_decides_over_the_base_of_the_next_delta(tmp: Path) -> None:
    """The consumer says that all is well; the live weights say that it is not."""
    _, said = driven(tmp, "skip-refit", 4)
    rows = facts_of(tmp, "refit")
    assert said == [None] * 4
    assert [row["committed"] for row in rows] == [True, False, False, False]
    assert [row["transport"] for row in rows] == ["full", "packed", "full", "full"], "after a miss weights are sent in full"
    assert [len(row["wrong_names"]) for row in rows] == [0, 2, 2, 2]


def case_refused_payloads_leave_a_fact_and_no_bit(tmp: Path) -> None:
    for fault, reason in (("truncated-payload", "truncated"), ("replayed-payload", "replay"), ("wrong-base", "wrong-base")):
        place = tmp / fault
        place.mkdir()
        _, said = driven(place, fault, 4)
        rows = facts_of(place, "refit")
        assert said == [None, None, reason, None], fault
        assert [row["committed"] for row in rows] == [True, True, False, True], fault
        assert f"refused ({reason})" in rows[2]["refused"]
        assert (rows[2]["wrong_names"], rows[3]["transport"]) == ([], "full")
        assert rows[2]["touched_names"] == (1 if fault == "wrong-base" else 0)


def case_a_policy_without_a_buffer_cannot_have_the_fault() -> None:
    policy = TrainedPolicy.__new__(TrainedPolicy)
    policy.model = Plain(a=torch.zeros(3))
    assert "unsynced-buffer" in str(raised(policy.drift, ValueError))
    table = table_of(policy.model)
    table.add_(1)
    policy.drift()
    assert table.tolist() != [1, 1]
