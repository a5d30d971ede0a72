"""campaign.toml with flags on top: what wins, where paths start, and errors that name the file, the key and the fix."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from seatrial.cli.input_files import read_campaign
from seatrial.core.errors import UserError

FILE = """
name = "small"
verifier = "choice"
[[datasets]]
name = "a"
path = "data/a.jsonl"
repeats = 2
verifier = "exact"
[[datasets]]
name = "b"
path = "/data/b.jsonl"
[policy]
url = "http://h/v1"
[work]
seeds = "0-1"
[verifiers.mine]
kind = "function"
function = "rewards.py:score"
"""


def file(tmp_path: Path, old: str = "", new: str = "") -> Path:
    path = tmp_path / "campaign.toml"
    assert old in FILE
    path.write_text(FILE.replace(old, new, 1))
    return path


def refused(source: Path | None, flags: dict[str, Any], *settings: str) -> tuple[str, str]:
    with pytest.raises(UserError) as caught:
        read_campaign(source, flags, settings)
    return caught.value.message, caught.value.fix


def test_paths_start_at_the_file(tmp_path: Path) -> None:
    campaign = read_campaign(file(tmp_path), {})
    assert [dataset.path for dataset in campaign.datasets] == [str(tmp_path / "data/a.jsonl"), "/data/b.jsonl"]
    assert campaign.verifiers["mine"].function == f"{tmp_path}/rewards.py:score"


def test_flags_alone_make_a_campaign(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    flags = {"datasets": [{"name": "rows", "path": "rows.jsonl"}], "policy.url": "http://h/v1", "verifier": "exact", "work.shards": None}
    campaign = read_campaign(None, flags, ["sampling.temperature=0.5", "sampling.stop=END"])
    assert (campaign.name, campaign.datasets[0].path) == ("rollouts", str(tmp_path / "rows.jsonl"))
    assert campaign.sampling == {"temperature": 0.5, "stop": "END"}


def test_flags_win_over_the_file_and_over_what_its_datasets_say(tmp_path: Path) -> None:
    campaign = read_campaign(file(tmp_path), {"work.repeats": 4, "verifier": "math", "policy.url": "http://other/v1"})
    assert (campaign.work.repeats, campaign.work.seeds, campaign.policy.url) == (4, None, "http://other/v1")
    assert [dataset.repeats for dataset in campaign.datasets] == [None, None]
    assert {campaign.verifier_of(dataset).kind for dataset in campaign.datasets} == {"math"}


def test_without_flags_datasets_have_their_own(tmp_path: Path) -> None:
    campaign = read_campaign(file(tmp_path), {"work.repeats": None, "verifier": None})
    assert [campaign.verifier_of(dataset).kind for dataset in campaign.datasets] == ["exact", "choice"]
    assert (campaign.datasets[0].repeats, campaign.work.seeds) == (2, "0-1")


def test_settings_come_last(tmp_path: Path) -> None:
    campaign = read_campaign(file(tmp_path), {"work.repeats": 4}, ["work.seeds=0-2,7", "requests.concurrency=8"])
    assert (campaign.work.repeats, campaign.work.seeds, campaign.requests.concurrency) == (None, "0-2,7", 8)


def test_stored_settings_are_the_base(tmp_path: Path) -> None:
    stored = read_campaign(file(tmp_path), {}).model_dump(mode="json", exclude_unset=True)
    campaign = read_campaign(None, {}, ["requests.concurrency=8"], stored)
    assert campaign.requests.concurrency == 8
    assert campaign.datasets[0].verifier == "exact"
    assert campaign.identity() == read_campaign(file(tmp_path), {}).identity()


@pytest.mark.parametrize(
    ("old", "new", "message", "fix"),
    [
        ("url =", "urll =", "policy.urll: unknown key", "did you mean url?"),
        ("[policy]", "[polcy]", "polcy: unknown key", "did you mean policy?"),
        ('"http://h/v1"', '"ftp://h"', "policy.url: 'ftp://h' cannot stand here", "correct url; docs/rollouts.md"),
        ('seeds = "0-1"', 'seeds = "3-1"', "work: '3-1' is no number and no range", "correct work; docs/rollouts.md"),
        ('seeds = "0-1"', 'shards = "x"', "work.shards: Input should be a valid integer", "correct shards; docs/rollouts.md"),
        ("repeats = 2", "limits = 2", "datasets.a.limits: unknown key", "did you mean limit?"),
        ('path = "data/a.jsonl"', "", "datasets.a.path: is missing", "correct path; docs/rollouts.md"),
        ('verifier = "choice"', 'verifier = "chioce"', "dataset b: unknown verifier 'chioce'; known: mine, exact", "docs/rollouts.md"),
        ("[work]", '[policy.server]\nkind = "vllm"\nmodel = "m"\n[work]', "policy: say one of url (pre-hosted)", "correct policy"),
        ("[work]", "[work", "(at line 14", "correct the file"),
    ],
)
def test_what_is_wrong_in_a_file_is_named_with_a_fix(tmp_path: Path, old: str, new: str, message: str, fix: str) -> None:
    said, mend = refused(file(tmp_path, old, new), {})
    assert said.startswith(f"{tmp_path}/campaign.toml: ")
    assert message in said
    assert fix in mend


def test_what_is_missing_among_flags_is_named_as_a_flag() -> None:
    rows = {"datasets": [{"name": "rows", "path": "rows.jsonl"}]}
    assert refused(None, {}) == (
        "nothing to collect: no campaign file, and no --input",
        "name a campaign.toml, or say --input FILE.jsonl --url URL",
    )
    assert refused(None, rows)[1].startswith("say --url")
    said, mend = refused(None, {**rows, "policy.url": "http://h/v1"})
    assert said.startswith("dataset rows: who scores it?")
    assert mend == "say --verifier"


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("nothing", "--set nothing: KEY=VALUE is meant"),
        ("=3", "--set =3: KEY=VALUE is meant"),
        ("datasets.a=3", "datasets.a: datasets is no table"),
        ("policy.url.x=3", "policy.url.x: url is no table"),
        ("requests.concurency=3", "requests.concurency: unknown key"),
    ],
)
def test_a_setting_that_cannot_be(tmp_path: Path, setting: str, message: str) -> None:
    assert message in refused(file(tmp_path), {}, setting)[0]


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    assert refused(tmp_path / "no.toml", {})[0] == f"{tmp_path}/no.toml: cannot read: No such file or directory"


def test_a_server_is_not_named_twice(tmp_path: Path) -> None:
    said, _ = refused(file(tmp_path, 'url = "http://h/v1"', 'server = {kind = "vllm"}'), {})
    assert said.startswith(f"{tmp_path}/campaign.toml: policy.server: kind vllm needs")
