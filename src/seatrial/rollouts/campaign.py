"""campaign.toml: what a campaign collects, from whom, how much at a time, and how it is judged.

- Unknown keys are refused; so are values that exclude each other, with the reason.
- No secret stands in it: an API key is named by the variable that holds it (`key_env`).
- `identity` is what must not change between start and resume. Where servers are, how many requests are open, how long to wait and
  how shards are launched may change.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from seatrial.launch.servers import Server
from seatrial.model.job import Mount, Name, Variables
from seatrial.model.record import Record
from seatrial.rollouts.values import (
    Arguments,
    Count,
    Label,
    Number,
    Repeats,
    Sampling,
    Seconds,
    Share,
    Url,
    Variable,
    Whole,
    parse_numbers,
    secret_message,
    tokens_in,
)

SeedRule = Literal["derived", "repeat", "none"]


class Dataset(Record):
    """One file of rows."""

    name: Label
    path: str
    """JSONL or Parquet; a relative path is relative to campaign.toml."""
    format: Literal["auto", "gym", "plain"] = "auto"
    """`gym`: rows with responses_create_params. `plain`: a column with the prompt, and one with the answer."""
    prompt: str = "prompt"
    """plain: the column that holds the prompt, a text or a list of messages."""
    answer: str | None = None
    """plain: the column that holds the expected answer; None takes `answer` or `expected_answer`, where there is one."""
    system: str | None = None
    """plain: a system message before each prompt."""
    agent: str | None = None
    """Gym: the agent of rows that name none."""
    tags: tuple[Label, ...] = ()
    tag_columns: tuple[str, ...] = ()
    """Columns whose values become tags, such as difficulty."""
    limit: Count | None = None
    """Only the first so many rows."""
    weight: Annotated[Number, Field(gt=0, le=1)] = 1.0
    """Only this share of the rows, chosen by their ids: the same ones every time."""
    repeats: Repeats | None = None
    """Instead of the campaign's."""
    verifier: str | None = None
    """Instead of the campaign's: a name of `[verifiers]`, or a kind."""


class Work(Record):
    """How the units come about, and how they are cut."""

    repeats: Repeats | None = None
    """Rollouts of each row; 1 when nothing is said."""
    seeds: str | None = None
    """Instead of repeats: the repetitions by number, such as 0-3,7."""
    seed: Whole = 0
    """The campaign's own seed: every unit's seed is derived from it, the row and the repetition."""
    seed_rule: SeedRule = "derived"
    """`repeat` sends the number of the repetition, as Gym and Skills do; `none` sends no seed."""
    shards: Count | None = None
    target_minutes: Seconds = 60.0
    """Without `shards`: how long a shard should take."""
    rollout_s: Seconds = 30.0
    """Without `shards`: how long a rollout is thought to take."""
    parallel: Count | None = None
    """At most so many shards at a time."""
    rounds: Count = 3
    """How often shards with something missing are launched again."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.repeats and self.seeds is not None:
            raise ValueError('repeats and seeds exclude each other: repeats = 4 is seeds = "0-3"')
        self.labels()
        return self

    def labels(self, repeats: int | None = None) -> tuple[int, ...]:
        """Numbers of the repetitions; a dataset's own `repeats` comes before the campaign's."""
        if repeats is not None:
            return tuple(range(repeats))
        return parse_numbers(self.seeds) if self.seeds is not None else tuple(range(self.repeats or 1))


class Policy(Record):
    """The model that is asked: at a URL, or served in the job."""

    model: str | None = None
    """The name that requests ask for; None takes the server's only one."""
    url: Url | None = None
    """Base URL, such as http://host:8000/v1. Excludes `server`."""
    urls: tuple[Url, ...] = ()
    """Several of the same kind; requests go to the one with the fewest open."""
    key_env: Variable | None = None
    """The variable that holds the API key."""
    api: Literal["chat", "responses"] = "chat"
    server: Server | None = None
    """Self-hosted, in the allocation of each shard: as in docs/slurm.md. Its name is always `policy`."""

    @model_validator(mode="after")
    def _one_place(self) -> Self:
        places = [name for name in ("url", "urls", "server") if getattr(self, name)]
        if len(places) != 1:
            said = f"{' and '.join(places)} were said" if places else "none of them was said"
            raise ValueError(f"say one of url (pre-hosted), urls (several of them) and server (self-hosted); {said}")
        if self.server and self.server.kind == "url":
            raise ValueError("a server of kind url runs elsewhere already: say policy.url instead")
        return self


