"""Rounds of jobs of a campaign: checks before one, how shards are dealt to tasks, the batch that is launched, and what a task runs.

- Each launch is a batch of its own, which collects what is pending at that moment. The first round on a cluster has a task per shard;
  later ones pack shards into tasks of about equal size. On this machine all shards are dealt to as many tasks as run at a time.
- `collect_task` collects the shards of one task from the backend that the campaign names. Exit code 0: nothing of them is pending.
  99: something is; the message says why.
- What can be known before a round is checked before it: API keys, the sandbox, packages, functions that score, and Gym. Nothing is asked of
  servers, and nothing of the user's is run: a function is looked for in the text of its file.
"""

from __future__ import annotations

import ast
import asyncio
import difflib
import importlib.util
import os
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from urllib.parse import urlsplit

from seatrial.core.errors import BlockedError, UserError
from seatrial.core.files import read_model, write_json
from seatrial.core.guarded import BadValue, parse_python, read_file
from seatrial.core.jobs import PLACEHOLDER, After, Batch, Component, Job, Ready
from seatrial.core.records import Record, replace
from seatrial.core.verdict import Boundary
from seatrial.evidence.redact import Redactor
from seatrial.rollouts.backends.openai_format import PARAMETERS, sort_sampling
from seatrial.rollouts.campaign import NUMBERS, Campaign, Gym, api_key_of
from seatrial.rollouts.campaign_dir import CampaignDir
from seatrial.rollouts.collect_engine import CollectEnd, Collector
from seatrial.rollouts.manifest import Units, check_functions, file_of, load_campaign, load_manifest
from seatrial.rollouts.rollout_record import Backend, Verifier
from seatrial.rollouts.verifiers.judge_verifier import check_template
from seatrial.runtime.environments import Environments, mounts_of
from seatrial.runtime.interrupt import stop_requested
from seatrial.runtime.local_jobs import gpus_here
from seatrial.runtime.servers import components

LOCAL = "local"
COLLECT, MERGE = "collect", "merge"
SANDBOX = "sandbox"
_PLAN = "plan.json"


class Round(Record):
    """rounds/<number>/plan.json."""

    number: int
    made: int
    on: str
    """`local`, or `slurm:PROFILE`."""
    owed: int
    tasks: tuple[tuple[int, ...], ...]


def list_rounds(place: CampaignDir) -> tuple[Round, ...]:
    found = [file for file in place.rounds.glob(f"*/{_PLAN}") if file.parent.name.isdecimal()]
    plans = sorted(found, key=lambda file: int(file.parent.name))
    return tuple(read_model(file, Round) for file in plans)


def round_dir(place: CampaignDir, number: int) -> Path:
    return place.rounds / f"{number:04d}"


def plan_round(
    place: CampaignDir, owed: Mapping[int, int], largest: int, on: str, parallel: int | None = None, most: int | None = None
) -> Round:
    """The next round for shards that owe so many units; `largest` is the size of a full shard, `parallel` as in `[work]`.

    `most` is how many tasks the cluster takes in one array: where shards are more, they are dealt to so many tasks.
    """
    past, most = list_rounds(place), (parallel or 1) if on == LOCAL else most
    tasks = _packed(owed, largest) if past and on != LOCAL else [(shard,) for shard in sorted(owed)]
    if most and len(tasks) > most:
        tasks = [tuple(chain.from_iterable(tasks[first::most])) for first in range(most)]
    number = past[-1].number + 1 if past else 1
    return Round(number=number, made=int(time.time()), on=on, owed=sum(owed.values()), tasks=tuple(tasks))


def save_round(place: CampaignDir, planned: Round) -> None:
    write_json(round_dir(place, planned.number) / _PLAN, planned)


def load_round(place: CampaignDir, number: int) -> Round:
    return read_model(round_dir(place, number) / _PLAN, Round)


def _packed(owed: Mapping[int, int], largest: int) -> list[tuple[int, ...]]:
    """Shards in order, together while they owe no more than one full shard does."""
    tasks: list[list[int]] = []
    filled = 0
    for shard, count in sorted(owed.items()):
        if not tasks or filled + count > largest:
            tasks.append([])
            filled = 0
        tasks[-1].append(shard)
        filled += count
    return [tuple(task) for task in tasks]


