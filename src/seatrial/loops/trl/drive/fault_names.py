"""The faults that can be injected into this loop, by name."""

from __future__ import annotations

FAULTS = {
    "constant-reward": "every completion earns 0.5: no advantage anywhere",
    "reward-raises": "the reward function raises at its third call",
    "no-optimizer-step": "the optimizer's step does nothing",
    "nan-weight": "one weight becomes NaN after step 2",
    "nan-loss": "the reported loss is NaN at step 3, the gradient is not",
    "skip-update": "the optimizer updates the weights at every second step only",
    "frozen-layer": "the first layer is frozen although everything should train",
    "wrong-reference": "the reference model is not the policy's starting point",
    "wrong-mask": "generation attends to padding",
    "half-advantages": "half of the advantages are zero",
    "train-base": "a base weight is trained although LoRA should freeze it",
    "frozen-adapter": "adapter weights are put back after every step",
    "forget-optimizer": "the checkpoint's optimizer state is not restored",
    "forget-rng": "the checkpoint's random number generators are not restored",
    "skip-refit": "the generator keeps its old weights after the first refit",
    "flip-bit": "one bit of one weight is wrong after each refit",
    "swap-layers": "two tensors of equal shape change places in the refit",
    "no-grad-sync": "ranks do not exchange gradients",
    "blind": "images are blanked before they reach the model",
    "blind-generation": "images are blanked for generation only",
    "swapped-pictures": "each row is generated with the picture of another",
    "early-exit": "the process ends with exit code 0 after step 2",
    "hang": "the process stops doing anything after step 2",
}
