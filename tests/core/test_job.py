"""Jobs as data: what is refused, and with which words."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from seatrial.core.jobs import After, Batch, Component, Ending, Job, Ready, Result, UnitState, UnitStatus
from seatrial.core.verdict import Verdict

CLIENT: dict[str, Any] = {"name": "client", "role": "client", "command": ["true"]}
SERVER: dict[str, Any] = {"name": "server", "command": ["serve", "{port}"], "port": True, "ready": {}}


def job(*parts: dict[str, Any], **more: Any) -> Job:
    return Job.model_validate({"name": "job", "components": list(parts), **more})


@pytest.mark.parametrize(
    ("parts", "more", "words"),
    [
        ([SERVER], {}, "exactly one client; this one has 0: none"),
        ([CLIENT, {**CLIENT, "name": "other"}], {}, "exactly one client; this one has 2: client, other"),
        ([CLIENT, {**SERVER, "name": "client"}], {}, "two components or servers are called client"),
        ([{**CLIENT, "replicas": 2}], {}, "the client is one"),
        ([CLIENT, {**SERVER, "port": False}], {}, "ready needs port = true"),
        ([CLIENT, {**SERVER, "container": "a", "image": "b"}], {}, "exclude each other"),
        ([CLIENT, {**SERVER, "nodes": 2}], {}, "tasks = 1 cannot be spread evenly over nodes = 2"),
        ([CLIENT, {**SERVER, "group": "gpu"}], {"array": 2}, "Slurm refuses arrays of heterogeneous jobs"),
        ([CLIENT], {"minutes": 2, "warn_s": 120}, "warn_s = 120 leaves nothing of minutes = 2"),
        ([CLIENT], {"parallel": 2}, "parallel needs array"),
        ([{**CLIENT, "command": ["{url:servr}"]}, SERVER], {}, "names no service; known: client, server"),
        ([{**CLIENT, "command": ["{url:quiet}"]}, {"name": "quiet", "command": ["x"]}], {}, "quiet has no port = true"),
        ([{**CLIENT, "environment": {"HF_TOKEN": "x"}}], {}, "HF_TOKEN looks like a secret"),
        ([{**CLIENT, "environment": {"a b": "x"}}], {}, "is not the name of a variable"),
        ([{**CLIENT, "mounts": ["/a"]}], {}, "mounts"),
        ([{**CLIENT, "command": []}], {}, "command"),
        ([{**CLIENT, "gpu": 1}], {}, "gpu"),
        ([{**CLIENT, "name": "Client; rm"}], {}, "name"),
        ([{**CLIENT, "command": ["--port", "{port}"]}], {}, "{port} needs port = true"),
        ([{**CLIENT, "environment": {"A": "{head_port}"}}], {}, "{head_port} needs port = true"),
        ([{**CLIENT, "command": ["{prot}"], "port": True}], {}, "{prot} is no placeholder; did you mean {port}?"),
        ([{**CLIENT, "command": ["{indx}"]}], {}, "did you mean {index}?"),
        ([CLIENT], {"servers": {"judge": "file:///etc"}}, "judge"),
        ([CLIENT], {"after_ids": ["1; rm"]}, "after_ids"),
    ],
)
def test_what_cannot_run_is_refused(parts: list[dict[str, Any]], more: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError) as error:
        job(*parts, **more)
    assert words in str(error.value)


def test_ordinary_variables_are_no_secrets() -> None:
    plain = {"MAX_TOKENS": "5", "TOKENIZERS_PARALLELISM": "false", "SOME_KEY": "short"}
    assert job({**CLIENT, "environment": plain}).client.environment == plain


@pytest.mark.parametrize(("minutes", "seconds"), [(1, 15), (4, 60), (8, 120), (600, 120)])
def test_the_warning_never_takes_a_short_limit_away(minutes: int, seconds: int) -> None:
    assert job(CLIENT).warning_s(minutes) == seconds
    assert job(CLIENT, warn_s=7).warning_s(minutes) == 7


def test_other_words_in_braces_are_left_alone() -> None:
    words = ("{}", '{"a": 1}', "{name}", "${HOME}", "{x,y}", "{prompt}")
    assert job({**CLIENT, "command": list(words)}).client.command == words


def test_units_groups_and_parts() -> None:
    made = job(SERVER, CLIENT, array=3)
    assert list(made.units()) == [0, 1, 2]
    assert list(job(CLIENT).units()) == [0]
    assert made.groups() == ("",)
    assert made.client.name == "client"
    assert [item.name for item in made.services()] == ["server"]


def test_a_job_comes_after_earlier_ones_only() -> None:
    part = Component(name="client", role="client", command=("true",))
    merge = Job(name="merge", components=(part,), after=(After(job="array"),))
    array = Job(name="array", components=(part,), array=2)
    assert Batch(jobs=(array, merge)).jobs[1] is merge
    for jobs in ((merge, array), (merge,)):
        with pytest.raises(ValidationError, match="comes after array, which no earlier job is called"):
            Batch(jobs=jobs)
    with pytest.raises(ValidationError, match="two jobs are called array"):
        Batch(jobs=(array, array))


def test_it_survives_json() -> None:
    made = Batch(jobs=(job(SERVER, CLIENT, servers={"judge": "https://a/v1"}),))
    assert Batch.model_validate_json(made.model_dump_json()) == made


def test_readiness_has_a_deadline_always() -> None:
    assert Ready().deadline_s > 0
    with pytest.raises(ValidationError):
        Ready(deadline_s=0)


@pytest.mark.parametrize("state", list(UnitState))
def test_only_a_result_is_a_pass(state: UnitState) -> None:
    expected = {"done": Verdict.PASS, "failed": Verdict.FAIL, "blocked": Verdict.BLOCKED, "lost": Verdict.BLOCKED}
    assert UnitStatus(job="j", index=0, slurm="1", state=state).verdict == expected.get(state.value)


def test_a_result_knows_its_ending() -> None:
    text = (
        '{"job": "demo", "index": 0, "slurm": "1_0", "restart": 0, "ending": "done", "component": "client.0", "exit_code": 0, '
        '"node": "n1", "started": 1, "ended": 2, "message": ""}'
    )
    assert Result.model_validate_json(text).ending is Ending.DONE
