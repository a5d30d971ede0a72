"""The manifest: a campaign directory appears whole or not at all, and what has changed is named."""

from __future__ import annotations

import errno
from array import array
from pathlib import Path
from typing import Any

import pytest

from seatrial.core.errors import BlockedError, UserError
from seatrial.core.files import read_json
from seatrial.rollouts import manifest as manifests
from seatrial.rollouts.campaign import Campaign
from seatrial.rollouts.campaign_dir import CampaignDir
from seatrial.rollouts.inputs import write_inputs
from seatrial.rollouts.manifest import (
    Manifest,
    Units,
    changes,
    check_functions,
    check_inputs,
    create_campaign,
    load_campaign,
    load_manifest,
    save_campaign,
    shard_count,
)
from tests.rollouts.inputs_made import campaign, jsonl, made, plain


def test_a_campaign_directory_is_made_and_read(tmp_path: Path) -> None:
    place, manifest = made(tmp_path, [plain(0), plain(1)], work={"repeats": 2, "shards": 2})
    assert load_manifest(place) == manifest
    assert load_campaign(place) == campaign(work={"repeats": 2, "shards": 2})
    assert sorted(path.name for path in place.root.iterdir()) == ["campaign.json", "inputs.index", "inputs.jsonl", "manifest.json"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.jsonl", "campaign"]
    assert (manifest.rows, manifest.units, manifest.repeats, manifest.name) == (2, 4, {"a": (0, 1)}, "tiny")
    check_inputs(place, manifest)
    place.inputs.write_bytes(place.inputs.read_bytes().replace(b"What", b"That"))
    with pytest.raises(UserError, match="not what"):
        check_inputs(place, manifest)


def test_a_refusal_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="bad row"):
        made(tmp_path, [plain(0), {}])
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]


def test_a_full_disk_leaves_nothing_and_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("seatrial.rollouts.inputs.os.fsync", full)
    with pytest.raises(BlockedError, match="No space left"):
        made(tmp_path, [plain(0)])
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]


@pytest.mark.parametrize("changed", [{1: 2**40}, {0: 1}, {1: 0}])
def test_an_index_that_was_edited_is_refused(tmp_path: Path, changed: dict[int, int]) -> None:
    place, manifest = made(tmp_path, [plain(0), plain(1), plain(2)])
    offsets = array("Q", place.index.read_bytes())
    for number, value in changed.items():
        offsets[number] = value
    place.index.write_bytes(offsets.tobytes())
    with pytest.raises(UserError, match=r"inputs\.index: rows do not follow"):
        Units(place, manifest)


def test_a_place_that_is_taken_is_refused(tmp_path: Path) -> None:
    place, _ = made(tmp_path, [plain(0)])
    before = place.manifest.read_bytes()
    with pytest.raises(UserError, match="holds a campaign already"):
        create_campaign(campaign(), tmp_path, place)
    assert place.manifest.read_bytes() == before
    with pytest.raises(UserError, match="no empty directory"):
        create_campaign(campaign(), tmp_path, CampaignDir(tmp_path))
    with pytest.raises(UserError, match="no empty directory"):
        create_campaign(campaign(), tmp_path, CampaignDir(tmp_path / "a.jsonl"))
    (tmp_path / "empty").mkdir()
    create_campaign(campaign(), tmp_path, CampaignDir(tmp_path / "empty"))
    create_campaign(campaign(), tmp_path, CampaignDir(tmp_path / "deep" / "er"))


def test_of_two_that_start_at_once_one_succeeds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = write_inputs
    place = CampaignDir(tmp_path / "campaign")

    def late(*arguments: Any) -> Any:
        monkeypatch.setattr(manifests, "write_inputs", real)
        create_campaign(campaign(work={"repeats": 9}), tmp_path, place)
        return real(*arguments)

    jsonl(tmp_path / "a.jsonl", [plain(0)])
    monkeypatch.setattr(manifests, "write_inputs", late)
    with pytest.raises(UserError, match="holds a campaign already"):
        create_campaign(campaign(), tmp_path, place)
    assert load_manifest(place).units == 9
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.jsonl", "campaign"]


