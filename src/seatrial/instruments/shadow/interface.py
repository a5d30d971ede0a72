"""What a loop gives the shadow and gets back: settings in the shadow's own words; findings per stage, the first divergence, every knob.

Every loop translates its command line into `ShadowSettings` without the change's code. A `Knob` says whether a recomputed run proved a
setting: configured, in force, exercised.
"""

from __future__ import annotations

import json
import math
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

Tensor = Any


@dataclass(frozen=True)
class Lora:
    """The adapters that were asked for."""

    rank: int
    alpha: float
    rslora: bool = False
    dora: bool = False
    dropout: float = 0.0
    bias: str = "none"
    targets: str | tuple[str, ...] = "all-linear"

    def scale(self) -> float:
        """The factor of the adapter's product: alpha over the rank, or over its root."""
        return self.alpha / (self.rank**0.5 if self.rslora else self.rank)


@dataclass(frozen=True)
class ShadowSettings:
    """The values of one training run, as configured."""

    max_steps: int
    seed: int = 42
    world: int = 1
    # data
    shuffle: bool = True
    seeded_order: bool = False
    """Whether each epoch is `torch.randperm` of a generator with the seed, and what fills no generation is left out."""
    group: int = 8  # completions per prompt
    micro_batch: int = 8  # rows of one forward pass of one process
    accumulation: int = 1  # forward passes per optimizer step
    partial: bool = False  # whether the last optimizer step of an epoch takes what forward passes are left
    splits: int = 1  # micro-batches that one generation is cut into
    iterations: int = 1  # how often each generation is used
    mixes_rows: bool = False  # whether the rows of a generation are shuffled before they are cut into micro-batches
    free_split: bool = False
    """Whether an optimizer step may be cut into micro-batches of any size: `micro_batch * accumulation` rows in all."""
    arrival: bool = False  # whether the prompts of one generation may come in any order, because several are generated at once
    # sampling
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float | None = None
    repetition_penalty: float = 1.0
    processors: str = "transformers"
    """Whose law scores are processed by: that of `transformers` or `vllm`, the `temperature` only, or `none` of them."""
    suppressed: tuple[int, ...] = ()  # tokens that are never drawn: a placeholder of a picture is none of the model's words
    max_tokens: int = 512
    # reward and advantage
    reward_weights: tuple[float, ...] = (1.0,)
    aggregation: str = "sum_then_normalize"
    scale: str = "group"
    std_floor: float = 1e-4  # added to the standard deviation that advantages are divided by
    estimator: str = "group"  # of advantages: `group` compares the completions of one prompt, `gae` needs a critic
    gamma: float = 1.0
    lam: float = 1.0
    reward_beta: float = 0.0  # weight of the KL penalty that is taken from the reward of each token
    reward_kl: str = "k1"
    # loss
    loss_type: str = "dapo"  # A loss with a reduction of its own, or how a clipped loss is reduced: one of `formulas.REDUCTIONS`
    loss_scale: float | None = None  # divides `seq-mean-token-sum-norm`; None takes the longest completion of the micro-batch
    epsilon_low: float = 0.2
    epsilon_high: float = 0.2
    delta: float | None = None
    dual_clip: float | None = None  # with a negative advantage the ratio counts as at most this
    beta: float = 0.0
    kl_type: str = "k3"  # estimator of the KL term; a `+` at its end takes the gradient of k2
    value_clip: float | None = None  # of a critic: how far a value may move from the old one
    kl_correction: bool = True
    level: str = "token"  # of the importance ratio: token or sequence
    mask_truncated: bool = False
    quantile: float = 1.0  # share of tokens with the highest entropy that the loss is made of
    entropy_coef: float = 0.0
    off_policy_threshold: float | None = None
    correction: str | None = None
    """How the loss makes up for a generator whose probabilities are not quite the policy's: one of `formulas.CORRECTIONS`."""
    correction_bounds: tuple[float, float] = (-math.inf, math.inf)
    sapo: tuple[float, float] = (1.0, 1.05)  # temperatures for positive and negative advantages
    vespo: tuple[float, float, float, float] = (2.0, 3.0, 3.0, 2.0)  # k and lambda for positive, then for negative advantages
    router_coef: float | None = None  # weight of a MoE model's load-balancing loss; None takes the model's own
    sync_steps: int | None = None  # the reference takes in the policy every so many steps; None: never
    sync_alpha: float = 0.6
    # update
    max_grad_norm: float = 1.0
    optimizer: str = "adamw"
    learning_rate: float = 1e-6
    betas: tuple[float, float] = (0.9, 0.999)
    epsilon: float = 1e-8
    weight_decay: float = 0.0
    decays: str = "named"
    """What weight decay leaves out: `named` biases and norms, by their names; `matrices` what has one dimension; `all` nothing."""
    optimizer_options: Mapping[str, float | str | bool] = field(default_factory=dict)
    schedule: str = "linear"
    warmup: int = 0
    rate_per_round: bool = False  # whether the schedule advances once per generation, and not with every optimizer step
    schedule_options: Mapping[str, float] = field(default_factory=dict)
    lora: Lora | None = None
    merges: bool = False  # whether adapters are merged for another generator and taken out again, which rounds the frozen weights
    critic: ShadowSettings | None = None  # what the critic is trained with, where there is one
    unsupported: Mapping[str, str] = field(default_factory=dict)  # stage to the reason why it cannot be recomputed

    def rows(self) -> int:
        return self.micro_batch * self.splits * self.world

    def prompts(self) -> int:
        return self.rows() // self.group

    def steps_per_round(self) -> int:
        """Optimizer steps that one generation serves."""
        return max(1, self.splits * self.iterations // self.accumulation)

    def passes(self, prompts: int) -> int:
        return prompts // self.prompts() * self.splits * self.iterations

    def is_split(self) -> bool:
        """Whether weights change while one generation is in use, so that its own log-probabilities must be kept."""
        return self.accumulation % (self.splits * self.iterations) != 0


@dataclass(frozen=True)
class World:
    """What the shadow knows beside the settings: the dataset, the tokenizer, the rewards, the model's files."""

    prompts: Sequence[Sequence[int]]  # token ids of each dataset row
    rewards: Mapping[str, Callable[[Sequence[Sequence[int]], Sequence[int]], Sequence[float | None]]]
    """Reward functions, given completions and dataset rows."""
    model: Path
    eos: tuple[int, ...]
    pad: int
    loop: str = ""  # the package of the loop
    versions: Mapping[str, str] = field(default_factory=dict)
    """Of the packages whose laws and metrics are known: a run of the same version follows each of them."""
    texts: Sequence[str] = ()  # the prompt of each dataset row, where reward functions are given it
    decode: Callable[[Sequence[int]], str] = lambda _: ""  # the text of a completion, as reward functions are given it
    pictures: Tensor = None  # pixel values of each dataset row, where prompts have a picture
    layout: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor] | None] | None = None
    """Makes the release's tensors of recorded ones, where the loop fuses or renames them."""

    def pictures_of(self, rows: Sequence[int]) -> Any:
        """Pixel values of dataset rows; None where prompts have no picture."""
        return None if self.pictures is None else self.pictures[list(rows)]