def check_root(root: Path) -> None:
    """A UserError for a campaign directory whose name cannot stand in a job."""
    if PLACEHOLDER.search(str(root)):
        raise UserError(f"{root}: words in braces have a meaning in a job", "choose another directory with --out")


def batch_of(place: CampaignDir, campaign: Campaign, planned: Round, gpus_per_node: int, *, merge: bool) -> Batch:
    """The jobs of a round: the collecting tasks with their servers, and, when asked for, a merge after them."""
    root = place.root.absolute()
    check_root(root)
    services: list[Component] = []
    client = ["collect", str(root), "--round", str(planned.number), "--task", "{index}"]
    if campaign.policy.server:
        server = replace(campaign.policy.server, name="policy")
        services += components(server, gpus_per_node)
        client += ["--urls", "{url:policy}" if server.route else "{urls:policy}"]
    if campaign.sandbox_service:
        command = _seatrial("sandbox", "--host", "{bind}", "--port", "{port}", "--campaign", str(root))
        services.append(Component(name=SANDBOX, command=command, port=True, ready=Ready(path="/health", deadline_s=120)))
        client += ["--sandbox", "{url:sandbox}"]
    jobs = [
        Job(
            name=COLLECT,
            components=(*services, _client(place, campaign, client)),
            array=len(planned.tasks),
            parallel=campaign.work.parallel,
            minutes=campaign.collector.minutes if planned.on != LOCAL else None,  # of a shard's job, and here is none
        )
    ]
    if merge:
        words = ("finish", str(root))
        jobs.append(Job(name=MERGE, components=(_client(place, campaign, words),), after=(After(job=COLLECT, when="any"),)))
    return Batch(jobs=tuple(jobs))


def _seatrial(*words: str) -> tuple[str, ...]:
    return (sys.executable, "-P", "-m", "seatrial.cli.main", "rollouts", *words)


def _client(place: CampaignDir, campaign: Campaign, words: Sequence[str]) -> Component:
    about = campaign.collector
    boxed = about.container or about.image
    wanted = [verify.function.rpartition(":")[0] for verify in campaign.verifiers.values() if verify.function]
    if campaign.gym:
        wanted += [text for text in (campaign.gym.directory, campaign.gym.python) if text]
    return Component(
        name="client",
        role="client",
        command=_seatrial(*words),
        cpus=about.cpus,
        memory_mb=about.memory_mb,
        container=about.container,
        image=about.image,
        mounts=(*(mounts_of(place.root.absolute(), [*map(Path, wanted)]) if boxed else ()), *about.mounts),
        environment=campaign.environment,
    )


def collect_task(
    place: CampaignDir, number: int, task: int, urls: Sequence[str], sandbox: str | None, progress: Callable[[str], None]
) -> CollectEnd:
    """Collect what the shards of a task owe; `urls` are the policy's servers in this job, `sandbox` the service beside it."""
    planned = load_round(place, number)
    if not 0 <= task < len(planned.tasks):
        raise UserError(f"round {number} has {len(planned.tasks)} tasks, and no task {task}", "seatrial rollouts resume plans anew")
    campaign = load_campaign(place)
    check_functions(load_manifest(place), campaign, Path.cwd())
    logs = round_dir(place, number) / "gym" / str(task)
    shards = planned.tasks[task]
    policy = campaign.policy
    bases = [*urls] or [str(url) for url in ((policy.url,) if policy.url else policy.urls)]
    backend = make_backend(campaign, place, shards, bases, sandbox, logs, progress)
    return run_collector(place, campaign, shards, backend, progress)


def run_collector(
    place: CampaignDir,
    campaign: Campaign,
    shards: Sequence[int],
    backend: Backend,
    progress: Callable[[str], None],
    only: Callable[[int], bool] | None = None,
) -> CollectEnd:
    """Collect these shards, until done or asked to stop (see `Interruptible`)."""

    def stop_reason() -> str | None:
        return "asked to stop" if stop_requested() else None

    async def main() -> CollectEnd:
        with Units(place, load_manifest(place)) as units:
            return await Collector(place, campaign, units, shards, backend, stop=stop_reason, progress=progress, only=only).run()

    return asyncio.run(main())


