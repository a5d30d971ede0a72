"""Checks before a GPU is touched: checkout, uv, Python, vendored Bridge, variables, GPUs, scripts, models and configuration."""

from __future__ import annotations

import ast
import difflib
import filecmp
import os
import re
import shlex
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from seatrial.checks.probe_facts import ABSENT
from seatrial.core.errors import FindingCode, UserError
from seatrial.core.files import read_table, read_text
from seatrial.core.guarded import BadValue, parse_python, parse_toml
from seatrial.core.loop import Context, finding, gather
from seatrial.core.records import Finding
from seatrial.core.verdict import Boundary
from seatrial.instruments.nemo_rl import vendored_bridge
from seatrial.instruments.nemo_rl.nemo_process import Failed
from seatrial.loops import host_findings as host
from seatrial.loops.hydra import OVERRIDE_FORM, Sizes, configured_wrong, override_key, rejected, unlike_claims, word_findings
from seatrial.loops.nemo_rl import nemo_checkout, nemo_runs, script_reader
from seatrial.loops.nemo_rl.nemo_runs import DEFAULT_MODEL, ScriptCall, available, gpus, offered, variants
from seatrial.loops.nemo_rl.script_dry_run import RecordedScript, ScriptError, Training, record_script
from seatrial.runtime.command import NoAnswerError, run_command

PYTHON_SECONDS = 30
GUARD = "NRL_IGNORE_TP_ACCURACY_CHECK"
REBUILD = "NRL_FORCE_REBUILD_VENVS"
ARCHITECTURES = "TORCH_CUDA_ARCH_LIST"
POLICY = "nemo_rl/models/policy/lm_policy.py"
_ASK = "import sys; print('.'.join(map(str, sys.version_info[:3])))"
_BOUND = re.compile(r"(>=|<)\s*([\d.]+)")
_workers = partial(finding, "worker environments", True)
_bridge = partial(finding, "vendored Bridge")
_data = partial(finding, "model", boundary=Boundary.DATA)


def uv_finding() -> Finding:
    found = shutil.which("uv")
    if found is None:
        return Finding(
            name="launcher", ok=False, message="no uv on PATH: NeMo-RL's scripts start everything through it", fix="pip install uv"
        )
    return Finding(name="launcher", ok=True, message=f"{found}: driver and Ray workers run through it")


def python_finding(context: Context, checkout: Path) -> Finding | tuple[()]:
    if not context.has_python:
        return ()
    wanted = _requires(checkout)
    try:
        done = run_command([context.python, "-I", "-c", _ASK], PYTHON_SECONDS, cwd=checkout, own_session=True)
    except NoAnswerError as error:
        return Finding(name="Python", ok=False, message=f"{context.python}: {error}", fix=nemo_checkout.sync_command(checkout))
    version = done.out.strip()
    if done.code or not all(_within(version, sign, bound) for sign, bound in _BOUND.findall(wanted)):
        message = f"{context.python} is Python {version or '(unknown)'}, and this checkout requires {wanted}"
        return Finding(name="Python", ok=False, message=message, fix=nemo_checkout.sync_command(checkout))
    return Finding(name="Python", ok=True, message=f"{context.python}: Python {version}")


def _requires(checkout: Path) -> str:
    path = checkout / "pyproject.toml"
    try:
        project = parse_toml(read_text(path)).get("project", {}) if path.is_file() else {}
    except BadValue:
        return ""
    return str(project.get("requires-python", ""))


def _within(version: str, sign: str, bound: str) -> bool:
    has, limit = ([int(part) for part in text.split(".") if part.isdecimal()] for text in (version, bound))
    return has >= limit if sign == ">=" else has < limit


def vendored_finding(context: Context, checkout: Path) -> Finding:
    """The Bridge inside the checkout is there, and whether it is the one under test."""
    place = checkout / nemo_checkout.VENDORED
    if not (place / nemo_checkout.BRIDGE).is_dir():
        return _bridge(False, f"{place}: no {nemo_checkout.BRIDGE}: the submodule is empty", nemo_checkout.submodules_command(checkout))
    tested = next((repo for repo in context.changes if "megatron.bridge" in repo.packages), None)
    if tested is None:
        return _bridge(True, f"{place}: no Bridge is under test, this one is used")
    apart = list(_differing(Path(tested.path) / nemo_checkout.BRIDGE, place / nemo_checkout.BRIDGE))
    if not apart:
        return _bridge(True, f"{place} is the same as the Bridge under test")
    how = "is replaced by a copy of it while the trial runs" if tested.synced else "stands behind it on PYTHONPATH"
    return _bridge(True, f"{place} differs from the Bridge under test in {len(apart)} files ({', '.join(apart[:3])}): it {how}")


