"""The demo's files: questions with the right answers, a campaign that loads, and a program that stands alone."""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from seatrial.rollouts import demo_server
from seatrial.rollouts.campaign import Campaign
from seatrial.rollouts.campaign_dir import CampaignDir
from seatrial.rollouts.collect_campaign import write_demo
from seatrial.rollouts.demo_server import choose
from seatrial.rollouts.manifest import create_campaign, load_campaign


def demo(where: Path) -> Path:
    return write_demo(where, Path("/env/bin/python"), where / "cache")


def test_the_campaign_loads_and_serves_itself(tmp_path: Path) -> None:
    file = demo(tmp_path / 'a "demo" ü')
    campaign = Campaign.model_validate(tomllib.loads(file.read_text(encoding="utf-8")))
    server = campaign.policy.server
    assert server is not None
    assert server.command[:3] == ("/env/bin/python", "-m", "seatrial.rollouts.demo_server")
    assert server.command[-1] == str(file.parent / "cache")
    assert server.environment["PYTHONPATH"] == str(file.parent / "program")
    assert [campaign.verifier_of(dataset).kind for dataset in campaign.datasets] == ["exact", "choice"]
    assert all((file.parent / dataset.path).is_file() for dataset in campaign.datasets)


def test_the_campaign_is_stored_as_it_is(tmp_path: Path) -> None:
    file = demo(tmp_path / "demo")
    campaign = Campaign.model_validate(tomllib.loads(file.read_text(encoding="utf-8")))
    place = CampaignDir(tmp_path / "campaign")
    assert create_campaign(campaign, file.parent, place, lambda _: None).units == 48 * 8
    assert load_campaign(place) == campaign


def test_rows_are_right_different_and_the_same_each_time(tmp_path: Path) -> None:
    first, again = demo(tmp_path / "a").parent, demo(tmp_path / "b").parent
    rows = {name: [json.loads(line) for line in (first / f"{name}.jsonl").read_text().splitlines()] for name in demo_server.MAKERS}
    for name, found in rows.items():
        assert (first / f"{name}.jsonl").read_bytes() == (again / f"{name}.jsonl").read_bytes()
        assert len({row["prompt"] for row in found}) == len(found) == 24
    assert {row["difficulty"] for found in rows.values() for row in found} == {"1-digit", "2-digit", "3-digit", "near", "far"}
    for row in rows["sums"]:
        assert sum(map(int, re.findall(r"\d+", row["prompt"]))) == int(row["answer"])
    for row in rows["largest"]:
        options = dict(re.findall(r"([A-D])\) (\d\d)", row["prompt"]))
        assert max(options, key=lambda letter: int(options[letter])) == row["answer"]
        first_two = sorted(options.values())[-2:]
        assert (first_two[0][0] == first_two[1][0]) == (row["difficulty"] == "near")


def test_the_program_needs_nothing_else_of_ours(tmp_path: Path) -> None:
    program = demo(tmp_path).parent / "program"
    code = "import sys, seatrial.rollouts.demo_server as serve; print(serve.__file__, 'torch' in sys.modules, 'pydantic' in sys.modules)"
    # -S: nothing is installed there, Seatrial neither.
    ran = subprocess.run([sys.executable, "-S", "-c", code], env={"PYTHONPATH": str(program)}, capture_output=True, text=True, check=False)
    assert ran.stdout.split() == [str(program / "seatrial/rollouts/demo_server.py"), "False", "False"], ran.stderr


@pytest.mark.parametrize(
    ("temperature", "top_p", "drawn"), [(0.0, 1.0, {2}), (1.0, 1.0, {0, 1, 2}), (1.0, 0.5, {2}), (1.0, 0.8, {1, 2}), (1e-3, 1.0, {2})]
)
def test_sampling_draws_from_the_likeliest(temperature: float, top_p: float, drawn: set[int]) -> None:
    draw = random.Random(0)
    logits = [-1.0, 0.5, 1.0]  # 8, 35 and 57 percent
    assert {choose(logits, temperature, top_p, draw) for _ in range(200)} == drawn


def test_sampling_keeps_to_the_probabilities() -> None:
    draw = random.Random(1)
    drawn = [choose([0.0, 1.0], 1.0, 1.0, draw) for _ in range(4000)]
    assert sum(drawn) / len(drawn) == pytest.approx(0.731, abs=0.03)
