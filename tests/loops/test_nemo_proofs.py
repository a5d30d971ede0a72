"""What a level's files prove: every proof holds on a whole run, and each is missed when its fact is wrong or gone."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from seatrial.core.records import CheckResult, Cost
from seatrial.core.series import Metrics, Series
from seatrial.core.specs import Level
from seatrial.core.verdict import Boundary
from seatrial.loops.nemo_rl.nemo_outputs import metric_files
from seatrial.loops.nemo_rl.nemo_proofs import Trained, dumps_agree, proofs
from seatrial.metrics.read import read_metrics

Points = dict[str, tuple[float, ...]]
MEGATRON = {"policy": {"megatron_cfg": {"enabled": True, "peft": {"enabled": True}}, "dtensor_cfg": {"enabled": False}}}
DTENSOR = {"policy": {"megatron_cfg": {"enabled": False}, "dtensor_cfg": {"enabled": True}}}
COMMON = {"sft": {"max_num_steps": 2}}
"""What the claims of the resume comparison are about, since only some of its runs use Megatron."""
CLAIMS = {"policy.megatron_cfg.enabled": True, "policy.dtensor_cfg.enabled": False}
PREPARE = "timing/train/prepare_for_generation"
GRPO: Points = {
    "train/loss": (0.1, 0.2, 0.3),
    "train/reward": (0.5, 0.25, 0.5),
    "train/grad_norm": (0.3, 0.2, 0.2),
    "train/lr": (1e-6, 1e-6, 1e-6),
    "train/advantages/max": (1.0, 1.5, 1.0),
    "train/advantages/min": (-1.0, -1.5, -1.0),
    "train/token_mult_prob_error": (1.01, 0.9999999, 1.02),
    "train/num_masked_seqs_by_logprob_error": (0.0, 0.0, 0.0),
    "train/global_valid_seqs": (8.0, 8.0, 8.0),
    f"{PREPARE}/total": (2.0, 2.0, 2.0),
    f"{PREPARE}/transfer_and_update_weights": (1.5, 1.5, 1.5),
}
SFT: Points = {
    **{"train/loss": (2.0, 1.9), "train/grad_norm": (1.0, 0.9), "train/lr": (1e-6, 2e-6), "train/global_valid_seqs": (4.0, 4.0)},
    **{"train/global_valid_toks": (99.0, 80.0), "train/num_unmasked_tokens": (99.0, 80.0), "train/num_valid_samples": (4.0, 4.0)},
}
DELTA: Points = {
    **{"refit/delta/changed_elements": (0.0, 50.0, 60.0), "refit/transfer/payloads": (0.0, 2.0, 2.0)},
    **{"refit/delta_verify/samples": (0.0, 32.0, 32.0), "refit/delta_verify/mismatches": (0.0, 0.0, 0.0)},
}
LOADED = "(W pid=1)   successfully loaded checkpoint from /c/ckpts/mcore/step_1/policy/weights [ t 1/1, p 1/1 ] at iteration 1\n"


def config(content: dict[str, Any]) -> str:
    return f"Final config:\n{ {**content, **COMMON}!r}\n"


def ended(steps: int, first: int = 1, total: int = 3) -> str:
    return "".join(f"{'=' * 25} Step {n}/{total} {'=' * 25}\n  • Total step time: 1.00s\n" for n in range(first, first + steps))


@dataclass
class Bench:
    """A level directory, and the metrics that its event files hold."""

    directory: Path
    level: str = "smoke"
    series: dict[str, Series] = field(default_factory=dict)
    claims: dict[str, dict[str, Any]] = field(default_factory=dict)

    def add(self, phase: str, points: Points, log: str, *, run: str = "", dump: str = "metrics.json", **claims: Any) -> None:
        """One run of a phase, with its dump and its part of the log."""
        place = self.directory / phase
        (place / "results" / "logs" / run / "exp_001").mkdir(parents=True, exist_ok=True)
        with (place / "run.log").open("a") as stream:
            stream.write(log)
        prefix = ("" if phase == "run" else f"{phase}/") + (f"{run}/" if run else "")
        for tag, values in points.items():
            self.series[prefix + tag] = Series(prefix + tag, tuple(range(1, len(values) + 1)), values)
        table = {tag: {str(step): value for step, value in enumerate(values, 1)} for tag, values in points.items()}
        (place / "results" / dump).write_text(json.dumps(table))
        base = {"sft.max_num_steps": 2} if phase == "resume" else CLAIMS
        self.claims[phase] = {**base, **self.claims.get(phase, {}), **{key.replace("__", "."): value for key, value in claims.items()}}

    def put(self, tag: str, *values: float) -> None:
        """Change a series of the event files, and not of the dump."""
        self.series[tag] = Series(tag, tuple(range(1, len(values) + 1)), values)

    def log(self, phase: str, change: Callable[[str], str]) -> None:
        path = self.directory / phase / "run.log"
        path.write_text(change(path.read_text()))

    def proofs(self) -> dict[str, CheckResult]:
        """All of them, by name."""
        rows = [{"fact": "claims", "phase": name, "values": values} for name, values in self.claims.items()]
        (self.directory / "imports").mkdir(exist_ok=True)
        (self.directory / "imports" / "facts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        sources = tuple(f"{self.directory / name}/results/logs/exp_001/tensorboard/events.out.tfevents.1" for name in self.claims)
        level = Level(number=0, name=self.level, title="t", proves="p", cost=Cost(minutes=1))
        made = proofs(level, self.directory, Metrics(series=self.series, sources=sources))
        assert len({check.name for check in made}) == len(made)
        assert all(check.kind == "proof" for check in made)
        return {check.name: check for check in made}

    def missed(self) -> dict[str, CheckResult]:
        return {name: check for name, check in self.proofs().items() if not check.passed}


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    """A whole run of level 0."""
    made = Bench(tmp_path)
    made.add("run", GRPO, config(MEGATRON) + ended(3))
    whole(made)
    return made


def whole(made: Bench) -> None:
    """Files that the engine, the witness and the conversion of the model leave."""
    stored = made.directory / "converted" / "Qwen" / "Qwen2.5-0.5B" / "iter_0000000"
    stored.mkdir(parents=True)
    (stored / "run_config.yaml").touch()
    packages = ("megatron.core", "megatron.bridge")
    rows = [{"process": "worker", "package": name, "method": "imported", "file": f"/b/{name}", "ok": True} for name in packages]
    (made.directory / "imports.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (made.directory / "phases.json").write_text(json.dumps([{"name": "imports"}, *({"name": name} for name in made.claims)]))


def test_a_whole_run_misses_nothing_and_every_proof_has_a_value(bench: Bench) -> None:
    found = bench.proofs()
    assert bench.missed() == {}
    assert len(found) == 15
    assert all(check.value for check in found.values())
    assert (
        found["weight transfer (run)"].value
        == "6 s in all, transfer dominates (75%): export, broadcast and load are timed as one by this transport"
    )


def test_a_run_that_fell_back_to_dtensor(bench: Bench) -> None:
    bench.log("run", lambda text: text.replace(repr(MEGATRON)[1:-1], repr(DTENSOR)[1:-1]))
    missed = bench.missed()["configuration in force (run)"]
    assert "policy.megatron_cfg.enabled fell back to False" in missed.message


@pytest.mark.parametrize("torn", ["", "Final config:\n{'policy': {"])
def test_a_configuration_that_cannot_be_read_back(bench: Bench, torn: str) -> None:
    bench.log("run", lambda _: torn + ended(3))
    assert bench.missed()["configuration in force (run)"].boundary is Boundary.CONFIG


def test_facts_that_are_not_there(bench: Bench) -> None:
    (bench.directory / "phases.json").write_text(json.dumps([{"name": "imports"}, {"name": "run"}, {"name": "lora"}]))
    assert bench.missed()["what the level claims was recorded"].value == "no facts of lora"
    bench.claims = {}
    (bench.directory / "phases.json").unlink()
    assert bench.missed()["what the level claims was recorded"].value == "no facts of any run"


def test_only_the_driver_imported_the_bridge(bench: Bench) -> None:
    path = bench.directory / "imports.jsonl"
    path.write_text(path.read_text().replace("worker", "driver") + "torn")
    assert "no Ray worker imported" in bench.missed()["Ray workers used Megatron-Core and Megatron-Bridge"].message


def test_a_step_that_the_log_does_not_end(bench: Bench) -> None:
    bench.log("run", lambda text: text[: text.rindex("  • Total")])
    assert bench.missed()["log and metrics show the same steps (run)"].value == "2 steps ended by the log, 3 have a loss"


def test_metrics_that_were_lost_by_a_crash_after_training(bench: Bench) -> None:
    (bench.directory / "run" / "results" / "metrics.json").unlink()
    assert "metrics lost by a teardown crash" in bench.missed()["metrics.json agrees with the event files"].message


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda table: table["train/loss"].pop("3"), "train/loss: 2 points dumped, 3 in the event files"),
        (lambda table: table.pop("train/lr"), "train/lr: 0 points dumped, 3 in the event files"),
        (lambda table: table["train/loss"].update({"2": 9.0}), "train/loss: other values at step 2"),
        (lambda table: table.update({"train/more": {"1": 1.0}}), "train/more: 1 points dumped, 0 in the event files"),
        (lambda table: table.update({"train/loss": 7}), "train/loss: 0 points dumped"),
    ],
)
def test_a_dump_that_is_not_what_the_event_files_hold(bench: Bench, change: Callable[[Any], Any], words: str) -> None:
    path = bench.directory / "run" / "results" / "metrics.json"
    table = json.loads(path.read_text())
    change(table)
    path.write_text(json.dumps(table))
    assert words in bench.missed()["metrics.json agrees with the event files"].message


def test_a_dump_that_is_torn_and_a_nan_that_both_have(bench: Bench) -> None:
    path = bench.directory / "run" / "results" / "metrics.json"
    bench.put("train/loss", 0.1, math.nan, 0.3)
    table = json.loads(path.read_text())
    path.write_text(json.dumps({**table, "train/loss": {"1": 0.1, "2": math.nan, "3": 0.3}}))
    assert "metrics.json agrees with the event files" not in bench.missed()
    path.write_text("{")
    assert "not valid JSON" in bench.missed()["metrics.json agrees with the event files"].message


DUMPED = Path(__file__).parents[1] / "data" / "nemo_rl" / "dumped"
"""Event files by torch's SummaryWriter, as NeMo-RL uses it: a run that was cut after step 2 and resumed from step 1, with NaN, infinity,
histograms, texts and hyperparameters; and what NeMo-RL's own tests/json_dump_tb_logs.py (7ea279ab) made of them."""


