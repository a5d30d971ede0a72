"""campaign.toml: what a campaign collects, from which servers, at what pace, and who scores it.

- Unknown keys and values that exclude each other are refused, with the reason.
- No secret stands in the file: `key_env` names the environment variable that holds an API key.
- `identity` may not change between start and resume. Servers, concurrency, waits and how shards are launched may.
- A row with `responses_create_params` is Gym's; any other is plain and becomes a request when it is rolled out (`format = "auto"`).
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, Strict, StringConstraints, model_validator

from seatrial.core.errors import UserError
from seatrial.core.jobs import Mount, Name, Variables
from seatrial.core.records import Record
from seatrial.core.secret_names import looks_random
from seatrial.evidence.redact import Redactor
from seatrial.rollouts.fast_json import unstorable
from seatrial.runtime.servers import Server

MOST_REPEATS = 100_000
"""Of a row. They are listed one by one; more are a slip of the keyboard."""
_SHAPES = Redactor({})
_LARGEST_LABEL = (1 << 63) - 1
NUMBERS = frozenset(
    {
        *("temperature", "top_p", "top_k", "min_p", "typical_p", "presence_penalty", "frequency_penalty", "repetition_penalty"),
        *("length_penalty", "max_output_tokens", "max_tokens", "max_completion_tokens", "min_tokens", "top_logprobs"),
        *("prompt_logprobs", "truncate_prompt_tokens", "thinking_token_budget", "max_tool_calls", "priority"),
    }
)
"""Of [sampling]: parameters that are numbers on every server that knows them."""


def _without_secrets(url: str) -> str:
    """An address is stored and shown, so it holds no key."""
    parts = urlsplit(url)
    if "@" in parts.netloc or parts.query or parts.fragment:
        raise ValueError("only scheme, host, port and path: the address is stored, a key is named by key_env")
    return url


def secret_in(value: Any, where: str = "", clear: Callable[[Any], Any] = _SHAPES.value) -> str | None:
    """The key below `where` whose value is a secret, "" for the value itself; None where there is none. `clear` takes secrets out."""
    entries = list(value.items()) if isinstance(value, Mapping) else []
    for key, entry in entries:
        inner = f"{where}.{key}" if where else str(key)
        found = secret_in(entry, inner, clear)
        if found is not None or (not isinstance(entry, Mapping) and clear({key: entry}) != {key: entry}):
            return found or inner
    for entry in value if isinstance(value, list | tuple) else ():
        if (found := secret_in(entry, where, clear)) is not None:
            return found
    return where if clear(value) != value else None


def _refuse_secrets(value: Any) -> Any:
    """What stands in a campaign is stored, shown and sent to every shard."""
    if (key := secret_in(value)) is not None:
        raise ValueError(secret_message(key))
    return value


def secret_message(key: str) -> str:
    """Why a secret is refused; it is not repeated."""
    what = f"{key} holds a secret" if key else "a secret stands here"
    return f"{what}; campaign.toml is stored and shown: export it, and name its variable with policy.key_env"


def _variable(name: str) -> str:
    """A name is stored and shown; a key that was typed in its place is neither."""
    if (
        not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]{0,127}", name)
        or _SHAPES.tokens(name) != name
        or (looks_random(name) and not name.isupper())
    ):
        raise ValueError("the name of a variable is meant, not a key: export the key, and write the name of its variable here")
    return name


def _sayable(sampling: Mapping[str, Any]) -> Mapping[str, Any]:
    """A date of TOML would become a text on its way, and NaN nothing at all; a text for a number fails each request."""
    for key, value in sampling.items():
        if what := unstorable(value):
            raise ValueError(f"{key} holds {what}, which no request can say")
    _refuse_secrets(sampling)
    for key, value in sampling.items():
        if key in NUMBERS and (isinstance(value, bool) or not isinstance(value, int | float | None)):
            raise ValueError(f"{key} = {value!r}: a number is meant")
    return sampling


Label = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,79}$")]
Url = Annotated[str, StringConstraints(pattern=r"^https?://[!-~]+$"), AfterValidator(_without_secrets)]
Variable = Annotated[str, AfterValidator(_variable)]
Arguments = Annotated[tuple[str, ...], AfterValidator(_refuse_secrets)]
Whole = Annotated[int, Strict()]
"""A text is no number: `repeats = "4"` is a slip, and would be another key's value as easily."""
Number = Annotated[float, Strict()]
Count = Annotated[Whole, Field(ge=1)]
Seconds = Annotated[Number, Field(ge=1e-3, le=1e9)]
Share = Annotated[Number, Field(ge=0, le=1)]
Repeats = Annotated[Whole, Field(ge=1, le=MOST_REPEATS)]
Sampling = Annotated[Mapping[str, Any], AfterValidator(_sayable)]


