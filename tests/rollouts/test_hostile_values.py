"""What a sceptic says in a campaign: numbers that nothing can store, secrets in addresses, keys that no header takes."""

from __future__ import annotations

import datetime
import math
from typing import Any

import pytest
from pydantic import ValidationError

from seatrial.core.errors import UserError
from seatrial.rollouts.campaign import MOST_REPEATS, Campaign, api_key_of, parse_numbers
from seatrial.rollouts.campaign_rounds import check_campaign


def campaign(**tables: Any) -> Campaign:
    said: dict[str, Any] = {
        "name": "x",
        "datasets": [{"name": "rows", "path": "rows.jsonl"}],
        "policy": {"url": "http://h/v1"},
        "verifier": "exact",
    }
    return Campaign.model_validate({**said, **tables})


@pytest.mark.parametrize(
    "url",
    ["http://user:secret@h/v1", "http://secret@h/v1", "http://h/v1?api_key=secret", "http://h/v1#secret", "http://[::1/v1"],
)
def test_an_address_holds_no_secret(url: str) -> None:
    with pytest.raises(ValidationError) as caught:
        campaign(policy={"url": url})
    assert "secret" not in str(caught.value.errors()[0]["msg"])
    with pytest.raises(ValidationError):
        campaign(policy={"urls": ["http://h/v1", url]})
    with pytest.raises(ValidationError):
        campaign(verifier="j", verifiers={"j": {"kind": "judge", "url": url}})


@pytest.mark.parametrize("value", [math.nan, math.inf, [1.0, math.nan], {"a": -math.inf}, datetime.date(2026, 1, 1), {"a": b"x"}])
def test_sampling_that_no_request_can_say_is_refused(value: Any) -> None:
    with pytest.raises(ValidationError, match="no request can say"):
        campaign(sampling={"top_p": 1.0, "x": value})


def test_sampling_of_any_depth_is_taken_as_it_is() -> None:
    said = {"temperature": 0, "stop": ["a", None], "chat_template_kwargs": {"thinking": True}}
    assert campaign(sampling=said).identity()["sampling"] == said


@pytest.mark.parametrize("seconds", [math.inf, math.nan, 0, -1, 1e300, 1e-300])
@pytest.mark.parametrize(
    ("table", "key"), [("requests", "timeout_s"), ("requests", "dead_s"), ("work", "rollout_s"), ("work", "target_minutes")]
)
def test_times_are_times(table: str, key: str, seconds: float) -> None:
    with pytest.raises(ValidationError):
        campaign(**{table: {key: seconds}})


@pytest.mark.parametrize("backoff_s", [math.inf, math.nan, -1])
def test_a_pause_ends(backoff_s: float) -> None:
    with pytest.raises(ValidationError):
        campaign(requests={"backoff_s": backoff_s})


@pytest.mark.parametrize("text", ["0-99999999999", f"0-{MOST_REPEATS}", f"0-{MOST_REPEATS - 1},{MOST_REPEATS}"])
def test_more_repetitions_than_anybody_means_are_refused_at_once(text: str) -> None:
    with pytest.raises(ValueError, match="more than 100000"):
        parse_numbers(text)


@pytest.mark.parametrize("text", ["", str(1 << 63), "9" * 30, "٣", "1-", "-1"])
def test_what_is_no_number_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="no number and no range"):
        parse_numbers(text)


def test_the_most_repetitions_are_allowed() -> None:
    assert len(parse_numbers(f"5-{MOST_REPEATS + 4}")) == MOST_REPEATS
    assert parse_numbers(str((1 << 63) - 1)) == ((1 << 63) - 1,)


def test_repeats_are_bounded_and_empty_seeds_are_not_one() -> None:
    for work in ({"repeats": MOST_REPEATS + 1}, {"seeds": ""}, {"repeats": 2, "seeds": ""}):
        with pytest.raises(ValidationError):
            campaign(work=work)
    with pytest.raises(ValidationError):
        campaign(datasets=[{"name": "rows", "path": "r", "repeats": MOST_REPEATS + 1}])


def test_a_key_from_a_file_loses_its_newline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", " abcdefgh\n")
    assert api_key_of("MY_KEY") == "abcdefgh"


@pytest.mark.parametrize("value", ["abc\tdef", "abc\ndef", "клюk", "a\x7f"])
def test_a_key_that_no_header_takes_is_refused_before_anything_starts(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("MY_KEY", value)
    with pytest.raises(UserError, match="MY_KEY") as caught:
        check_campaign(campaign(policy={"url": "http://h/v1", "key_env": "MY_KEY"}), here=True)
    assert value not in str(caught.value)


def test_a_key_of_blanks_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", " \n")
    with pytest.raises(UserError, match="not set"):
        api_key_of("MY_KEY")
