"""Rung reload: what save_hf_pretrained writes is the checkpoint again: transformers loads it, and computes the same with it.

Weights, configuration, tokenizer and logits are compared with those of the original directory.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from seatrial.probes.bridge import weights
from seatrial.probes.bridge.rank import Missing, Rank
from seatrial.probes.bridge.session import tokens

OTHER = ("_name_or_path", "transformers_version", "dtype", "torch_dtype")
"""What a saved configuration may say differently."""
TOKENIZER = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")


def run(rank: Rank) -> None:
    """Save, reload, compare."""
    import torch
    from transformers import AutoModelForCausalLM

    session = rank.session()
    place = rank.out / "saved"
    try:
        session.bridge.save_hf_pretrained(session.build(), place, show_progress=False)
    except (ValueError, OSError) as error:
        if "tokenizer" not in str(error) or any((rank.directory / name).is_file() for name in TOKENIZER):
            raise
        raise Missing(f"a tokenizer in {rank.directory}: save_hf_pretrained insists on one") from error
    config = rank.config()
    stored, saved = weights.on_disk(rank.directory), weights.on_disk(place)
    rank.write("saved", **weights.compare(saved, stored, session.torch_dtype(), weights.tied(config)))
    model, info = AutoModelForCausalLM.from_pretrained(
        place, dtype=session.torch_dtype(), attn_implementation="eager", local_files_only=True, output_loading_info=True
    )
    ids = tokens(config.vocab_size).to(session.device)
    with torch.no_grad():
        ours, theirs = (each(ids).logits.cpu() for each in (model.eval().to(session.device), session.hf()))
    rank.write(
        "reload",
        loading={key: weights.listed(sorted(map(str, found))) for key, found in info.items()},
        logits_equal=weights.same(ours, theirs),
        logits_finite=bool(ours.isfinite().all()),
        max_difference=float((ours - theirs).abs().max()) if ours.shape == theirs.shape else None,
        config=weights.listed(_config(rank.directory, place)),
        tokenizer=_tokenizer(rank.directory, place),
    )


def _config(original: Path, saved: Path) -> list[dict[str, Any]]:
    """The fields that differ, both sides."""
    from transformers import AutoConfig

    left, right = (AutoConfig.from_pretrained(place, local_files_only=True).to_dict() for place in (original, saved))
    keys = [key for key in {**left, **right} if key not in OTHER and left.get(key) != right.get(key)]
    return [{"name": key, "looks": f"{right.get(key)!r} instead of {left.get(key)!r}"} for key in keys]


def _tokenizer(original: Path, saved: Path) -> dict[str, Any]:
    """Tokenizer files that were there and are not, and whether both give the same tokens."""
    from transformers import AutoTokenizer

    there = [name for name in TOKENIZER if (original / name).is_file()]
    lost = [name for name in there if not (saved / name).is_file()]
    if not there or lost:
        return {"files": there, "lost": lost, "same": None}
    text = "The answer is 12 * (3 + 4) = 84."
    left, right = (AutoTokenizer.from_pretrained(place, local_files_only=True)(text)["input_ids"] for place in (original, saved))
    return {"files": there, "lost": lost, "same": bool(left) and left == right}
