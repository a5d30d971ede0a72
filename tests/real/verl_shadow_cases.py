"""The shadow's formulas against verl's own functions, and against values worked out by hand."""

from __future__ import annotations

import math
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import torch
from verl.trainer.ppo import core_algos
from verl.utils import torch_functional

from seatrial.instruments.batch_record import BatchRecord, events
from seatrial.instruments.shadow import formulas
from seatrial.instruments.shadow.interface import ShadowSettings
from seatrial.instruments.verl import shadow, verl_process, verl_settings

ROWS, TOKENS, GROUP = 8, 5, 4
ACTOR = "actor_rollout_ref.actor"


def batch() -> dict[str, Any]:
    """Rows of unequal length, in fp64."""
    made = torch.Generator().manual_seed(7)
    mask = torch.ones(ROWS, TOKENS, dtype=torch.long)
    for row, length in enumerate((5, 3, 1, 5, 2, 4, 5, 3)):
        mask[row, length:] = 0
    names = ("logps", "old", "ref", "values", "predicted", "returns", "entropies")
    return {"mask": mask, "rewards": torch.rand(ROWS, generator=made, dtype=torch.float64)} | {
        name: torch.randn(ROWS, TOKENS, generator=made, dtype=torch.float64) for name in names
    }


def near(own: Any, other: Any, tolerance: float = 1e-6) -> None:
    assert torch.allclose(own.double(), other.double(), atol=tolerance, rtol=tolerance), (own, other)


