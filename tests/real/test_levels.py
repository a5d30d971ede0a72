"""One trial of every level, as a user runs it, and everything it leaves behind."""

from __future__ import annotations

import json
import math
import re
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import jsonschema  # type: ignore[import-untyped]
import pytest
from bench.mutants.harness import phases_of

from seatrial.core.files import read_json, read_model, read_text
from seatrial.core.records import EnvironmentRecord, LevelResult, Report
from seatrial.core.verdict import ExitCode, Verdict, worst
from seatrial.instruments.trl.extra_runs import VARIANTS
from seatrial.loops.trl.loop import LOOP
from seatrial.metrics.read import read_metrics
from seatrial.report import build
from seatrial.runtime.environments import Environment
from tests.real.drive import Ran, call, environ, hashes, processes_of, run
from tests.real.inside import run_cases, write_shadows

pytestmark = [pytest.mark.real, pytest.mark.timeout(2700)]  # level 3 starts three servers, one after another

LEVELS = {level.number: level for level in LOOP.levels()}
RUN = list(LEVELS)
STAGES = (
    *("weights", "data", "sampling", "length", "reward", "advantage", "reference", "logprob", "ratio", "kl", "mask", "loss"),
    *("gradient", "clip", "schedule", "update", "logging"),
)
NUMBER = r"-?[\d.]+(?:e[+-]?\d+)?"
SOUND = {
    "metrics are undamaged": r"0\.0",
    "every metric is finite": r"(\d+) of \1 series, \d+ points",
    "no step was written twice": "0 series",
}
"""Proofs of every level."""


REFITS = {
    "no refit was refused": "0 of 6",
    "facts of the refits are whole": "0 problems",
    "every refit happened, once and in order": "replica 0: 6",
    "base before any update: bit-equal": "replica 0: 0 differed, 0 touched",
    "stale weights are seen before each refit": "5 of 5",
    "committed only after the generator's fingerprint matched": "6 of 6 committed",
    "versions grow by one on every replica": "replica 0: up to 6",
    "every sample is stamped with its version": r"[1-9]\d* samples",
    "the transports asked for were used": r"full \(overwrite\) 1, packed \(overwrite\) 2, sparse \(difference\) 2; "
    r"differences: (bitmap \d+, )?dense \d+",
    "token_mult_prob_error, the weak last check": r"1(\.0000\d*)? \(p50 .*, outliers 0\.0%\)",
}


def read(methods: str, elements: int, written: int) -> dict[str, str]:
    """How the generator's live weights were read, through a map that leaves nothing out."""
    return {
        **REFITS,
        "every tensor is proven, and how": methods,
        "the coordinate map was made, and the weights restored bit for bit": rf"replica 0: {elements} elements in \d+ runs",
        "every element is where its name says": "0 tensors are not",
        "every runtime tensor is classified": rf"replica 0: {written} written, \d+ shared, \d+ derived, \d+ constant",
        "every exported name is consumed": "0 are not",
        "nothing is left unwritten but padding and derived tensors": "0 are",
        "no tensor changes that nothing explains": "0 do",
        "no name is outside the map": "0 are",
        "nothing of the policy changes that is not exported": "0 tensors do",
    }


def synced(run: str, moved: str) -> dict[str, str]:
    """Proofs of TRL's own sync."""
    made = {
        "vLLM generates in its own process": r"vLLM \d[\w.+]+, pid \d+",
        "TRL's own sync sent every tensor under its name": "6 syncs, 0 left out, 0 under other names",
        "TRL's own sync leaves the policy as it was": f"moved by up to {moved}",
        "weights after each refit: bit-equal": r"21 tensors, 0 of 6 refits wrong",
        **read("forward 15, read 6", 310656, 15),
        "the transports asked for were used": r"trl \(sync\) 5",
    }
    return {f"{name} ({run})": value for name, value in made.items()}


def step(steps: int, where: str = "", without: tuple[str, ...] = ()) -> dict[str, str]:
    """Every stage of every step of a recorded run is the shadow's."""
    made = {
        f"step proof: {stage}{where}": rf"[1-9]\d* compared, at most {NUMBER} % of the tolerance"
        for stage in STAGES
        if stage not in without
    }
    return made | {f"every step was recomputed{where}": f"{steps} steps"}


VARIED = {
    f"{name} (variant {variant})": value
    for variant in VARIANTS
    for name, value in (("step proof", f"17 stages: {', '.join(STAGES)}"), ("every step was recomputed", "4 steps"))
}


