"""NeMo-RL: its own functionals with Megatron, driven from outside, in the environment that uv made for its checkout."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from seatrial.core.errors import UserError
from seatrial.core.guarded import real_path
from seatrial.core.loop import Context, Footprint, Isolation, Loop, Measures, Option, Phase, SideTests
from seatrial.core.records import CheckResult, Finding, LevelResult, RepoState
from seatrial.core.records import replace as replace_record
from seatrial.core.series import Metrics
from seatrial.core.specs import CheckSpec, Level
from seatrial.core.verdict import Boundary, Verdict
from seatrial.loops import bridge_tests
from seatrial.loops.bridge_tests import conformance
from seatrial.loops.host_findings import hub_cache, hub_snapshot, wrong_names
from seatrial.loops.hydra import KEYS, size_options, with_options
from seatrial.loops.nemo_rl import (
    nemo_checkout,
    nemo_metrics,
    nemo_outputs,
    nemo_preflight,
    nemo_proofs,
    nemo_runs,
    script_dry_run,
    script_reader,
)
from seatrial.loops.nemo_rl.nemo_checkout import VERSION, Generation, generation
from seatrial.loops.nemo_rl.nemo_runs import DEFAULT_MODEL, GPUS

NO_LORA = (
    "a Megatron run of two steps that was cut after the first and resumed is the run that was not cut, within the tolerances of "
    "NeMo-RL's own comparison; LoRA was not run"
)


def _changed(level: Level, options: Mapping[str, str]) -> dict[str, object]:
    match level.name:
        case "lora-checkpoint":
            return _without_lora(options)
        case "refit":
            offers = _offered(options)
            run = options["transports"].split(",") if options.get("transports") else nemo_runs.available(offers) if offers else ()
            left = tuple(name for name in nemo_runs.TRANSPORTS if name not in run)
            return {**_titled(level, ", ".join(run)), **_too_few(options), "not_taken": left}
        case "megatron-generation":
            return _megatron_generation(options)
        case "parallelism":
            sizes = ", ".join(f"{name.upper()} {int(options.get(name, 2 if name == 'tp' else 1))}" for name in KEYS)
            return {**_titled(level, options.get("recipe", sizes)), **_too_few(options)}
        case "architecture":
            named = options.get("architecture", options.get("recipe", ""))
            return {**_titled(level, named), "skip": nemo_runs.why_no_architecture(options)}
        case "learning":
            return {"steps": int(options.get("steps", nemo_runs.LEARNING_STEPS[0]))}
    return {}


def _offered(options: Mapping[str, str]) -> Generation | None:
    """What the checkout offers; None when none was named, or what was named is none: the preflight says so."""
    place = Path(options["nemo_rl"]) if "nemo_rl" in options else None
    return generation(place) if place is not None and (place / VERSION).is_file() else None


def _titled(level: Level, what: str) -> dict[str, object]:
    return {"title": f"{level.title} ({what})"} if what else {}


def _too_few(options: Mapping[str, str]) -> dict[str, object]:
    """One GPU has nothing to transfer to, and nothing to be parallel with."""
    few = int(options.get("gpus", GPUS)) < 2
    return {"skip": "one GPU is not enough for it: name more with --set options.gpus=N"} if few else {}


def _without_lora(options: Mapping[str, str]) -> dict[str, object]:
    """LoRA that this checkout does not have, or that is known to be broken there, is no fault of the change."""
    offers = _offered(options)
    why = nemo_runs.no_peft(options, offers) if offers else None
    return {"title": "Checkpoint (LoRA blocked by NeMo-RL)", "proves": NO_LORA, "left_out": (why,)} if why else {}


def _megatron_generation(options: Mapping[str, str]) -> dict[str, object]:
    offers = _offered(options)
    if offers is None:
        return {}
    supported = offers.megatron_generation and Path(nemo_runs.MEGATRON_GENERATION).name in offers.scripts
    return {} if supported else {"skip": "this NeMo-RL checkout does not support policy.generation.backend=megatron"}


def _foreign_core(context: Context) -> list[str]:
    """Of a Bridge under test without a Megatron-LM of its own."""
    tested = [repo.path for repo in context.changes if "megatron.bridge" in repo.packages and not repo.companion]
    cores = nemo_checkout.bundled_core(context)
    if not tested or not cores or any(core.is_relative_to(path) for core in cores for path in tested):
        return []
    return [f"the Bridge under test has no Megatron-LM (an empty submodule?): Megatron-Core came from {cores[0]}"]


UNITS = (
    "tests/unit/models/megatron/test_megatron_setup.py",
    "tests/unit/models/policy/test_megatron_worker.py",
    "tests/unit/utils/test_weight_transfer.py",
)
CHECKPOINT = ("tests/unit/utils/test_checkpoint.py", "tests/unit/utils/test_native_checkpoint.py")
VLLM = ("tests/unit/models/generation/test_vllm_generation.py", "tests/unit/models/generation/test_vllm_utils.py")
BY_LEVEL = {"lora-checkpoint": CHECKPOINT, "refit": VLLM}
MOVED = {
    "tests/unit/utils/test_weight_transfer.py": (
        "tests/unit/utils/test_weight_transfer_stream.py",
        "tests/unit/utils/test_packed_tensor.py",
    )
}
"""Where tests went that a guide still names."""
EXTRAS = ("mcore", "vllm")
UV = ("uv", "run", "--group", "test")


def _bridge(repo: RepoState) -> SideTests:
    root = Path(repo.path)
    files, notes = bridge_tests.tests_for_diff(repo)
    return SideTests(
        key="bridge",
        name="Bridge-side checks",
        argv=("uv", "run", "python", "-m", "pytest", "-q"),
        cwd=root,
        files=files,
        notes=notes,
        skip=None if files else f"{root}: none of the focused tests exists",
    )


def _units(place: Path, context: Context) -> list[SideTests]:
    """One run without extras, and one for each extra that tests are marked with: NeMo-RL leaves those out otherwise."""
    wanted = [*UNITS, *(file for level in context.levels for file in BY_LEVEL.get(level, ()))]
    files, notes = bridge_tests.present(place, wanted, MOVED)
    marks = {file: _marks(place / file) for file in files}
    common = SideTests(
        key="nemo-rl",
        name="NeMo-RL unit checks",
        argv=(*UV, "pytest", "-q"),
        cwd=place,
        env={"PYTHONPATH": os.pathsep.join((*_tested(context), nemo_checkout.python_path(context)))},
        files=tuple(file for file in files if None not in marks[file]),
        notes=notes,
        skip=None if files else f"{place}: none of the unit tests of the surface exists",
    )
    made = [common] if common.files or common.skip else []
    for extra in EXTRAS:
        marked = tuple(file for file in files if extra in marks[file])
        if marked:
            argv = (*UV, "--extra", extra, "pytest", "-q", f"--{extra}-only")
            name = f"NeMo-RL unit checks ({extra})"
            made.append(replace(common, key=f"nemo-rl-{extra}", name=name, argv=argv, files=marked, notes=() if made else notes))
    return made


def _tested(context: Context) -> list[str]:
    """The checkouts under test go first, also one that is copied into the vendored tree: that copy is made later."""
    return [repo.import_root for repo in context.changes if repo.import_root and not repo.companion]


def _marks(file: Path) -> set[str | None]:
    """Extras that tests of a file are marked with; None among them when all of its tests are."""
    text = file.read_text(encoding="utf-8", errors="replace") if file.is_file() else ""
    found: set[str | None] = {extra for extra in EXTRAS if f"mark.{extra}" in text}
    return found | {None} if re.search(rf"^pytestmark = .*mark\.({'|'.join(EXTRAS)})", text, re.MULTILINE) else found


MISMATCH = ("token_mult_prob_error", "seq_mult_prob_error", "gen_kl_error", "probs_ratio")
ILLEGAL_ACCESS = ("accelerator-memory-fault", "cuda-graph-fault")
"""Known failures, by id: the general one, and that of this loop."""
POLICY, GENERATION = "policy.megatron_cfg", "policy.generation"
MEGATRON_GENERATION, REFIT, PARALLELISM = "megatron-generation", "refit", "parallelism"
"""Names of the levels whose generator, transport or parallel sizes are others than those of the rest."""
NOT_FULL = {"packed", "reshard", "delta"}
FULL = {"transports": "full"}
"""Options of level 2: only this transport is run."""


def _illegal_access(result: LevelResult) -> bool:
    found = result.diagnosis.signature if result.diagnosis else None
    return found in ILLEGAL_ACCESS


def _mismatch(result: LevelResult) -> bool:
    """Generator and trainer disagree: by a metric, or by a proof that weights arrived."""
    missed = [check for check in result.checks if not check.passed]
    return any(word in check.tag for check in missed for word in MISMATCH) or any(
        check.kind == "proof" and check.boundary is Boundary.REFIT for check in missed
    )


def _crashed(result: LevelResult) -> bool:
    said = result.diagnosis is not None and result.diagnosis.verdict is not None
    return said or any(phase.ended != "exited" or phase.exit_code != 0 for phase in result.phases)


def _without_graphs(level: str) -> Isolation:
    if level == MEGATRON_GENERATION:
        place = f"{GENERATION}.mcore_generation_config"
        words = (f"{place}.num_cuda_graphs=null", f"{place}.use_cuda_graphs_for_non_decode_steps=false")
        return Isolation("no-cuda-graphs", words, "the CUDA graphs of Megatron generation", reduced=True)
    return Isolation("eager", (f"{GENERATION}.vllm_cfg.enforce_eager=true",), "the CUDA graphs of vLLM", reduced=True)


def _numerics(result: LevelResult) -> tuple[Isolation, ...]:
    every = [
        Isolation("no-sequence-parallel", (f"{POLICY}.sequence_parallel=false",), "sequence parallelism", reduced=True),
        Isolation("no-rope-fusion", (f"{POLICY}.apply_rope_fusion=false",), "the fused rope kernel", reduced=True),
        Isolation("short-sequences", ("policy.max_total_sequence_length=256",), "what builds up over long sequences"),
        Isolation("no-packing", ("policy.sequence_packing.enabled=false",), "sequence packing", reduced=True),
        Isolation(
            "tp-1", (f"{POLICY}.tensor_model_parallel_size=1", f"{POLICY}.sequence_parallel=false"), "tensor parallelism", reduced=True
        ),
    ]
    idle = _idle(result)
    made = [item for item in every if item.name not in idle]
    if result.name == MEGATRON_GENERATION:
        made.append(Isolation("vllm", (f"{GENERATION}.backend=vllm",), "generation by Megatron"))
    elif result.name != REFIT:  # other transports than the default are for vLLM alone
        made.append(Isolation("megatron", (f"{GENERATION}.backend=megatron",), "generation by vLLM, or the export of weights to it"))
    return tuple(made)


def _idle(result: LevelResult) -> set[str]:
    """Names of reruns that would change nothing: only level 4, or the trial's own arguments, turn these settings on."""
    if result.name == PARALLELISM:
        return set()
    settings = {"no-sequence-parallel": ("sequence_parallel", "false"), "tp-1": ("tensor_model_parallel_size", "1")}
    return {name for name, (key, off) in settings.items() if not _turned_on(result, key, off)}