def source_findings(context: Context, checkout: Path) -> Iterator[Finding]:
    """What the driver would refuse: a vendored tree that cannot be replaced for a while, and helpers that cannot be built."""
    try:
        marker = vendored_bridge.git_directory(checkout) / vendored_bridge.MARKER if (checkout / ".git").exists() else None
        if marker is not None and marker.is_file():
            message = f"{checkout / nemo_checkout.VENDORED} still holds the Bridge of a run that was killed"
            yield _bridge(False, message, shlex.join([sys.executable, "-m", "seatrial.instruments.nemo_rl.vendored_bridge", str(checkout)]))
        elif any(repo.synced for repo in context.changes) and os.environ.get("SEATRIAL_RAY_NODES", "1") != "1":
            message = "bridge = sync copies the Bridge on one node, and Ray runs over several: others may hold another tree at that path"
            yield _bridge(False, message, "--set options.bridge=path")
        elif any(repo.synced for repo in context.changes):
            vendored_bridge.require_clean(checkout / nemo_checkout.VENDORED)
    except Failed as error:
        yield _bridge(False, str(error), "see the message, or --set options.bridge=path")
    for core in nemo_checkout.bundled_core(context)[:1] if context.options.get("helpers") == "local" else ():
        if not (core / vendored_bridge.DATASETS / "Makefile").is_file():
            message = f"{core / vendored_bridge.DATASETS}: no Makefile, so helpers = local has nothing to build"
            yield Finding(name="Megatron-LM", ok=False, message=message, fix=nemo_checkout.submodules_command(core.parents[1]))


def submodule_core(context: Context, checkout: Path) -> Iterator[Finding]:
    """Some Megatron-LM must be there: the Bridge's own, or one under test."""
    bridges = [checkout / nemo_checkout.VENDORED, *(Path(repo.path) for repo in context.changes if "megatron.bridge" in repo.packages)]
    tested = any("megatron.core" in repo.packages for repo in context.changes)
    if not tested and not any((place / nemo_checkout.CORE / "megatron" / "core").is_dir() for place in bridges):
        message = f"no Megatron-LM below {' or '.join(str(place / nemo_checkout.CORE) for place in bridges)}: the submodule is empty"
        yield Finding(name="Megatron-LM", ok=False, message=message, fix=nemo_checkout.submodules_command(checkout))


def _differing(left: Path, right: Path) -> Iterator[str]:
    """Python files of either tree that the other lacks, or that differ."""
    names = {path.relative_to(root).as_posix() for root in (left, right) for path in root.rglob("*.py")}
    for name in sorted(names):
        one, two = left / name, right / name
        if not (one.is_file() and two.is_file() and filecmp.cmp(one, two, shallow=False)):
            yield name


def variable_findings(context: Context, checkout: Path) -> Iterator[Finding]:
    """Variables that evidence must not rest on, and one that Megatron cannot do without."""
    if os.environ.get(GUARD) or any(GUARD in word for word in context.arguments):
        message = f"{GUARD} is set: it switches off NeMo-RL's check of the accuracy with TP >= 4, and evidence must not rest on that"
        yield Finding(name="variables", ok=False, boundary=Boundary.CONFIG, message=message, fix=f"unset {GUARD}")
    policy = checkout / POLICY
    if ARCHITECTURES not in os.environ and policy.is_file() and ARCHITECTURES in read_text(policy):
        message = f"{ARCHITECTURES} is not set: this NeMo-RL refuses to train with Megatron without it"
        yield Finding(name="variables", ok=False, message=message, fix=f"export {ARCHITECTURES}='9.0 10.0' (those of your GPUs)")


