"""The conformance ladder on one GPU: Qwen2, Qwen3-MoE, Llama and a Qwen2.5-0.5B configuration with random weights.

    PYTHONPATH=src python3 bench/bridge_h200.py run OUT [--rungs a,b,…] [--models a,b,…] [--faults a,b,…] [--engine vllm] [-- OPTIONS]
    PYTHONPATH=src python3 bench/bridge_h200.py judge OUT        # where Seatrial is installed: the table, and what was missed

`run` needs torch with CUDA, transformers, Megatron-Core and Megatron-Bridge; `judge` needs none of them.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

LARGE = "qwen2.5-0.5b"
MODELS = ("qwen2", "qwen3-moe", "llama", LARGE)
SIZES = {
    "vocab_size": 151936,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32768,
    "rope_theta": 1000000.0,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "dtype": "bfloat16",
}
"""As config.json of Qwen2.5-0.5B has them."""


def large(place: Path) -> Path:
    """A checkpoint of the real sizes in bf16, with random weights and a small tokenizer."""
    import torch
    import transformers

    from seatrial.instruments.engines import tiny_models

    torch.manual_seed(7)
    config = transformers.Qwen2Config(**{key: value for key, value in SIZES.items() if key != "rope_theta"})
    config.rope_parameters = {"rope_type": "default", "rope_theta": SIZES["rope_theta"]}
    model = transformers.Qwen2ForCausalLM(config).to(torch.bfloat16)
    for value in model.parameters():
        if value.dim() == 1:
            value.data.add_(0.1 * torch.randn_like(value))
    model.save_pretrained(place)
    tiny_models.tokenizer().save_pretrained(place)
    return place


def run(out: Path, models: list[str], rungs: list[str], faults: list[str], options: dict[str, object]) -> int:
    """The ladder in a process of its own: clean rungs, or seeded faults on the first of the rungs that are to see each."""
    from seatrial.instruments.bridge.faults import FAULTS

    out.mkdir(parents=True, exist_ok=True)
    items = [{"model": model, "rung": rung, "fault": None} for model in models for rung in rungs]
    if faults:
        items = [{"model": FAULTS[name].model, "rung": FAULTS[name].rungs[0], "fault": name} for name in faults]
    places = {name: str(large(out / "large")) if name == LARGE else None for name in dict.fromkeys(item["model"] for item in items)}
    plan = out / "plan.json"
    plan.write_text(json.dumps({"device": "cuda", "models": places, "items": items, "options": options}), encoding="utf-8")
    return subprocess.run([sys.executable, "-m", "seatrial.instruments.bridge.ladder", str(plan), str(out)], check=False).returncode


def judge(out: Path) -> None:
    """The table, and every check that was missed."""
    from seatrial.checks.probe_facts import read_facts
    from seatrial.probes.bridge_report import bridge_table
    from seatrial.probes.bridge_verdict import BridgeRequest
    from seatrial.probes.bridge_verdict import judge_ladder as judge_facts
    from seatrial.probes.refit_run import check_line

    facts = read_facts(out / "facts.jsonl")
    for row in facts.of("rung"):
        if row["fault"]:
            asked = BridgeRequest(models=(row["model"],), rungs=(row["rung"],), device="cuda", fault=row["fault"])
            found = judge_facts(facts, asked)
            print(f"fault {row['fault']}: {found.verdict}: {found.reason[:200]}")
    ends = facts.of("rung", fault=None)
    if not ends:
        return
    models, rungs = (tuple(dict.fromkeys(str(row[key]) for row in ends)) for key in ("model", "rung"))
    judged = judge_facts(facts, BridgeRequest(models=models, rungs=rungs, device="cuda"))
    print(f"{judged.verdict}: {judged.reason}\n\n{bridge_table(judged.families, rungs)}\n")
    for family in judged.families:
        for rung in family.rungs:
            print(f"{family.model}: {rung.rung}: {rung.verdict}, {rung.seconds:.1f} s: {rung.reason[:300]}")
            for check in rung.checks:
                print(f"    {check_line(check)}"[:300])


def main() -> None:
    """Run or judge."""
    from seatrial.instruments.bridge.rungs import TABLE

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("run", "judge"))
    parser.add_argument("out", type=Path)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--rungs", default=",".join(TABLE))
    parser.add_argument("--faults", default="")
    parser.add_argument("--engine", default="transformers")
    parser.add_argument("--steps", type=int, default=20)
    own, server = sys.argv[1:], []
    if "--" in own:
        place = own.index("--")
        own, server = own[:place], own[place + 1 :]
    given = parser.parse_args(own)
    if given.action == "judge":
        judge(given.out)
        return
    options = {"engine": given.engine, "engine_python": sys.executable, "server": server, "steps": given.steps}
    raise SystemExit(
        run(given.out, given.models.split(","), given.rungs.split(","), [name for name in given.faults.split(",") if name], options)
    )


if __name__ == "__main__":
    main()
