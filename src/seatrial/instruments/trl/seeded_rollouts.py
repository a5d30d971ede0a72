"""Rollouts that depend only on weights, prompt, step and index: sampled in the trainer, or by a process that is refitted before each.

`python -m seatrial.instruments.trl.seeded_rollouts` is that process: the generation process of level 2.
"""

from __future__ import annotations

import argparse
import hashlib
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from seatrial.instruments import facts
from seatrial.instruments.engines.transformers_generator import Generator, connect
from seatrial.instruments.refit.agreement import Mismatch, token_mult_prob_error
from seatrial.instruments.refit.payload_header import TRANSPORTS, RefitRefused
from seatrial.instruments.refit.refit_driver import RefitDriver, RefittedGenerator
from seatrial.instruments.witness import ImportProofs


def seeds(prompts: Sequence[str], step: int, seed: int) -> list[int]:
    """One seed per completion; repeats of a prompt are told apart by their order."""
    seen: Counter[str] = Counter()
    made = []
    for prompt in prompts:
        text = f"{seed}\0{step}\0{seen[prompt]}\0{prompt}"
        seen[prompt] += 1
        made.append(int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "big"))
    return made


def forward(model: Any, rows: Sequence[Sequence[int]], pad: int, **extra: Any) -> Any:
    """Logits of left-padded rows, with positions counted from each row's first token, without a cache."""
    width = max(len(row) for row in rows)
    ids = torch.tensor([[pad] * (width - len(row)) + list(row) for row in rows], device=model.device)
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows], device=model.device)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    return model(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False, **extra).logits


@torch.no_grad()  # type: ignore[untyped-decorator]
def sample(
    model: Any, prompt_ids: Sequence[Sequence[int]], row_seeds: Sequence[int], length: int, eos: int, pad: int
) -> tuple[list[list[int]], list[list[float]]]:
    """Completions and the log-probabilities of their tokens, at temperature 1."""
    draws = [torch.Generator().manual_seed(seed) for seed in row_seeds]
    completions: list[list[int]] = [[] for _ in prompt_ids]
    logprobs: list[list[float]] = [[] for _ in prompt_ids]
    for _ in range(length):
        open_rows = [i for i, ids in enumerate(completions) if not ids or ids[-1] != eos]
        if not open_rows:
            break
        logits = forward(model, [[*prompt_ids[i], *completions[i]] for i in open_rows], pad)[:, -1]
        table = torch.log_softmax(logits.float(), -1).cpu()
        for row, i in enumerate(open_rows):
            token = int(torch.multinomial(table[row].exp(), 1, generator=draws[i]))
            completions[i].append(token)
            logprobs[i].append(float(table[row, token]))
    return completions, logprobs


@torch.no_grad()  # type: ignore[untyped-decorator]
def logprobs_of(
    model: Any, prompt_ids: Sequence[Sequence[int]], completions: Sequence[Sequence[int]], pad: int, heat: float = 1.0, **extra: Any
) -> list[list[float]]:
    """Log-probabilities of given completions under `model`, at temperature `heat`."""
    rows = [[*prompt, *completion] for prompt, completion in zip(prompt_ids, completions, strict=True)]
    table = torch.log_softmax(forward(model, rows, pad, **extra).float() / heat, -1)
    result = []
    for row, completion in enumerate(completions):
        length = len(completion)
        places = torch.arange(table.shape[1] - length - 1, table.shape[1] - 1)
        result.append(table[row, places, torch.tensor(completion, dtype=torch.long)].cpu().tolist())
    return result