STEP = ("ratio", "kl", "mask", "loss", "gradient", "clip", "advantage", "reference", "logprob")
"""The stages that are proven by the gradient."""


@dataclass(frozen=True)
class Knob:
    """One setting that a step passes through."""

    stage: str
    default: Any
    neutral: tuple[Any, ...] = ()  # values without an effect
    exercised_by: str = ""  # the shadow's counter that must not be zero for the setting to have had an effect
    only: str = ""  # what alone reads it, in the loop's own words: a loss type, an advantage estimator. Nothing: each.

    def status(self, value: Any, found: Mapping[str, Any], exercised: Mapping[str, int], read: bool = True) -> str:
        """What the findings on a run say of the setting; `read` is false where nothing of the run reads it."""
        stage = next(entry for entry in found["stages"] if entry["stage"] == self.stage)
        if stage["unproven"]:
            return "not proven"
        if not read:
            return "not exercised"
        if any(value == item and type(value) is type(item) for item in self.neutral):
            return "neutral"
        if self.exercised_by and not exercised[self.exercised_by]:
            return "not exercised"
        return "proven" if stage["compared"] and found["divergence"] is None else "not proven"


STAGES = (
    *("weights", "data", "sampling", "length", "reward", "value", "advantage", "reference", "logprob", "ratio", "kl", "mask", "loss"),
    *("gradient", "clip", "schedule", "update", "logging"),
)
"""In the order in which a step passes through them; the first that diverges is the answer."""


class Diverged(Exception):
    def __init__(self, stage: str, what: str, expected: Any, found: Any, **where: Any) -> None:
        super().__init__(f"{stage}: {what}")
        self.stage, self.what, self.expected, self.found, self.where = stage, what, expected, found, where


@dataclass
class StageFinding:
    """How one stage stands after a whole run."""

    stage: str
    compared: int = 0  # values compared
    worst: float = 0.0  # largest deviation, as a share of what is allowed
    unproven: str = ""  # why it could not be recomputed
    notes: list[str] = field(default_factory=list)


def shown(value: Any) -> str:
    if isinstance(value, float):
        return "NaN" if math.isnan(value) else f"{value:.6g}"
    if hasattr(value, "tolist"):
        return shown(value.tolist())
    if isinstance(value, (list, tuple)):
        text = ", ".join(shown(item) for item in list(value)[:12])
        return f"[{text}{', …' if len(value) > 12 else ''}]"
    return str(value)


@dataclass
class Findings:
    stages: dict[str, StageFinding] = field(default_factory=lambda: {name: StageFinding(name) for name in STAGES})
    divergence: dict[str, Any] | None = None
    knobs: list[dict[str, Any]] = field(default_factory=list)
    steps: int = 0

    def count(self, stage: str, values: int, worst: float = 0.0) -> None:
        entry = self.stages[stage]
        entry.compared += values
        entry.worst = max(entry.worst, worst)

    def diverge(self, found: Diverged, step: int) -> None:
        """Keep the divergence of the earliest step and, within it, of the earliest stage."""
        where = {"step": step, **found.where}
        entry = {"stage": found.stage, "what": found.what, "expected": shown(found.expected), "found": shown(found.found), **where}
        old = self.divergence
        if old is None or (entry["step"], STAGES.index(entry["stage"])) < (old["step"], STAGES.index(old["stage"])):
            self.divergence = entry

    def to_json(self) -> dict[str, Any]:
        return {
            "schema_version": 1,
            "steps": self.steps,
            "stages": [asdict(entry) for entry in self.stages.values()],
            "divergence": self.divergence,
            "knobs": self.knobs,
        }


def write_findings(target: Path, recompute: Callable[[], dict[str, Any]]) -> None:
    """Write what a recomputation finds; whatever goes wrong in it is written, too: then the run was not recomputed."""
    try:
        made = recompute()
    except Exception as error:  # noqa: BLE001 - a defect of ours is never the change's
        made = {"schema_version": 1, "error": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()}
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_suffix(".tmp")
    temporary.write_text(json.dumps(made, indent=1, allow_nan=False, default=str), encoding="utf-8")
    temporary.replace(target)