@pytest.mark.parametrize(
    ("tag", "words"), [("", ""), ("train/loss", "train/loss: other values at step 2"), ("train/kl", "train/kl: other")]
)
def test_what_the_real_programs_write(tmp_path: Path, tag: str, words: str) -> None:
    place = tmp_path / "run" / "results"
    shutil.copytree(DUMPED, place)
    if tag:
        table = json.loads((place / "metrics.json").read_text())
        table[tag]["2"] = 0.2
        (place / "metrics.json").write_text(json.dumps(table))
    metrics = read_metrics(metric_files(tmp_path)[""])
    (found,) = dumps_agree(Trained("run", tmp_path, metrics, {}))
    assert (found.passed, found.value) == (not tag, "6 series, 18 points")
    assert found.message.startswith(words)
    assert bool(found.message) == bool(tag)


@pytest.mark.parametrize(
    ("tag", "values", "name", "words"),
    [
        ("train/token_mult_prob_error", (1.01, 0.0, 1.0), "tokens counted at every step", "below 1 at step 2: everything was masked"),
        ("train/token_mult_prob_error", (1.01, math.nan, 1.0), "tokens counted at every step", "step 2"),
        ("train/num_masked_seqs_by_logprob_error", (0.0, 2.0, 0.0), "no sequence was masked for its error", "masking hides outlier"),
        ("train/grad_norm", (0.0, 0.0, 0.0), "a gradient and a learning rate", ""),
        ("train/lr", (0.0, 0.0, 0.0), "a gradient and a learning rate", ""),
    ],
)
def test_numbers_that_upstream_passes(bench: Bench, tag: str, values: tuple[float, ...], name: str, words: str) -> None:
    bench.put(tag, *values)
    missed = bench.missed()[name]
    assert words in missed.message
    if "masked" in name:
        assert missed.value == "0.2 of the sequences at step 2"