def case_group_advantages() -> None:
    made = batch()
    rewards = formulas.token_rewards(made["rewards"], made["mask"], None, None, ShadowSettings(max_steps=1))
    for scaled in (True, False):
        index = numpy.repeat(numpy.arange(ROWS // GROUP), GROUP)
        theirs, _ = core_algos.compute_grpo_outcome_advantage(rewards, made["mask"], index, norm_adv_by_std_in_grpo=scaled)
        s = ShadowSettings(max_steps=1, group=GROUP, scale="group" if scaled else "none", std_floor=verl_settings.GRPO_FLOOR)
        near(formulas.advantages(made["rewards"].unsqueeze(1), s).unsqueeze(1) * made["mask"], theirs)


def case_gae_and_kl_in_the_reward() -> None:
    made = batch()
    for beta, kind in ((0.0, "kl"), (0.3, "kl"), (0.3, "low_var_kl"), (0.3, "mse"), (0.3, "abs")):
        s = ShadowSettings(max_steps=1, reward_beta=beta, reward_kl=verl_settings._kl(kind))
        own = formulas.token_rewards(made["rewards"], made["mask"], made["old"], made["ref"], s)
        plain = formulas.token_rewards(made["rewards"], made["mask"], None, None, s)
        near(own, plain - beta * core_algos.kl_penalty(made["old"], made["ref"], kind) * made["mask"])
        theirs = core_algos.compute_gae_advantage_return(own, made["values"], made["mask"], gamma=0.9, lam=0.7)
        for mine, other in zip(formulas.gae(own, made["values"], made["mask"], 0.9, 0.7), theirs, strict=True):
            near(mine * made["mask"], other * made["mask"])


def case_gae_by_hand() -> None:
    rewards, values = torch.tensor([[0.0, 0.0, 1.0]]).double(), torch.tensor([[0.5, 0.25, 0.75]]).double()
    _, returns = formulas.gae(rewards, values, torch.ones(1, 3), 0.5, 0.2)
    last = 1.0 - 0.75
    middle = 0.5 * 0.75 - 0.25 + 0.5 * 0.2 * last
    first = 0.5 * 0.25 - 0.5 + 0.5 * 0.2 * middle
    near(returns, torch.tensor([[first + 0.5, middle + 0.25, last + 0.75]], dtype=torch.float64), 1e-12)


def case_kl_estimates_and_their_gradients() -> None:
    made = batch()
    for name in ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3", "k1+", "k3+", "low_var_kl+"):
        one, two = (made["logps"].clone().requires_grad_() for _ in range(2))
        own = formulas.kl_estimate(one, made["ref"], verl_settings._kl(name))
        theirs = core_algos.kl_penalty(two, made["ref"], name)
        near(own, theirs)
        own.sum().backward()
        theirs.sum().backward()
        near(one.grad, two.grad)


def case_clipped_losses_in_every_reduction() -> None:
    made = batch()
    advantage = made["values"]
    for mode in formulas.REDUCTIONS:
        s = ShadowSettings(
            max_steps=1,
            loss_type=mode,
            epsilon_low=0.1,
            epsilon_high=0.3,
            dual_clip=1.5,
            kl_correction=False,
            micro_batch=ROWS,
            accumulation=2,
        )
        one, two = (made["logps"].clone().requires_grad_() for _ in range(2))
        terms = formulas.Terms(one, made["old"], None, made["entropies"], made["mask"].double(), advantage, s)
        own = formulas.reduced(terms.policy, terms.mask, 0.0, s, 50.0)
        config = SimpleNamespace(clip_ratio=0.2, clip_ratio_low=0.1, clip_ratio_high=0.3)
        config.get = lambda name, default: {"clip_ratio_c": 1.5}.get(name, default)
        config.global_batch_info = {"dp_size": 1, "batch_num_tokens": 50, "global_batch_size": 2 * ROWS, "loss_scale_factor": None}
        theirs, _ = core_algos.compute_policy_loss_vanilla(made["old"], two, advantage, made["mask"], mode, config)
        near(own, theirs)
        own.backward()
        theirs.backward()
        near(one.grad, two.grad)


def case_value_losses() -> None:
    made = batch()
    s = ShadowSettings(max_steps=1, loss_type="token-mean", micro_batch=ROWS)
    terms, clipped = formulas.value_terms(made["predicted"], made["values"], made["returns"], 0.2)
    loss, share = core_algos.compute_value_loss(made["predicted"], made["returns"], made["values"], made["mask"], 0.2, batch_num_tokens=50)
    near(formulas.reduced(terms, made["mask"], 0.0, s, 50.0), loss)
    near((clipped * made["mask"]).sum() / made["mask"].sum(), share)


def case_schedules_of_fsdp2() -> None:
    words = ["trainer.total_training_steps=9", "data.train_batch_size=8", f"{ACTOR}.ppo_mini_batch_size=4", f"{ACTOR}.ppo_epochs=2"]
    words += ["algorithm.adv_estimator=grpo", f"{ACTOR}.optim.lr=0.5", f"{ACTOR}.optim.lr_warmup_steps=3", f"{ACTOR}.strategy=fsdp2"]
    for kind, first in (("constant", "True"), ("cosine", "True"), ("cosine", "False")):
        more = [f"{ACTOR}.optim.lr_scheduler_type={kind}", f"{ACTOR}.optim.min_lr_ratio=0.1", f"{ACTOR}.optim.zero_indexed_step={first}"]
        s = verl_settings.settings([*words, *more])
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.5)
        if kind == "constant":
            theirs = torch_functional.get_constant_schedule_with_warmup(optimizer, 3)
        else:
            theirs = torch_functional.get_cosine_schedule_with_warmup(optimizer, 3, 9, 0.1, zero_indexed_step=first == "True")
        assert s.steps_per_round() == 4
        for step in range(36):
            assert math.isclose(formulas.rate(step + 1, s), optimizer.param_groups[0]["lr"], rel_tol=1e-12), (kind, first, step)
            if step % 4 == 3:
                optimizer.step()
                theirs.step()


def case_adam_with_odd_settings() -> None:
    s = ShadowSettings(max_steps=9, betas=(0.8, 0.95), epsilon=1e-6, weight_decay=0.1, decays="all")
    weight = torch.nn.Parameter(torch.linspace(-1, 1, 6, dtype=torch.float64))
    theirs, own = torch.optim.AdamW([weight], lr=0.01, betas=s.betas, eps=s.epsilon, weight_decay=0.1), formulas.Moments(s)
    for step in range(4):
        weight.grad = torch.sin(weight.detach() * (step + 1))
        expected = own.step({"w": weight.detach().clone()}, {"w": weight.grad}, 0.01)["w"]
        theirs.step()
        near(expected, weight.detach(), 1e-12)


def case_overrides_are_read_as_hydra_reads_them() -> None:
    words = ["algorithm.adv_estimator=gae", "trainer.total_training_steps=3", "data.train_batch_size=8", "actor_rollout_ref.rollout.n=4"]
    words += f"{ACTOR}.ppo_mini_batch_size=4 {ACTOR}.ppo_micro_batch_size_per_gpu=8 {ACTOR}.optim.betas=[0.8,0.95]".split()
    words += f"+{ACTOR}.strategy=fsdp2 critic.cliprange_value=0.1 critic.ppo_epochs=3 {ACTOR}.clip_ratio_low=null".split()
    s = verl_settings.settings(words)
    assert (s.micro_batch, s.accumulation, s.splits, s.iterations, s.rows(), s.prompts()) == (8, 2, 4, 1, 32, 8)
    assert (s.betas, s.epsilon_low, s.dual_clip, s.estimator, s.beta) == ((0.8, 0.95), 0.2, 3.0, "gae", 0.0)
    assert s.critic is not None
    assert (s.critic.value_clip, s.critic.iterations, s.critic.micro_batch, s.critic.free_split) == (0.1, 3, 16, True)
    assert s.unsupported == {}
    refused = verl_settings.settings([*words, f"{ACTOR}.policy_loss.loss_mode=gspo", f"{ACTOR}.optim.optimizer=SGD"]).unsupported
    assert {"loss", "gradient", "update"} <= set(refused)
    assert "loss_mode=gspo" in refused["loss"]


class Words:
    """A tokenizer of one character per token, from `a`; 0 is special."""

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        assert skip_special_tokens
        return "".join(chr(96 + token) for token in ids if token)

    def __call__(self, text: str, add_special_tokens: bool) -> dict[str, list[int]]:
        assert not add_special_tokens
        return {"input_ids": [ord(mark) - 96 for mark in text]}


def case_parts_become_one_record(tmp: Path) -> None:
    parts = tmp / verl_process.PARTS
    server, actor, critic = (BatchRecord(parts / name) for name in ("server", "actor", "critic"))
    for version in (0, 1):
        for prompt, tokens in (([5, 5], [1, 2]), ([6], [3]), ([5, 5], [2, 0])):  # as they happen to finish
            tensors = {"prompt": torch.tensor(prompt), "tokens": torch.tensor(tokens), "scores": torch.zeros(len(tokens), 9)}
            server.add("generated", "", {"version": version, "asked": {"temperature": 0.5}}, tensors)
    os.environ[verl_process.RECORD_VARIABLE] = str(parts)
    for row, text in ((1, "c"), (0, "b"), (0, "zz"), (0, "ab"), (1, "c"), (0, "b")):
        verl_process.rewarded(row, text, row + 0.5)
    del os.environ[verl_process.RECORD_VARIABLE]
    for record, prefix in ((actor, ""), (critic, "value_")):
        record.add(f"{prefix}started", "", {"trainable": []})
        for version in (0, 1):
            record.add(f"{prefix}loss", "", {"loss": 0.1, "round": version})
            record.add(f"{prefix}updated", "", {}, step=version + 1)
    (tmp / "metrics.jsonl").write_text('{"step": 1, "data": {"a": 1.0}}\n{"step": 2, "data": {"a": 2.0}}\n', encoding="utf-8")
    shadow.assemble(tmp, 3, Words(), [[5, 5], [6]])
    found = list(events(tmp))
    one = ["generated", "rewarded", "value_loss", "value_updated", "loss", "updated", "logged"]
    assert [event.kind for event in found] == ["started", "value_started", *one, *one]
    generated, rewarded = (event.tensors() for event in found[2:4])
    assert generated["prompt_ids/lengths"].tolist() == [2, 2, 1]
    assert generated["completion_ids"].tolist() == [[1, 2], [2, 0], [3, 0]]
    # The first completion was never given to the reward: the call with another text of its row stands there.
    assert rewarded["rows"].tolist() == [0, 0, 1]
    assert rewarded["lengths"].tolist() == [2, 2, 1]
    assert rewarded["completion_ids"].tolist() == [[26, 26], [2, 0], [3, 0]]
    assert not parts.exists()
    shadow.assemble(tmp, 3, Words(), [[5, 5], [6]])
    assert len(list(events(tmp))) == len(found)