def _turned_on(result: LevelResult, key: str, off: str) -> bool:
    """Whether the trial's own loop arguments give the policy's setting another value than `off`; the last one counts."""
    said = [word.lower() for word in result.arguments if POLICY in word and key in word]
    return bool(said) and not said[-1].endswith(f"={off}")


def _transports(result: LevelResult) -> tuple[Isolation, ...]:
    """Other ways for the weights, at the level that is about them: the full transport alone, unless nothing else was run, and no
    transfer between GPUs at all."""
    if result.name != REFIT:
        return ()
    full = Isolation("full-transport", (), "a transport other than full", reduced=True, options=FULL)
    colocated = Isolation("colocated", (f"{GENERATION}.colocated.enabled=true",), "the transfer between workers", options=FULL)
    return (colocated,) if set(result.not_taken) == NOT_FULL else (full, colocated)


NOT_SERVED = ("hub-rate-limit", "hub-offline")
DEATHS = ("SIGSEGV", "SIGABRT", "SIGBUS", "ActorDiedError", "worker died")
LOADS = (
    "from transformers import AutoConfig, AutoTokenizer; p = {path!r}; "
    "AutoConfig.from_pretrained(p, local_files_only=True); AutoTokenizer.from_pretrained(p, local_files_only=True)"
)


