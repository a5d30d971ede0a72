"""Rewards computed anew: same units, new scores, failures and gaps as they were; exactly once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from seatrial.core.errors import UserError
from seatrial.rollouts.campaign import Campaign
from seatrial.rollouts.campaign_dir import CampaignDir
from seatrial.rollouts.journal.journal_scan import Scanner
from seatrial.rollouts.manifest import Units, load_campaign, load_manifest
from seatrial.rollouts.results.rescore import RescoreBackend, prepare_rescore, rescore
from seatrial.rollouts.rollout_record import FailureKind, InputRow, RolloutError, RolloutOutcome, Score, Unit
from tests.rollouts.collecting import Boxed, Told, failing, heads, make, prompts, rows, run


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.fsync", lambda handle: None)


async def said(unit: Unit) -> RolloutOutcome:
    """A rollout that said `answer N`, with reward 0."""
    part = {"type": "output_text", "text": f"answer {unit.number}"}
    response = {"object": "response", "output": [{"type": "message", "content": [part]}]}
    row = {"response": response, "reward": 0.0, "extracted_answer": "old", "_ng_task_index": unit.row.index}
    return RolloutOutcome(row, 0.0, "old", 10, 20, 3, "length", {"speed": 1.0}, latency_s=7.5)


class Number(Boxed):
    """The reward is the number that was said."""

    def __init__(self, bad: int | None = None) -> None:
        self.bad = bad
        self.seen: list[str] = []

    async def score(self, row: InputRow, text: str, output: Sequence[Mapping[str, Any]]) -> Score:
        self.seen.append(text)
        number = int(text.split()[-1])
        if number == self.bad:
            raise RolloutError(FailureKind.REWARD, "cannot score it")
        return Score(float(number), text, {"extracted_answer": text}, {"length": float(len(text))})


def collected(folder: Path, count: int = 6) -> tuple[CampaignDir, Campaign]:
    """A campaign with one failure for good (2), one unit that is owed (4), and else rollouts."""
    place, campaign = make(folder, prompts(count), work={"shards": 2}, requests={"tries": 1})
    bad = failing(FailureKind.CONTEXT_LENGTH, 2)

    async def act(unit: Unit) -> RolloutOutcome:
        if unit.number == 4:
            raise RolloutError(FailureKind.HTTP_5XX, "later")
        return await bad.act(unit) if unit.number == 2 else await said(unit)

    run(place, campaign, Told(act), shards=[0, 1])
    return place, campaign


def again(source: CampaignDir, out: CampaignDir, campaign: Campaign, verifier: Number, **more: Any) -> Any:
    prepare_rescore(source, out, campaign)
    backend = RescoreBackend(source, {"rows": verifier})
    return run(out, campaign, backend, **{"shards": [0, 1], "only": backend.has, **more})


def test_rewards_are_new_and_everything_else_is_as_it_was(tmp_path: Path) -> None:
    source, campaign = collected(tmp_path)
    out, verifier = CampaignDir(tmp_path / "out"), Number()
    ended = again(source, out, campaign, verifier)
    assert (ended.reason, ended.ok, ended.failed, ended.owed) == ("done", 4, 1, 1)
    new = {head.unit: head for head in heads(out)}
    old = {head.unit: head for head in heads(source) if head.settled}
    assert {number: head.reward for number, head in new.items() if head.ok} == {0: 0.0, 1: 1.0, 3: 3.0, 5: 5.0}
    for number, head in new.items():
        before = old[number]
        assert (head.task, head.repeat, head.seed, head.latency_s) == (before.task, before.repeat, before.seed, before.latency_s)
        assert (head.input_tokens, head.output_tokens, head.turns, head.finish) == (
            *(before.input_tokens, before.output_tokens, before.turns, before.finish),
        )
    assert new[3].answer == "answer 3"
    assert new[3].metrics == {"speed": 1.0, "length": 8.0}
    row = rows(out)[3]
    assert (row["reward"], row["extracted_answer"], row["_ng_task_index"]) == (3.0, "answer 3", 3)
    assert row["rescored"] == {"source": str(source.root), "reward": 0.0, "answer": "old"}


def test_failures_stay_failures_and_gaps_stay_gaps(tmp_path: Path) -> None:
    source, campaign = collected(tmp_path)
    out, verifier = CampaignDir(tmp_path / "out"), Number()
    again(source, out, campaign, verifier)
    (failed,) = [head for head in heads(out) if not head.ok]
    assert (failed.unit, failed.kind, failed.final, failed.message) == (2, "context-length", True, "made to fail 2")
    with Units(out, load_manifest(out)) as units:
        scanner = Scanner(out, units)
        scanner.update()
        assert list(scanner.owed([0, 1])) == [4]
    assert len(verifier.seen) == 4


def test_what_failed_only_in_being_scored_is_scored(tmp_path: Path) -> None:
    place, campaign = make(tmp_path, prompts(6), requests={"tries": 1, "attempts": 1})
    kinds = dict(enumerate([FailureKind.REWARD, FailureKind.JUDGE, FailureKind.SANDBOX, FailureKind.AGENT, FailureKind.REWARD]))

    async def act(unit: Unit) -> RolloutOutcome:
        outcome = await said(unit)
        if (kind := kinds.get(unit.number)) is None:
            return outcome
        usage = {"input_tokens": 10, "output_tokens": 20}
        row = {"response": {**outcome.row["response"], "usage": usage}} if unit.number != 4 else {}
        raise RolloutError(kind, "no score", heals=False, row=row)

    run(place, campaign, Told(act))
    out = CampaignDir(tmp_path / "out")
    ended = again(place, out, campaign, Number(bad=2), shards=[0])
    assert (ended.ok, ended.failed, ended.owed) == (3, 3, 0)
    new, found = {head.unit: head for head in heads(out)}, rows(out)
    assert {number: head.reward for number, head in new.items() if head.ok} == {0: 0.0, 1: 1.0, 5: 5.0}
    assert (new[1].input_tokens, new[1].output_tokens, new[1].turns, new[1].finish) == (10, 20, 1, "stop")
    assert (found[1]["_ng_task_index"], found[1]["dataset"], found[1]["rescored"]["reward"]) == (1, "rows", None)
    assert {number: (head.kind, head.message) for number, head in new.items() if not head.ok} == {
        2: ("reward", "cannot score it"),
        3: ("agent", "no score"),
        4: ("reward", "no score"),
    }
    # It can be tried once more from here: the response is kept.
    third = CampaignDir(tmp_path / "third")
    assert again(out, third, campaign, Number(), shards=[0]).ok == 4


def test_a_function_that_was_edited_is_another_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, campaign = collected(tmp_path)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("def reward(row, text): return 1")
    verify = {"mine": {"kind": "function", "function": "mine.py:reward"}}
    scored = Campaign.model_validate({**campaign.model_dump(exclude_unset=True), "verifier": "mine", "verifiers": verify})
    out = CampaignDir(tmp_path / "out")
    assert prepare_rescore(source, out, scored) == prepare_rescore(source, out, scored)
    (tmp_path / "mine.py").write_text("def reward(row, text): return 0")
    with pytest.raises(UserError, match="was begun with another verifiers"):
        prepare_rescore(source, out, scored)


def test_called_again_it_goes_on_where_it_was(tmp_path: Path) -> None:
    source, campaign = collected(tmp_path)
    out, verifier = CampaignDir(tmp_path / "out"), Number()
    assert again(source, out, campaign, verifier, stop=lambda: "now").reason == "stopped"
    assert again(source, out, campaign, verifier, shards=[1]).ok == 3
    assert again(source, out, campaign, verifier).ok == 4
    assert again(source, out, campaign, verifier).ok == 4
    assert len(rows(out)) == 5
    assert len(verifier.seen) == 4


def test_a_verifier_that_fails_costs_the_row(tmp_path: Path) -> None:
    source, campaign = collected(tmp_path)
    out = CampaignDir(tmp_path / "out")
    ended = again(source, out, campaign, Number(bad=3))
    assert (ended.ok, ended.failed) == (3, 2)
    assert "reward" not in rows(out)[3]
    assert rows(out)[3]["response"]["output"]
    assert {head.unit: head.kind for head in heads(out) if not head.ok} == {2: "context-length", 3: "reward"}


def test_the_source_is_only_read(tmp_path: Path) -> None:
    source, campaign = collected(tmp_path)
    before = {path: path.read_bytes() for path in source.root.rglob("*") if path.is_file()}
    again(source, CampaignDir(tmp_path / "out"), campaign, Number())
    assert {path: path.read_bytes() for path in source.root.rglob("*") if path.is_file()} == before


def test_the_new_campaign_can_be_loaded_and_collects_nothing(tmp_path: Path) -> None:
    source, campaign = collected(tmp_path)
    out = CampaignDir(tmp_path / "out")
    manifest = prepare_rescore(source, out, campaign.model_copy(update={"name": "anew", "verifier": "choice"}))
    assert load_manifest(out) == manifest
    assert load_campaign(out).verifier == "choice"
    assert (manifest.name, manifest.units, manifest.rescored) == ("anew", 6, str(source.root))
    with pytest.raises(UserError, match="scored anew: nothing is collected here"):
        run(out, campaign, Told(said))


def test_another_source_or_other_settings_are_refused(tmp_path: Path) -> None:
    source, campaign = collected(tmp_path)
    out = CampaignDir(tmp_path / "out")
    prepare_rescore(source, out, campaign)
    with pytest.raises(UserError, match="was begun with another verifier"):
        prepare_rescore(source, out, campaign.model_copy(update={"verifier": "choice"}))
    other, _ = make(tmp_path / "other", ["something else"])
    with pytest.raises(UserError, match="holds another campaign"):
        prepare_rescore(other, out, campaign)
    with pytest.raises(UserError, match="holds another campaign"):
        prepare_rescore(source, source, campaign)


def test_a_dataset_that_nobody_scores_is_refused(tmp_path: Path) -> None:
    source, campaign = collected(tmp_path)
    renamed = Campaign.model_validate({**campaign.model_dump(), "datasets": [{"name": "other", "path": "rows.jsonl"}]})
    with pytest.raises(UserError, match="no dataset is called rows"):
        prepare_rescore(source, CampaignDir(tmp_path / "out"), renamed)
    assert not (tmp_path / "out").exists()


def test_inputs_that_were_edited_are_refused(tmp_path: Path) -> None:
    source, campaign = collected(tmp_path)
    source.inputs.write_bytes(source.inputs.read_bytes().replace(b"question", b"Question"))
    with pytest.raises(UserError, match="not what manifest"):
        prepare_rescore(source, CampaignDir(tmp_path / "out"), campaign)


def test_the_whole_of_it_with_a_real_verifier(tmp_path: Path) -> None:
    source, campaign = collected(tmp_path)
    verify = {"number": {"kind": "exact", "pattern": r"answer (\d)"}}
    changed = Campaign.model_validate({**campaign.model_dump(exclude_unset=True), "verifier": "number", "verifiers": verify})
    out = CampaignDir(tmp_path / "out")
    for _ in range(2):
        status = rescore(source, out, changed, lambda _: None)
        assert (status.ok, status.failed, status.owed, status.mean_reward) == (4, 1, 1, 0.0)
    assert {head.unit: head.answer for head in heads(out) if head.ok} == {0: "0", 1: "1", 3: "3", 5: "5"}
