"""Which of verl's metrics mean what, and where those of a sound run stay."""

from __future__ import annotations

from seatrial.model.signals import Bound, Signals

SIGNALS = Signals(
    loss=("actor/(?:pg_)?loss", "critic/(?:vf_)?loss", "train/loss"),
    grad_norm=("(?:actor|critic|train)/grad_norm",),
    rate=("(?:actor|critic|train)/lr",),
    reward=("critic/score/mean", "critic/rewards/mean"),
    spreads=(("critic/advantages/max", "critic/advantages/min"), ("critic/score/max", "critic/score/min")),
    lengths=("response_length/(?:mean|max)", "train/global_tokens"),
    entropy=("actor/entropy",),
    moving=("actor/ppo_kl", "actor/kl_loss", "critic/vpred_mean"),
    counters=("training/global_step", "training/epoch", r"train/total_tokens\(B\)"),
    shares=(
        *("actor/pg_clipfrac(?:_lower)?", "critic/vf_clipfrac", "response/aborted_ratio"),
        *("(?:response_length(?:_non_aborted)?|prompt_length)/clip_ratio", "training/rollout_probs_diff_(?:max|mean)"),
    ),
    not_negative=(
        *(
            "rollout_corr/k3_kl",
            "training/rollout_probs_diff_std",
            "critic/vf_loss",
            "train/global_tokens",
            "rollout_corr/(?:training|rollout)_ppl",
        ),
        "(?:response_length(?:_non_aborted)?|prompt_length|global_seqlen)/(?:min|mean|max)",
    ),
    ordered=tuple(
        (f"{name}/{less}", f"{name}/{more}")
        for name in (
            "critic/score",
            "critic/rewards",
            "critic/advantages",
            "critic/returns",
            "critic/values",
            "response_length",
            "prompt_length",
        )
        for less, more in (("min", "mean"), ("mean", "max"), ("min", "max"))
    ),
    bounds=(
        Bound("(?:actor|critic|train)/(?:pg_|vf_)?loss", low=-1e6, high=1e6, floor=100, growth=100),
        Bound("(?:actor|train)/grad_norm", high=1e6, floor=100, growth=300),
        Bound("critic/grad_norm", high=1e6, floor=1e4, growth=300),
        Bound("(?:actor|critic|train)/lr", high=10),
        # Between the policy before and after an update: 5 nats per token are a probability of 0.7 %.
        Bound("actor/ppo_kl", low=-1e3, high=1e3, floor=5, growth=100),
        Bound("actor/kl_loss", low=-1e4, high=1e4, floor=20, growth=100),
        Bound("actor/entropy", high=1e4, floor=20, growth=20),
        Bound("critic/(?:score|rewards|returns|values|advantages)/.+|critic/vpred_mean", low=-1e9, high=1e9, floor=1e4, growth=1e3),
        # Generator and trainer: 6e-4 with stale weights of a tiny model, 5e-3 in the field's large ones.
        Bound("training/rollout_probs_diff_mean", high=0.1),
        Bound("training/rollout_actor_probs_pearson_corr", low=0.9, high=1.0001),
        Bound("rollout_corr/(?:kl|k3_kl|log_ppl_diff|log_ppl_abs_diff)", low=-5, high=5),
    ),
    control="control/",
)
