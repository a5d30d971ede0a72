"""The faults that can be injected into this loop: what each does, the levels that must catch it, the stage that names it.

They act in faults.py, those of `STEP` within one training step; those of a refit act in the generation process.
"""

from __future__ import annotations

from seatrial.instruments.facts import LoopFault

EVERY = (0, 1, 2, 3, 4, 5, 6)
OTHER: dict[str, LoopFault] = {
    "constant-reward": LoopFault("every completion earns 0.5: no advantage anywhere", EVERY),
    "reward-raises": LoopFault("the reward function raises at its third call", EVERY),
    "no-optimizer-step": LoopFault("the optimizer's step does nothing", EVERY),
    "nan-weight": LoopFault("one weight becomes NaN after step 2", EVERY),
    "nan-loss": LoopFault("the reported loss is NaN from step 3 on, the gradient is not", (0, 1, 2, 3, 4, 5)),
    "skip-update": LoopFault("the optimizer updates the weights at every second step only", EVERY),
    "frozen-layer": LoopFault("the first layer is frozen although everything should train", (0, 2, 3, 4, 6), "weights"),
    "wrong-reference": LoopFault("the reference model is not the policy's starting point", (0,), "reference"),
    "wrong-mask": LoopFault("generation attends to padding", (0, 1, 5), "sampling"),
    "half-advantages": LoopFault("half of the advantages are zero", (0, 1, 2, 3, 4, 5), "advantage"),
    "train-base": LoopFault("a base weight is trained although LoRA should freeze it", (1,)),
    "frozen-adapter": LoopFault("adapter weights are put back after every step", (1,)),
    "forget-optimizer": LoopFault("the checkpoint's optimizer state is not restored", (1,)),
    "forget-rng": LoopFault("the checkpoint's random number generators are not restored", (1,)),
    "skip-refit": LoopFault("the generator keeps its old weights after the first refit", (2, 3)),
    "flip-bit": LoopFault("one bit of one weight is wrong after each refit", (2, 3)),
    "swap-layers": LoopFault("two tensors of equal shape change places in the refit", (2, 3)),
    "truncated-payload": LoopFault("the payload of the third refit loses its last byte", (2,)),
    "replayed-payload": LoopFault("the third refit brings the payload of the second again", (2,)),
    "wrong-base": LoopFault("one bit of the generator differs before the first sparse refit", (2,)),
    "sync-skips-tensor": LoopFault("TRL's own sync to vLLM leaves one tensor out", (3,)),
    "sync-swaps-names": LoopFault("TRL's own sync to vLLM sends two tensors under each other's name", (3,)),
    "sync-mangles-name": LoopFault("TRL's own sync to vLLM leaves a wrapper's prefix on one name", (3,)),
    "dead-generator": LoopFault("the generation process is killed in the middle of the third refit", (2, 3)),
    "no-grad-sync": LoopFault("ranks do not exchange gradients", (4,)),
    "blind": LoopFault("images are blanked before they reach the model", (5,), "data"),
    "blind-generation": LoopFault("images are blanked for generation only", (5,), "data"),
    "swapped-pictures": LoopFault("each row is generated with the picture of another", (5,), "data"),
    "early-exit": LoopFault("the process ends with exit code 0 after step 2", EVERY),
    "hang": LoopFault("the process stops doing anything after step 2", EVERY),
}
STEP: dict[str, dict[str, str]] = {
    "weights": {
        "reinitialised-layer": "one layer keeps its random weights when the model is loaded",
        "rounded-weights": "the model is loaded through bfloat16",
        "swapped-weights": "two layers change places when the model is loaded",
        "lora-scaled-twice": "LoRA's scaling is applied twice",
        "lora-frozen-layer": "the adapters of the first layer do not train",
    },
    "data": {
        "stuck-sampler": "the sampler gives the first batch for ever",
        "unshuffled-data": "the sampler does not shuffle",
        "split-groups": "the completions of a group belong to several prompts",
        "repeated-micro-batch": "the first micro-batch is used again in place of the last",
        "shifted-columns": "reward functions get the dataset columns of the next prompt",
    },
    "sampling": {
        "cold-generation": "generation at 0.7 of the temperature",
        "no-top-p": "generation without top-p",
        "no-repetition-penalty": "generation without the repetition penalty",
        "stale-generation": "generation with the weights before the first step",
        "biased-draws": "tokens are drawn from a sharper distribution than the scores say",
    },
    "length": {
        "short-completions": "generation stops two tokens before the limit",
        "ignored-end": "completions go on after their end token",
        "stripped-end": "the end token is removed from completions",
    },
    "reward": {
        "shifted-rewards": "each completion gets the reward of the next",
        "shifted-texts": "reward functions get the texts of the next completion",
        "swapped-rewards": "two reward functions change places",
        "clipped-rewards": "rewards above 0.5 count as 0.5",
    },
    "advantage": {
        "batch-deviation": "advantages are divided by the batch's standard deviation instead of the group's",
        "swapped-reward-weights": "two reward weights change places",
        "absolute-advantages": "advantages lose their sign",
        "population-deviation": "the standard deviation is that of a population, not of a sample",
    },
    "reference": {
        "other-sync-alpha": "the reference is synced with another alpha",
        "never-synced": "the reference is never synced",
        "live-reference": "the policy is its own reference",
        "adapted-reference": "the reference keeps the adapters",
    },
    "logprob": {
        "untempered-logprobs": "log-probabilities without the temperature",
        "shifted-logprobs": "log-probabilities are those of the token before",
        "half-precision-logprobs": "log-probabilities are rounded to bfloat16",
        "truncated-old-logprobs": "old log-probabilities are zero from the fourth token on",
    },
    "ratio": {
        "other-epsilon": "the ratio is clipped at another epsilon",
        "unclipped-ratio": "the ratio is not clipped",
        "forgotten-policy": "the ratio is taken to the current policy, not to the one that generated",
        "one-sided-clip": "the ratio is clipped from above only",
    },
    "kl": {
        "double-kl": "the KL weight is doubled",
        "no-kl": "the KL term is left out",
        "uncorrected-kl": "the KL term without its importance weight",
        "sequence-ratio": "one ratio per sequence instead of per token, which the KL term's importance weight shows first",
    },
    "mask": {
        "unmasked-end": "the end token is left out of the loss mask",
        "masked-truncation": "truncated completions are masked",
        "padding-in-loss": "the loss mask covers padding",
        "masked-first-token": "the first token of each completion does not count in the loss",
    },
    "loss": {
        "double-loss": "the loss is doubled",
        "sequence-mean-loss": "each sequence is averaged before the batch is",
        "undivided-loss": "the loss is not divided by the accumulation steps",
        "own-token-count": "each micro-batch is divided by its own tokens",
    },
    "gradient": {
        "dropped-micro-batch": "the first micro-batch of an accumulation is lost",
        "detached-layer": "no gradient passes below the second layer",
        "kept-gradient": "the gradient of the step before is not cleared",
        "doubled-gradient": "one tensor's gradient counts twice",
        "lora-added-twice": "the adapters' output is added twice",
    },
    "clip": {
        "other-clip-norm": "the gradient is clipped at another norm",
        "no-clip": "the gradient is not clipped",
        "clip-each-tensor": "each tensor is clipped on its own",
    },
    "schedule": {
        "long-warmup": "warm-up takes a step too many",
        "stuck-schedule": "the schedule does not go on after the warm-up",
        "double-schedule": "the schedule goes on twice per step",
    },
    "update": {
        "third-rate-swapped-betas": "a third of the learning rate, with swapped betas",
        "decayed-norms": "weight decay on norms",
        "lost-parameter": "the optimizer does not know the first layer's norm",
        "rounded-update": "weights are rounded to bfloat16 after each step",
    },
    "logging": {
        "stale-metric": "the logged KL is that of the step before",
        "clipped-norm-logged": "the logged gradient norm is that after clipping",
        "last-loss-logged": "the logged loss is that of the last micro-batch",
        "next-rate-logged": "the logged learning rate is that of the next step",
    },
}
"""Silent faults of one step, by the stage that names them."""
AT_LEVEL_1 = ("lora-scaled-twice", "lora-frozen-layer", "adapted-reference", "lora-added-twice")  # those of adapters
FAULTS: dict[str, LoopFault] = OTHER | {
    name: LoopFault(text, (1,) if name in AT_LEVEL_1 else (0,), stage) for stage, faults in STEP.items() for name, text in faults.items()
}