def make_backend(
    campaign: Campaign,
    place: CampaignDir,
    shards: Sequence[int],
    urls: Sequence[str],
    sandbox: str | None,
    logs: Path,
    progress: Callable[[str], None],
) -> Backend:
    """Who makes the rollouts of these shards; `logs` is for servers that it starts."""
    bases = [base_url(url) for url in urls]
    key = api_key_of(campaign.policy.key_env)
    if campaign.gym:
        from seatrial.rollouts.backends.gym_backend import GymBackend, GymCollector

        agents = agents_of(place, shards)
        kind = GymBackend if campaign.gym.driver == "agents" else GymCollector
        parts = urlsplit(sandbox) if sandbox is not None else None
        service = (parts.hostname or "127.0.0.1", parts.port or 80) if parts else None
        return kind(campaign, bases, key, logs, agents=agents, sandbox=service, place=place, progress=progress)
    from seatrial.rollouts.backends.direct_backend import DirectBackend

    return DirectBackend(campaign, bases, make_verifiers(campaign, bases), key, place=place, progress=progress)


def agents_of(place: CampaignDir, shards: Sequence[int]) -> set[str]:
    with Units(place, load_manifest(place)) as units:
        rows = {units.row_of(number) for shard in shards for number in units.of_shard(shard)}
        return {agent for index in sorted(rows) if (agent := units.row(index).agent)}


def base_url(url: str) -> str:
    """Base of the OpenAI interface: a server in the job is known by host and port alone."""
    bare = url.rstrip("/")
    return bare if bare.endswith("/v1") or bare.count("/") > 2 else f"{bare}/v1"


def make_verifiers(campaign: Campaign, urls: Sequence[str]) -> Mapping[str, Verifier]:
    """The verifier of each dataset; datasets that say the same share one. A judge without a URL is the policy itself."""
    from seatrial.rollouts.verifiers import make_verifier

    datasets = {dataset.name: dataset for dataset in campaign.datasets}
    made: dict[str, Verifier] = {}
    verifiers: dict[str, Verifier] = {}
    for dataset in campaign.datasets:
        verify = campaign.verifier_of(dataset)
        if verify.kind == "judge" and verify.url is None and urls:
            policy = campaign.policy
            verify = replace(verify, url=urls[0], model=verify.model or policy.model, key_env=policy.key_env)
        key = verify.model_dump_json()
        if key not in made:
            made[key] = make_verifier(verify, campaign.sandbox, Path.cwd(), None, datasets)
        verifiers[dataset.name] = made[key]
    return verifiers


def check_campaign(campaign: Campaign, *, here: bool) -> None:
    """Raises a UserError or a BlockedError for what would stop every shard.

    `here`: the collectors run on this machine. Whether another one, or a container, has a sandbox is seen there.
    """
    sort_sampling(campaign.sampling)  # names what cannot stand there
    server = campaign.policy.server
    if here and server and server.kind in ("vllm", "sglang") and not gpus_here():
        raise UserError(
            f"policy.server: {server.kind} needs GPUs, and this machine has none",
            'start it on a cluster (--on slurm:PROFILE), name a pre-hosted one (policy.url), or serve by kind = "command"',
        )
    verifiers = [] if campaign.gym else [campaign.verifier_of(dataset) for dataset in campaign.datasets]
    for variable in (campaign.policy.key_env, *(verify.key_env for verify in verifiers)):
        api_key_of(variable)
    for verify in verifiers:
        if verify.kind == "judge" and verify.prompt is not None:
            check_template(verify.prompt)
    kinds = {verify.kind for verify in verifiers}
    boxed = campaign.collector.container or campaign.collector.image
    if "math" in kinds and not boxed and importlib.util.find_spec("math_verify") is None:
        raise UserError("the verifier math needs math-verify, which is not installed", 'pip install "seatrial[rollouts]"')
    for spec in dict.fromkeys(verify.function for verify in verifiers if verify.function):
        _check_function(spec, boxed=bool(boxed))
    if here and ("code" in kinds or campaign.sandbox_service):
        from seatrial.rollouts.sandbox import why_not

        if (reason := why_not()) is not None:
            fix = "install bubblewrap (apt-get install bubblewrap) where user namespaces are allowed, or leave out code rewards"
            raise BlockedError(Boundary.ENVIRONMENT, f"no sandbox here: {reason}", fix)
    if campaign.gym and not boxed:
        _check_gym(campaign.gym, here=here)


