"""A model as judge: what it is asked, what counts as a verdict, and what becomes of the rest."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from aiohttp import web

from seatrial.core.errors import UserError
from seatrial.rollouts.rollout_record import FailureKind, RolloutError, Verifier
from seatrial.rollouts.verifiers.judge_verifier import verdict
from tests.rollouts.verifiers import failure, made, row, score, talk


class Asked:
    """A judge that says what it is told to, one after another; the last one again and again."""

    def __init__(self, *says: str | Exception) -> None:
        self.says = [*says]
        self.prompts: list[str] = []
        self.closed = False

    async def __call__(self, prompt: str) -> str:
        self.prompts.append(prompt)
        said = self.says.pop(0) if len(self.says) > 1 else self.says[0]
        if isinstance(said, Exception):
            raise said
        return said

    async def close(self) -> None:
        self.closed = True


@pytest.mark.parametrize(
    ("said", "reward"),
    [
        ("It fits. [[A=B]]", 1.0),
        ("[[ A != B ]]", 0.0),
        ("[[A=B]] I repeat: [[A=B]]", 1.0),
        ("[[A=B]] or rather [[A!=B]]", None),
        ("<think>[[A=B]]?</think>[[A!=B]]", 0.0),
        ("<think>[[A=B]]</think>", None),
        ('{"reward": 0.5}', 0.5),
        ('```json\n{"correct": true}\n```', 1.0),
        ('{"correct": false, "why": "x"}', 0.0),
        ('{"correct": 1}', None),
        ('{"reward": 2}', None),
        ('{"reward": true}', None),
        ('{"reward": NaN}', None),
        ('{"reward": 1, "correct": false}', None),
        ('I say {"reward": 1}', None),
        ("[A=B]", None),
        ("yes", None),
        ("", None),
    ],
)
def test_a_verdict_is_read_strictly(said: str, reward: float | None) -> None:
    assert verdict(said) == reward


def test_the_judge_sees_question_reference_and_answer_each_once() -> None:
    asked = Asked("[[A=B]]")
    given = row(prompt="How {answer} much?", answer="four {question}")
    result = score(made(kind="judge", policy=asked), given, "It is {expected} 4")
    assert (result.reward, result.fields["judge"]) == (1.0, "[[A=B]]")
    prompt = asked.prompts[0]
    for part in ("<question>\nHow {answer} much?\n<", "<reference>\nfour {question}\n<", "<candidate>\nIt is {expected} 4\n<"):
        assert part in prompt


def test_a_question_of_messages_is_what_the_user_said() -> None:
    asked = Asked("[[A!=B]]")
    messages = [{"role": "system", "content": "hush"}, {"role": "user", "content": [{"type": "input_text", "text": "Q?"}]}]
    score(made(kind="judge", policy=asked, prompt="{question}|{answer}"), row(responses_create_params={"input": messages}), "A!")
    assert asked.prompts == ["Q?|A!"]


def test_an_empty_answer_is_wrong_without_asking() -> None:
    asked = Asked("[[A=B]]")
    assert score(made(kind="judge", policy=asked), row(prompt="q", answer="x"), " \n").reward == 0.0
    assert asked.prompts == []


@pytest.mark.parametrize("name", ["{quesion}", "{Answer}", "{ expected }", "{answers}"])
def test_a_name_that_is_nearly_one_of_ours_is_refused(name: str) -> None:
    with pytest.raises(UserError, match="which is no name") as raised:
        made(kind="judge", policy=Asked(""), prompt=f"{name} {{answer}} [[A=B]] or [[A!=B]]")
    assert name in str(raised.value)


def test_other_braces_may_stand_in_a_template() -> None:
    made(kind="judge", policy=Asked(""), prompt=r'{answer} in \boxed{x} and {"reward": 1}, \text{final}')


def test_no_verdict_is_asked_for_once_more() -> None:
    asked = Asked("hm", "[[A=B]]")
    assert score(made(kind="judge", policy=asked), row(prompt="q", answer="x"), "x").reward == 1.0
    assert len(asked.prompts) == 2


def test_failures_of_the_judge_are_of_class_judge_and_heal_as_they_did() -> None:
    given = row(prompt="q", answer="x")

    def failed(*says: str | Exception) -> RolloutError:
        return asyncio.run(failure(made(kind="judge", policy=Asked(*says)), given))

    twice = failed("hm")
    assert (twice.kind, twice.heals, twice.row) == ("judge", False, {"judge": "hm"})
    assert "must ask for [[A=B]] or [[A!=B]]" in str(twice)
    down = failed(RolloutError(FailureKind.RATE_LIMIT, "busy", after_s=3))
    assert (down.kind, down.heals, down.after_s, str(down)) == ("judge", True, 3, "judge: busy")
    assert not failed(RolloutError(FailureKind.CONTEXT_LENGTH, "too long")).heals

    async def never(prompt: str) -> str:
        await asyncio.sleep(9)
        return prompt

    late = asyncio.run(failure(made(kind="judge", policy=never, timeout_s=0.05), given))
    assert (late.kind, late.heals) == ("judge", True)
    assert "within 0.05 s" in str(late)


def test_what_cannot_judge_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="no policy to ask"):
        made(kind="judge")
    with pytest.raises(UserError, match=r"no \{answer\}"):
        made(kind="judge", prompt="{question}", policy=Asked(""))
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    with pytest.raises(UserError, match="JUDGE_KEY"):
        made(kind="judge", url="http://127.0.0.1:1/v1", key_env="JUDGE_KEY")


def served(answer: Callable[[web.Request], Awaitable[web.Response]], use: Callable[[str], Awaitable[None]]) -> None:
    async def main() -> None:
        app = web.Application()
        app.add_routes([web.post("/v1/chat/completions", answer), web.get("/v1/models", _models)])
        runner = web.AppRunner(app)
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            await use(f"http://127.0.0.1:{runner.addresses[0][1]}/v1")
        finally:
            await runner.cleanup()

    asyncio.run(main())


async def _models(_: web.Request) -> web.Response:
    return web.json_response({"data": [{"id": "judge-1"}]})


def test_a_judge_at_a_url(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "sk-judge-key")
    seen = []

    async def answer(request: web.Request) -> web.Response:
        body = await request.json()
        seen.append((request.headers["Authorization"], body["model"], body["temperature"]))
        if len(seen) > 1:
            return web.json_response({"error": {"message": "down, sk-judge-key"}}, status=500)
        message = {"role": "assistant", "content": "[[A=B]]"}
        return web.json_response({"id": "1", "choices": [{"index": 0, "message": message, "finish_reason": "stop"}]})

    async def use(url: str) -> None:
        verifier: Verifier = made(kind="judge", url=url, key_env="JUDGE_KEY")
        try:
            assert (await verifier.score(row(prompt="q", answer="x"), "x", ())).reward == 1.0
            error = await failure(verifier, row(prompt="q", answer="x"))
        finally:
            await verifier.close()
        assert (error.kind, error.heals) == ("judge", True)
        assert "sk-judge-key" not in str(error)
        assert seen[0] == ("Bearer sk-judge-key", "judge-1", 0)

    served(answer, use)


def test_the_asker_is_closed_with_its_verifier() -> None:
    asked = Asked("[[A=B]]")

    async def use(verifier: Verifier) -> None:
        assert not asked.closed

    talk(lambda: made(kind="judge", policy=asked), use)
    assert asked.closed