def worker_environments(checkout: Path) -> Iterator[Finding]:
    """A worker's environment is used as it is once it exists, even if the lock has changed since."""
    place = Path(os.environ.get("NEMO_RL_VENV_DIR") or checkout / "venvs")
    lock = checkout / "uv.lock"
    made = [path.parents[1] for path in place.glob("*/bin/python")]
    if os.environ.get(REBUILD, "").lower() == "true":
        yield _workers(f"{REBUILD} is set: the environments of Ray workers below {place} are made anew, which takes long")
        return
    old = [path.name for path in made if lock.is_file() and (path / "bin" / "python").lstat().st_mtime < lock.stat().st_mtime]
    if old:
        names = ", ".join(sorted(old)[:3])
        yield _workers(
            f"{len(old)} environments of Ray workers below {place} are older than uv.lock ({names}): {REBUILD}=true makes them anew"
        )


MODEL = "policy.model_name"
TOKENIZER = "policy.tokenizer.name"
OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
_YES = ("1", "true", "yes", "on")


def named_model_findings(trainings: Sequence[Training], context: Context) -> tuple[Finding, ...]:
    named = dict.fromkeys(item for training in trainings for item in _named(training))
    return tuple(found for model, tokenizer in named for found in _model(model, tokenizer, context))


def given_model_findings(context: Context) -> tuple[Finding, ...]:
    """The same of the trial's own model, where no script could be asked for what it trains."""
    return _model(context.model, True, context)


def expert_findings(context: Context) -> Iterator[Finding]:
    """Expert parallelism is about a model with experts: on a dense one it would show nothing."""
    wanted = context.options.get("architecture") == "moe" and "architecture" in context.levels
    wanted = wanted or ("parallelism" in context.levels and int(context.options.get("ep", 1)) > 1)
    if not wanted or "recipe" in context.options:
        return
    place = Path(context.model) if Path(context.model).is_dir() else host.hub_snapshot(context.model)
    file = place / "config.json"
    if not file.is_file() and context.model != DEFAULT_MODEL:
        yield _data(True, f"{context.model}: whether it has experts is not known before it is downloaded")
    elif not file.is_file() or not host.config_is_kind(read_table(file), "moe"):
        fix = "--model with a model that has experts, or --set options.recipe=…"
        yield _data(
            False, f"{context.model} has no experts ({', '.join(host.KINDS['moe'])}), so expert parallelism would show nothing", fix
        )


def _named(training: Training) -> Iterator[tuple[str, bool]]:
    """Models by the last override of each key, and whether the tokenizer comes from there."""
    last = {override_key(word): word.partition("=")[2].strip("'\"") for word in training.overrides}
    for key, value in last.items():
        if key.endswith(".model_name") and value not in ("", "null"):
            yield value, key == MODEL and last.get(TOKENIZER, value) == value


def _model(model: str, tokenizer: bool, context: Context) -> tuple[Finding, ...]:
    if model.startswith(("/", ".", "~")):
        return _directory(Path(model).expanduser(), tokenizer, context)
    cached = host.hub_snapshot(model)
    if (cached / "config.json").is_file():
        message = f"{model}: cached; to use no network: HF_HUB_OFFLINE=1, -- {MODEL}={cached} {TOKENIZER}={cached}"
        return (_data(True, message),)
    if any(os.environ.get(name, "").lower() in _YES for name in OFFLINE):
        fix = f"hf download {model} where there is a network, with the same HF_HOME"
        return (_data(False, f"{model}: offline, and no snapshot of it below {host.hub_cache()}", fix),)
    return (_data(True, f"{model}: no snapshot below {host.hub_cache()}: NeMo-RL will download it"),)


def _directory(directory: Path, tokenizer: bool, context: Context) -> tuple[Finding, ...]:
    # Weights that were converted before need not be there any more; what is there must be whole.
    weights = any(directory.glob("*.safetensors")) or any(directory.glob("*.index.json"))
    named = context.options.get("nemo_rl")
    build = nemo_checkout.sync_command(Path(named)) if named else nemo_checkout.CLONE
    return host.model_findings(directory, context, host.ModelUse(build=build, weights=weights, tokenizer=tokenizer))


