"""The shadow of a verl run: assembles its batch record and recomputes it in a process that imports nothing of the change.

    python -m seatrial.instruments.verl.shadow --shadow-out FILE [options of train.py] -- [Hydra overrides]

It gets the same words as the trainer, so that what was configured is known without the trainer.
"""

from __future__ import annotations

import json
import math
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from seatrial.instruments.batch_record import ROWS, TENSORS, BatchRecord, Event, Moment, events
from seatrial.instruments.facts import prompts
from seatrial.instruments.shadow import expected_logs, formulas
from seatrial.instruments.shadow.interface import Diverged, ShadowSettings, write_findings
from seatrial.instruments.shadow.recompute import Shadow
from seatrial.instruments.shadow.rounds import Round
from seatrial.instruments.verl import megatron_layout, train, verl_settings
from seatrial.instruments.verl.verl_process import PARTS, REWARDS, even_share

REWARD = "even_share"


def assemble(run: Path, rows: int, tokenizer: Any, prompts: Sequence[Sequence[int]]) -> None:
    """Write record.jsonl of a run, once; `rows` completions are made per round, of the `prompts` of the dataset. The parts are removed when
    the record is whole; what an attempt that was killed has left is written anew."""
    if not (run / PARTS).is_dir():
        return
    (run / ROWS).unlink(missing_ok=True)
    shutil.rmtree(run / TENSORS, ignore_errors=True)
    known = {tuple(ids): row for row, ids in enumerate(prompts)}
    parts = run / PARTS
    record = BatchRecord(run)
    made = _by_version(parts / "server")
    calls = _lines(parts / REWARDS)
    engines = {role: _rounds(parts / role) for role in ("critic", "actor")}
    logged = {int(row["step"]): row["data"] for row in _lines(run / "metrics.jsonl")}
    for started in (found[0] for _, found in sorted(engines["actor"].items())[:1]):
        _copy(record, started)
    for started in (found[0] for _, found in sorted(engines["critic"].items())[:1]):
        _copy(record, started)
    for version in sorted({*made, *(key for found in engines.values() for key in found)}):
        if version in made:
            _generated(record, made[version])
            mine, calls = calls[:rows], calls[rows:]
            _rewarded(record, made[version], mine, tokenizer, known)
        for role in ("critic", "actor"):
            for event in engines[role].get(version, ()):
                if not event.kind.endswith("started"):
                    _copy(record, event)
        if version + 1 in logged:
            record.add("logged", "logging", logged[version + 1], step=version + 1)
    shutil.rmtree(parts)


def _lines(path: Path) -> list[dict[str, Any]]:
    """Rows that a run wrote. A ValueError that names the line which is none: left out, it would look as if a row had no reward."""
    found = []
    for number, line in enumerate(path.read_bytes().split(b"\n") if path.is_file() else (), 1):
        try:
            row = json.loads(line) if line.strip() else None
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path}: line {number}: {error}") from error
        if row is not None and not isinstance(row, dict):
            raise ValueError(f"{path}: line {number}: not a table")
        found += [row] if row is not None else []
    return found


def _by_version(directory: Path) -> dict[int, list[Event]]:
    found: dict[int, list[Event]] = {}
    for event in _events(directory):
        found.setdefault(int(event.values["version"]), []).append(event)
    return found


def _rounds(directory: Path) -> dict[int, list[Event]]:
    """Events by round; an update belongs to the round of its micro-batches."""
    found: dict[int, list[Event]] = {}
    now = 0
    for event in _events(directory):
        now = int(event.values.get("round", now))
        found.setdefault(now, []).append(event)
    return found


def _events(directory: Path) -> Iterator[Event]:
    return events(directory) if (directory / ROWS).is_file() else iter(())


def _copy(record: BatchRecord, event: Event) -> None:
    record.add(event.kind, "", event.values, event.tensors(), step=event.step)


def _ordered(found: Sequence[Event]) -> list[dict[str, Any]]:
    """Tensors of the completions of a round, prompt by prompt: which prompt is asked for first differs between runs."""
    groups: dict[tuple[int, ...], list[dict[str, Any]]] = {}
    for event in found:
        tensors = event.tensors()
        groups.setdefault(tuple(tensors["prompt"].tolist()), []).append(tensors)
    return [tensors for _, group in sorted(groups.items()) for tensors in group]