class Requests(Record):
    """How the policy is asked."""

    concurrency: Count = 64
    """At most so many open requests of one shard; fewer while the server is overloaded."""
    timeout_s: Seconds = 1800.0
    """Of one rollout, all its turns."""
    connect_s: Seconds = 10.0
    tries: Count = 4
    """Of one unit within an attempt, for failures that can heal."""
    backoff_s: Annotated[Number, Field(ge=0, le=3600)] = 1.0
    """Before the second try; doubled each time, at most a minute, never less than the server asks for."""
    attempts: Count = 3
    """Attempts of a shard after which a unit that failed each time is given up."""
    dead_s: Seconds = 120.0
    """So long may nobody answer before the shard ends, to be launched again."""


class Failures(Record):
    """When a campaign stops by itself."""

    max_share: Share = 0.2
    """Of settled units, over all shards."""
    after: Count = 100
    """Settled units before the share means anything."""
    max_count: Annotated[Whole, Field(ge=0)] | None = None


class Gym(Record):
    """NeMo Gym: its servers are started in each shard, its agents are driven."""

    config_paths: tuple[str, ...] = ()
    """As Gym's own: resources servers, agents, model servers."""
    resources: tuple[str, ...] = ()
    """Instead of config_paths: resources servers by name."""
    model_type: str = "vllm_model"
    """With `resources`: Gym's model server."""
    agent: str | None = None
    """For rows and datasets that name none."""
    driver: Literal["agents", "collector"] = "agents"
    """`agents`: we post each row to its agent, so that each failure is a row. `collector`: Gym's own `gym eval run --no-serve`."""
    environment: str | None = "gym"
    """An environment that `seatrial env build` makes. Excludes `python`."""
    python: str | None = None
    """Interpreter of your own Gym environment or checkout."""
    directory: str | None = None
    """Where Gym's relative paths start: the root of your Gym checkout."""
    run_arguments: Arguments = ()
    """More arguments of `gym env start`."""
    collect_arguments: Arguments = ()
    """More arguments of `gym eval run`; needs driver = "collector"."""
    servers: Count | None = None
    """How many servers must be healthy; None takes what Gym's configuration starts."""
    deadline_s: Seconds = 1200.0
    """Until they are."""
    shared_environments: bool = False
    """Whether Gym's servers run in Gym's own environment instead of one each: no network, no uv; their packages must be there."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.python and "environment" in self.model_fields_set:
            raise ValueError("environment (built by Seatrial) and python (your own) exclude each other")
        if bool(self.config_paths) == bool(self.resources):
            raise ValueError("say either config_paths or resources")
        if self.collect_arguments and self.driver != "collector":
            raise ValueError('collect_arguments are those of Gym\'s own collector: say driver = "collector", or use [sampling]')
        return self


class SandboxLimits(Record):
    """What untrusted code may use."""

    memory_mb: Count = 1024
    cpu_s: Seconds = 10.0
    wall_s: Seconds = 20.0
    processes: Count = 64
    output_kb: Count = 256
    disk_mb: Count = 64
    at_once: Count | None = None
    """Programs at a time; None: the machine's CPUs."""