def _backend(result: LevelResult) -> list[str]:
    fell = any(f"{POLICY}.enabled" in check.settings for check in result.checks if not check.passed)
    words = "-- policy.dtensor_cfg.enabled=false policy.megatron_cfg.enabled=true"
    return [f"the policy was not Megatron's: use a configuration of Megatron, or add {words}"] if fell else []


def _even(result: LevelResult) -> list[str]:
    """Nothing to learn from: a small model answers the few prompts of a step all rightly, or all wrongly."""
    words = "-- grpo.num_prompts_per_step=8 grpo.num_generations_per_prompt=4 policy.train_global_batch_size=32"
    even = result.vacuous and result.boundary is Boundary.REWARD
    return [f"more samples per step make uneven rewards likely: {words}"] if even else []


def _early(result: LevelResult) -> list[str]:
    reached, expected = result.steps_reached, result.steps_expected
    ended = all(phase.exit_code == 0 for phase in result.phases) and not (result.diagnosis and result.diagnosis.verdict)
    if not ended or expected is None or (reached or 0) >= expected:
        return []
    why = f"see the last lines of {result.directory}/run.log (a time limit, no more data, a skipped step)"
    return [f"NeMo-RL ended by itself after step {reached or 0} of {expected}: {why}"]


def _death(result: LevelResult) -> list[str]:
    """A worker that was killed, or crashed in native code, without a known cause."""
    found = result.diagnosis
    if found is None or found.signature is not None or not any(word in " ".join(found.excerpt) for word in DEATHS):
        return []
    where = "its last lines in Ray's own logs (worker-*.err), and the kernel's out-of-memory killer (dmesg)"
    return [f"a worker died: look for {where}; run the baseline, to see whether it dies there, too"]