def _generated(record: BatchRecord, found: Sequence[Event]) -> None:
    rows = _ordered(found)
    pad = torch.nn.utils.rnn.pad_sequence
    tensors = {
        "prompt_ids": pad([row["prompt"] for row in rows], batch_first=True),
        "prompt_ids/lengths": torch.tensor([len(row["prompt"]) for row in rows]),
        "completion_ids": pad([row["tokens"] for row in rows], batch_first=True),
        "completion_ids/lengths": torch.tensor([len(row["tokens"]) for row in rows]),
        "scores": pad([row["scores"] for row in rows], batch_first=True),
    }
    asked = sorted({tuple(sorted(event.values["asked"].items())) for event in found}, key=str)
    record.add(
        "generated",
        "sampling",
        {"asked": [dict(pairs) for pairs in asked]},
        tensors,
    )


def _rewarded(
    record: BatchRecord, found: Sequence[Event], calls: list[dict[str, Any]], tokenizer: Any, known: Mapping[tuple[int, ...], int]
) -> None:
    """Each completion with the call that was given its text; a call with another text keeps that text, as tokens."""
    made = [(known.get(tuple(row["prompt"].tolist())), row["tokens"].tolist()) for row in _ordered(found)]
    texts = [tokenizer.decode(tokens, skip_special_tokens=True) for _, tokens in made]
    left, taken = list(calls), dict[int, dict[str, Any]]()
    # What fits best is taken first, so that a wrong call takes no right one away.
    for fits in (("row", "text"), ("row",), ("text",), ()):
        for place, (row, _) in enumerate(made):
            wanted = {"row": row, "text": texts[place]}
            call = next((call for call in left if all(call[key] == wanted[key] for key in fits)), None)
            if place not in taken and call is not None:
                left.remove(call)
                taken[place] = call
    ids, rows, rewards = [], [], []
    for place, call in sorted(taken.items()):
        same = call["text"] == texts[place]
        ids.append(made[place][1] if same else tokenizer(call["text"], add_special_tokens=False)["input_ids"])
        rows.append(int(call["row"]))
        rewards.append(float(call["reward"]))
    width = max([1, *map(len, ids)])
    given = {
        "completion_ids": torch.tensor([[*row, *[0] * (width - len(row))] for row in ids], dtype=torch.long).reshape(len(ids), width),
        "lengths": torch.tensor([len(row) for row in ids], dtype=torch.long),
        "rewards": torch.tensor(rewards, dtype=torch.float64),
        "rows": torch.tensor(rows, dtype=torch.long),
    }
    record.add("rewarded", "reward", {"function": REWARD}, given)


VERSION = "0.9.1"
"""The verl whose metrics are known."""


def recompute(arguments: Any, words: list[str]) -> dict[str, Any]:
    import torch
    import transformers
    from transformers import AutoTokenizer

    from seatrial.instruments.shadow.interface import World

    torch.set_num_threads(1)
    path = train.model_path(arguments)
    tokenizer = AutoTokenizer.from_pretrained(path)
    settings = verl_settings.settings(words)
    asked = prompts(arguments.prompts + arguments.validation, train.DATA_SEED)[: arguments.prompts]
    world = World(
        prompts=[chat(tokenizer, text) for text in asked],
        rewards={REWARD: lambda completions, _: [even_share(tokenizer.decode(list(ids), skip_special_tokens=True)) for ids in completions]},
        model=path,
        eos=(tokenizer.eos_token_id,),
        pad=tokenizer.pad_token_id,
        loop="verl",
        versions={"verl": VERSION},
        layout=_layout(path, words),
    )
    run: Path = arguments.out
    assemble(run, settings.rows(), tokenizer, world.prompts)
    shadow = RoundShadow(run, settings, world, lambda text: print(f"seatrial: shadow: {text}", flush=True))
    made = shadow.run().to_json()
    made["knobs"] = knobs(words, made, shadow, settings)
    made["imports"] = {module.__name__: str(module.__file__) for module in (torch, transformers)}
    return made