def test_metrics_that_are_not_logged(bench: Bench) -> None:
    for tag in ("train/token_mult_prob_error", "train/num_masked_seqs_by_logprob_error", "train/lr"):
        del bench.series[tag]
    missed = bench.missed()
    assert missed["tokens counted at every step"].value == "not logged"
    assert missed["a gradient and a learning rate"].value == "no train/lr"
    assert "no sequence was masked for its error" not in missed  # no threshold is in force
    bench.log("run", lambda text: text.replace("'policy':", "'grpo': {'seq_logprob_error_threshold': 2.0}, 'policy':", 1))
    assert bench.missed()["no sequence was masked for its error"].value == "not logged"


def test_a_level_without_metrics(bench: Bench) -> None:
    bench.series = {}
    assert bench.missed()["the run left metrics (run)"].value == "none"


LORA_LOG = "(W pid=1)   Total parameters: 500,000\n(W pid=1)   Trainable parameters: 1,024\nSaving checkpoint for step 3...\n"
LORA: dict[str, Any] = {"policy__megatron_cfg__peft__enabled": True, "checkpointing__enabled": True}


@pytest.fixture
def lora(tmp_path: Path) -> Bench:
    made = Bench(tmp_path, "lora-checkpoint")
    saving = {**MEGATRON, "checkpointing": {"enabled": True}}
    stored = tmp_path / "lora" / "checkpoints" / "step_3" / "policy"
    stored.mkdir(parents=True)
    (stored / "weights").touch()
    made.add("lora", {**GRPO, "timing/train/checkpointing": (0.0, 0.0, 1.0)}, config(saving) + LORA_LOG + ended(3), **LORA)
    whole(made)
    return made