class Verify(Record):
    """One way to score an answer."""

    kind: Literal["exact", "choice", "math", "code", "judge", "function"]
    ignore_case: bool = True
    """exact."""
    pattern: str | None = None
    """exact, choice: a regular expression; its first group, or all it matches, is the answer. The last match counts."""
    tests: str = "tests"
    """code: the column with the tests (docs/rollouts.md)."""
    language: Literal["python"] = "python"
    url: Url | None = None
    """judge: base URL; None asks the policy."""
    model: str | None = None
    """judge."""
    key_env: Variable | None = None
    """judge."""
    prompt: str | None = None
    """judge: a template with {question}, {expected}, {answer}."""
    timeout_s: Seconds = 30.0
    """math, function, judge: of one answer."""
    function: str | None = None
    """function: `module:name` or `path/file.py:name`; called with (row, text), gives a number, or a dict with `reward`."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if (self.kind == "function") != (self.function is not None):
            raise ValueError("kind function and the key function go together")
        for key in ("url", "model", "key_env", "prompt"):
            if self.kind != "judge" and getattr(self, key) is not None:
                raise ValueError(f"{key} is of kind judge, not {self.kind}")
        if self.pattern is not None:
            try:
                re.compile(self.pattern)
            except re.error as error:
                raise ValueError(f"pattern: {error}") from error
        return self


class Collector(Record):
    """The process that collects a shard, where it runs as a job."""

    cpus: Count = 2
    memory_mb: Count | None = None
    minutes: Count | None = None
    """Time limit of a shard's job; None takes the profile's."""
    container: str | None = None
    """A name that the profile knows; None runs it outside of containers."""
    image: str | None = None
    mounts: tuple[Mount, ...] = ()


class Campaign(Record):
    """A campaign.toml."""

    name: Name
    datasets: tuple[Dataset, ...] = Field(min_length=1)
    work: Work = Field(default_factory=Work)
    policy: Policy
    sampling: Sampling = Field(default_factory=dict)
    """Parameters of every request: temperature, top_p, max_output_tokens, …; they win over a row's own, as Gym's do."""
    requests: Requests = Field(default_factory=Requests)
    failures: Failures = Field(default_factory=Failures)
    gym: Gym | None = None
    """With it rollouts come from NeMo Gym; without it we ask the policy and verify ourselves."""
    verifier: str | None = None
    """A name of `[verifiers]`, or a kind that needs no more said."""
    verifiers: Mapping[str, Verify] = Field(default_factory=dict)
    sandbox: SandboxLimits = Field(default_factory=SandboxLimits)
    sandbox_service: bool = False
    """Whether each shard runs the sandbox as a service for Gym's resources servers (NEMO_SKILLS_SANDBOX_HOST and _PORT)."""
    skills_layout: bool = False
    """Whether merge also writes rollouts-rs<seed>.jsonl with .done files, as NeMo-Skills users know them."""
    collector: Collector = Field(default_factory=Collector)
    environment: Variables = Field(default_factory=dict)
    """Variables of the collector."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if (key := tokens_in(self.model_dump(mode="json"))) is not None:
            raise ValueError(secret_message(key))
        names = [dataset.name for dataset in self.datasets]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"two datasets are called {twice[0]}")
        if self.gym and (self.verifier or self.verifiers or any(dataset.verifier for dataset in self.datasets)):
            raise ValueError("Gym's resources servers verify: [gym] excludes verifier and [verifiers]")
        if self.sandbox_service and not self.gym:
            raise ValueError("sandbox_service is for Gym's resources servers: the code verifier needs none")
        if not self.gym:
            for dataset in self.datasets:
                self.verifier_of(dataset)
        return self

    def verifier_of(self, dataset: Dataset) -> Verify:
        """How a dataset is scored; a ValueError names what is not known."""
        name = dataset.verifier or self.verifier
        if name is None:
            raise ValueError(
                f"dataset {dataset.name}: who scores it? say verifier = exact, choice, math, code, judge, or one of [verifiers]"
            )
        if name in self.verifiers:
            return self.verifiers[name]
        if name in ("exact", "choice", "math", "code", "judge"):
            return Verify.model_validate({"kind": name})
        if name == "function":
            raise ValueError(f'dataset {dataset.name}: a function needs a table: [verifiers.mine] with kind and function = "file.py:name"')
        known = ", ".join((*self.verifiers, "exact", "choice", "math", "code", "judge"))
        raise ValueError(f"dataset {dataset.name}: unknown verifier {name!r}; known: {known}")

    def identity(self) -> dict[str, Any]:
        """What a result depends on: resume refuses when it has changed."""
        kept = self.model_dump(
            mode="json",
            exclude={
                "requests": True,
                "failures": True,
                "skills_layout": True,
                "environment": True,
                "collector": True,
                "policy": {"url", "urls", "key_env", "server"},
                "work": {"parallel", "rounds", "target_minutes", "rollout_s"},
                "gym": {"environment", "python", "directory", "deadline_s", "servers", "shared_environments"},
                "sandbox": {"at_once"},
                "verifiers": {"__all__": {"url", "key_env", "timeout_s"}},
            },
        )
        for dataset in kept["datasets"]:
            # Where a file lies does not matter; what is in it does, and the manifest has its hash.
            del dataset["path"]
        if self.policy.server:
            kept["policy"]["model"] = self.policy.model or self.policy.server.served_name or self.policy.server.model
        return kept
