"""Which model is asked: the named or the only one, the same for every collector; and what is said when a server is not what is meant."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from seatrial.core.errors import BlockedError, UserError
from seatrial.rollouts.backends import direct_backend as clients
from seatrial.rollouts.backends.direct_backend import OpenAIClient, choose_model
from seatrial.rollouts.campaign import Requests
from seatrial.rollouts.campaign_dir import CampaignDir
from seatrial.rollouts.rollout_record import RolloutError
from seatrial.runtime.servers import free_port
from tests.rollouts.stub import Stub


def asked(place: CampaignDir | None, named: str | None = None, models: Sequence[str] = ("toy",)) -> str:
    """What a collector finds at a server with these models."""

    async def main() -> str:
        async with Stub(models=tuple(models)) as stub:
            client = OpenAIClient([stub.url], "chat/completions", None, Requests(dead_s=1))
            await client.open()
            try:
                return await choose_model(client, named, place)
            finally:
                await client.close()

    return asyncio.run(main())


def test_the_first_ones_model_is_pinned_and_another_is_refused_with_both_names(tmp_path: Path) -> None:
    place = CampaignDir(tmp_path)
    assert asked(place) == "toy"
    assert asked(place) == "toy"
    with pytest.raises(UserError, match="has the model 'other', and this campaign began with 'toy'") as caught:
        asked(place, models=["other"])
    assert caught.value.fix == "serve toy again, or start a new campaign"
    assert [path.name for path in tmp_path.iterdir()] == ["model.json"]
    assert asked(place, "toy", ["other", "toy"]) == "toy"


def test_nothing_is_pinned_by_a_server_that_is_refused(tmp_path: Path) -> None:
    place = CampaignDir(tmp_path)
    with pytest.raises(UserError, match="the server has no 'gpt'; it has toy") as caught:
        asked(place, "gpt")
    assert caught.value.fix == "nothing was collected: start anew with --model toy (policy.model)"
    with pytest.raises(UserError, match="the server lists 2: a, b"):
        asked(place, models=["a", "b"])
    assert not place.model.exists()


def test_once_something_may_be_collected_the_server_is_to_be_mended(tmp_path: Path) -> None:
    place = CampaignDir(tmp_path)
    assert asked(place, "gpt", ["gpt"]) == "gpt"
    with pytest.raises(UserError, match="it has toy") as caught:
        asked(place, "gpt")
    assert caught.value.fix.startswith("serve gpt there")


def test_a_directory_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises((UserError, BlockedError), match=r"model\.json"):
        asked(CampaignDir(tmp_path / "gone"))


def no_listing(monkeypatch: pytest.MonkeyPatch, status: int) -> None:
    """GET models is answered with this status."""

    async def ask(self: OpenAIClient, server: Any) -> tuple[int, str]:
        return status, f"answered {status}"

    monkeypatch.setattr(OpenAIClient, "_ask", ask)


def test_a_path_that_lists_nothing_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    no_listing(monkeypatch, 404)
    with pytest.raises(UserError, match=r"not said, and GET http://127\.0\.0\.1:\d+/v1/models answered 404") as caught:
        asked(None)
    assert "policy.url is the server's base" in caught.value.fix
    assert asked(None, "toy") == "toy"


def test_the_address_stands_in_what_speaks_of_it() -> None:
    async def main() -> tuple[str, str]:
        async with Stub() as stub:
            client = OpenAIClient([stub.url], "chat/completions", None, Requests())
            await client.open()
            said = []
            for status in (404, 418):
                with pytest.raises(RolloutError) as caught:
                    await client.post(b'{"messages": [{"content": "[[status=%d]]"}]}' % status)
                said.append(str(caught.value))
            await client.close()
            return said[0].replace(str(stub.port), "P"), said[1]

    assert asyncio.run(main()) == (
        "HTTP 404: made to answer 404 (POST http://127.0.0.1:P/v1/chat/completions)",
        "HTTP 418: made to answer 418",
    )


def test_a_wait_for_nobody_is_told_after_a_moment_and_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clients, "_SILENT_S", 0.05)
    said: list[str] = []
    url = f"http://127.0.0.1:{free_port()}/v1"

    async def main() -> None:
        client = OpenAIClient([url], "x", None, Requests(dead_s=0.4), said.append)
        await client.open()
        try:
            await client.models()
        finally:
            await client.close()

    with pytest.raises(BlockedError, match="connection refused"):
        asyncio.run(main())
    assert said == [f"no answer yet from {url}: connection refused; waiting up to 0.4 s (requests.dead_s)"]
