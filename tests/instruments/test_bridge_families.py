"""The table of families: every architecture of the Bridge is in it, and its sizes make mistakes visible."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from seatrial.instruments.bridge import rungs
from seatrial.instruments.bridge.rungs import FAMILIES, RUNNING, STOPPED, Family, Missing
from seatrial.instruments.engines import tiny_models

SUPPORTED = [
    "BailingMoeV2ForCausalLM",
    "DeciLMForCausalLM",
    "DeepseekV2ForCausalLM",
    "DeepseekV3ForCausalLM",
    "DeepseekV4ForCausalLM",
    "Ernie4_5_MoeForCausalLM",
    "Ernie4_5_VLMoeForConditionalGeneration",
    "Exaone4ForCausalLM",
    "Exaone4_5_ForConditionalGeneration",
    "ExaoneMoEForCausalLM",
    "ExaoneMoeForCausalLM",
    "FalconH1ForCausalLM",
    "Gemma2ForCausalLM",
    "Gemma3ForCausalLM",
    "Gemma3ForConditionalGeneration",
    "Gemma4ForCausalLM",
    "Gemma4ForConditionalGeneration",
    "GemmaForCausalLM",
    "Glm4MoeForCausalLM",
    "Glm4MoeLiteForCausalLM",
    "Glm4vMoeForConditionalGeneration",
    "GlmMoeDsaForCausalLM",
    "GptOssForCausalLM",
    "HYV3ForCausalLM",
    "KimiK25ForConditionalGeneration",
    "KimiK2ForCausalLM",
    "LlamaForCausalLM",
    "MiMoForCausalLM",
    "MiMoV2FlashForCausalLM",
    "MiniMaxM2ForCausalLM",
    "MiniMaxM3SparseForConditionalGeneration",
    "Mistral3ForConditionalGeneration",
    "MistralForCausalLM",
    "NemotronForCausalLM",
    "NemotronHForCausalLM",
    "NemotronH_Nano_Omni_Reasoning_V3",
    "NemotronH_Nano_VL_V2",
    "NemotronLabsDiffusionModel",
    "OlmoeForCausalLM",
    "Qwen2AudioForConditionalGeneration",
    "Qwen2ForCausalLM",
    "Qwen2_5OmniForConditionalGeneration",
    "Qwen2_5_VLForConditionalGeneration",
    "Qwen3ASRForConditionalGeneration",
    "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM",
    "Qwen3NextForCausalLM",
    "Qwen3OmniMoeForConditionalGeneration",
    "Qwen3VLForConditionalGeneration",
    "Qwen3VLMoeForConditionalGeneration",
    "Qwen3_5ForCausalLM",
    "Qwen3_5ForConditionalGeneration",
    "Qwen3_5MoeForCausalLM",
    "Qwen3_5MoeForConditionalGeneration",
    "SarvamMLAForCausalLM",
    "SarvamMoEForCausalLM",
    "Step3p5ForCausalLM",
    "Step3p7ForConditionalGeneration",
]
"""AutoBridge.list_supported_models() of Bridge 0.6.2."""


def test_every_architecture_of_the_bridge_is_in_the_table() -> None:
    assert len(SUPPORTED) == 58
    assert {family.architecture for family in FAMILIES.values()} == set(SUPPORTED)


def test_no_name_is_in_both_tables() -> None:
    assert len(FAMILIES) == len(RUNNING) + len(STOPPED)


def test_the_families_that_are_promised_run() -> None:
    assert {"qwen2", "qwen3", "qwen3-moe", "llama"} <= set(RUNNING)
    assert len({family.architecture for family in RUNNING.values()}) >= 8


@pytest.mark.parametrize("name", RUNNING)
def test_a_family_that_runs_says_how(name: str) -> None:
    family = FAMILIES[name]
    assert family.config
    assert not family.needs


@pytest.mark.parametrize("name", STOPPED)
def test_a_family_that_cannot_run_names_the_part(name: str, tmp_path: Path) -> None:
    with pytest.raises(Missing, match=r"Transformer Engine|mamba-ssm|transformers class|tiny checkpoint"):
        rungs.ensure_family(name, tmp_path / name)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", RUNNING)
def test_sizes_can_be_split_and_show_mistakes(name: str) -> None:
    found = rungs.family_settings(FAMILIES[name])
    assert found["num_key_value_heads"] % 2 == found["num_attention_heads"] % 2 == found["num_hidden_layers"] % 2 == 0
    assert found["vocab_size"] % 2 == (name == "qwen2-odd")
    assert found["vocab_size"] > 98, "the tokenizer has 98 words"
    assert (found["rope_theta"], found["rms_norm_eps"]) == (50000.0, 3e-5)
    assert found["tie_word_embeddings"] is FAMILIES[name].tied
    assert None not in {key: value for key, value in found.items() if key != "bos_token_id"}.values()


@pytest.mark.parametrize("name", [name for name, family in RUNNING.items() if family.moe])
def test_experts_are_four_and_two_are_chosen(name: str) -> None:
    found = rungs.family_settings(FAMILIES[name])
    assert 4 in {found.get(key) for key in ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")}
    assert 2 in {found.get(key) for key in ("num_experts_per_tok", "moe_k")}


def test_an_unknown_family_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no family 'qwen9'; known: qwen2, "):
        rungs.ensure_family("qwen9", tmp_path / "x")


def test_a_checkpoint_that_is_there_is_kept(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    assert rungs.ensure_family("llama", tmp_path) == tmp_path
    assert (tmp_path / "config.json").read_text(encoding="utf-8") == "{}"


def test_another_class_than_the_table_says_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Other:
        """What transformers would make."""

    auto = SimpleNamespace(from_config=lambda config, dtype: Other())
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(manual_seed=lambda seed: None, float32="float32"))
    monkeypatch.setitem(sys.modules, "transformers", SimpleNamespace(AutoModelForCausalLM=auto, LlamaConfig=dict))
    with pytest.raises(ValueError, match="LlamaConfig makes a Other, not the LlamaForCausalLM"):
        rungs.ensure_family("llama", tmp_path / "llama")
    assert not list(tmp_path.iterdir()), "a torn checkpoint was left behind"


def test_none_leaves_a_size_out() -> None:
    found: dict[str, Any] = rungs.family_settings(Family("X", "XConfig", {"head_dim": None, "norm_eps": 1e-3}))
    assert "head_dim" not in found
    assert found["norm_eps"] == 1e-3


def test_whole_gives_what_another_process_made_first(tmp_path: Path) -> None:
    place = tmp_path / "model"

    def late(temporary: Path) -> None:
        (temporary / "config.json").write_text("mine", encoding="utf-8")
        place.mkdir()
        (place / "config.json").write_text("theirs", encoding="utf-8")

    assert (tiny_models.whole(place, late) / "config.json").read_text(encoding="utf-8") == "theirs"
    assert [found.name for found in tmp_path.iterdir()] == ["model"]