def parse_numbers(text: str) -> tuple[int, ...]:
    """`0-3,7` as numbers; a ValueError for anything else, for a number said twice, and for more than anybody means."""
    found: list[int] = []
    for part in text.replace(" ", "").split(","):
        match = re.fullmatch(r"([0-9]{1,20})(?:(?:-|\.\.)([0-9]{1,20}))?", part)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, -1)
        if last < first or last > _LARGEST_LABEL:
            raise ValueError(f"{part!r} is no number and no range: write 0-3,7")
        if len(found) + last - first >= MOST_REPEATS:
            raise ValueError(f"{text}: more than {MOST_REPEATS} repetitions")
        found += range(first, last + 1)
    if len(set(found)) < len(found):
        raise ValueError(f"{text}: a number is said twice")
    return tuple(found)


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
    agent: str | None = None
    tags: tuple[Label, ...] = ()
    tag_columns: tuple[str, ...] = ()
    limit: Count | None = None
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
    urls: tuple[Url, ...] = ()
    """Several of the same kind; requests go to the one with the fewest open."""
    key_env: Variable | None = None
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

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        # Names alone: a prompt may speak of passwords.
        if (key := secret_in(self.model_dump(mode="json"), clear=_SHAPES.names)) is not None:
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
        from seatrial.core import registry
        from seatrial.rollouts.verifiers import installed_verifier

        if (installed := installed_verifier(name)) is not None:
            return installed
        known = ", ".join((*self.verifiers, "exact", "choice", "math", "code", "judge", *registry.names(registry.VERIFIERS)))
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


def api_key_of(variable: str | None) -> str | None:
    """An API key, from the variable that holds it; a UserError when it is not set."""
    if variable is None:
        return None
    # A key that was read from a file brings its newline along.
    key = os.environ.get(variable, "").strip()
    if not key:
        if not re.fullmatch(r"[A-Z][A-Z0-9_]*", variable):  # it may be the key itself, typed where the name belongs
            raise UserError(
                "key_env names a variable that is not set here", "write the name of a variable there, such as POLICY_API_KEY, and export it"
            )
        raise UserError(f"the variable {variable} is to hold an API key, and is not set here", f"export {variable}=… before you start")
    if not (key.isascii() and key.isprintable()):
        raise UserError(f"the variable {variable} is to hold an API key, and holds characters that no header can", "see what was exported")
    return key


PARAMS = "responses_create_params"
RESPONSES_KEYS = frozenset(
    {
        *("background", "include", "input", "instructions", "max_output_tokens", "max_tool_calls", "metadata", "model"),
        *("parallel_tool_calls", "previous_response_id", "prompt", "reasoning", "service_tier", "store", "stream", "temperature"),
        *("text", "tool_choice", "tools", "top_logprobs", "top_p", "truncation", "user"),
    }
)
"""Of the Responses API, as NeMo Gym 0.4.0 takes them (NeMoGymResponseCreateParamsNonStreaming); it forbids all others."""
_ANSWERS = ("expected_answer", "answer")


def is_gym(data: Mapping[str, Any], dataset: Dataset) -> bool:
    return PARAMS in data if dataset.format == "auto" else dataset.format == "gym"


def prompt_messages(data: Mapping[str, Any], dataset: Dataset) -> list[Mapping[str, Any]]:
    """The messages that a row asks with: of a Gym row its `input` (items that are no messages included), of a plain one its prompt
    behind the dataset's system message. The row must have passed `check`."""
    said = data[PARAMS]["input"] if is_gym(data, dataset) else data[dataset.prompt]
    messages: list[Mapping[str, Any]] = [{"role": "user", "content": said}] if isinstance(said, str) else list(said)
    if dataset.system is not None and not is_gym(data, dataset):
        return [{"role": "system", "content": dataset.system}, *messages]
    return messages


def expected(data: Mapping[str, Any], dataset: Dataset) -> Any:
    """The expected answer as the row has it: the dataset's `answer` column, else expected_answer, else answer; None without."""
    columns = _ANSWERS if dataset.answer is None else (dataset.answer,)
    return next((data[column] for column in columns if data.get(column) is not None), None)
