"""`rescore`: the rewards of stored rollouts computed anew, into a campaign directory of its own. The policy is not asked.

- Units are those of the source. A rollout keeps its row, response, tokens and latency, and gets the new reward, answer and fields of
  the verifier; `rescored` in its row says which reward it had. One that cannot be scored keeps its response in the failure's row.
- Units that failed for good stay failed, of the same class, unless they failed only in being scored (classes reward, judge, sandbox) and
  their response is stored. Units that are missing stay missing.
- It is the same collector with another backend: exactly once, and called again it goes on where it was.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import orjson

from seatrial import __version__
from seatrial.core.errors import UserError
from seatrial.core.files import sync_directory, write_json
from seatrial.core.records import replace as replace_record
from seatrial.rollouts.backends import openai_format as answers
from seatrial.rollouts.campaign import Campaign, Failures
from seatrial.rollouts.campaign_dir import CampaignDir
from seatrial.rollouts.campaign_rounds import make_verifiers, run_collector
from seatrial.rollouts.campaign_runner import Status, StatusReader
from seatrial.rollouts.journal.journal_scan import PENDING, Scanner
from seatrial.rollouts.manifest import Manifest, Units, building, check_inputs, identity_of, load_manifest, save_campaign
from seatrial.rollouts.results.campaign_merge import Index
from seatrial.rollouts.rollout_record import (
    FailureKind,
    Head,
    RolloutError,
    RolloutOutcome,
    Unit,
    Verifier,
    check,
    close_verifiers,
    head_of,
    row_of,
    score_answer,
)

_IN_SCORING = (FailureKind.REWARD, FailureKind.JUDGE, FailureKind.SANDBOX)


def rescore(source: CampaignDir, out: CampaignDir, campaign: Campaign, progress: Callable[[str], None]) -> Status:
    """Score the rollouts of `source` as `campaign` says, into `out`; goes on when `out` was begun. Says how `out` stands then."""
    manifest = prepare_rescore(source, out, campaign)
    backend = RescoreBackend(source, make_verifiers(campaign, [str(url) for url in (campaign.policy.url, *campaign.policy.urls) if url]))
    # The budget is for a policy that is asked in vain. Here failures of the source are carried over, and would spend it.
    lenient = replace_record(campaign, failures=Failures(max_share=1.0))
    run_collector(out, lenient, range(manifest.shards), backend, progress, only=backend.has)
    with Units(out, manifest) as units:
        return StatusReader(out, manifest, units).read()


def prepare_rescore(source: CampaignDir, out: CampaignDir, campaign: Campaign) -> Manifest:
    """Make the new campaign directory, or take up the one that an earlier call made. Refuses another source or other settings."""
    known = load_manifest(source)
    if campaign.gym:
        raise UserError("campaign: [gym]: Gym's resources servers verify while they collect", "give a campaign file with a verifier")
    names = {dataset.name for dataset in campaign.datasets}
    if absent := next((file.dataset for file in known.files if file.dataset not in names), None):
        message = f"campaign: no dataset is called {absent}, whose rollouts {source.root} holds"
        raise UserError(message, f'add one with name = "{absent}"')
    # Seeds are those that the rollouts were asked with.
    identity = {**identity_of(campaign, Path.cwd()), "work": known.identity["work"]}
    if out.manifest.is_file():
        found = load_manifest(out)
        if not found.rescored or found.inputs_sha256 != known.inputs_sha256:
            raise UserError(f"{out.root}: holds another campaign", "name another directory")
        if changed := [key for key in identity if identity[key] != found.identity.get(key)]:
            fix = "name another directory, or say what you said before"
            raise UserError(f"{out.root}: was begun with another {', '.join(changed)}", fix)
        return found
    check_inputs(source, known)
    manifest = replace_record(
        known,
        name=campaign.name,
        made=datetime.now(UTC).isoformat(timespec="seconds"),
        seatrial=__version__,
        identity=identity,
        imported=None,
        rescored=str(source.root.absolute()),
    )
    with building(out) as draft:
        for before, now in ((source.inputs, draft.inputs), (source.index, draft.index)):
            shutil.copyfile(before, now)
            with now.open("rb+") as stream:
                os.fsync(stream.fileno())
        save_campaign(draft, campaign)
        write_json(draft.manifest, manifest)
        sync_directory(draft.root)
    return manifest


class RescoreBackend:
    """Gives the stored rollouts of another campaign with the verifier applied again; a `Backend`."""

    def __init__(self, source: CampaignDir, verifiers: Mapping[str, Verifier]) -> None:
        self._source = source
        self._verifiers = verifiers
        self._settled = bytearray()
        self._index = Index(0)

    def has(self, number: int) -> bool:
        """Whether the source has settled this unit; known once it is open."""
        return self._settled[number] != PENDING

    async def open(self) -> None:
        """Find where the winning record of each unit lies."""

        def read() -> None:
            with Units(self._source, load_manifest(self._source)) as units:
                self._index = Index(units.total)
                self._settled = Scanner(self._source, units, self._index).update().settled

        await asyncio.to_thread(read)

    async def roll(self, unit: Unit) -> RolloutOutcome:
        head, row = self._record(unit.number)
        if not head.ok:
            head, row = _unscored(unit, head, row)
        output = (row.get("response") or {}).get("output") or []
        # Rollouts that were imported from Skills have what was said in a column of its own.
        text = answers.text_of(output) if output else str(row.get("generation") or "")
        kept = {key: value for key, value in row.items() if key != "reward"}
        score = await score_answer(self._verifiers[unit.row.dataset], unit.row, text, output, kept)
        note = {"source": str(self._source.root.absolute()), "reward": head.reward, "answer": head.answer}
        return RolloutOutcome(
            row={**row, **score.fields, "reward": score.reward, "rescored": note},
            reward=score.reward,
            answer=score.answer,
            input_tokens=head.input_tokens,
            output_tokens=head.output_tokens,
            turns=head.turns,
            finish=head.finish,
            metrics={**head.metrics, **score.metrics},
            latency_s=head.latency_s,
        )

    async def alive(self) -> str | None:
        """Files do not go away."""
        return None

    async def close(self) -> None:
        """End the verifiers."""
        await close_verifiers(self._verifiers)

    def _record(self, number: int) -> tuple[Head, dict[str, Any]]:
        file, offset = self._index.place_of(number)
        handle = os.open(self._index.files[file], os.O_RDONLY | os.O_CLOEXEC)
        try:
            line = os.pread(handle, self._index.length[number], offset)
        finally:
            os.close(handle)
        return head_of(line, check(line)), row_of(line)


def _unscored(unit: Unit, head: Head, row: dict[str, Any]) -> tuple[Head, dict[str, Any]]:
    """A failure as the rollout that it is but for its score; raises the failure when it is more than that."""
    kind, response = FailureKind(head.kind or ""), row.get("response")
    if kind not in _IN_SCORING or not isinstance(response, dict) or not response.get("output"):
        raise RolloutError(kind, head.message, heals=False, row=row)
    # The head of a failure says nothing of the answer.
    said = answers.read(orjson.dumps(response), "responses", unit.number)
    told: dict[str, Any] = {"input_tokens": said.input_tokens, "output_tokens": said.output_tokens, "finish": said.finish}
    told["turns"] = sum(item.get("type") == "message" for item in said.output) or 1
    about = {"_ng_task_index": unit.row.index, "_ng_rollout_index": unit.repeat, "task_id": unit.row.id, "dataset": unit.row.dataset}
    return replace(head, **told), {**about, **row}