COMPOSE_SECONDS = 300
COMPOSER = Path(__file__).parents[2] / "instruments" / "compose_config.py"
BATCHES = ("policy.train_micro_batch_size", "policy.logprob_batch_size")
MEGATRON = "policy.megatron_cfg"
TP, PP, CP = (f"{MEGATRON}.{name}_parallel_size" for name in ("tensor_model", "pipeline_model", "context"))
APART = "policy.generation.colocated"
CLUSTER = ("cluster.gpus_per_node", "cluster.num_nodes", f"{APART}.enabled", f"{APART}.resources.gpus_per_node")
UNCLEAN = "script and configuration are of different versions: use a clean checkout"
OTHER_VERSION = "this level was written for another version of NeMo-RL: use a revision that has the key, or leave the level out"
GUARDED_TP = 4
"""From this size on NeMo-RL refuses to train and to compute log-probabilities with different batch sizes."""


@dataclass(frozen=True, slots=True)
class ComposeRequest:
    """One training to compose: how it was recorded, and what is claimed of it."""

    title: str
    training: Training
    claims: Mapping[str, Any]
    gpus: int | None = None
    """GPUs that it may use; None is any number."""
    ours: tuple[str, ...] = ()
    """Overrides that the level itself adds to those of the script."""


def config_findings(
    wanted: Sequence[ComposeRequest], checkout: Path, start: Sequence[str], environment: Mapping[str, str], own: Sequence[str]
) -> list[Finding]:
    """Findings over all trainings; `own` are the user's overrides, which are named as such."""
    with tempfile.TemporaryDirectory(prefix="seatrial-compose-") as folder:
        runs = [_request(item, checkout, Path(folder, f"{number}.yaml")) for number, item in enumerate(wanted)]
        unknown = [
            configured_wrong(False, f"{w.title}: {w.training.program} names no configuration of its own")
            for w, run in zip(wanted, runs, strict=True)
            if run is None
        ]
        if unknown:
            return unknown
        try:
            answers = host.ask(start, COMPOSER, checkout, environment, COMPOSE_SECONDS, {"checkout": str(checkout), "runs": runs})
        except NoAnswerError as error:
            message = f"the configuration could not be composed in {error}"
            return [finding("configuration", False, message, "make uv's environment of the checkout: uv sync")]
    source = nemo_checkout.read_source(checkout)
    made = [finding for item, answer in zip(wanted, answers, strict=True) for finding in _judge(item, answer, own, source)]
    claimed = sum(len(item.claims) for item in wanted)
    return _once(made) or [configured_wrong(True, f"{len(wanted)} runs composed, {claimed} values as claimed, every override is read")]


def default_config(program: Path) -> Path | None:
    """The configuration that a program takes when none is named: it joins its own folder, the rest of the path and the name."""
    try:
        tree = parse_python(read_text(program))
    except BadValue as error:
        raise UserError(
            f"{program}: not Python: {error.what}{f' ({error.where})' if error.where else ''}", "correct the program"
        ) from error
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "join":
            parts = [word.value for word in node.args[1:] if isinstance(word, ast.Constant) and isinstance(word.value, str)]
            if parts and parts[-1].endswith(".yaml") and len(parts) == len(node.args) - 1:
                return program.parent.joinpath(*parts)
    return None


def _request(item: ComposeRequest, checkout: Path, written: Path) -> dict[str, Any] | None:
    """What the driver is asked for; None when the configuration is not known."""
    training = item.training
    config = checkout / training.config if training.config else default_config(checkout / training.program)
    if training.text is not None:
        written.write_text(training.text, encoding="utf-8")
        config = written
    if config is None:
        return None
    return {
        "config": str(config),
        "overrides": list(training.overrides),
        "keys": [*item.claims, f"{MEGATRON}.enabled", TP, PP, CP, *CLUSTER, *BATCHES],
    }