def test_a_directory_without_manifest_is_no_campaign(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no manifest"):
        load_manifest(CampaignDir(tmp_path))


def test_a_campaign_with_an_own_interpreter_can_be_read_again(tmp_path: Path) -> None:
    whole = campaign(gym={"config_paths": ["x.yaml"], "python": "/opt/gym/bin/python", "agent": "solver"})
    save_campaign(CampaignDir(tmp_path), whole)
    assert load_campaign(CampaignDir(tmp_path)) == whole


@pytest.mark.parametrize(
    ("units", "work", "shards"),
    [
        (320_000, {"shards": 400}, 400),
        (3, {"shards": 400}, 3),
        (320_000, {}, 42),
        (320_000, {"target_minutes": 30, "rollout_s": 60}, 167),
        (10, {}, 1),
    ],
)
def test_shards_from_a_target_duration(units: int, work: dict[str, Any], shards: int) -> None:
    assert shard_count(campaign(work=work), units) == shards


BASE: dict[str, Any] = {"work": {"repeats": 2}, "sampling": {"temperature": 0.7, "extra": {"k": [1]}}}


def started(folder: Path) -> Manifest:
    jsonl(folder / "b.jsonl", [plain(1)])
    jsonl(folder / "a.jsonl", [plain(0)])
    return create_campaign(campaign({"name": "a"}, {"name": "b"}, **BASE), folder, CampaignDir(folder / "campaign"))


def changed(folder: Path, *datasets: dict[str, Any], **tables: Any) -> list[str]:
    """What differs after the manifest was stored and read."""
    started(folder)
    now: Campaign = campaign(*(datasets or ({"name": "a"}, {"name": "b"})), **{**BASE, **tables})
    return changes(load_manifest(CampaignDir(folder / "campaign")), now, folder)


def test_the_same_campaign_has_no_changes(tmp_path: Path) -> None:
    assert changed(tmp_path) == []


def test_what_results_do_not_depend_on_may_change(tmp_path: Path) -> None:
    (tmp_path / "moved").mkdir()
    jsonl(tmp_path / "moved" / "a.jsonl", [plain(0)])
    assert (
        changed(
            tmp_path,
            {"name": "a", "path": "moved/a.jsonl"},
            {"name": "b"},
            requests={"concurrency": 3, "timeout_s": 5},
            policy={"url": "http://elsewhere:9/v1"},
            work={"repeats": 2, "parallel": 3, "rounds": 9},
        )
        == []
    )


@pytest.mark.parametrize(
    ("tables", "said"),
    [
        ({"sampling": {"temperature": 1.0, "extra": {"k": [1]}}}, ["sampling.temperature: 0.7 -> 1.0"]),
        ({"sampling": {"temperature": 0.7, "extra": {"k": [2]}}}, ["sampling.extra.k: [1] -> [2]"]),
        ({"sampling": {}}, ["sampling.temperature: 0.7 -> (none)", "sampling.extra.k: [1] -> (none)"]),
        ({"work": {"repeats": 4}}, ["work.repeats: 2 -> 4"]),
        ({"policy": {"url": "http://localhost:1/v1", "model": "other"}}, ['policy.model: null -> "other"']),
    ],
)
def test_changed_keys_are_named(tmp_path: Path, tables: dict[str, Any], said: list[str]) -> None:
    assert changed(tmp_path, **tables) == said


def test_changed_datasets_are_named(tmp_path: Path) -> None:
    manifest = started(tmp_path)

    def said(*datasets: dict[str, Any]) -> list[str]:
        return changes(manifest, campaign(*datasets, **BASE), tmp_path)

    jsonl(tmp_path / "c.jsonl", [plain(2)])
    assert said({"name": "a"}) == ["datasets.b: removed"]
    assert said({"name": "a"}, {"name": "b"}, {"name": "c"}) == ["datasets.c: added"]
    assert said({"name": "b"}, {"name": "a"}) == ["datasets: order a, b -> b, a"]
    assert said({"name": "a", "limit": 5}, {"name": "b"}) == ["datasets.a.limit: null -> 5"]
    jsonl(tmp_path / "b.jsonl", [plain(2)])
    assert said({"name": "a"}, {"name": "b"}) == [f"datasets.b: content changed ({tmp_path / 'b.jsonl'})"]
    (tmp_path / "b.jsonl").unlink()
    assert said({"name": "a"}, {"name": "b"}) == [f"datasets.b: {tmp_path / 'b.jsonl'} cannot be read any more: No such file or directory"]


def scored_by(function: str) -> Campaign:
    return campaign(verifier="mine", verifiers={"mine": {"kind": "function", "function": function}})


@pytest.mark.parametrize("function", ["fn.py:reward", "seatrial_test_package.inner.fn:reward"])
def test_a_function_that_was_edited_is_named(tmp_path: Path, function: str) -> None:
    file = tmp_path / (function.split(":")[0].removesuffix(".py").replace(".", "/") + ".py")
    file.parent.mkdir(parents=True, exist_ok=True)
    if file.parent != tmp_path:
        (tmp_path / "seatrial_test_package" / "__init__.py").write_text("raise SystemExit('nothing is imported')")
    file.write_text("def reward(row, text): return 1.0")
    jsonl(tmp_path / "a.jsonl", [plain(0)])
    manifest, now = create_campaign(scored_by(function), tmp_path, CampaignDir(tmp_path / "campaign")), scored_by(function)
    assert changes(load_manifest(CampaignDir(tmp_path / "campaign")), now, tmp_path) == []
    check_functions(manifest, now, tmp_path)
    file.write_text("def reward(row, text): return 0.5")
    assert changes(manifest, now, tmp_path) == [f"verifiers.mine.function: content changed ({function})"]
    if function.startswith("fn.py"):
        with pytest.raises(UserError, match=r"verifiers\.mine\.function: content changed"):
            check_functions(manifest, now, tmp_path)
    else:
        check_functions(manifest, now, tmp_path)  # a collector may have another environment
    file.unlink()
    assert changes(manifest, now, tmp_path) == [f"verifiers.mine.function: {function} cannot be found any more"]
    (other,) = changes(manifest, scored_by("other.py:f"), tmp_path)
    assert other == f'verifiers.mine.function: "{function}" -> "other.py:f"'


def test_a_function_that_cannot_be_found_ahead_is_known_by_its_name(tmp_path: Path) -> None:
    jsonl(tmp_path / "a.jsonl", [plain(0)])
    manifest = create_campaign(scored_by("no.such.module:f"), tmp_path, CampaignDir(tmp_path / "campaign"))
    assert manifest.identity["verifiers"]["mine"]["function_sha256"] is None
    assert changes(manifest, scored_by("no.such.module:f"), tmp_path) == []


def test_a_manifest_of_another_version_is_refused(tmp_path: Path) -> None:
    place, _ = made(tmp_path, [plain(0)])
    text = place.manifest.read_text()
    assert read_json(place.manifest)["version"] == 1
    place.manifest.write_text(text.replace('"version": 1', '"version": 2'))
    with pytest.raises(UserError, match=r"manifest\.json: version"):
        load_manifest(place)