@pytest.mark.parametrize(
    ("old", "new", "name"),
    [
        ("Trainable parameters: 1,024", "Trainable parameters: 0", "trainable parameters of adapters (lora)"),
        ("Trainable parameters: 1,024", "Trainable parameters: 500,000", "trainable parameters of adapters (lora)"),
        ("Trainable parameters: 1,024", "", "trainable parameters of adapters (lora)"),
        ("Saving checkpoint", "", "a checkpoint was saved (lora)"),
        ("'peft': {'enabled': True}", "'peft': {'enabled': False}", "configuration in force (lora)"),
    ],
)
def test_adapters_and_their_checkpoint(lora: Bench, old: str, new: str, name: str) -> None:
    assert lora.missed() == {}
    lora.log("lora", lambda text: text.replace(old, new))
    assert list(lora.missed()) == [name]


def test_a_checkpoint_that_was_begun_and_never_written(lora: Bench) -> None:
    lora.put("lora/timing/train/checkpointing", 0.0, 0.0, 0.0)
    assert lora.missed()["a checkpoint was saved (lora)"].message == "its writing was not timed"


def test_a_checkpoint_that_was_timed_and_is_not_there(lora: Bench) -> None:
    stored = lora.directory / "lora" / "checkpoints"
    (stored / "step_3").rename(stored / "tmp_step_3")
    assert lora.missed()["a checkpoint was saved (lora)"].message == f"{stored}/step_3 holds no file"


def labelled(label: str, text: str) -> str:
    return "".join(f"[{label}] {line}\n" for line in text.splitlines())


@pytest.fixture
def resume(tmp_path: Path) -> Bench:
    made = Bench(tmp_path, "lora-checkpoint")
    saving = "Saving checkpoint for step 1...\n"
    logs = {
        "baseline": labelled("baseline 2step", config(DTENSOR) + ended(2)),
        "dtensor": labelled("dtensor 1step", config(DTENSOR) + ended(1) + saving)
        + labelled("dtensor 2step", config(DTENSOR) + ended(1, 2)),
        "mcore": labelled("mcore 1step", config(MEGATRON) + ended(1) + saving)
        + labelled("mcore 2step", config(MEGATRON) + LOADED + ended(1, 2)),
    }
    for run, log in logs.items():
        made.add("resume", SFT, log, run=run, dump=f"{run}{'' if run == 'baseline' else '_2step'}.json")
    whole(made)
    return made


def test_a_resume_that_was_one(resume: Bench) -> None:
    assert resume.missed() == {}
    found = resume.proofs()
    assert found["resumed mcore run equals the uncut one"].value == "14 of 14 values"
    assert found["log and metrics show the same steps (resume)"].value == "6 steps ended by the log, 6 have a loss"