def trained(tensors: str, steps: int, where: str = "", frozen: str | None = "0") -> dict[str, str]:
    """Proofs of one whole training run; an adapter leaves the base frozen, and has proofs of its own for that."""
    made = {
        f"trained weights{where} changed": f"{tensors} tensors",
        f"gradients reach every tensor{where}": "0 without",
        f"every step was logged{where}": f"{steps} of {steps}",
        f"optimizer updates{where}": rf"\[{steps}, {steps}\]",
    }
    if frozen is None:
        return made | {"the checkpoint stores the adapter's settings": r"\d\d compared"}
    return made | {
        f"no parameter is frozen{where}": rf"{frozen} of \d{{6}}",
        f"loaded weights equal the files{where}: bit-equal": r"\d+ of \d+ tensors",
        f"saved weights equal the model{where}: bit-equal": r"\d+ of \d+ tensors",
        f"saved settings and tokenizer are the model's{where}": r"\d files",
        f"embeddings are tied as configured{where}": "True|False",
    }


PROOFS: dict[int, dict[str, str]] = {
    0: step(8) | VARIED | trained("26 of 26", 8) | {"random numbers come from the seed": "7 of 7 variants"},
    1: {
        **step(8, " (full)"),
        "trainable parameters": r"29184 of \d{6}",
        "only adapters train": "0 others",
        "adapter weights changed": r"28 of 28 tensors",
        "base frozen": r"0 of 29 tensors moved",
        **trained("28 of 28", 8, " (full)", frozen=None),
        "checkpoint is complete": "checkpoint-4",
        "resumed from the checkpoint": "step 4",
        "new adapters from the seed: bit-equal": r"57 of 57 equal",
        "random state from the seed: bit-equal": r"(\d+) of \1 equal",
        "adapters in the checkpoint: bit-equal": r"28 of 28 equal",
        "adapters as they are saved at the end: bit-equal": r"28 of 28 equal",
        "history of both runs: bit-equal": r"(\d+) of \1 equal",
        "restored weights: bit-equal": r"57 of 57 equal",
        "restored optimizer: bit-equal": r"138 of 138 equal",
        "restored scheduler: bit-equal": r"(\d+) of \1 equal",
        "trajectory after the resume: bit-equal": r"(\d\d) of \1 metrics x 4 steps equal",
        "final weights of both runs: bit-equal": r"57 of 57 equal",
        "final optimizer of both runs: bit-equal": r"138 of 138 equal",
        "final scheduler of both runs: bit-equal": r"(\d+) of \1 equal",
        "final generators of both runs: bit-equal": r"(\d+) of \1 equal",
    },
    2: {
        **step(6),
        **trained("26 of 26", 6),
        "generation runs in its own process": r"pid \d+ on (cpu|cuda\S*)",
        "weights after each refit: bit-equal": r"26 tensors, 0 of 6 refits wrong",
        "the generator ties what the trainer ties": "True",
        **read("read 26", 227840, 26),
    },
    3: {
        **step(6),
        **trained("21 of 21", 6),
        **step(6, " (sync)"),
        **step(6, " (lora)"),
        "vLLM generates in its own process": r"vLLM \d[\w.+]+, pid \d+",
        "weights after each refit: bit-equal": r"21 tensors, 0 of 6 refits wrong",
        **read("forward 15, read 6", 310656, 15),  # all matrices but the embedding are packed
        **trained("21 of 21", 6, " (sync)"),
        **synced("sync", r"0\.0e\+00"),
        "training facts (lora)": "there",
        "every step was logged (lora)": "6 of 6",
        "optimizer updates (lora)": r"\[6, 6\]",
        "adapter weights (lora) changed": r"28 of 28 tensors",
        **synced("lora", rf"{NUMBER}"),
    },
    4: {
        **step(6, " (one)"),
        **step(6, " (two)"),
        **trained("26 of 26", 6, " (one)"),
        "two processes form one group": r"world sizes \[2, 2\]",
        "ranks draw random numbers of their own": "others",
        "optimizer updates (two)": r"\[\[6, 6\], \[6, 6\]\]",
        "final weights of two ranks against one": rf"norms {NUMBER}, {NUMBER}",
        "ranks end with the same weights: bit-equal": r"29 of 29 equal",
        "trajectory of two ranks against one": rf"{NUMBER} % of the tolerance.*",
    },
    5: {
        **step(6, " (moe)"),
        **step(6, " (vlm)"),
        "MoE router weights changed": r"2 of 2 tensors",
        "MoE expert weights changed": r"4 of 4 tensors",
        **trained("25 of 25", 6, " (moe)"),
        "another picture changes the logits": rf"{NUMBER} \(same picture {NUMBER}\)",
        "vision tower weights changed": r"21 of 23 tensors",  # LLaVA reads the layer before the last norm
        "projector weights changed": r"4 of 4 tensors",
        **trained("52 of 54", 6, " (vlm)"),
    },
    6: {
        **step(4, " (learn/1)", without=("reference", "kl")),
        "every seed has a learning arm and a control": "5 and 5",
        "learning arms changed the weights": "5 of 5",
        "control arms changed nothing": "0 of 5",
        "rewards were logged as they were given": "0 others",
        "each seed has random numbers of its own": "5 kinds",
        "every arm made and logged every step": "10 of 10",
    },
}
PROCESSES = {number: {"driver"} for number in LEVELS} | {2: {"driver", "generator"}, 3: {"driver", "vllm"}, 4: {"driver", "rank1"}}
STAMP = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z ")


