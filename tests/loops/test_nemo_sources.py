"""What the driver would refuse is said before: a vendored tree that cannot be replaced, helpers that cannot be built, experts
that a model does not have; and what a killed run left is restored by one command."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from seatrial.core.errors import BlockedError
from seatrial.core.loop import Context
from seatrial.instruments.nemo_rl import vendored_bridge
from seatrial.loops import get_loop
from seatrial.loops.nemo_rl import nemo_checkout, nemo_preflight
from tests.loops.nemo_rl_checkout import Bench, as_repository, make_bench


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    made = make_bench(tmp_path)
    as_repository(made.nemo_rl)
    return made


def synced(bench: Bench) -> Context:
    context = bench.context()
    target = str(bench.nemo_rl / nemo_checkout.VENDORED)
    changes = (context.changes[0].model_copy(update={"synced": target}), *context.changes[1:])
    return replace(context, changes=changes)


def said(context: Context, bench: Bench) -> list[str]:
    return [finding.message for finding in nemo_preflight.source_findings(context, bench.nemo_rl) if not finding.ok]


def test_a_clean_vendored_tree_can_be_replaced_and_one_with_changes_cannot(bench: Bench) -> None:
    assert said(synced(bench), bench) == []
    (bench.nemo_rl / nemo_checkout.VENDORED / nemo_checkout.BRIDGE / "provider.py").write_text("mine\n")
    (message,) = said(synced(bench), bench)
    assert "uncommitted changes" in message
    assert said(bench.context(), bench) == [], "on PYTHONPATH nothing is replaced"


def test_what_a_killed_run_left_blocks_the_next_one_until_it_is_restored(bench: Bench, tmp_path: Path) -> None:
    target = bench.nemo_rl / nemo_checkout.VENDORED
    marker = vendored_bridge.git_directory(bench.nemo_rl) / vendored_bridge.MARKER
    (bench.bridge / nemo_checkout.BRIDGE / "provider.py").write_text("changed\n")
    as_repository(bench.bridge)
    vendored_bridge.start_sync(bench.bridge, target, tmp_path / "kept", marker)
    (finding,) = [found for found in nemo_preflight.source_findings(bench.context(), bench.nemo_rl) if not found.ok]
    assert "still holds the Bridge of a run that was killed" in finding.message
    assert finding.fix.endswith(f"-m seatrial.instruments.nemo_rl.vendored_bridge {bench.nemo_rl}")
    assert vendored_bridge.main([str(bench.nemo_rl)]) == 0
    assert (target / nemo_checkout.BRIDGE / "provider.py").read_text() == "NAME = 'provider'\n"
    assert said(bench.context(), bench) == []
    assert vendored_bridge.main([str(tmp_path / "nowhere")]) == 2


def test_helpers_without_a_makefile_are_said_with_the_command(bench: Bench) -> None:
    (message,) = said(bench.context(helpers="local"), bench)
    assert "no Makefile" in message


@pytest.mark.parametrize(("settings", "ok"), [({"num_experts": 8}, True), ({"text_config": {"n_routed_experts": 4}}, True), ({}, False)])
def test_expert_parallelism_is_for_a_model_with_experts(bench: Bench, settings: dict[str, object], ok: bool) -> None:
    place = bench.root / "model"
    (place / "config.json").write_text(json.dumps(settings))
    for context in (
        bench.context(levels=("architecture",), architecture="moe", model=str(place)),
        bench.context(levels=("parallelism",), ep="2", model=str(place)),
    ):
        assert all(finding.ok for finding in nemo_preflight.expert_findings(context)) is ok


def test_a_model_that_is_not_here_cannot_be_asked_but_the_default_is_known(bench: Bench) -> None:
    context = bench.context(levels=("architecture",), architecture="moe")
    assert [finding.ok for finding in nemo_preflight.expert_findings(context)] == [False]
    (unknown,) = nemo_preflight.expert_findings(replace(context, model="org/unknown"))
    assert unknown.ok
    assert "not known" in unknown.message
    assert list(nemo_preflight.expert_findings(bench.context())) == []


def test_without_a_checkout_the_missing_option_is_what_is_said() -> None:
    with pytest.raises(BlockedError, match="no NeMo-RL checkout was named") as caught:
        nemo_checkout.interpreter({})
    assert "--nemo-rl PATH" in caught.value.fix


def test_coverage_is_named_in_the_title_and_what_it_leaves_out_in_the_limitations(bench: Bench) -> None:
    given = {"nemo_rl": str(bench.nemo_rl), "transports": "full,delta", "tp": "4", "gpus": "4", "architecture": "vlm"}
    loop = get_loop("nemo-rl").configured(given)
    titles = [level.title for level in loop.levels()]
    assert titles[2] == "Non-colocated vLLM refit (full, delta)"
    assert titles[4] == "Parallelism stress (TP 4, PP 1, CP 1, EP 1, ETP 1)"
    assert titles[5] == "Architecture (vlm)"
    context = bench.context()
    assert any("all parallel sizes were 1" in text for text in loop.limitations(loop.levels()[0], context))
    assert any("expert parallel size 1" in text for text in loop.limitations(loop.levels()[4], context))
    for file in (bench.bridge / nemo_checkout.CORE).rglob("*.py"):
        file.unlink()
    (bench.bridge / nemo_checkout.CORE / "megatron" / "core").rmdir()
    foreign = [text for text in loop.limitations(loop.levels()[0], context) if "Megatron-Core came from" in text]
    assert str(bench.nemo_rl / nemo_checkout.VENDORED) in foreign[0]