@contextmanager
def evaluated(trainer: Any) -> Iterator[Any]:
    """The policy in evaluation mode; a generation process that refuses or is gone ends the run with its cause."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    training = model.training
    model.eval()
    try:
        yield model
    except RefitRefused as refusal:
        raise RuntimeError(str(refusal)) from None  # the first exception of a chain is taken for the cause
    model.train(training)


def seeded_rollouts(seed: int) -> Any:
    """A rollout function for the trainer. Groups must be whole on each rank, or indices would collide."""

    def rollouts(prompts: list[str], trainer: Any) -> dict[str, Any]:
        if len(prompts) % trainer.num_generations:
            raise RuntimeError(f"{len(prompts)} prompts on this rank are not whole groups of {trainer.num_generations}")
        tokenizer, length = trainer.processing_class, trainer.args.max_completion_length
        prompt_ids, drawn = tokenizer(prompts).input_ids, seeds(prompts, trainer.state.global_step, seed)
        with evaluated(trainer) as model:
            completions, logprobs = sample(model, prompt_ids, drawn, length, tokenizer.eos_token_id, tokenizer.pad_token_id)
        return {"prompt_ids": prompt_ids, "completion_ids": completions, "logprobs": logprobs}

    return rollouts


COMPARED = 8  # samples of the last generation whose log-probabilities are compared before and after a refit


class RefittedRollouts:
    """A rollout function for the trainer: refit, prove, sample."""

    def __init__(self, generator: RefittedGenerator, out: Path, seed: int, fault: str | None) -> None:
        self.generator, self.facts, self.metrics = generator, out / "facts.jsonl", out / "metrics.jsonl"
        self.seed, self.fault = seed, fault
        self.driver: RefitDriver | None = None
        self.last: tuple[list[list[int]], list[list[int]]] | None = None

    def __call__(self, prompts: list[str], trainer: Any) -> dict[str, Any]:
        """TRL calls this once per generation with the prompts of this process."""
        tokenizer, step, pad = trainer.processing_class, trainer.state.global_step, trainer.processing_class.pad_token_id
        prompt_ids = tokenizer(prompts).input_ids
        with evaluated(trainer) as model:
            driver = self.refit(model, pad, step)
            given = (prompt_ids, seeds(prompts, step, self.seed), trainer.args.max_completion_length, tokenizer.eos_token_id, pad)
            made = self.generator.ask("sample", *given)
            self.sampled(driver, made, prompt_ids, logprobs_of(model, prompt_ids, made["tokens"], pad))
        return {"prompt_ids": prompt_ids, "completion_ids": made["tokens"], "logprobs": made["logprobs"]}

    def sampled(self, driver: RefitDriver, made: dict[str, Any], prompts: list[list[int]], own: list[list[float]]) -> None:
        """Facts and metrics of samples that were made after the last refit; `own`: what the policy gives their tokens."""
        found = driver.samples(made, own)
        row = {"refit/sampled_max_dlogp": found.max_abs, "refit/token_mult_prob_error": found.value}
        row |= {"refit/median_sequence_prob_error": found.p50, "refit/p99_sequence_prob_error": found.p99}
        facts.append(self.metrics, {"step": driver.step + 1, **row, "refit/worst_sequence_prob_error": found.max_sequence})
        self.last = (prompts[:COMPARED], made["tokens"][:COMPARED])

    def refit(self, model: Any, pad: int, step: int) -> RefitDriver:
        """Bring the generator to the trainer's weights, which no refused payload does."""
        plain = self.plain(model)
        export = self.export(plain)
        if self.driver is None:
            self.driver = self.new_driver(export)
            self.begin()
            self.driver.begin(export)
        row, refused = self.driver.refit(step, plain, export, lambda: self.gap(model, pad))
        if refused is not None:
            raise refused
        if row["stale_max_dlogp"] is not None:
            gaps = {f"refit/{name}": row[name] for name in ("stale_max_dlogp", "fresh_max_dlogp")}
            facts.append(self.metrics, {"step": step + 1, **gaps})
        return self.driver

    def gap(self, model: Any, pad: int) -> Mismatch | None:
        """How far the generator's log-probabilities of the last batch are from the trainer's, right now."""
        if self.last is None:
            return None
        theirs = self.generator.ask("logprobs", *self.last, pad)
        return token_mult_prob_error(theirs, logprobs_of(model, *self.last, pad))

    def new_driver(self, export: dict[str, Any]) -> RefitDriver:
        return RefitDriver(self.generator, self.facts, export, TRANSPORTS, self.fault)

    def plain(self, model: Any) -> Any:
        return model

    def export(self, model: Any) -> dict[str, Any]:
        """The weights as they are sent: tied ones once."""
        return {name: value.detach().cpu() for name, value in model.named_parameters()}

    def begin(self) -> None:
        """What is to be done once, before the generator learns the map."""

    def finish(self) -> None:
        if self.driver is not None:
            self.driver.end()


PACKAGES = ("torch", "transformers")  # what the generation process imports


class SeededGenerator(Generator):
    """A generation process with this sampling."""

    def sample(self, *arguments: Any) -> tuple[list[list[int]], list[list[float]]]:
        made: tuple[list[list[int]], list[list[float]]] = sample(self.model, *arguments)
        return made

    def logprobs(self, *arguments: Any) -> list[list[float]]:
        found: list[list[float]] = logprobs_of(self.model, *arguments)
        return found


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("--socket", "--model", "--device"):
        parser.add_argument(name, required=True)
    for name in ("--facts", "--imports"):
        parser.add_argument(name, type=Path, required=True)
    parser.add_argument("--under-test", action="append", default=[])
    parser.add_argument("--fault")
    arguments = parser.parse_args()
    imports = ImportProofs(arguments.imports, "generator", arguments.under_test)
    imports.prove(PACKAGES)
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32, local_files_only=True)
    model.to(arguments.device).eval()
    tied = model.get_output_embeddings().weight.data_ptr() == model.get_input_embeddings().weight.data_ptr()
    row = {"fact": "process", "process": "generator", "tied": tied, "pid": os.getpid(), "parent": os.getppid(), "device": str(model.device)}
    facts.append(arguments.facts, row)
    connect(arguments.socket, SeededGenerator(model, arguments.fault))
    imports.close(PACKAGES)


if __name__ == "__main__":
    main()
