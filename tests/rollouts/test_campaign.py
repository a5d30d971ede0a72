"""campaign.toml as data: what excludes what, and what a result depends on."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from seatrial.rollouts.campaign import Campaign, parse_numbers

PLAIN: dict[str, Any] = {
    "name": "small",
    "datasets": [{"name": "sums", "path": "sums.jsonl"}],
    "policy": {"url": "http://127.0.0.1:8000/v1"},
    "verifier": "exact",
}
SERVER = {"kind": "vllm", "model": "/models/m"}


def made(**changes: Any) -> Campaign:
    return Campaign.model_validate({**PLAIN, **changes})


@pytest.mark.parametrize(("text", "numbers"), [("0-3,7", (0, 1, 2, 3, 7)), ("5", (5,)), ("2..4", (2, 3, 4)), ("1, 0", (1, 0))])
def test_numbers(text: str, numbers: tuple[int, ...]) -> None:
    assert parse_numbers(text) == numbers


@pytest.mark.parametrize("text", ["", "3-1", "0-2,1", "a", "1-", "-1", "1,,2"])
def test_what_are_no_numbers(text: str) -> None:
    with pytest.raises(ValueError):
        parse_numbers(text)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"policy": {"url": "http://h/v1", "server": SERVER}}, "url and server were said"),
        ({"policy": {}}, "none of them"),
        ({"policy": {"server": {"kind": "url", "url": "http://h/v1"}}}, "say policy.url"),
        ({"work": {"repeats": 2, "seeds": "0-1"}}, "exclude each other"),
        ({"verifier": None}, "who scores it"),
        ({"verifier": "maths"}, "unknown verifier 'maths'"),
        ({"gym": {"resources": ["mcqa"]}}, "excludes verifier"),
        ({"gym": {"resources": ["mcqa"], "config_paths": ["a.yaml"]}, "verifier": None}, "either config_paths or resources"),
        ({"gym": {"resources": ["mcqa"], "collect_arguments": ["+a=1"]}, "verifier": None}, 'driver = "collector"'),
        ({"gym": {"resources": ["mcqa"], "python": "/p", "environment": "gym"}, "verifier": None}, "exclude each other"),
        ({"sandbox_service": True}, "for Gym's resources servers"),
        ({"datasets": [PLAIN["datasets"][0], PLAIN["datasets"][0]]}, "two datasets"),
        ({"verifiers": {"mine": {"kind": "exact", "function": "a:b"}}}, "go together"),
        ({"verifiers": {"mine": {"kind": "math", "model": "m"}}}, "of kind judge"),
        ({"verifiers": {"mine": {"kind": "exact", "pattern": "("}}}, "pattern"),
        ({"environment": {"OPENAI_API_KEY": "sk-1234567890abcdef"}}, "secret"),
        ({"unknown": 1}, "Extra inputs"),
        ({"work": {"repeats": "4"}}, "should be a valid integer"),
        ({"work": {"shards": "4"}}, "should be a valid integer"),
        ({"work": {"seed": "4"}}, "should be a valid integer"),
        ({"requests": {"dead_s": "4"}}, "should be a valid number"),
        ({"failures": {"max_share": "0.5"}}, "should be a valid number"),
        ({"sampling": {"temperature": "hot"}}, "temperature = 'hot': a number is meant"),
        ({"sampling": {"top_k": True}}, "top_k = True: a number is meant"),
    ],
)
def test_what_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        made(**changes)


def test_a_dataset_has_its_own_verifier_and_repeats() -> None:
    datasets = [{"name": "a", "path": "a"}, {"name": "b", "path": "b", "verifier": "strict", "repeats": 2}]
    campaign = made(datasets=datasets, verifiers={"strict": {"kind": "exact", "ignore_case": False}}, work={"seeds": "0-3,7"})
    assert campaign.verifier_of(campaign.datasets[0]).ignore_case
    assert not campaign.verifier_of(campaign.datasets[1]).ignore_case
    assert campaign.work.labels() == (0, 1, 2, 3, 7)
    assert campaign.work.labels(campaign.datasets[1].repeats) == (0, 1)


@pytest.mark.parametrize(
    "changes",
    [
        {"requests": {"concurrency": 7}},
        {"policy": {"url": "http://elsewhere:1/v1", "key_env": "KEY"}},
        {"failures": {"max_share": 0.9}},
        {"work": {"rounds": 9, "parallel": 3}},
        {"collector": {"cpus": 9}},
        {"datasets": [{"name": "sums", "path": "/other/place.jsonl"}]},
    ],
)
def test_what_no_result_depends_on_may_change(changes: dict[str, Any]) -> None:
    assert made(**changes).identity() == made().identity()


@pytest.mark.parametrize(
    "changes",
    [
        {"sampling": {"temperature": 0.5}},
        {"work": {"repeats": 2}},
        {"work": {"seed": 1}},
        {"work": {"shards": 3}},
        {"policy": {"url": "http://127.0.0.1:8000/v1", "model": "another"}},
        {"policy": {"url": "http://127.0.0.1:8000/v1", "api": "responses"}},
        {"verifier": "choice"},
        {"datasets": [{"name": "sums", "path": "sums.jsonl", "limit": 1}]},
        {"sandbox": {"memory_mb": 1}},
    ],
)
def test_what_results_depend_on_is_part_of_the_identity(changes: dict[str, Any]) -> None:
    assert made(**changes).identity() != made().identity()


def test_a_judge_may_move_and_must_stay_the_same_model() -> None:
    def judged(**keys: str) -> dict[str, Any]:
        return made(verifier="grader", verifiers={"grader": {"kind": "judge", **keys}}).identity()

    first = judged(url="http://a/v1", model="m", key_env="ONE")
    assert first == judged(url="http://b/v1", model="m", key_env="TWO")
    assert first != judged(url="http://a/v1", model="other", key_env="ONE")


def test_a_self_hosted_policy_is_known_by_its_model() -> None:
    hosted = made(policy={"server": SERVER})
    assert hosted.identity()["policy"]["model"] == "/models/m"
    assert hosted.identity() == made(policy={"url": "http://h/v1", "model": "/models/m"}).identity()


KEY = "sk-" + "proj-aB3dE5gH7jK9mN1pQ3sT5"


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"sampling": {"api_key": "hunter2-hunter9"}}, "api_key"),
        ({"sampling": {"extra_headers": {"Authorization": f"Bearer {KEY}"}}}, "extra_headers.Authorization"),
        ({"sampling": {"extra_body": {"auth": [{"x-api-key": "hunter2-hunter9"}]}}}, "extra_body.auth.x-api-key"),
        ({"sampling": {"user": KEY}}, "user"),
        ({"sampling": {"max_tokens": KEY}}, "max_tokens"),
        ({"gym": {"resources": ["mcqa"], "run_arguments": ["--api-key", "hunter2-hunter9"]}, "verifier": None}, "secret"),
        ({"policy": {"url": "http://h/v1", "model": KEY}}, "policy.model"),
        ({"policy": {"url": "http://h/v1", "key_env": KEY}}, "the name of a variable"),
        ({"policy": {"url": "http://h/v1", "key_env": "hf_" + "aB3dE5gH7jK9mN1pQ3sT5vW7yZ2bC4dF6"}}, "the name of a variable"),
        ({"policy": {"url": "http://h/v1", "key_env": "a1b2c3d4e5f6a7b8"}}, "the name of a variable"),
        ({"verifiers": {"j": {"kind": "judge", "key_env": KEY}}}, "the name of a variable"),
    ],
)
def test_a_secret_in_a_campaign_is_refused_by_its_key(changes: dict[str, Any], key: str) -> None:
    with pytest.raises(ValidationError) as refused:
        made(**changes)
    message = str(refused.value.errors()[0]["msg"])
    assert key in message
    assert not any(secret in message for secret in ("hunter2", KEY[8:], "aB3dE5gH", "a1b2c3d4"))


def test_parameters_that_only_sound_like_secrets_are_taken() -> None:
    schema = {"type": "object", "properties": {"password": {"type": "string"}, "token": {"type": "integer"}}}
    sampling = {
        "max_tokens": 512,
        "stop_token_ids": [1, 2],
        "stop": ["</s>"],
        "min_tokens": 1,
        "cache_salt": "x",
        "extra_body": {"schema": schema},
    }
    assert made(sampling=sampling, policy={"url": "http://h/v1", "key_env": "OPENAI_API_KEY_2"}).sampling == sampling