def _hub(result: LevelResult, context: Context) -> tuple[str, ...]:
    """Where a local snapshot of the model is, when the hub did not serve it."""
    signature = result.diagnosis.signature if result.diagnosis else None
    if signature not in NOT_SERVED or Path(context.model).exists():
        return ()
    place = hub_snapshot(context.model)
    if not (place / "config.json").is_file():
        fix = "download it once, on a machine that may, or name a directory with --model"
        return (f"{hub_cache()} holds no snapshot of {context.model}: {fix}",)
    loads, model = shlex.quote(LOADS.format(path=str(place))), shlex.quote(str(place))
    return (
        f"a snapshot is at {place}; check that it loads: uv run python -c {loads}",
        f"then run offline: HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 seatrial run nemo-rl … --model {model} (model and tokenizer)",
    )


PACKAGES = {"bridge": "megatron.bridge", "megatron": "megatron.core", "nemo-rl": "nemo_rl", "nemo_rl": "nemo_rl"}
"""What a change of this name must provide."""
RECIPE = "a maintained recipe for levels 4 and 5, such as llm/grpo-llama3.2-1b-instruct-1n8g-megatron"


class NemoRl(Loop):
    name = "nemo-rl"
    title = "NeMo-RL"
    folder = Path(__file__).parent
    default_model = DEFAULT_MODEL
    footprint = Footprint(tmp_mb=1_000, tmp_inodes=5_000, shm_mb=8_000, ray=True)
    measures = Measures(
        signals=nemo_metrics.SIGNALS,
        metric_files=nemo_outputs.metric_files,
        read_console=nemo_outputs.read_console,
        steps_reached=nemo_outputs.steps_reached,
        steps_planned=nemo_outputs.steps_planned,
        vacuous=nemo_metrics.vacuous,
        unseen=nemo_metrics.unseen,
        tokens=nemo_outputs.tokens,
        other_run=nemo_outputs.other_run,
    )
    options = (
        Option("nemo_rl", "the NeMo-RL checkout whose functionals are driven", "path"),
        Option("gpus", "GPUs of the host", "number", str(GPUS)),
        Option(
            "bridge",
            "how the Bridge under test is used: path (first on PYTHONPATH) or sync (copied into the vendored tree, and restored)",
            "choice",
            "path",
            ("path", "sync"),
        ),
        Option("tests", "the Bridge's and NeMo-RL's own unit tests before the levels", "choice", "on", ("on", "off")),
        Option("peft", "broken: leave LoRA out of levels 1 and 6, it is known to be broken there", "choice", "on", ("on", "broken")),
        Option("transports", "transports of level 2, such as full,delta; all that the checkout has unless said"),
        *size_options("level 4", "levels 4 and 5"),
        Option("sequence_parallel", "in level 4", "choice", "false", ("false", "true")),
        Option("recipe", RECIPE),
        Option("architecture", "what level 5 is for", "choice", choices=nemo_runs.ARCHITECTURES),
        Option("steps", "steps of level 6", "number", str(nemo_runs.LEARNING_STEPS[0]), (), *nemo_runs.LEARNING_STEPS),
        Option(
            "helpers",
            "local: build Megatron's dataset helpers in a node-local copy (home is full or read-only)",
            "choice",
            "off",
            ("off", "local"),
        ),
    )

    def adjust(self) -> None:
        """A checkout by its real place; transports that exist."""
        if "nemo_rl" in self.chosen:
            self.chosen = {**self.chosen, "nemo_rl": str(real_path(Path(self.chosen["nemo_rl"])))}
        for name in self.chosen.get("transports", "full").split(","):
            if name not in nemo_runs.TRANSPORTS:
                known = ", ".join(nemo_runs.TRANSPORTS)
                raise UserError(f"options.transports = {self.chosen['transports']!r}: {name!r} is none of {known}", "use full,delta")

    def checkouts(self) -> Mapping[str, Path]:
        return {"nemo-rl": Path(self.chosen["nemo_rl"])} if "nemo_rl" in self.chosen else {}

    def interpreter(self) -> Path:
        return nemo_checkout.interpreter(self.chosen)

    def launcher(self) -> Path | None:
        """NeMo-RL's own ray.sub: it is submitted from the root of the checkout."""
        found = Path(self.chosen.get("nemo_rl", "."), "ray.sub")
        return found if "nemo_rl" in self.chosen and found.is_file() else None

    def placed(self, changes: tuple[RepoState, ...]) -> tuple[RepoState, ...]:
        """With `bridge = sync` the Bridge under test is imported from the vendored tree, which then holds a copy of it."""
        place = next((repo.path for repo in changes if "nemo_rl" in repo.packages), self.chosen.get("nemo_rl"))
        if self.chosen.get("bridge") != "sync" or place is None:
            return changes
        target = str(Path(place) / nemo_checkout.VENDORED)
        return tuple(
            replace_record(repo, synced=target) if "megatron.bridge" in repo.packages and not repo.companion else repo for repo in changes
        )

    def import_path(self, context: Context) -> tuple[str, ...]:
        return nemo_checkout.import_path(context)

    def levels(self) -> tuple[Level, ...]:
        return with_options(super().levels(), self.chosen, GPUS, _changed)

    def phases(self, level: Level, context: Context, directory: Path) -> tuple[Phase, ...]:
        return nemo_runs.phases(level, context, directory)

    def shown(self, level: Level, context: Context, directory: Path) -> tuple[str, ...]:
        return script_dry_run.describe_scripts(level, context, directory)

    def findings(self, context: Context) -> tuple[Finding, ...]:
        return (*wrong_names(context, PACKAGES), *nemo_preflight.nemo_findings(context))

    def side_tests(self, context: Context) -> tuple[SideTests, ...]:
        """The Bridge's conformance and tests, when one is under test; then NeMo-RL's. None when they were switched off."""
        if context.options.get("tests") == "off":
            return ()
        bridge = next((repo for repo in context.changes if "megatron.bridge" in repo.packages and not repo.companion), None)
        place = nemo_checkout.checkout_of(context)
        made = [_bridge(bridge)] if bridge else []
        return (*conformance(context), *made, *(_units(place, context) if place else []))

    def isolations(self, result: LevelResult) -> tuple[Isolation, ...]:
        """The reruns of a failed level; none when there is nothing to separate."""
        if result.verdict is not Verdict.FAIL:
            return ()
        if _illegal_access(result):
            return (_without_graphs(result.name),)
        if _mismatch(result):
            return (*_numerics(result), *_transports(result))
        if not _crashed(result):
            return ()
        if result.boundary is Boundary.CHECKPOINT:
            return (Isolation("no-checkpoint", ("checkpointing.enabled=false",), "saving or loading checkpoints, not the model"),)
        return _transports(result) if result.boundary is Boundary.REFIT else ()

    def next_steps(self, result: LevelResult, context: Context) -> tuple[str, ...]:
        """By what went wrong: the hub, the backend, rewards without spread, an early end, a worker's death."""
        return (*_hub(result, context), *_backend(result), *_even(result), *_early(result), *_death(result))

    def limitations(self, level: Level, context: Context) -> tuple[str, ...]:
        made = []
        if level.name in ("lora-checkpoint", "learning") and (why := nemo_runs.no_peft(context.options, nemo_runs.offered(context))):
            made.append(why)
        if level.name != "parallelism" and "recipe" not in context.options and "policy.megatron_cfg" not in " ".join(context.arguments):
            made.append("all parallel sizes were 1, but for experts where they are named: use level 4")
        if level.name == "parallelism" and "recipe" not in context.options and int(context.options.get("ep", 1)) == 1:
            made.append("expert parallel size 1: routing across ranks was not exercised")
        made += _foreign_core(context)
        if level.name == "refit":
            made.append("full and packed leave the same trace: that tensors were packed rests on the size of the buckets that was set")
            run, here = nemo_runs.transports(context), nemo_runs.available(nemo_runs.offered(context))
            left = [name for name in nemo_runs.TRANSPORTS if name not in run]
            made += [f"transport not run: {name}{'' if name in here else ', which this checkout does not have'}" for name in left]
        if any("enforce_eager=true" in word.lower() or "num_cuda_graphs=null" in word for word in context.arguments):
            made.append("CUDA graphs were off: this is a reduced-optimization run")
        return tuple(made)

    def own_checks(self, level: Level, directory: Path) -> tuple[CheckSpec, ...]:
        return script_reader.own_checks(level, directory)

    def proofs(self, level: Level, directory: Path, metrics: Metrics) -> tuple[CheckResult, ...]:
        return nemo_proofs.proofs(level, directory, metrics)


LOOP = NemoRl()