@pytest.mark.parametrize(
    ("name", "factor", "missed"),
    [("loss", 1.04, 0), ("loss", 1.06, 1), ("grad_norm", 0.94, 1), ("lr", 1.01, 1), ("num_valid_samples", 1.001, 1)],
)
def test_a_resumed_run_that_is_another(resume: Bench, name: str, factor: float, missed: int) -> None:
    first, second = SFT[f"train/{name}"]
    resume.put(f"resume/mcore/train/{name}", first, second * factor)
    found = resume.missed()
    assert ("resumed mcore run equals the uncut one" in found) is bool(missed)
    assert "resumed dtensor run equals the uncut one" not in found


def test_a_resumed_run_that_lost_a_point(resume: Bench) -> None:
    resume.put("resume/mcore/train/loss", 2.0)
    assert "loss at step 2: None instead of 1.9" in resume.missed()["resumed mcore run equals the uncut one"].message


@pytest.mark.parametrize(
    ("old", "new", "name"),
    [
        ("[mcore 2step] " + "=" * 25 + " Step 2/", "[mcore 2step] " + "=" * 25 + " Step 1/", "the resumed Megatron run begins with step 2"),
        ("[mcore 1step] Saving", "[mcore 1step] Skipping", "the first Megatron run saved step 1"),
        ("mcore/step_1/policy", "nemo_rl/Qwen", "the resumed Megatron run loaded what step 1 saved"),
        ("successfully loaded", "did not load", "the resumed Megatron run loaded what step 1 saved"),
        (f"[mcore 2step] {repr(MEGATRON)[:-1]}", f"[mcore 2step] {repr(DTENSOR)[:-1]}", "the resumed runs trained with Megatron"),
    ],
)
def test_a_resume_that_was_none(resume: Bench, old: str, new: str, name: str) -> None:
    resume.log("resume", lambda text: text.replace(old, new))
    assert list(resume.missed()) == [name]


@pytest.fixture
def refit(tmp_path: Path) -> Bench:
    made = Bench(tmp_path, "refit")
    extra: dict[str, Points] = {"full": {}, "reshard": {}, "delta": DELTA}
    for name, points in extra.items():
        line = "nccl_reshard bulk comm group IPs/ports (1 stage(s)): []\n" if name == "reshard" else ""
        made.add(name, {**GRPO, **points}, config(MEGATRON) + line + ended(3))
    whole(made)
    return made


def test_every_transport_was_used(refit: Bench) -> None:
    assert refit.missed() == {}
    assert refit.proofs()["the delta transport carried changed elements"].value == (
        "refit/delta/changed_elements 0 to 60; refit/transfer/payloads 0 to 2"
    )


def test_a_transport_that_was_not_used(refit: Bench) -> None:
    refit.log("reshard", lambda text: text.replace("nccl_reshard", "nccl"))
    refit.put(f"full/{PREPARE}/transfer_and_update_weights", 1.0, 1.0, 0.0)
    refit.put("delta/refit/delta/changed_elements", 0.0, 5.0, 0.0)
    refit.put("reshard/refit/delta/changed_elements", 1.0)
    refit.put("delta/refit/delta_verify/samples", 16.0, 0.0, 0.0)
    names = [name for name in refit.missed() if "metrics.json" not in name]
    assert names == [
        "trained weights were transferred at every step (full)",
        "no sparse transport was used (reshard)",
        "the reshard transport was set up",
        "the delta transport carried changed elements",
        "the delta transport was verified by samples",
    ]


def test_a_delta_transport_that_left_a_step_out_or_sent_other_values(refit: Bench) -> None:
    refit.put("delta/refit/delta/changed_elements", 0.0, 50.0)
    refit.put("delta/refit/delta_verify/mismatches", 0.0, 1.0, 0.0)
    missed = refit.missed()
    assert missed["the delta transport carried changed elements"].message == "delta/refit/delta/changed_elements is not logged at step 3"
    assert missed["the delta transport was verified by samples"].value == "64 samples, 1 differ"


def test_a_delta_transport_has_nothing_to_carry_before_the_first_update(refit: Bench) -> None:
    refit.put("delta/train/lr", 0.0, 1e-6, 1e-6)
    refit.put("delta/refit/delta/changed_elements", 0.0, 0.0, 60.0)
    refit.put("delta/refit/transfer/payloads", 0.0, 0.0, 2.0)
    assert "the delta transport carried changed elements" not in refit.missed()


