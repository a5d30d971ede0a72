"""Which of NeMo-RL's metrics mean what, and where those of a sound run stay."""

from __future__ import annotations

from seatrial.loops.nemo_rl.after.steps import AGREE, ERROR, FLOOR
from seatrial.model.signals import Bound, Signals

SIGNALS = Signals(
    loss=("train/loss", "train/critic/loss"),
    grad_norm=("train/(?:critic/)?grad_norm",),
    rate=("train/(?:critic/)?lr",),
    reward=("train/reward",),
    spreads=(("train/advantages/max", "train/advantages/min"),),
    lengths=("train/mean_gen_tokens_per_sample", "train/global_valid_toks"),
    entropy=("train/approx_entropy",),
    moving=(ERROR, "train/gen_kl_error"),
    counters=("train/total_num_tokens_seen",),
    not_negative=(
        "train/global_valid_(?:toks|seqs)",
        "train/num_(?:valid_samples|unmasked_tokens|masked_seqs_by_logprob_error)",
        "train/draft_loss",
    ),
    bounds=(
        Bound("train/loss", low=-1e6, high=1e6, floor=50, growth=100),
        Bound("train/critic/loss", high=1e6, floor=100, growth=100),
        Bound("train/grad_norm", high=1e6, floor=100, growth=300),
        # The maintained scripts allow 1500.
        Bound("train/critic/grad_norm", high=1e6, floor=1e4, growth=300),
        Bound("train/(?:critic/)?lr", high=10),
        # It is 1 at least, and 0 where every token is masked.
        Bound(ERROR, low=FLOOR, high=AGREE),
        Bound("train/max_seq_mult_prob_error", high=1e3),
        # The maintained scripts allow a median of 1.3 of asynchronous runs.
        Bound("train/(?:gen_kl_error|policy_kl_error|js_divergence_error|kl_penalty)", low=-5, high=100, floor=5, growth=100),
        Bound("train/approx_entropy", high=1e4, floor=20, growth=20),
        # A mean over all tokens: the clip of an update keeps it near 1.
        Bound("train/probs_ratio(?:_clamped)?", low=0.1, high=10),
        Bound("train/probs_ratio(?:_clamped)?_(?:min|max)", low=0, high=100),
        Bound("train/reward|train/advantages/.+", low=-1e9, high=1e9, floor=1e4, growth=1e3),
    ),
)
