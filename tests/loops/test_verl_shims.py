"""The parts of the CPU shims that need neither torch nor Megatron: patches at import, and the layout of fused tensors."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from seatrial.instruments.megatron import import_patches
from seatrial.instruments.verl import megatron_layout
from seatrial.instruments.witness import Witness


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package whose modules can be patched; everything is as before afterwards."""
    folder = tmp_path / "strange"
    folder.mkdir()
    (folder / "__init__.py").write_text("", encoding="utf-8")
    finders = list(sys.meta_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(import_patches, "_stand_ins", {})
    monkeypatch.setattr(import_patches, "_patches", {})
    monkeypatch.setattr(import_patches, "_hidden", set())
    yield folder
    sys.meta_path[:] = finders
    for name in [name for name in sys.modules if name.partition(".")[0] == "strange"]:
        del sys.modules[name]


def test_one_module_gets_a_package_that_nobody_else_sees(package: Path) -> None:
    for name in ("one", "two"):
        (package / f"{name}.py").write_text(
            "try:\n    import absent.inner as found\n    from absent.inner import value\nexcept ImportError:\n    found = None\n",
            encoding="utf-8",
        )
    absent, inner = ModuleType("absent"), ModuleType("absent.inner")
    absent.inner, inner.value = inner, 7  # type: ignore[attr-defined]
    import_patches.supply("strange.one", "absent", absent)
    assert importlib.import_module("strange.one").value == 7
    assert importlib.import_module("strange.two").found is None
    assert "absent" not in sys.modules


def test_a_module_is_patched_once_it_has_run(package: Path) -> None:
    (package / "late.py").write_text("value = 1\n", encoding="utf-8")

    def double(module: ModuleType) -> None:
        module.value *= 2  # type: ignore[attr-defined]

    import_patches.after("strange.late", double)
    module = importlib.import_module("strange.late")
    assert module.value == 2
    assert inspect.getsource(module) == "value = 1\n"  # so do tracebacks
    import_patches.after("strange.late", double)
    assert module.value == 4


def test_a_version_that_a_patch_does_not_fit_is_named(package: Path) -> None:
    (package / "new.py").write_text("", encoding="utf-8")
    import_patches.after("strange.new", lambda module: setattr(module, "one", module.two))
    with pytest.raises(RuntimeError, match=r"no CPU shim fits this strange.new .*'two'"):
        importlib.import_module("strange.new")


def test_a_hidden_module_is_not_there(package: Path) -> None:
    (package / "gone.py").write_text("", encoding="utf-8")
    import_patches.hide("strange.gone")
    with pytest.raises(ModuleNotFoundError, match=r"strange\.gone"):
        importlib.import_module("strange.gone")


def test_the_import_witness_sees_a_patched_module(package: Path, tmp_path: Path) -> None:
    (package / "seen.py").write_text("", encoding="utf-8")
    Witness(str(tmp_path), "driver", {"strange": str(tmp_path)}, []).start()
    import_patches.after("strange.seen", lambda module: setattr(module, "patched", True))
    assert importlib.import_module("strange.seen").patched
    assert "seen.py" in (tmp_path / "loaded.jsonl").read_text(encoding="utf-8")


def test_tensors_that_are_not_fused_get_their_other_name() -> None:
    held = {
        "embedding.word_embeddings.weight": "e",
        "decoder.final_layernorm.weight": "n",
        "output_layer.weight": "o",
        "decoder.layers.11.input_layernorm.weight": "i",
        "decoder.layers.0.pre_mlp_layernorm.weight": "p",
        "decoder.layers.0.self_attention.linear_proj.to_wrap.weight": "w",
        "decoder.layers.0.mlp.linear_fc1.adapter.linear_in.weight": "a",
        "decoder.layers.0.mlp.linear_fc2.adapter.linear_out.weight": "b",
    }
    assert megatron_layout.exported(held, 2, 16) == {
        "model.embed_tokens.weight": "e",
        "model.norm.weight": "n",
        "lm_head.weight": "o",
        "model.layers.11.input_layernorm.weight": "i",
        "model.layers.0.post_attention_layernorm.weight": "p",
        "model.layers.0.self_attn.o_proj.weight": "w",
        "model.layers.0.mlp.gate_proj.lora_A.weight": "a",
        "model.layers.0.mlp.up_proj.lora_A.weight": "a",
        "model.layers.0.mlp.down_proj.lora_B.weight": "b",
    }


@pytest.mark.parametrize(
    "name",
    [
        "decoder.layers.0.mlp.router.weight",
        "decoder.layers.0.self_attention.q_layernorm.weight",
        "decoder.layers.0.mlp.linear_fc2.adapter.other.weight",
        "vision.weight",
    ],
)
def test_one_tensor_that_is_not_known_and_there_is_no_opinion(name: str) -> None:
    assert megatron_layout.exported({"output_layer.weight": "o", name: "x"}, 2, 16) is None