def test_a_delta_transport_of_the_older_generation(refit: Bench) -> None:
    for tag in list(DELTA)[:2]:
        del refit.series[f"delta/{tag}"]
    assert refit.missed()["the delta transport carried changed elements"].value == "no trace"
    refit.put(f"delta/{PREPARE}/weight_transfer/producer/sparse_encode", 0.0, 0.5, 0.5)
    assert "the delta transport carried changed elements" not in refit.missed()


def test_a_delta_transport_with_changes_and_without_payloads(refit: Bench) -> None:
    del refit.series["delta/refit/transfer/payloads"]
    assert "the delta transport carried changed elements" in refit.missed()


QUANT = "Detected ModelOpt NVFP4 checkpoint\nVllmQuantInternalWorkerExtension\nVllmQuantGenerationWorker pid=1: Inserted 12 quantizers\n"


@pytest.mark.parametrize(
    ("claim", "line", "bad", "name"),
    [
        ("policy__draft__enabled", "  • Draft Loss: 0.5\n", "", "the draft model was trained and synchronised"),
        (
            *("policy__draft__enabled", "  • Draft Loss: 0.5\n"),
            "  • Draft Loss: 0.5\nSpeculative decoding is enabled without draft refit sync\n",
            "the draft model was trained and synchronised",
        ),
        ("policy__quant_calib_size", QUANT, QUANT.replace("12 q", "0 q"), "the generator was quantized"),
    ],
)
def test_the_path_of_an_architecture_was_taken(tmp_path: Path, claim: str, line: str, bad: str, name: str) -> None:
    claimed: dict[str, Any] = {claim: True}
    content = {**MEGATRON, "policy": {**MEGATRON["policy"], "draft": {"enabled": True}, "quant_calib_size": True}}
    made = Bench(tmp_path, "architecture")
    made.add("run", GRPO, config(content) + line + ended(3), **claimed)
    whole(made)
    assert made.missed() == {}
    assert made.proofs()["the architecture's own path was turned on"].value == "eagle, qat"
    assert name in made.proofs()
    made.log("run", lambda text: text.replace(line, bad))
    assert list(made.missed()) == [name]


RISE = "learning signal: the reward rose"


@pytest.mark.parametrize(
    ("rewards", "accuracy", "missed"),
    [
        ([0.1, 0.2, 0.1, 0.2, 0.1] * 2 + [0.3, 0.4] * 5, (0.1, 0.3), []),
        ([0.1, 0.2, 0.1, 0.2, 0.1] * 4, (0.3, 0.25), [RISE]),
        ([0.1, 0.2, 0.1, 0.2, 0.1] * 3 + [0.1, 0.2, 0.1, 0.2, 0.2], (0.3, 0.25), []),
        ([0.5, 0.4, 0.5, 0.4, 0.5] * 2 + [0.1, 0.2] * 5, (), ["learning signal: the reward did not fall", RISE]),
        ([0.5] * 10 + [0.4] * 10, (), ["learning signal: the reward did not fall", RISE]),
        ([0.5] * 4, (), ["learning signal: the reward did not fall"]),
        ([0.1, 0.2, 0.1, 0.2, 0.1] * 4, (0.5, 0.1), [RISE, "learning signal: validation did not fall"]),
    ],
)
def test_the_learning_signal(bench: Bench, rewards: list[float], accuracy: tuple[float, ...], missed: list[str]) -> None:
    bench.level = "learning"
    bench.put("train/reward", *rewards)
    if accuracy:
        bench.put("validation/accuracy", *accuracy)
    assert [name for name in bench.missed() if name.startswith("learning signal")] == missed


def test_an_assertion_that_was_not_expanded(bench: Bench) -> None:
    bench.proofs()
    row = {
        "fact": "assertions",
        "phase": "run",
        "script": "tests/functional/a.sh",
        "expressions": ["max(data['x']) < $B", "max(data['x']) < 1"],
    }
    path = bench.directory / "imports" / "facts.jsonl"
    path.write_text(path.read_text() + json.dumps(row) + "\ntorn\n")
    level = Level(number=0, name="smoke", title="t", proves="p", cost=Cost(minutes=1))
    missed = {check.name: check for check in proofs(level, bench.directory, Metrics(series=bench.series)) if not check.passed}
    assert missed["assertions of a.sh were read"].message == "max(data['x']) < $B"
    assert "facts are whole" in missed
    assert missed["metrics.json agrees with the event files"].value == "no event files"
