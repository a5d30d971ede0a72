"""One trained model of a run: its independent forward pass, the gradient that its optimizer saw, and the update.

The forward pass is a pinned transformers release in fp64 or fp32, with weights that the record gives. Adapters are applied by their
formula, not by PEFT, and gradients flow back to their factors.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from seatrial.instruments.batch_record import Moment, layer_norms, sample
from seatrial.instruments.bits import fingerprint
from seatrial.instruments.shadow import formulas, locate_stage
from seatrial.instruments.shadow.draws import LIMIT, Sum
from seatrial.instruments.shadow.interface import Diverged, Findings, Lora, ShadowSettings, shown
from seatrial.instruments.shadow.rounds import MicroBatch

Tensor = Any
Layout = Callable[[Mapping[str, Tensor]], Mapping[str, Tensor] | None]


class UnknownArchitectureError(Exception):
    """The release has no such model: there is nothing to compare a forward pass with."""


class ShadowPolicy:
    """A model of the pinned release, without weights of its own."""

    def __init__(self, path: Path, dtype: Any, lora: Lora | None, critic: bool = False, layout: Layout | None = None) -> None:
        import transformers
        from transformers.pytorch_utils import Conv1D

        kind = json.loads((path / "config.json").read_text(encoding="utf-8")).get("model_type")
        if kind not in transformers.CONFIG_MAPPING:
            raise UnknownArchitectureError(f"transformers {transformers.__version__} does not know the architecture {kind!r}")
        config = transformers.AutoConfig.from_pretrained(path, **({"num_labels": 1, "classifier_dropout": 0.0} if critic else {}))
        text = config.get_text_config()
        self.has_router = hasattr(text, "output_router_logits")
        how = {"attn_implementation": "sdpa"}  # eager attention gives NaN for padding in fp64
        if self.has_router:
            how["experts_implementation"] = "eager"  # the grouped product knows no fp64
        made = "ImageTextToText" if hasattr(config, "vision_config") else "CausalLM"
        made = "TokenClassification" if critic else made
        self.model = getattr(transformers, f"AutoModelFor{made}").from_pretrained(path, dtype=dtype, config=config, **how).eval()
        self.head = tuple(name for name, _ in self.model.named_parameters() if critic and not name.startswith(self.model.base_model_prefix))
        """Parameters that no file holds: a critic's head is new."""
        self.model.requires_grad_(False)
        self.linear = (torch.nn.Linear, Conv1D)
        self.turned = {name for name, module in self.model.named_modules() if isinstance(module, Conv1D)}
        if layout is not None:
            # An engine of its own trains the row of the padding token where one was sampled; transformers leaves that row out.
            self.model.get_input_embeddings().padding_idx = None
        self.dtype, self.lora, self.config, self.layout = dtype, lora, config, layout
        self.router_coef = float(getattr(text, "router_aux_loss_coef", 0.0)) if self.has_router else 0.0

    def files(self) -> dict[str, Tensor]:
        return {name: value.detach() for name, value in self.model.named_parameters() if name not in self.head}

    def linear_layers(self) -> list[str]:
        """Names of the layers that `all-linear` means: every linear layer but the head, transposed ones (GPT-2) among them."""
        head = self.model.get_output_embeddings()
        linear = (name for name, module in self.model.named_modules() if isinstance(module, self.linear) and module is not head)
        return [name for name in linear if f"{name}.weight" not in self.head]

    def norms(self) -> set[str]:
        return set(layer_norms(self.model))

    def dropout(self) -> str:
        """The first setting that makes the model's forward pass random while it trains; none: empty."""
        config = self.config.get_text_config()
        rates = {name: value for name, value in config.to_dict().items() if name.endswith(("dropout", "pdrop", "dropout_prob"))}
        return next((f"{name} {value}" for name, value in rates.items() if isinstance(value, float) and value > 0), "")

    def renamed(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Recorded tensors by the release's names; a layout that does not know one of them is a defect of ours."""
        made = weights if self.layout is None else self.layout(weights)
        if made is None:
            raise NotImplementedError("the layout of the model's tensors is not known")
        return dict(made)

    def arguments(self, weights: Mapping[str, Tensor], adapted: bool = True) -> dict[str, Tensor]:
        """The release's parameters from recorded ones: same names, or PEFT's, merged by the formula. A head may lack its bias."""
        weights = self.renamed(weights)
        named = dict(self.model.named_parameters()) if self.head else {}
        absent = {name: torch.zeros_like(named[name]) for name in self.head if name.endswith(".bias") and name not in weights}
        if self.lora is None:
            return {**weights, **absent}
        made, deltas = dict(absent), dict[str, dict[str, Tensor]]()
        for name, value in weights.items():
            plain = name.removeprefix("base_model.model.")
            layer, _, rest = plain.partition(".lora_")
            if rest:
                deltas.setdefault(layer, {})[rest.split(".")[0]] = value
            else:
                made[plain.replace(".base_layer.", ".")] = value
        for layer, parts in deltas.items() if adapted else ():
            delta = self.lora.scale() * parts["B"] @ parts["A"]
            merged = made[f"{layer}.weight"] + (delta.T if layer in self.turned else delta)
            if "magnitude_vector" in parts:
                norm = merged.detach().norm(dim=1, keepdim=True)
                merged = parts["magnitude_vector"].unsqueeze(1) * merged / norm
            made[f"{layer}.weight"] = merged
        return made

    def forward(self, weights: Mapping[str, Tensor], ids: Tensor, mask: Tensor, positions: Tensor | None = None, **extra: Any) -> Any:
        given = {"input_ids": ids, "attention_mask": mask, "use_cache": False, **extra}
        if positions is not None:
            given["position_ids"] = positions
        return torch.func.functional_call(self.model, dict(weights), args=(), kwargs=given)


def completion_terms(output: Any, ids: Tensor, width: int, temperature: float) -> tuple[Tensor, Tensor]:
    """Log-probabilities and entropies of the last `width` tokens, at a temperature."""
    logits = output.logits[:, -width - 1 : -1] / temperature
    table = torch.log_softmax(logits, -1)
    logps = table.gather(-1, ids[:, -width:].unsqueeze(-1)).squeeze(-1)
    return logps, -(table.exp() * table).sum(-1)


def token_values(output: Any, width: int) -> Tensor:
    return output.logits[:, -width - 1 : -1, 0]


EPS = formulas.EPS
SLACK = 20.0  # how much larger than the shadow's own fp32 error a deviation may be
FORWARD = ("sampling", "value", "advantage", "reference", "logprob", "ratio", "kl", "loss", "gradient", "clip", "logging")
"""Stages that need the model's own forward pass to be recomputed."""
FLOOR = 1e-5  # relative deviation of a gradient that is always allowed
TINY = 1e-3  # the share of the largest gradient so far that a deviation may be measured by
NOISY = 1e-3  # the relative fp32 error of a gradient above which losses and metrics of a step are not compared
ROUNDING = 1e-6  # of the largest weight of a tensor: how far merging an adapter and taking it out again may move a weight


class Network:
    """The policy or the critic. `where` goes into every divergence."""

    def __init__(
        self,
        model: Path,
        settings: ShadowSettings,
        found: Findings,
        where: Mapping[str, Any] | None = None,
        critic: bool = False,
        layout: Layout | None = None,
    ) -> None:
        self.s, self.found, self.where = settings, found, dict(where or {})
        self.release = True  # whether the release knows the architecture
        try:
            self.policy = ShadowPolicy(model, torch.float64, settings.lora, critic, layout)
            self.single = ShadowPolicy(model, torch.float32, settings.lora, critic, layout)
        except UnknownArchitectureError as error:
            self.release = False
            self.unproven(dict.fromkeys(("weights", *FORWARD), f"{error}: no independent forward pass is possible"))
        self.moments = formulas.Moments(settings, self.policy.norms() if self.release else set())
        self.weights: dict[str, Tensor] = {}
        self.kept: dict[str, Tensor] = {}  # the weights as they are recorded: of a large model, samples
        self.left: Mapping[str, str] = {}  # hashes of the weights that the last step left, where not all of them are recorded whole
        self.known = True  # whether every weight is known: those of a large model are until its first update
        self.reference: dict[str, Tensor] = {}
        self.trainable: list[str] = []
        self.batch: list[MicroBatch] = []
        self.gap: dict[str, float] = {}  # the shadow's own fp32 error of each gradient
        self.largest = 0.0  # the largest norm of a gradient so far
        self.noisy = False  # whether fp32 rounds so much at this step that its values say little
        self.steps = 0
        self.own_law = False  # whether the loop is of the version whose laws are known
        if self.release and self.policy.dropout():
            self.unproven(dict.fromkeys(FORWARD, f"{self.policy.dropout()} of the model is random"))

    def diverged(self, stage: str, what: str, expected: Any, got: Any, **where: Any) -> Diverged:
        return Diverged(stage, what, expected, got, **{**where, **self.where})

    def proves(self, stage: str) -> bool:
        return not self.found.stages[stage].unproven

    def unproven(self, reasons: Mapping[str, str]) -> None:
        for stage, reason in reasons.items():
            self.found.stages[stage].unproven = reason

    def arguments(self, policy: ShadowPolicy, weights: Mapping[str, Tensor] | None = None, adapted: bool = True) -> dict[str, Tensor]:
        named = self.weights if weights is None else weights
        return policy.arguments({name: value.to(policy.dtype) for name, value in named.items()}, adapted)

    # the start

    def start(self, moment: Moment, known_start: bool = False) -> None:
        """The weights at the start are those of the model's files, and those train that should."""
        event = moment.first()
        self.kept = event.tensors()
        self.known = self.release
        self.weights = dict(self.kept) if event.values["whole"] or not self.release else self._filled()
        self.trainable = list(event.values["trainable"])
        for rank, other in enumerate(moment.ranks[1:], 1):
            self.same(self.kept, other.tensors(), rank, "weights at the start")
        if not self.release:
            self.moments.norms = set(event.values["norms"])
            return
        if any(".experts." in name and ".lora_" in name for name in self.weights):
            self.unproven(dict.fromkeys(("weights", *FORWARD), "adapters on fused experts have no formula here"))
            return
        files = self.policy.files()
        base = self.policy.arguments(self.weights, adapted=False)
        for name, value in files.items():
            if name not in base:
                raise self.diverged("weights", "a tensor of the model's files is not in the model", name, "missing", tensor=name)
            if base[name].shape != value.shape or not torch.equal(base[name].double(), value.to(base[name].dtype).double()):
                raise self.diverged("weights", "loaded weights", "those of the model's files", "others", tensor=name)
        stray = sorted(set(base) - set(files) - set(self.policy.head))
        if stray:
            raise self.diverged("weights", "a tensor of the model is not in its files", "none", stray[0], tensor=stray[0])
        self.found.count("weights", len(files))
        if self.proves("weights"):
            self._trainable(event.values["adapters"])
            if known_start:
                self._adapters_start()
        self.reference = {name: value.clone() for name, value in self.weights.items()}

    def _filled(self) -> dict[str, Tensor]:
        """The weights of a large model: what the record holds as samples is taken from the files, if the samples are theirs."""
        files, made = self.policy.files(), {}
        for name, kept in self.kept.items():
            plain = name.removeprefix("base_model.model.").replace(".base_layer.", ".")
            value = files.get(plain)
            if value is None or value.shape == kept.shape:
                made[name] = kept
                continue
            value = value.to(kept.dtype)
            if not torch.equal(sample(value), kept):
                raise self.diverged("weights", "loaded weights", "those of the model's files", "others", tensor=name)
            made[name] = value
        return made

    def same(self, left: Mapping[str, Tensor], right: Mapping[str, Tensor], rank: int, what: str) -> None:
        for name, value in left.items():
            if name not in right or not torch.equal(value, right[name]):
                raise self.diverged("gradient", f"{what} on all ranks", "equal bits", f"rank {rank} has others", tensor=name)

    def _trainable(self, adapters: Mapping[str, Mapping[str, Any]]) -> None:
        """Trainable parameters, ranks and scales are those that were asked for."""
        lora = self.s.lora
        if lora is None:
            frozen = sorted(set(self.weights) - set(self.trainable))
            if frozen:
                what = "frozen parameters, though all should train"
                raise self.diverged("weights", what, "none", f"{len(frozen)} tensors", tensor=frozen[0])
            self.found.count("weights", len(self.trainable))
            return
        layers = self.policy.linear_layers()
        if lora.targets != "all-linear":
            wanted = (lora.targets,) if isinstance(lora.targets, str) else lora.targets
            layers = [name for name in layers if any(name == word or name.endswith(f".{word}") for word in wanted)]
        got = {name.removeprefix("base_model.model."): value for name, value in adapters.items()}
        missing, stray = sorted(set(layers) - set(got)), sorted(set(got) - set(layers))
        if missing or stray:
            what = "a layer that should have an adapter has none" if missing else "a layer has an adapter that was not asked for"
            raise self.diverged("weights", what, f"{len(layers)} layers", f"{len(got)} layers", tensor=(missing or stray)[0])
        for name, adapter in got.items():
            if adapter["rank"] != lora.rank:
                raise self.diverged("weights", "the adapter's rank", lora.rank, adapter["rank"], tensor=name)
            if not math.isclose(adapter["scale"], lora.scale(), rel_tol=1e-6):
                raise self.diverged("weights", "the adapter's scale", lora.scale(), adapter["scale"], tensor=name)
        parts = ("lora_A", "lora_B", *(["lora_magnitude_vector"] if lora.dora else []))
        asked = {f"base_model.model.{layer}.{part}" for layer in layers for part in parts}
        trained = self.policy.renamed({name: self.weights[name] for name in self.trainable})
        plain = (name.removeprefix("base_model.model.") for name in trained if name not in self.policy.head)
        names = {f"base_model.model.{name.removesuffix('.weight').removesuffix('.default')}" for name in plain}
        if names != asked:
            odd = sorted(names ^ asked)
            raise self.diverged("weights", "trainable parameters", f"{len(asked)} tensors", f"{len(names)} tensors", tensor=odd[0])
        for name, value in trained.items():
            filled = bool(value.any())
            if ".lora_" in name and filled == (".lora_B." in name):
                wanted_fill, got_fill = ("zero", "not zero") if filled else ("random", "zero")
                raise self.diverged("weights", "a factor of a new adapter", wanted_fill, got_fill, tensor=name)
        self.found.count("weights", len(self.trainable))

    def _adapters_start(self) -> None:
        """The first factor of a new adapter is drawn evenly from a range that its width gives (PEFT's default)."""
        what, drawn = "the first factor of a new adapter", dict[str, str]()
        for name, value in self.weights.items():
            if ".lora_A." not in name:
                continue
            twin = drawn.setdefault(fingerprint.tensor_hash(value), name)
            if twin != name:
                raise self.diverged("weights", what, "a draw of its own", f"that of {twin}", tensor=name)
            bound, flat = 1 / math.sqrt(value.shape[1]), value.double().flatten()
            mean, square = Sum(), Sum()
            mean.add(flat, torch.full_like(flat, bound**2 / 3), bound)
            square.add(flat**2 - bound**2 / 3, torch.full_like(flat, bound**4 * 4 / 45), bound**2)
            score, largest = max(abs(mean.score()), abs(square.score())), float(flat.abs().max())
            varied = value.dtype != torch.float32 or len(flat.unique()) > len(flat) // 2
            if not (score <= LIMIT and largest <= bound * 1.01 and varied):
                found = f"mean {shown(float(flat.mean()))}, largest {shown(largest)}"
                raise self.diverged("weights", what, f"evenly drawn within {bound:.6g}", found, tensor=name)
            self.found.count("weights", 1, score / LIMIT)

    def saved(self, directory: Path) -> None:
        """What training saved, loaded by the release, is what its last step left."""
        if not (directory / "config.json").is_file() or not self.known or self.s.lora is not None or not self.proves("weights"):
            return
        own = self.policy.arguments(self.weights)
        for name, value in ShadowPolicy(directory, torch.float32, None).files().items():
            if name in own and not torch.equal(own[name].float(), value):
                what = "saved weights, as the release loads them"
                raise self.diverged("weights", what, "those after the last step", "others", tensor=name)
        self.found.count("weights", len(own))

    # the step

    def untouched(
        self, before: Mapping[str, str], when: str = "between two optimizer steps", after: Mapping[str, Tensor] | None = None
    ) -> None:
        """The weights at the optimizer's step are those that the last one left.

        Merging rounds: where adapters are merged for a generator, frozen weights are taken over from `after` the step.
        """
        for name, value in self.weights.items():
            if before.get(name) != (self.left.get(name) or fingerprint.tensor_hash(value)):
                if after is not None and self._rounded(name, value, after.get(name)):
                    continue
                raise self.diverged("update", f"weights changed {when}", "as the last step left them", "other bits", tensor=name)
        self.found.count("update", len(self.weights))

    def _rounded(self, name: str, value: Tensor, after: Tensor | None) -> bool:
        """Whether a frozen weight is the one after a step but for rounding, and so taken over."""
        if not self.s.merges or name in self.trainable or after is None or after.shape != value.shape:
            return False
        if not float((after - value).abs().max()) <= ROUNDING * float(value.abs().max()):
            return False
        self.weights[name] = self.kept[name] = after
        return True

    def leaves(self, policy: ShadowPolicy) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Trainable weights that gradients are taken by, and all arguments of a forward pass made of them."""
        made = {name: self.weights[name].to(policy.dtype).requires_grad_(True) for name in self.trainable}
        return made, policy.arguments({**{name: value.to(policy.dtype) for name, value in self.weights.items()}, **made})

    def tolerances(
        self, expected: Mapping[str, Tensor], norm: float, gradient: Callable[[MicroBatch, ShadowPolicy], dict[str, Tensor]]
    ) -> None:
        """Measures the shadow's own fp32 error on this step, too."""
        single = [gradient(part, self.single) for part in self.batch]
        now = {}
        for name, whole in expected.items():
            off = float((sum(part[name] for part in single).double() / self.s.world - whole).norm())
            now[name] = off / self._size(whole, norm) if math.isfinite(off) else math.inf
            self.gap[name] = max(self.gap.get(name, 0.0), now[name])
        self.noisy = max(now.values(), default=0.0) > NOISY

    def _size(self, value: Tensor, norm: float) -> float:
        """What a deviation of a tensor's gradient is measured by: its norm, and small parts of the whole gradient's and the largest."""
        return float(value.norm()) + 1e-4 * norm + TINY * self.largest + 1e-30

    def gradient_off(self, expected: Mapping[str, Tensor], got: Mapping[str, Tensor], clip: float, norm: float) -> str | None:
        """The tensor whose gradient deviates most, beyond what rounding explains."""
        worst, name_of = 0.0, None
        # An adapter's first factor has no gradient at first: the largest error of all tensors stands for each.
        rounding = max(self.gap.values(), default=0.0)
        for name, value in expected.items():
            if name not in got:
                if float(value.norm()) > 1e-6 * norm:
                    return name
                continue
            mine = locate_stage.kept(value, got[name])
            off = float((got[name].double() - clip * mine).norm()) / clip / self._size(mine, norm)
            share = off / (SLACK * rounding + FLOOR)
            if not share <= worst:
                worst, name_of = share, name
        if not worst <= 1.0:
            return name_of
        self.found.count("gradient", 0, worst)
        return None

    def norms_off(self, expected: Mapping[str, Tensor], accumulated: Mapping[str, float], norm: float) -> str | None:
        """The tensor whose gradient had another norm before clipping, which hides a wrong scale; one process sees the whole gradient."""
        worst, name_of = 1.0, None
        rounding = max(self.gap.values(), default=0.0)
        for name, size in accumulated.items() if self.s.world == 1 else ():
            if name not in expected:
                continue
            share = abs(size - float(expected[name].norm())) / self._size(expected[name], norm) / (SLACK * rounding + FLOOR)
            if not share <= worst:
                worst, name_of = share, name
        return name_of

    def schedule(self, groups: Iterable[Mapping[str, Any]], rate: float) -> None:
        for group in groups:
            if not math.isclose(group["lr"], rate, rel_tol=1e-6, abs_tol=1e-15):
                raise self.diverged("schedule", "learning rate", rate, group["lr"])
            self.found.count("schedule", int(self.proves("schedule")))

    def parameters(self, groups: Iterable[Mapping[str, Any]]) -> None:
        """The optimizer has every trainable parameter once: of one that it does not have, no gradient is seen either."""
        names = [name for group in groups for name in group["names"]]
        lost = [name for name in self.trainable if name not in names]
        if lost or len(set(names)) != len(names):
            what = "parameters of the optimizer"
            raise self.diverged("update", what, f"{len(self.trainable)} tensors", f"{len(set(names))} tensors", tensor=(lost or names)[0])

    def update(self, groups: Sequence[Mapping[str, Any]], got: Mapping[str, Tensor], after: Mapping[str, Tensor], rate: float) -> None:
        """The optimizer made of these gradients the weights that it should."""
        self._knobs(groups)
        expected = self.moments.step(self.kept, got, rate)
        for name, value in self.kept.items():
            own = expected.get(name, value.double())
            moved = float((own - value.double()).abs().max())
            allowed = 4 * EPS * own.abs() + 2e-5 * moved + self.moments.slack.get(name, 0.0) + 1e-12
            off = torch.nan_to_num((after[name].double() - own).abs() / allowed, nan=math.inf)
            worst = float(off.max())
            if not worst <= 1.0:
                at = int(off.argmax())
                own_move, got_move = ((new.double() - value.double()).flatten()[at] for new in (own, after[name]))
                raise self.diverged("update", "change of a weight", own_move, got_move, tensor=name)
            self.found.count("update", value.numel(), worst)

    def _knobs(self, groups: Iterable[Mapping[str, Any]]) -> None:
        """Settings of the optimizer that are not what was configured name themselves."""
        s = self.s
        wanted = {"betas": list(s.betas), "eps": s.epsilon} if s.optimizer in formulas.ADAM else {}
        for group in groups:
            for name in group["names"]:
                decay = s.weight_decay if self.moments.decays(name, self.weights[name].dim()) else 0.0
                if "weight_decay" in group and not math.isclose(group["weight_decay"], decay, rel_tol=1e-9, abs_tol=1e-15):
                    raise self.diverged("update", "weight decay", decay, group["weight_decay"], tensor=name)
            for key, value in wanted.items():
                got = list(group[key]) if isinstance(group.get(key), (list, tuple)) else group.get(key)
                if got != value:
                    raise self.diverged("update", f"the optimizer's {key}", value, got)

    def step(
        self,
        moment: Moment,
        gradient: Callable[[MicroBatch, ShadowPolicy], dict[str, Tensor]],
        located: Callable[[locate_stage.WrongStage], None],
    ) -> tuple[float, float]:
        """Compare one optimizer step with what it should be; returns the norm of the gradient (NaN: not proven) and the learning rate.

        `gradient` is that of one micro-batch; `located` raises Diverged at the stage of a wrong one.
        """
        s, event = self.s, moment.first()
        if s.free_split:
            rows = sum(len(part.rows) for part in self.batch)
            if rows != s.micro_batch * s.accumulation * s.world:
                raise self.diverged("data", "rows per optimizer step", s.micro_batch * s.accumulation, rows / s.world)
        elif len(self.batch) != s.accumulation * s.world:
            raise self.diverged("gradient", "micro-batches that one optimizer step took in", s.accumulation, len(self.batch) / s.world)
        tensors = event.tensors()
        for rank, other in enumerate(moment.ranks[1:], 1):
            self.same(tensors, other.tensors(), rank, "gradients and weights")
        got, after = _below(tensors, "gradient/"), _below(tensors, "weight/")
        self.untouched(event.values["before"], after=after)
        if self.proves("update"):
            self.parameters(event.values["groups"])
        rate = formulas.rate(event.step, s) if self.proves("schedule") else float(event.values["groups"][0]["lr"])
        norm = math.nan
        if self.proves("gradient") and self.known:
            parts = [gradient(part, self.policy) for part in self.batch]
            expected = {name: sum(part[name] for part in parts) / s.world for name in self.trainable}
            norm = math.sqrt(sum(float((value**2).sum()) for value in expected.values()))
            clip = min(1.0, s.max_grad_norm / (norm + 1e-6)) if s.max_grad_norm > 0 else 1.0
            accumulated = event.values.get("accumulated", {})
            self.noisy = False
            self.largest = max(self.largest, norm)
            if self.steps < 2:
                self.tolerances(expected, norm, gradient)
            off, unclipped = self.gradient_off(expected, got, clip, norm), self.norms_off(expected, accumulated, norm)
            if (off or unclipped) and self.steps >= 2:  # weights that run away round more than the first steps do
                self.tolerances(expected, norm, gradient)
                off, unclipped = self.gradient_off(expected, got, clip, norm), self.norms_off(expected, accumulated, norm)
            tensor = unclipped or off
            if tensor is not None:
                seen = (got, accumulated, norm, clip, tensor, unclipped is None)
                located(locate_stage.WrongStage(self.batch, expected, *seen, s, self.diverged))
            self.found.count("gradient", sum(value.numel() for value in got.values()))
            if not self.noisy:
                self._losses()
        self.schedule(event.values["groups"], rate)
        if self.proves("update"):
            self.update(event.values["groups"], got, after, rate)
        self._take(after, event.values.get("after", {}))
        self.steps += 1
        return norm, rate

    def _losses(self) -> None:
        """The gradient is right; a loss that is not has a part without a gradient, as clipped tokens are."""
        scales = (1.0,) if self.own_law else (1.0, float(self.s.accumulation))  # another version may scale it later
        for index, part in enumerate(self.batch):
            if part.loss is not None and not any(math.isclose(part.own_loss * k, part.loss, rel_tol=2e-3, abs_tol=2e-5) for k in scales):
                stage = "ratio" if part.terms is not None and part.terms.is_clipped() else "loss"
                raise self.diverged(stage, f"the loss of micro-batch {index + 1}", part.own_loss, part.loss, row=part.rows[0])

    def _take(self, after: Mapping[str, Tensor], left: Mapping[str, str]) -> None:
        """The weights after a step; those that are recorded as samples are no longer known once they have changed."""
        for name, value in after.items():
            if value.shape == self.weights[name].shape:
                self.weights[name] = value
            elif self.known and left.get(name) != fingerprint.tensor_hash(self.weights[name]):
                self.known = False
        self.kept, self.left = {**self.kept, **after}, left


def _below(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