def chat(tokenizer: Any, text: str) -> list[int]:
    said = tokenizer.apply_chat_template([{"role": "user", "content": text}], add_generation_prompt=True, tokenize=False)
    return list(tokenizer(said, add_special_tokens=False)["input_ids"])


def _layout(path: Path, words: Sequence[str]) -> Any:
    """How Megatron's fused tensors belong to the release's; None where the engine has the release's own."""
    if verl_settings.strategy(verl_settings.given(words)) != verl_settings.MEGATRON:
        return None
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(path)
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads

    def released(named: Mapping[str, Any]) -> Mapping[str, Any] | None:
        made = megatron_layout.exported(named, config.num_key_value_heads, head)
        if made and "lm_head.weight" in made and made["lm_head.weight"].shape[0] == 1:
            made["score.weight"] = made.pop("lm_head.weight")  # a critic's
        return made

    return released


def knobs(words: list[str], made: dict[str, Any], shadow: Any, settings: ShadowSettings) -> list[dict[str, Any]]:
    values = verl_settings.knob_values(words)
    estimator = "gae" if settings.estimator == "gae" else "grpo"
    rows = []
    for name, knob in verl_settings.knobs(words).items():
        status = knob.status(values[name], made, shadow.exercised, knob.only in ("", estimator))
        rows.append({"knob": name, "stage": knob.stage, "configured": values[name], "in_force": None, "status": status})
    return rows


def main() -> None:
    """Recompute one run and write what was found; a defect of ours is written, too, and is never the change's."""
    words = sys.argv[1:]
    split = words.index("--") if "--" in words else len(words)
    parser = train.parser()
    parser.add_argument("--shadow-out", type=Path, required=True)
    arguments = parser.parse_args(words[:split])
    write_findings(arguments.shadow_out, lambda: recompute(arguments, words[split + 1 :]))
    print("seatrial: shadow complete", flush=True)


ALWAYS = ("actor/grad_norm", "actor/lr", "actor/pg_loss", "critic/score/mean")


