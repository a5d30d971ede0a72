"""The faults that can be injected into this loop: what each does, and the levels that are to catch it."""

from __future__ import annotations

EVERY = (0, 1, 2, 3, 4, 5, 6)
FAULTS: dict[str, tuple[str, tuple[int, ...]]] = {
    "constant-reward": ("every completion earns 0.5: no advantage anywhere", EVERY),
    "reward-raises": ("the reward function raises at its third call", EVERY),
    "no-optimizer-step": ("the optimizer's step does nothing", EVERY),
    "nan-weight": ("one weight becomes NaN after step 2", EVERY),
    "nan-loss": ("the reported loss is NaN from step 3 on, the gradient is not", (0, 1, 2, 3, 4, 5)),
    "skip-update": ("the optimizer updates the weights at every second step only", EVERY),
    "frozen-layer": ("the first layer is frozen although everything should train", (0, 2, 3, 4, 6)),
    "wrong-reference": ("the reference model is not the policy's starting point", (0,)),
    "wrong-mask": ("generation attends to padding", (0, 1, 5)),
    "half-advantages": ("half of the advantages are zero", (0, 1, 2, 3, 4, 5)),
    "train-base": ("a base weight is trained although LoRA should freeze it", (1,)),
    "frozen-adapter": ("adapter weights are put back after every step", (1,)),
    "forget-optimizer": ("the checkpoint's optimizer state is not restored", (1,)),
    "forget-rng": ("the checkpoint's random number generators are not restored", (1,)),
    "skip-refit": ("the generator keeps its old weights after the first refit", (2, 3)),
    "flip-bit": ("one bit of one weight is wrong after each refit", (2, 3)),
    "swap-layers": ("two tensors of equal shape change places in the refit", (2, 3)),
    "truncated-payload": ("the payload of the third refit loses its last byte", (2,)),
    "replayed-payload": ("the third refit brings the payload of the second again", (2,)),
    "wrong-base": ("one bit of the generator differs before the first sparse refit", (2,)),
    "dead-generator": ("the generation process is killed in the middle of the third refit", (2, 3)),
    "no-grad-sync": ("ranks do not exchange gradients", (4,)),
    "blind": ("images are blanked before they reach the model", (5,)),
    "blind-generation": ("images are blanked for generation only", (5,)),
    "swapped-pictures": ("each row is generated with the picture of another", (5,)),
    "early-exit": ("the process ends with exit code 0 after step 2", EVERY),
    "hang": ("the process stops doing anything after step 2", EVERY),
}
