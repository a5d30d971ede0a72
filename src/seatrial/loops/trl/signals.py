"""Which of Trainer's metrics mean what, and where those of a sound run stay."""

from __future__ import annotations

from seatrial.model.signals import Bound, Signals

SIGNALS = Signals(
    loss=("train/loss",),
    grad_norm=("train/grad_norm",),
    rate=("train/learning_rate",),
    reward=("train/reward",),
    deviations=("train/reward_std",),
    ties=("train/frac_reward_zero_std",),
    lengths=("train/completions/(?:mean|max)_length",),
    entropy=("train/entropy",),
    moving=("train/kl",),
    counters=("train/epoch", "train/num_tokens"),
    shares=("train/clip_ratio(?:/.+)?", "train/completions/clipped_ratio", "train/mean_token_accuracy"),
    not_negative=("train/kl", "train/num_tokens", "train/completions/.*length", r"train/rewards/.+/std", "train/step_time"),
    ordered=(
        ("train/completions/min_length", "train/completions/mean_length"),
        ("train/completions/mean_length", "train/completions/max_length"),
        ("train/completions/min_terminated_length", "train/completions/max_terminated_length"),
    ),
    bounds=(
        # A policy's loss is near 0; sums over a sequence are larger. Norms are those before clipping: spikes of 30 times are common.
        Bound("train/loss", low=-1e6, high=1e6, floor=50, growth=100),
        Bound("train/grad_norm", high=1e6, floor=100, growth=300),
        Bound("train/learning_rate", high=10),
        # Per token: 20 nats are a probability of 2e-9.
        Bound("train/kl", high=1e4, floor=20, growth=100),
        # The logarithm of a vocabulary of 500 million.
        Bound("train/entropy", high=1e4, floor=20, growth=20),
        Bound("train/reward(?:s/.+/mean|s/.+/std|_std)?", low=-1e9, high=1e9, floor=1e4, growth=1e3),
        Bound("train/sampling/sampling_logp_difference/mean", high=1.0),
    ),
    control="control/",
)