class RoundShadow(Shadow):
    def _generated(self, moment: Moment) -> None:
        for asked in moment.first().values.get("asked", ()):
            self._asked(asked)
        super()._generated(moment)
        self.steps: dict[str, list[float]] = {}
        """Metrics of each optimizer step."""

    def _asked(self, asked: Mapping[str, Any]) -> None:
        """What the generation server was asked for is what was configured; it applies the temperature only."""
        s = self.s
        wanted = {"temperature": s.temperature, "top_p": s.top_p, "top_k": s.top_k or -1, "repetition_penalty": 1.0}
        for name, value in wanted.items():
            if asked.get(name) != value:
                raise Diverged("sampling", f"the {name} that the generation server was asked for", value, asked.get(name))
            self.found.count("sampling", 1)

    def _end(self) -> None:
        if self.round is not None:
            self._close(self.round)

    def _add(self, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self.steps.setdefault(name, []).append(value)

    def _expect(self, norm: float, rate: float) -> None:
        s, batch = self.s, self.actor.batch
        terms = [part.terms for part in batch if part.terms is not None]
        together = float(sum(int(each.mask.sum()) for each in terms))
        with torch.no_grad():
            made = {"actor/grad_norm": norm, "actor/loss": sum(part.own_loss for part in batch)}
            made["actor/pg_loss"] = _summed([each.policy for each in terms], terms, together, s)
            if s.entropy_coef:
                made["actor/entropy_loss"] = _summed([each.entropies for each in terms], terms, together, s)
            if s.beta:
                made["actor/kl_loss"] = _summed([each.kl for each in terms], terms, together, s)
                self.exercised["kl"] += sum(bool((each.kl * each.mask > 1e-9).any()) for each in terms if each.kl is not None)
            clipped, dual, drift = [], [], []
            for each in terms:
                ratio, advantage = each.ratio, each.advantage
                bounded = ratio.clamp(1 - s.epsilon_low, 1 + s.epsilon_high)
                loss = torch.max(-advantage * ratio, -advantage * bounded)
                clipped.append(_mean_of_rounds((-advantage * bounded > -advantage * ratio).double(), each.mask))
                dual.append(
                    _mean_of_rounds(((loss > -advantage * s.dual_clip) & (advantage < 0)).double(), each.mask) if s.dual_clip else 0.0
                )
                drift.append(_mean_of_rounds(-ratio.log(), each.mask))
                self.exercised["clipped_low"] += int((((ratio < 1 - s.epsilon_low) & (advantage < 0)) * each.mask).sum())
                self.exercised["clipped_high"] += int((((ratio > 1 + s.epsilon_high) & (advantage > 0)) * each.mask).sum())
            self.exercised["dual_clipped"] += sum(value > 0 for value in dual)
            made |= {"actor/pg_clipfrac": _average(clipped), "actor/pg_clipfrac_lower": _average(dual), "actor/ppo_kl": _average(drift)}
        self._add(made)

    def _expect_values(self, norm: float, rate: float) -> None:
        critic = self._critic()
        for part in critic.batch:
            mask, rows = part.round.mask[part.rows].double(), part.rows
            _, out = formulas.value_terms(part.values, part.round.values[rows], part.round.returns[rows], critic.s.value_clip or math.inf)
            self._add({"critic/vf_clipfrac": _mean_of_rounds(out.double(), mask), "critic/vpred_mean": _mean_of_rounds(part.values, mask)})
        loss = sum(part.own_loss for part in critic.batch)
        self._add({"critic/grad_norm": norm, "critic/loss": loss, "critic/vf_loss": loss})

    def _logged(self, moment: Moment) -> None:
        made = self.round
        if not self._proves("logging") or not self._proves("gradient") or made is None or made.ids is None:
            return
        expected = {name: _average(values) for name, values in self.steps.items()}
        expected |= self._round(made)
        expected["actor/lr"] = formulas.rate(self.actor.steps + 1, self.s)
        if self.critic is not None:
            expected["critic/lr"] = formulas.rate(self.critic.steps + 1, self.critic.s)
        tokens = int(made.mask.sum())
        self.found.count("logging", expected_logs.compare(expected, moment.first().values, tokens, self.world.loop in self.same, ALWAYS))

    def _round(self, made: Round) -> dict[str, float]:
        s, mask = self.s, made.mask
        lengths, asked = (torch.tensor([len(ids) for ids in rows], dtype=torch.float64) for rows in (made.completions, made.prompts))
        inside = mask.bool()
        advantages = made.advantages if made.advantages.dim() == 2 else made.advantages.unsqueeze(1).expand(-1, mask.shape[1])
        returns = made.returns if made.returns is not None else advantages
        rewards = made.rewarded.sum(1) if made.rewarded is not None else made.total
        found = {
            **_three("critic/score", made.total),
            **_three("critic/rewards", rewards),
            **_three("critic/advantages", advantages[inside]),
            **_three("critic/returns", returns[inside]),
            **_three("response_length", lengths),
            **_three("prompt_length", asked),
            "response_length/clip_ratio": float((lengths == lengths.max()).double().mean()),
            "response/aborted_ratio": 0.0,
        }
        if made.entropies is not None and s.loss_type == "token-mean":
            found["actor/entropy"] = _mean_of_rounds(made.entropies, mask.double())
        if made.values is not None:
            values, known = made.values[inside], returns[inside]
            found |= _three("critic/values", values)
            found["critic/vf_explained_var"] = float(1 - (known - values).var() / (known.var() + 1e-5))
        if s.reward_beta:
            penalty = formulas.kl_estimate(made.old, made.ref, s.reward_kl) * mask
            self.exercised["reward_kl"] += int((penalty.abs() > 1e-9).sum())
            found["actor/reward_kl_penalty"] = float((penalty.sum(1) / mask.sum(1)).mean())
            found["actor/reward_kl_penalty_coeff"] = s.reward_beta
        return found


def _three(name: str, values: Any) -> dict[str, float]:
    return {f"{name}/mean": float(values.mean()), f"{name}/max": float(values.max()), f"{name}/min": float(values.min())}


def _mean_of_rounds(values: Any, mask: Any) -> float:
    return float((values * mask).sum() / mask.sum())


def _average(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _summed(values: Sequence[Any], terms: Sequence[formulas.Terms], tokens: float, s: ShadowSettings) -> float:
    return sum(float(formulas.reduced(value, each.mask, 0.0, s, tokens)) for value, each in zip(values, terms, strict=True))


if __name__ == "__main__":
    main()
