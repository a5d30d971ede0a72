"""A sceptic edits the files of a campaign: what contradicts itself is refused, stray files matter to nobody, inputs stay."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from seatrial.core.errors import BlockedError, UserError
from seatrial.rollouts import campaign_rounds
from seatrial.rollouts import manifest as manifests
from seatrial.rollouts.campaign_dir import CampaignDir, read_stop_file, write_stop_file
from seatrial.rollouts.journal.journal_scan import Scanner
from seatrial.rollouts.manifest import Units
from seatrial.rollouts.results.campaign_export import select_tasks, write_gym_layout, write_skills_layout
from seatrial.rollouts.results.profile_build import make_profile
from seatrial.rollouts.results.rescore import rescore
from seatrial.rollouts.rollout_record import FailureKind
from tests.rollouts.collecting import failing, make, prompts, run
from tests.rollouts.inputs_made import merged
from tests.rollouts.profiled import campaign, collected, ok, questions


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.fsync", lambda handle: None)


@pytest.fixture
def place(tmp_path: Path) -> CampaignDir:
    """Two rows by two repetitions in two shards, all collected."""
    return collected(campaign(tmp_path, {"rows": questions(2)}, repeats=2), [[ok(1), ok(0)], [ok(1), ok(1)]])


def set_to(**keys: Any) -> Callable[[dict[str, Any]], None]:
    return lambda data: data.update(keys)


def fewer_rows(data: dict[str, Any]) -> None:
    data["files"][0]["rows"] = 1


@pytest.mark.parametrize(
    "edit",
    [
        *(set_to(units=2), set_to(units=0), set_to(units=-1), set_to(units=8), set_to(rows=1), set_to(shards=0), set_to(shards=5)),
        *(set_to(repeats={}), set_to(repeats={"rows": [0]}), set_to(repeats={"rows": [0, 0]}), set_to(repeats={"other": [0, 1]})),
        *(set_to(files=[]), set_to(identity={}), set_to(identity={"work": {}}), fewer_rows),
    ],
)
def test_a_manifest_that_contradicts_itself_is_refused(place: CampaignDir, edit: Callable[[dict[str, Any]], None]) -> None:
    data = json.loads(place.manifest.read_text())
    edit(data)
    place.manifest.write_text(json.dumps(data))
    with pytest.raises(UserError, match=r"manifest\.json"):
        manifests.load_manifest(place)


def test_rows_that_were_edited_are_never_merged(place: CampaignDir) -> None:
    place.inputs.write_bytes(place.inputs.read_bytes().replace(b"question 0", b"question 9"))
    with pytest.raises(UserError, match=r"inputs\.jsonl"):
        merged(place)
    assert not (place.merged / "merge.json").exists()


def test_stray_files_beside_shards_and_rounds_matter_to_nobody(place: CampaignDir) -> None:
    (place.shards / "00007").touch()
    (place.shards / "notes.txt").touch()
    campaign_rounds.save_round(place, campaign_rounds.Round(number=1, made=0, on="local", owed=4, tasks=((0, 1),)))
    shutil.copytree(campaign_rounds.round_dir(place, 1), place.rounds / "0001.bak")
    with Units(place, manifests.load_manifest(place)) as units:
        assert Scanner(place, units).update().ok == 4
    assert [found.number for found in campaign_rounds.list_rounds(place)] == [1]


@pytest.mark.parametrize("pass_at", [float("nan"), float("inf"), float("-inf")])
def test_a_threshold_that_is_no_number_gives_no_profile(place: CampaignDir, pass_at: float, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="finite"):
        make_profile(place, pass_at=pass_at)
    with pytest.raises(UserError, match="finite"):
        select_tasks(place, low=0, high=1, out=tmp_path / "out.jsonl", pass_at=pass_at)


def test_an_export_never_replaces_the_merge(place: CampaignDir) -> None:
    before = merged(place).sha256
    with pytest.raises(UserError, match="lies in the directory of a campaign"):
        write_gym_layout(place, place.merged)
    with pytest.raises(UserError, match="lies in the directory of a campaign"):
        write_skills_layout(place, place.root / "skills" / ".." / "merged")
    assert merged(place).sha256 == before


@pytest.mark.parametrize("moved", [False, True])
def test_an_export_never_replaces_an_input(tmp_path: Path, moved: bool) -> None:
    place = collected(campaign(tmp_path, {"rollouts": questions(1)}, repeats=1, shards=1), [[ok(1)]])
    merged(place)
    home = tmp_path / "moved" if moved else tmp_path
    home.mkdir(exist_ok=True)
    file = (tmp_path / "rollouts.jsonl").rename(home / "rollouts.jsonl")
    before = file.read_bytes()
    with pytest.raises(UserError, match="is an input"):
        write_gym_layout(place, home)
    assert file.read_bytes() == before


def test_failures_of_the_source_do_not_stop_a_rescore(tmp_path: Path) -> None:
    source, asked = make(tmp_path, prompts(6), failures={"max_share": 1.0})
    run(source, asked, failing(FailureKind.CONTEXT_LENGTH, 0, 1, 2, 3))
    strict = asked.model_copy(update={"failures": asked.failures.model_copy(update={"max_share": 0.0, "after": 1})})
    status = rescore(source, CampaignDir(tmp_path / "new"), strict, lambda _: None)
    assert (status.ok, status.failed, status.owed, status.stopped) == (2, 4, 0, "")


def test_a_stop_that_the_disk_does_not_take_says_so(place: CampaignDir, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, data: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(BlockedError, match=r"stop\.json"):
        write_stop_file(place, "too many failures", "me")
    assert read_stop_file(place) is None
    assert not list(place.root.glob(".stop-*"))
