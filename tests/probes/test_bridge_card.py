"""The verification card: the whole inventory, nothing verified that was not run, and YAML that a strict reader takes."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from seatrial.core.errors import UserError
from seatrial.core.records import RepoState
from seatrial.core.verdict import Verdict
from seatrial.probes.bridge_report import DISCLAIMER, HARDWARE, _scalar, about, card, card_text, require_card
from seatrial.probes.bridge_verdict import BridgeProbe, BridgeRequest, FamilyResult, JudgedBridgeProbe, RungResult

COMMIT = "067f987df" + "0" * 31
BRIDGE = RepoState(name="bridge", path="/work/bridge", commit=COMMIT, branch=None, packages=("megatron.bridge",))
RUNGS = (
    RungResult(rung="import", title="HF weights reach every parameter", verdict=Verdict.PASS, reason="/secret/place", figure="26/26"),
    RungResult(rung="roundtrip", title="export is the checkpoint, bit for bit", verdict=Verdict.PASS, reason="", figure="26/26"),
    RungResult(rung="parity", title="logits are transformers' logits", verdict=Verdict.FAIL, reason="", figure="2.4e-07"),
    RungResult(rung="lora", title="LoRA adapters", verdict=Verdict.PASS, reason=""),
)


def probe(
    *models: str, changes: tuple[RepoState, ...] = (BRIDGE,), fault: str | None = None, device: str = "cpu", transformers: str = "5.17.0"
) -> BridgeProbe:
    families = tuple(FamilyResult(model=Path(model).name, verdict=Verdict.FAIL, reason="", rungs=RUNGS) for model in models)
    judged = JudgedBridgeProbe(
        verdict=Verdict.FAIL, reason="", families=families, versions={"transformers": f"{transformers} from /venv/transformers/__init__.py"}
    )
    asked = BridgeRequest(models=models, rungs=(), device=device, fault=fault)
    return BridgeProbe(seatrial="1", created="now", command=(), asked=asked, changes=changes, judged=judged)


def made(of: BridgeProbe) -> dict[str, Any]:
    family = of.judged.families[0]
    return card(family, about(of, family))


def leaves(items: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {name: item if "status" in item else item[HARDWARE] for name, item in items.items()}


def test_the_inventory_is_whole_and_nothing_is_verified() -> None:
    whole = made(probe("qwen2"))
    assert list(whole) == ["title", "summary", "verification_index", "model", "verification_environment", "items"]
    direct = ["hf_to_megatron_cpu", "hf_to_megatron_gpu", "megatron_to_hf_cpu", "megatron_to_hf_gpu", "manual_forward_pass", "inference"]
    training = ["pretrain", "sft", "sft_export_inference", "sft_long_context", "peft", "checkpoint_resume"]
    assert list(whole["items"]) == [*direct, *training]
    assert whole["verification_index"] == {"model_level": {"unverified": direct}, "training": {HARDWARE: {"unverified": training}}}
    for item in leaves(whole["items"]).values():
        assert (item["status"], item["last_verified"], item["precision"]) == ("unverified", None, None)
        assert "bridge_commit" not in item
        assert item.get("command", item.get("commands")) is None


def test_the_fields_that_the_format_asks_for_by_item() -> None:
    whole = made(probe("qwen2"))
    assert whole["summary"].startswith(DISCLAIMER)
    assert set(whole["model"]) == {"hf_id", "hf_revision", "architecture", "min_transformers_version"}
    assert re.fullmatch(r"nvcr\.io/nvidia/(nemo|pytorch):[A-Za-z0-9._-]+", whole["verification_environment"]["base_container"])
    assert whole["verification_environment"]["bridge_commit"] == COMMIT
    assert whole["model"]["min_transformers_version"] == "5.17.0"
    items = leaves(whole["items"])
    assert {name for name, item in items.items() if "metrics" in item} == {
        "pretrain",
        "sft",
        "sft_long_context",
        "peft",
        "checkpoint_resume",
    }
    assert all(len(item["metrics"]) == 5 and not any(item["metrics"].values()) for item in items.values() if "metrics" in item)
    assert {name for name, item in items.items() if item.get("enabled_features") == {}} == {"pretrain", "sft", "sft_long_context", "peft"}
    assert {name: item["depends_on"] for name, item in items.items() if "depends_on" in item} == {
        "sft_export_inference": "sft",
        "checkpoint_resume": "pretrain",
    }
    resume = items["checkpoint_resume"]["resume_comparison"]
    assert (resume["reference_item"], resume["loss_relative_tolerance"], resume["sentinels_match"]) == ("pretrain", 0.01, None)
    assert {name for name, item in items.items() if "commands" in item} == {"sft_export_inference"}


def test_what_was_measured_is_said_with_what_it_was_measured_on() -> None:
    items = leaves(made(probe("qwen2"))["items"])
    said = items["hf_to_megatron_cpu"]["expected_result"]
    assert said.startswith("Not verified. Seatrial measured on cpu with a tiny random-weight model")
    assert "HF weights reach every parameter: Pass (26/26)" in said
    assert "Fail (2.4e-07)" in items["manual_forward_pass"]["expected_result"]
    assert "LoRA adapters: Pass" in items["peft"]["expected_result"]
    for name in ("hf_to_megatron_gpu", "megatron_to_hf_gpu", "inference", "pretrain", "checkpoint_resume"):
        assert items[name]["expected_result"] is None
    on_gpu = leaves(made(probe("qwen2", device="cuda"))["items"])
    assert on_gpu["hf_to_megatron_cpu"]["expected_result"] is None
    assert "on cuda" in on_gpu["megatron_to_hf_gpu"]["expected_result"]


def test_a_checkpoint_of_ones_own_is_not_called_tiny_and_still_not_verified(tmp_path: Path) -> None:
    place = tmp_path / "qwen2"  # called like a family
    place.mkdir()
    (place / "config.json").write_text(json.dumps({"architectures": ["Qwen2ForCausalLM"]}))
    whole = made(probe(str(place)))
    assert (whole["title"], whole["model"]["architecture"]) == ("qwen2", "Qwen2ForCausalLM")
    said = leaves(whole["items"])["megatron_to_hf_cpu"]
    assert "the weights of a local checkpoint" in said["expected_result"]
    assert said["status"] == "unverified"
    (place / "config.json").write_text("{}")
    with pytest.raises(UserError, match="names no architecture"):
        made(probe(str(place)))


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (probe("qwen2", "llama"), "one model, and here are 2"),
        (probe("qwen2", fault="qkv"), "with the fault qkv"),
        (probe("qwen2", changes=()), "no checkout is under test"),
        (probe("qwen2", changes=(BRIDGE.model_copy(update={"dirty": ("a.py",)}),)), "uncommitted changes"),
        (probe("qwen2", changes=(BRIDGE.model_copy(update={"commit": "abc"}),)), "no commit of 40"),
        (probe("qwen2", transformers="unknown version"), "version of transformers"),
    ],
)
def test_why_there_can_be_no_card(given: BridgeProbe, why: str) -> None:
    with pytest.raises(UserError, match=why):
        card_text(given)


def test_what_can_be_known_before_the_run_is(tmp_path: Path) -> None:
    def refused(given: BridgeProbe, place: Path) -> str:
        with pytest.raises(UserError) as caught:
            require_card(given.asked, given.changes, place)
        return caught.value.message

    place = tmp_path / "new" / "card.yaml"
    require_card(probe("qwen2").asked, (BRIDGE,), place)
    assert not list(tmp_path.iterdir()), "it only looked"
    assert "one model, and here are 2" in refused(probe("qwen2", "llama"), place)
    assert "with the fault qkv" in refused(probe("qwen2", fault="qkv"), place)
    assert "no checkout is under test" in refused(probe("qwen2", changes=()), place)
    assert "uncommitted" in refused(probe("qwen2", changes=(BRIDGE.model_copy(update={"dirty": ("a.py",)}),)), place)
    assert "is a directory" in refused(probe("qwen2"), tmp_path)
    (tmp_path / "config.json").write_text("{}")
    assert "names no architecture" in refused(probe(str(tmp_path)), place)
    assert "cannot write" in refused(probe("qwen2"), tmp_path / "config.json" / "card.yaml")


@pytest.mark.parametrize("figure", ["see /home/me/log", "~me/x", "$HOME", "a@b.org", "10.0.0.1", "http://x", "../x", "our cluster"])
def test_nothing_private_gets_into_a_card(figure: str) -> None:
    given = probe("qwen2")
    rungs = (RUNGS[0].model_copy(update={"figure": figure}),)
    family = given.judged.families[0].model_copy(update={"rungs": rungs})
    judged = given.judged.model_copy(update={"families": (family,)})
    with pytest.raises(UserError, match="the card would hold"):
        card_text(given.model_copy(update={"judged": judged}))


def read(text: str) -> dict[str, Any]:
    """The YAML that a card is made of, read by its indentation."""
    root: dict[str, Any] = {}
    places: list[Any] = [root]
    lines = text.splitlines()
    for number, line in enumerate(lines):
        depth = (len(line) - len(line.lstrip())) // 2
        del places[depth + 1 :]
        if line.lstrip().startswith("- "):
            places[depth].append(json.loads(line.lstrip()[2:]))
            continue
        key, _, rest = line.strip().partition(":")
        assert key not in places[depth], "a key twice"
        following = lines[number + 1].lstrip() if number + 1 < len(lines) else ""
        places[depth][key] = json.loads(rest) if rest.strip() else [] if following.startswith("- ") else {}
        places.append(places[depth][key])
    return root


def test_the_text_is_the_card() -> None:
    given = probe("qwen2")
    text = card_text(given)
    assert read(text) == made(given)
    assert "/secret/place" not in text
    assert "loss_absolute_tolerance: 1.0e-06\n" in text


def test_text_that_yaml_would_read_otherwise_is_quoted_and_the_rest_refused() -> None:
    assert [_scalar(value) for value in ("null", "1e-6", "a: b # c", 'say "x"')] == ['"null"', '"1e-6"', '"a: b # c"', '"say \\"x\\""']
    assert [_scalar(value) for value in list[object]((None, {}, 0.5, 1e-6, 1e22))] == ["null", "{}", "0.5", "1.0e-06", "1.0e+22"]
    for value in list[object]((float("nan"), "two\nlines", b"x")):
        with pytest.raises(ValueError, match="cannot hold"):
            _scalar(value)
