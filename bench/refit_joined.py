"""A joined loop on one GPU: a policy that trains, a vLLM server in its own process, a refit after every step, all of it proven.

    PYTHONPATH=src python3 bench/refit_joined.py --model DIR --out DIR [--steps 20] [-- SERVER OPTIONS]

After the clean steps the faults of `export_faults` are injected, one per refit, each followed by a clean refit. For each the table
says what the refit proof named and what `token_mult_prob_error`, the field's usual check, would have said. DIR/facts.jsonl holds
the facts of the clean steps alone, DIR/faults.jsonl those of the rest.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

from seatrial.instruments.engines.transformers_loop import Loop
from seatrial.instruments.engines.vllm_loop import Engine, Policy, device
from seatrial.instruments.engines.vllm_server import VllmServer
from seatrial.instruments.refit import refit_driver
from seatrial.instruments.refit.payload_header import TRANSPORTS
from seatrial.instruments.refit.refit_driver import say

LIMIT = 1.05
"""The field's limit for token_mult_prob_error."""


def rows(path: Path, fact: str) -> list[dict[str, Any]]:
    """The facts of one kind."""
    found = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [row for row in found if row["fact"] == fact]


def steps(loop: Loop, first: int, count: int) -> None:
    """Sample, train, refit."""
    for step in range(first, first + count):
        loop.sample(step)
        assert loop.completions is not None
        reward = loop.policy.step(loop.completions)
        loop.refit(step)
        (refit, gap) = rows(loop.driver.facts, "refit")[-1], rows(loop.driver.facts, "mismatch")[-1]
        wrong = len(refit["wrong_names"])
        say(f"step {step}: reward {reward:.3f}, {refit['transport']}, {wrong} wrong of {refit['names']}, error {gap['value']:.6f}")


def main() -> None:
    """Start the server, run the clean steps, then the faults, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("server", nargs="*")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    policy = Policy(arguments.model, False, device())
    dtype = str(policy.model.dtype).removeprefix("torch.")
    options = ("--dtype", dtype, *arguments.server)
    with VllmServer(arguments.model, arguments.out / "server.log", say, options) as server:
        say(f"server ready after {time.monotonic() - began:.0f} s")
        loop = Loop(policy, Engine(server, arguments.out, None), arguments.out, TRANSPORTS, None)
        loop.driver.first = {name: value.clone() for name, value in policy.export().items()}
        loop.run(arguments.steps)
        values = [row["value"] for row in rows(loop.driver.facts, "mismatch")]
        say(f"clean: {arguments.steps} steps, error at most {max(values):.7f}, {time.monotonic() - began:.0f} s")
        loop.driver.facts = arguments.out / "faults.jsonl"
        table = []
        for index, fault in enumerate(refit_driver.EXPORT_FAULTS):
            step = arguments.steps + 1 + 2 * index
            loop.driver.fault = fault
            try:
                steps(loop, step, 1)
            except ValueError as error:
                say(f"{fault}: {error}")
                continue
            row, gap = rows(loop.driver.facts, "refit")[-1], rows(loop.driver.facts, "mismatch")[-1]
            loop.driver.fault = None
            steps(loop, step + 1, 1)
            healed = rows(loop.driver.facts, "refit")[-1]["wrong_names"]
            table.append((fault, row["wrong_names"], gap["value"], healed))
    say(f"done in {time.monotonic() - began:.0f} s")
    print(
        "| fault | named by the proof | token_mult_prob_error | seen by < 1.05 | wrong after the next clean refit |\n|---|---|---|---|---|"
    )
    for fault, wrong, value, healed in table:
        shown = ", ".join(wrong[:3]) + (f" and {len(wrong) - 3} more" if len(wrong) > 3 else "")
        print(f"| {fault} | {shown or 'nothing'} | {value:.6f} | {'no' if value < LIMIT else 'yes'} | {len(healed)} |")


if __name__ == "__main__":
    main()