def campaign_warnings(campaign: Campaign) -> list[str]:
    """What may be meant, and is probably a slip: a parameter that nobody may know, close to one that many do."""
    found = []
    for key in campaign.sampling:
        close = difflib.get_close_matches(key, PARAMETERS | NUMBERS, n=1, cutoff=0.8)
        if close and close[0] != key:
            found.append(f"sampling.{key} is passed on as it is; did you mean {close[0]}?")
    return found


def _check_function(spec: str, *, boxed: bool) -> None:
    """See that a function that scores is there; whether it works is seen when it is called."""
    module, _, name = spec.rpartition(":")
    if not module or not name.isidentifier():
        raise UserError(f"verifiers: function = {spec!r} names no function", "write module:name, or path/file.py:name")
    file = file_of(spec, Path.cwd())
    if file is None:
        # A container may have it, and so may an import hook, such as that of an editable install.
        if not boxed and importlib.util.find_spec(module.partition(".")[0]) is None:
            raise UserError(f"verifiers: function: there is no module {module}", f"install it, or write path/file.py:{name}")
        return
    try:
        tree = parse_python(read_file(file)) if file.suffix == ".py" else None
    except OSError as error:
        raise UserError(f"verifiers: function: {file}: cannot read: {error.strerror}", "correct the path") from error
    except BadValue as error:
        raise UserError(
            f"verifiers: function: {file}: not Python: {error.what}{f' ({error.where})' if error.where else ''}", "correct the file"
        ) from error
    if tree is not None and not _may_define(tree, name):
        functions = [node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
        raise UserError(f"verifiers: function: {file} has no {name}", f"it has: {', '.join(functions) or 'no function'}")


def _may_define(tree: ast.Module, name: str) -> bool:
    """Whether a module could have this name: only what is certain is refused."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and node.name in (name, "__getattr__"):
            return True
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id == name:
            return True
        if isinstance(node, ast.alias) and (node.asname or node.name) in (name, "*"):
            return True
    return False


def _check_gym(gym: Gym, *, here: bool) -> None:
    """See that what the campaign says of Gym is so, where Gym is installed already."""
    from seatrial.rollouts.backends import gym_install
    from seatrial.rollouts.backends.gym_install import GYM_ENVIRONMENT, GYM_LOCK

    paths = [os.environ.get("PATH", os.defpath)]
    if gym.python or gym.environment != GYM_ENVIRONMENT or Environments().find(GYM_ENVIRONMENT, GYM_LOCK) is not None:
        found = gym_install.find_gym(gym)
        gym_install.check_gym(gym, found)
        paths = [str(found.python.parent), str(found.base / "bin"), *paths]
    if here and not gym.shared_environments and shutil.which("uv", path=os.pathsep.join(paths)) is None:
        fix = "pip install uv, or say gym.shared_environments = true where Gym's own environment has all that the servers need"
        raise BlockedError(Boundary.ENVIRONMENT, "Gym makes an environment for each of its servers with uv, which is not on PATH", fix)


def build_environments(campaign: Campaign, progress: Callable[[str], None]) -> None:
    """Build Gym's environment, where it is ours and is not there yet; what could not be checked before is checked then."""
    from seatrial.rollouts.backends.gym_install import GYM_LOCK

    gym = campaign.gym
    if gym and gym.python is None and gym.environment is not None and Environments().find(gym.environment, GYM_LOCK) is None:
        Environments().build(gym.environment, GYM_LOCK, progress, line_filter=Redactor(os.environ).lines().line)
        _check_gym(gym, here=False)
