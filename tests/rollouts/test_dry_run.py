"""A dry run: shards and commands, and on Slurm the scripts; nothing is made where the campaign would lie."""

from __future__ import annotations

from pathlib import Path

import pytest

from seatrial.core.jobs import Profile
from seatrial.rollouts import campaign_runner, manifest
from seatrial.rollouts.campaign_runner import RunTarget
from tests.rollouts.collecting import make, prompts


def test_on_this_machine_shards_and_the_command_of_a_task(tmp_path: Path) -> None:
    place, campaign = make(tmp_path, prompts(5), work={"repeats": 2, "shards": 2, "parallel": 2})
    shown = campaign_runner.dry_run(place, tmp_path / "there", campaign, manifest.load_manifest(place), RunTarget())
    lines = shown.text.splitlines()
    assert lines[0] == "campaign small: 5 rows, 10 rollouts"
    assert lines[1].startswith("  rows: 5 rows x 2 (")
    assert lines[2].startswith("  2 shards of 4 to 6 rollouts, dealt by rows; less than a minute each")
    assert lines[4].startswith("2 tasks at a time on this machine")
    assert lines[5].endswith(f"rollouts collect {tmp_path / 'there'} --round 1 --task '{{index}}'")
    assert shown.answers == ()
    assert not (tmp_path / "there").exists()
    assert not place.rounds.exists()


def test_a_long_shard_says_its_minutes(tmp_path: Path) -> None:
    place, campaign = make(tmp_path, prompts(4), work={"shards": 1, "rollout_s": 3600}, requests={"concurrency": 2})
    shown = campaign_runner.dry_run(place, tmp_path, campaign, manifest.load_manifest(place), RunTarget())
    assert "1 shard of 4 rollouts" in shown.text
    assert "about 120 min each, if a rollout takes 3600 s and 2 are open" in shown.text


def test_on_slurm_the_scripts_and_what_slurm_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RunTarget, "most_tasks", 1000)
    monkeypatch.setattr(
        "seatrial.rollouts.campaign_runner.slurm_submit.validate", lambda *_: (("collect", "ok"), ("merge", "invalid partition"))
    )
    place, campaign = make(tmp_path, prompts(6), work={"shards": 3, "parallel": 2})
    where = RunTarget("slurm:x", Profile(partition="p", time="1:00:00"))
    shown = campaign_runner.dry_run(place, tmp_path / "there", campaign, manifest.load_manifest(place), where)
    assert "# ===== collect =====\n#!/" in shown.text
    assert "#SBATCH --array=0-2%2" in shown.text
    assert "# ===== merge =====" in shown.text
    assert shown.answers == (("collect", "ok"), ("merge", "invalid partition"))
    assert not (tmp_path / "there").exists()