class _Page(HTMLParser):
    """Collects what the attributes of a page point to, and its content security policy."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.policy = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [value or "" for name, value in attrs if name in ("src", "href", "action", "data", "poster", "srcset")]
        if ("http-equiv", "Content-Security-Policy") in attrs:
            self.policy = dict(attrs)["content"] or ""


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """The one trial that this module looks at."""
    return run(tmp_path_factory.mktemp("levels"), "trl", "--level", "all", name="every lével")


def test_every_level_is_a_pass(everything: Ran) -> None:
    assert everything.code == ExitCode.PASS, everything.output
    trial = everything.trial
    assert (trial.status, trial.verdict) == ("done", Verdict.PASS)
    assert [level.number for level in trial.levels] == sorted(LEVELS)
    assert not any(level.skip for level in LEVELS.values())
    assert processes_of(everything.directory) == [], "no server is left behind"


@pytest.mark.skipif(3 not in RUN, reason="level 3 did not run")
def test_settings_of_trls_own_generation_are_proven(everything: Ran, environment: Environment, tmp_path: Path) -> None:
    _, sync, lora = phases_of(3, everything.directory / "levels" / "3-vllm", environment.python, run_dir=everything.directory)[3:]
    case = "case_settings_of_trls_own_generation_diverge_as_others"
    assert run_cases("tests/real/trl_served_cases.py", (case,), extra=write_shadows(tmp_path / "shadows", (sync, lora))) == {case: None}


@pytest.mark.parametrize("number", RUN)
def test_level_passes_and_says_what_it_proved(everything: Ran, number: int) -> None:
    result = everything.level(number)
    assert result.verdict is Verdict.PASS, result.reason
    assert (result.boundary, result.vacuous, result.reason) == (None, False, LEVELS[number].proves)
    assert result.steps_reached == result.steps_expected == LEVELS[number].steps
    assert set(LEVELS[number].claims_not) <= set(result.limitations)
    assert [(phase.ended, phase.exit_code) for phase in result.phases] == [("exited", 0)] * len(result.phases)
    assert 1 < result.cpu_seconds < 300


@pytest.mark.parametrize("number", RUN)
def test_proofs_by_name_and_value(everything: Ran, number: int) -> None:
    proofs = {check.name: check for check in everything.level(number).checks if check.kind == "proof"}
    wanted = SOUND | PROOFS[number]
    assert proofs.keys() == wanted.keys()
    for name, pattern in wanted.items():
        assert proofs[name].passed
        assert re.fullmatch(pattern, str(proofs[name].value)), f"{name}: {proofs[name].value}"


@pytest.mark.parametrize("number", RUN)
def test_every_check_of_the_ladder_was_evaluated(everything: Ran, number: int) -> None:
    checks = [check for check in everything.level(number).checks if check.kind == "expression"]
    assert [check.name for check in checks] == [spec.expr for spec in LEVELS[number].checks]
    for check in checks:
        assert check.passed
        assert isinstance(check.value, float)
        assert math.isfinite(check.value)
        assert check.steps
        assert not check.missing


def test_tolerances_are_far_from_what_was_measured(everything: Ran) -> None:
    """A proof that only just holds here would be a coin toss on another machine."""
    ranks = next(check for check in everything.level(4).checks if check.name.startswith("trajectory"))
    assert float(str(ranks.value).split(" ")[0]) < 20
    values = {check.name: check.value for check in everything.level(6).checks}
    assert float(str(values['t_pvalue(data["signal/gain_over_control"]) < 0.01'])) < 1e-3
    assert float(str(values['mean(data["signal/gain_over_control"]) > 0'])) > 0.1


def test_default_levels_of_this_trial_are_a_pass(everything: Ran, tmp_path: Path) -> None:
    """What `seatrial run` without a level does is part of this trial: the same levels, all passed."""
    done = call(tmp_path, "plan", "--json")
    planned = [level["number"] for level in json.loads(done.stdout)["levels"]]
    assert planned == [0, 1, 6]
    assert worst(everything.level(number).verdict for number in planned) is Verdict.PASS


def test_records_follow_the_shipped_schemas(everything: Ran) -> None:
    for name in ("trial", "report"):
        shipped = read_json(build.DIRECTORY / f"{name}.schema.json")
        jsonschema.Draft202012Validator.check_schema(shipped)
        jsonschema.validate(read_json(everything.directory / f"{name}.json"), shipped, jsonschema.Draft202012Validator)


def test_evidence(everything: Ran, environment: Environment) -> None:
    place = everything.directory / "evidence"
    recorded = read_model(place / "environment.json", EnvironmentRecord)
    assert recorded == everything.trial.environment
    assert recorded.lock == environment.lock_hash
    assert Path(recorded.python).is_relative_to(environment.path)
    assert {"trl", "torch", "transformers", "peft", "accelerate", "datasets"} <= recorded.packages.keys()
    assert read_json(place / "repos.json") == []
    assert read_json(place / "config.json")["run.levels"] == {"value": "all", "origin": "command line"}
    proofs = read_json(place / "imports.json")
    assert proofs == [item.model_dump(mode="json") for item in everything.trial.imports]
    assert {proof["process"] for proof in proofs} == {"driver", "generator", "rank1", "vllm"}
    assert all(proof["ok"] and proof["method"] == "imported" for proof in proofs)
    assert {proof["package"] for proof in proofs if proof["process"] == "generator"} == {"torch", "transformers"}
    assert {proof["package"] for proof in proofs if proof["process"] == "vllm"} == {"torch", "transformers", "vllm"}


@pytest.mark.parametrize("number", RUN)
def test_files_of_a_level(everything: Ran, number: int) -> None:
    place, result = everything.place(number), everything.level(number)
    assert result.directory == f"levels/{place.name}" == f"levels/{number}-{LEVELS[number].name}"
    assert read_model(place / "result.json", LevelResult) == result
    assert read_json(place / "checks.json") == [check.model_dump(mode="json") for check in result.checks]
    processes = {json.loads(line)["process"] for line in read_text(place / "imports.jsonl").splitlines()}
    assert processes == PROCESSES[number]
    assert not list(place.rglob("*.pids")), "a run that ended leaves no pid file"


@pytest.mark.parametrize("number", RUN)
def test_metrics_are_strict_json_by_step(everything: Ran, number: int) -> None:
    path = everything.place(number) / "metrics.jsonl"
    rows = [json.loads(line, parse_constant=pytest.fail) for line in read_text(path).splitlines()]
    steps = [row["step"] for row in rows]
    assert steps == list(range(1, len(steps) + 1))
    assert len(steps) == LEVELS[number].steps
    found = read_metrics([path])
    assert not found.damage
    assert not found.overlaps
    assert not any(series.non_finite() for series in found.series.values())


@pytest.mark.parametrize("number", RUN)
def test_log_lines_have_times(everything: Ran, number: int) -> None:
    lines = (everything.place(number) / "run.log").read_bytes().decode().rstrip("\n").split("\n")  # a progress bar's \\r ends no line
    phases = [phase.name for phase in everything.level(number).phases if not phase.name.startswith("shadow")]
    headings = [line for line in lines if line.startswith("===== ")]
    assert headings == ([f"===== {name} =====" for name in phases] if len(phases) > 1 else [])
    bare = [line for line in lines if line not in headings and not STAMP.match(line)]
    assert not bare
    assert any("seatrial: imports proven in driver" in line for line in lines)


def test_summary_answers_in_its_first_line(everything: Ran) -> None:
    text = read_text(everything.directory / "summary.md")
    assert text.startswith("Result: Pass - ")
    headings = [line for line in text.split("\n") if re.fullmatch(r"[A-Z][\w-]+:", line)]
    assert headings == ["Deliverables:", "Evidence:", "Limitations:", "Follow-ups:"]
    assert text in everything.output, "the command prints the summary as it is stored"


def test_report_names_every_level_as_a_deliverable(everything: Ran) -> None:
    report = read_model(everything.directory / "report.json", Report)
    assert report.result is Verdict.PASS
    assert report.trial == everything.trial
    verdicts = {deliverable.name: deliverable.verdict for deliverable in report.deliverables}
    for number in sorted(LEVELS):
        named = [verdict for name, verdict in verdicts.items() if f"level {number} " in name or (number == 0 and "policy run" in name)]
        assert named == [everything.level(number).verdict]


def test_junit(everything: Ran) -> None:
    root = ElementTree.fromstring(read_text(everything.directory / "junit.xml"))
    cases = root.findall(".//testcase")
    checks = sum(len(level.checks) for level in everything.trial.levels)
    assert int(root.attrib["tests"]) == len(cases) == len(LEVELS) + checks
    assert (root.attrib["failures"], root.attrib["errors"], root.attrib["skipped"]) == ("0", "0", "0")


def test_html_loads_nothing_from_elsewhere(everything: Ran) -> None:
    text = read_text(everything.directory / "report.html")
    page = _Page()
    page.feed(text)
    assert "default-src 'none'" in page.policy
    assert page.found
    assert all(target.startswith("#") for target in page.found)
    assert not re.findall(r"url\(\s*['\"]?(?!data:)|@import", text)
    # The licence of the plot library names its home; that is a comment.
    assert set(re.findall(r"https?://[^\s\"'<>)]+", text)) <= {"https://github.com/leeoniya/uPlot"}


def test_report_command_gives_the_same_summary(everything: Ran, tmp_path: Path) -> None:
    before = read_text(everything.directory / "summary.md")
    done = call(tmp_path, "report", everything.directory)
    assert done.returncode == ExitCode.PASS
    assert done.stdout == before == read_text(everything.directory / "summary.md")


def test_judge_agrees_from_the_files_alone(everything: Ran, tmp_path: Path) -> None:
    place = everything.place(0)
    words = ("judge", "trl", "--log", place / "run.log", "--metrics", place / "metrics.jsonl", "--json")
    done = call(tmp_path, *words, "--level", "0", "--expect-steps", "8")
    found = json.loads(done.stdout)
    assert (done.returncode, found["verdict"], found["steps_reached"]) == (ExitCode.PASS, "Pass", 8)
    done = call(tmp_path, *words, "--level", "0", "--expect-steps", "9")
    assert (done.returncode, json.loads(done.stdout)["reason"]) == (ExitCode.FAIL, "reached step 8 of 9")


def test_judge_never_passes_a_level_that_rests_on_probes(everything: Ran, tmp_path: Path) -> None:
    place = everything.place(1)
    done = call(tmp_path, "judge", "trl", "--log", place / "run.log", "--metrics", place / "metrics.jsonl", "--level", "1", "--json")
    assert done.returncode == ExitCode.BLOCKED, done.stdout
    assert "seatrial run trl --level 1" in json.loads(done.stdout)["reason"]


@pytest.mark.parametrize("number", RUN)
def test_command_scripts_are_valid_shell(everything: Ran, number: int) -> None:
    subprocess.run(["bash", "-n", everything.place(number) / "command.sh"], check=True)


def test_command_script_runs_as_it_stands_and_leaves_the_evidence_alone(everything: Ran, tmp_path: Path) -> None:
    """From a directory with a package of the loop's name in it, which must not be what runs."""
    decoy = tmp_path / "trl"
    decoy.mkdir()
    (decoy / "__init__.py").write_text("raise RuntimeError('imported from where the script was called')\n", encoding="utf-8")
    before, out = hashes(everything.directory), tmp_path / "again ünd again"
    script = everything.place(0) / "command.sh"
    done = subprocess.run(
        ["bash", script], cwd=tmp_path, env={**environ(), "OUT": str(out)}, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert hashes(everything.directory) == before
    again, first = (read_metrics([place / "run" / "metrics.jsonl"]) for place in (out, everything.place(0)))
    assert again.series["train/loss"] == first.series["train/loss"], "the script is the run: the same losses, bit for bit"