def _judge(item: ComposeRequest, answer: Mapping[str, Any], own: Sequence[str], source: nemo_checkout.ConfigSource) -> Iterator[Finding]:
    if answer["error"]:
        yield configured_wrong(
            False, f"{item.title}: NeMo-RL's own configuration does not compose: {answer['error']}", "use a clean checkout"
        )
        return
    yield from rejected(item.title, answer, own, "NeMo-RL", lambda override: OTHER_VERSION if override in item.ours else UNCLEAN)
    for override, added in answer["added"].items():
        why = source.unread(override_key(override), added)
        if why and override_key(override) not in answer["referred"]:
            fix = "leave it out, or use the key that this checkout reads" if override in own else "use the keys of this checkout"
            yield configured_wrong(False, f"{item.title}: {override} is accepted, but {why}: a run with it would be vacuous", fix)
    yield from unlike_claims(item.title, item.claims, answer, own, "NeMo-RL's own script")
    asked = _all_gpus(answer["values"])
    if item.gpus is not None and asked is not None and asked > item.gpus:
        yield configured_wrong(False, f"{item.title} asks for {asked} GPUs, and {item.gpus} are to be used", f"--set options.gpus={asked}")
    if answer["values"].get(f"{MEGATRON}.enabled") is True:
        yield from _composed_sizes(item.title, answer["values"])


def _composed_sizes(title: str, values: Mapping[str, Any]) -> Iterator[Finding]:
    """NeMo-RL refuses sizes that do not divide its GPUs, and TP >= 4 with different batch sizes."""
    tp, pp, cp = (values[key] if isinstance(values.get(key), int) else 1 for key in (TP, PP, CP))
    train, logprob = (values.get(key, ABSENT) for key in BATCHES)
    wrong = Sizes(tp, pp, cp).problem(world) if (world := _trainers(values)) else None
    if wrong:
        yield configured_wrong(False, f"{title}: {wrong}", f"choose {TP}, {PP} and {CP} so that their product divides the GPUs that train")
    if tp >= GUARDED_TP and logprob not in (ABSENT, train):
        message = f"{title}: TP {tp} with train_micro_batch_size {train} and logprob_batch_size {logprob}: NeMo-RL refuses it"
        yield configured_wrong(False, message, f"use TP 1 or 2; or set {BATCHES[0]} and {BATCHES[1]} to the same number")


def _all_gpus(values: Mapping[str, Any]) -> int | None:
    gpus, nodes = (values.get(key) for key in CLUSTER[:2])
    return gpus * nodes if isinstance(gpus, int) and isinstance(nodes, int) else None


def _trainers(values: Mapping[str, Any]) -> int | None:
    """GPUs that train; None where generation has nodes of its own."""
    gpus, (nodes, together, generating) = _all_gpus(values), (values.get(key) for key in CLUSTER[1:])
    if gpus is None or together is not False:
        return gpus
    return gpus - generating if nodes == 1 and isinstance(generating, int) and generating < gpus else None


def _once(findings: Sequence[Finding]) -> list[Finding]:
    """A script that trains several times says the same of each."""
    return list(dict.fromkeys(findings))


MACHINE = (
    *(FindingCode.GPUS, FindingCode.PYTHON, FindingCode.LAUNCHER, FindingCode.VENDORED_BRIDGE, FindingCode.MEGATRON_LM),
    *(FindingCode.VARIABLES, FindingCode.DISK_OF_THE_MODEL_CACHE),
)
"""Findings about this machine: the configuration can be composed all the same."""
Calls = Mapping[str, Sequence[ScriptCall]]


def nemo_findings(context: Context) -> tuple[Finding, ...]:
    """What must be right before a GPU is touched; the configuration is composed only when the rest is."""
    place = nemo_checkout.checkout_of(context)
    found = nemo_checkout.layout(place)
    of_the_machine = (
        lambda: expert_findings(context),
        lambda: host.gpus_here(gpus(context), "run it on a cluster with --on"),
        host.cache_room,
    )
    if not found.ok or place is None:
        return gather(lambda: found, uv_finding, lambda: given_model_findings(context), *of_the_machine)
    runs = {name: variants(name, context) for name in context.levels}
    made = [
        *gather(
            lambda: found,
            uv_finding,
            lambda: python_finding(context, place),
            lambda: vendored_finding(context, place),
            lambda: submodule_core(context, place),
            lambda: variable_findings(context, place),
            lambda: worker_environments(place),
            lambda: source_findings(context, place),
            *of_the_machine,
            lambda: _sizes(runs),
            lambda: _transports(runs, context),
            lambda: _words(context, place),
            lambda: _scripts(runs, place),
        )
    ]
    if all(finding.ok or finding.code in MACHINE for finding in made):
        made += gather(lambda: configuration(runs, context, place))
    else:
        first = ", ".join(dict.fromkeys(finding.name for finding in made if not finding.ok and finding.code not in MACHINE))
        made += gather(lambda: given_model_findings(context))
        made.append(configured_wrong(True, f"not composed, because this must be right before: {first}"))
    return tuple(dict.fromkeys(made))


