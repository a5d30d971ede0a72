"""Rollouts of levels 2 and 3: a separate generation process, refitted before every generation, and proven each time.

Level 2's process is `generator.py`, here; level 3's is a vLLM server (see `served.py`). The refits, and the facts about each, are those
of the refit probe (`probes.refit.driver`). A payload that the generator refuses ends the run.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from seatrial.loops.trl.drive import sampler
from seatrial.probes import facts
from seatrial.probes.refit.driver import Generator, RefitDriver
from seatrial.probes.refit.errors import RefitRefused
from seatrial.probes.refit.header import TRANSPORTS
from seatrial.probes.refit.mismatch import Mismatch, token_mult_prob_error

COMPARED = 8
"""Samples of the last generation whose log-probabilities are compared before and after a refit."""


class RefittedRollouts:
    """A rollout function for the trainer: refit, prove, sample."""

    def __init__(self, generator: Generator, out: Path, seed: int, fault: str | None) -> None:
        self.generator, self.facts, self.metrics = generator, out / "facts.jsonl", out / "metrics.jsonl"
        self.seed, self.fault = seed, fault
        self.driver: RefitDriver | None = None
        self.last: tuple[list[list[int]], list[list[int]]] | None = None

    def __call__(self, prompts: list[str], trainer: Any) -> dict[str, Any]:
        """TRL calls this once per generation with the prompts of this process."""
        tokenizer, model = trainer.processing_class, trainer.accelerator.unwrap_model(trainer.model)
        prompt_ids = tokenizer(prompts).input_ids
        training = model.training
        model.eval()
        try:
            step, pad = trainer.state.global_step, tokenizer.pad_token_id
            driver = self.refit(model, pad, step)
            given = (prompt_ids, sampler.seeds(prompts, step, self.seed), trainer.args.max_completion_length, tokenizer.eos_token_id, pad)
            made = self.generator.ask("sample", *given)
            self.sampled(driver, made, prompt_ids, sampler.logprobs_of(model, prompt_ids, made["tokens"], pad))
        except RefitRefused as refusal:
            raise RuntimeError(str(refusal)) from None  # the first exception of a chain is taken for the cause
        model.train(training)
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
        return token_mult_prob_error(theirs, sampler.logprobs_of(model, *self.last, pad))

    def new_driver(self, export: dict[str, Any]) -> RefitDriver:
        """The driver of the refits; `export` is what both sides hold before the first."""
        return RefitDriver(self.generator, self.facts, export, TRANSPORTS, self.fault)

    def plain(self, model: Any) -> Any:
        """The policy as the generator holds it."""
        return model

    def export(self, model: Any) -> dict[str, Any]:
        """The weights as they are sent: tied ones once."""
        return {name: value.detach().cpu() for name, value in model.named_parameters()}

    def begin(self) -> None:
        """What is to be done once, before the generator learns the map."""

    def finish(self) -> None:
        """The facts that need the whole run."""
        if self.driver is not None:
            self.driver.end()