def _sizes(runs: Calls) -> list[Finding]:
    wrong = [f"{level} ({call.name}): {why}" for level, each in runs.items() for call in each if (why := call.sizes.problem(call.trainers))]
    fix = "choose --set options.tp=, pp=, cp=, ep=, etp= so that their products divide the GPUs"
    return [configured_wrong(False, text, fix, "sizes") for text in wrong]


def _transports(runs: Calls, context: Context) -> list[Finding]:
    here = available(offered(context))
    lacking = [call.name for call in runs.get("refit", ()) if call.name not in here]
    if not lacking:
        return []
    message = f"refit: this NeMo-RL has no transport {', '.join(lacking)}; it has {', '.join(here)}"
    return [configured_wrong(False, message, f"--set options.transports={','.join(here)}", "transports")]


def _words(context: Context, place: Path) -> list[Finding]:
    """Arguments must be overrides, or `--config PATH`; and the scripts pass them on unquoted: white space would split one."""
    words = list(context.arguments)
    while "--config" in words[:-1]:
        at = words.index("--config")
        del words[at : at + 2]
    places = [*context.arguments, str(context.run_dir), str(place), nemo_checkout.python_path(context)]
    return word_findings(words, places, "script", f"{OVERRIDE_FORM}, or --config PATH")


def _scripts(runs: Calls, place: Path) -> list[Finding]:
    made = []
    for script in dict.fromkeys(call.script for each in runs.values() for call in each):
        if not (place / script).is_file():
            here = [str(path.relative_to(place)) for path in (place / script).parent.glob("*.sh")]
            similar = difflib.get_close_matches(script, here, n=3)
            near = f"; similar scripts there: {', '.join(similar)}" if similar else ""
            fix = "check out a revision that has it, or leave the level out"
            made.append(configured_wrong(False, f"{place}: {script} is missing{near}", fix, "scripts"))
    return made


def configuration(runs: Calls, context: Context, place: Path) -> list[Finding]:
    """Run the scripts with stand-ins, look for their models, and compose what they would run."""
    environment = {**os.environ, "PYTHONPATH": nemo_checkout.python_path(context)}
    wanted: list[ComposeRequest] = []
    made: list[Finding] = []
    for level, call in ((level, call) for level, each in runs.items() for call in each):
        phase = nemo_runs.training(call, context, context.run_dir / "levels" / level)
        words = phase.argv[phase.argv.index("--") + 1 :]
        title = f"{level} ({call.name})"
        try:
            found = record_script(place / call.script, place, words, {**environment, **phase.env})
        except ScriptError as error:
            made.append(
                configured_wrong(False, f"{title}: {error}", "use a clean checkout, and set the variables that the script asks for")
            )
            continue
        made += _unread(title, call, place, found) if call.assertions else []
        wanted += [ComposeRequest(title, training, call.claims, gpus(context), call.overrides) for training in found.trainings]
    made += named_model_findings([item.training for item in wanted], context)
    if wanted and not context.has_python:
        made.append(configured_wrong(True, "not composed: there is no interpreter for it yet (see environment)"))
    elif wanted:
        made += config_findings(wanted, place, [str(context.python)], environment, context.arguments)
    return made


def _unread(title: str, call: ScriptCall, place: Path, found: RecordedScript) -> list[Finding]:
    """What the script really hands to the checker was also read from it: else the level would judge by less than the script."""
    lost = script_reader.unread(place / call.script, found.assertions)
    if not lost:
        return []
    message = f"{title}: {call.script} asserts {lost[0]}, which Seatrial does not read from it"
    more = f" ({len(lost)} of {len(found.assertions)} assertions)" if len(found.assertions) > 1 else ""
    return [configured_wrong(False, message + more, "use NeMo-RL's own script unchanged, or leave the level out", "assertions")]
