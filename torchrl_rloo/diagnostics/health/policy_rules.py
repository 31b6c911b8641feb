"""Rules about the policy: entropy, divergence from the reference, size of updates, sampler against trainer, critic."""

from __future__ import annotations

import math
import statistics

from torchrl_rloo.diagnostics.health.conditions import above, below, compared, grown, not_finite
from torchrl_rloo.diagnostics.health.history import History
from torchrl_rloo.diagnostics.health.rule import Evidence, Rule

_SPIKE = 10.0  # gradient norm over the median of the window
_MOST_UNSOLVED = 0.25  # smallest share of unsolved rows for which exploration matters


def entropy_collapse(history: History) -> Evidence | None:
    """Hold if completions of unsolved prompts have lost their entropy: a solved prompt needs none."""
    name, share = "outcome/unsolved/entropy", "outcome/unsolved/share"
    start, recent, unsolved = history.start(name), history.recent(name), history.recent(share)
    if start is None or unsolved is None or unsolved < _MOST_UNSOLVED or recent >= 0.1 * start:
        return None
    return compared(name, start, recent) | {share: unsolved}


def mode_collapse(history: History) -> Evidence | None:
    """Hold if the completions of a group are nearly all the same although most are wrong."""
    name, share = "diversity/distinct", "outcome/unsolved/share"
    start, recent, unsolved = history.start(name), history.recent(name), history.recent(share)
    if None in (start, recent, unsolved) or unsolved < _MOST_UNSOLVED or recent >= min(0.1, 0.5 * start):
        return None
    return compared(name, start, recent) | {share: unsolved}


def gradient_spikes(history: History) -> Evidence | None:
    """Hold if three of the latest 20 gradient norms are ten times the median."""
    norms = history.window("grad_norm")
    if len(norms) < 20:
        return None
    limit = _SPIKE * statistics.median(norms)
    spikes = [norm for norm in norms[-20:] if norm > limit > 0]
    return {"grad_norm": max(spikes), "spikes": len(spikes), "limit": limit} if len(spikes) >= 3 else None


def sampler_not_updated(history: History) -> Evidence | None:
    """Hold if the sampler stays exactly the reference although gradients are taken."""
    window = history.window("kl", 20)
    norm = history.recent("grad_norm")
    if len(window) < 20 or norm is None or norm == 0 or any(abs(value) > 1e-7 for value in window):
        return None
    return {"kl": window[-1], "grad_norm": norm}


def value_divergence(history: History) -> Evidence | None:
    """Hold if the values are worse than a constant: for 20 steps, or lately with a loss that has tripled."""
    name, loss = "explained_variance", grown("loss_critic", 3.0)(history)
    recent, long = history.recent(name), history.recent(name, 20)
    if recent is None or recent >= 0 or (loss is None and (long is None or long >= 0)):
        return None
    return {name: recent} | dict(loss or {})


def kl_controller_at_work(history: History) -> Evidence | None:
    """Hold if the controller has raised the KL coefficient fivefold."""
    first, now = history.first("kl_coeff"), history.now("kl_coeff")
    if not first or now is None or now < 5 * first:
        return None
    return compared("kl_coeff", first, now)


POLICY_RULES = (
    Rule(
        "nan",
        not_finite("loss", "grad_norm", "entropy", "kl", "kl_approx"),
        ("loss", "grad_norm", "entropy", "kl", "kl_approx"),
        "A metric of the update is not finite, so the weights are about to be lost.",
        "Lower optimizer.lr, set train.max_grad_norm=1, compute in float32, and look for infinite rewards.",
        "finite",
        "arithmetic",
        "stop",
        at=("loss", "grad_norm", "entropy", "kl", "kl_approx"),
    ),
    Rule(
        "entropy_collapse",
        entropy_collapse,
        ("outcome/unsolved/entropy", "outcome/unsolved/share"),
        "The policy no longer explores prompts that it has not solved: their entropy is below a tenth of its start.",
        "Raise the upper clip (loss.surrogate.high=0.28), set kl.coeff=0.01, or lower optimizer.lr.",
        "falls slowly, and stays above a tenth of its start on unsolved prompts",
        "https://arxiv.org/abs/2505.22617 (entropy mechanism), https://arxiv.org/abs/2503.14476 (clip-higher)",
        patience=3,
    ),
    Rule(
        "mode_collapse",
        mode_collapse,
        ("diversity/distinct", "outcome/unsolved/share"),
        "The completions of a prompt are nearly all the same, although most of them are wrong.",
        "Lower optimizer.lr, set kl.coeff=0.01, or raise generate.temperature and plan.num_generations.",
        "above 0.1 while a quarter of the rows is unsolved",
        "https://arxiv.org/abs/2503.14476 (DAPO, section 3.1)",
        patience=3,
    ),
    Rule(
        "entropy_growth",
        grown("entropy", 2.0, plus=0.3),
        ("entropy",),
        "The entropy has doubled: completions turn into noise, or the reward pays for it.",
        "Read completions of this step; lower optimizer.lr, set kl.coeff=0.01, and reward the whole completion.",
        "declines slowly from the start",
        "https://arxiv.org/abs/2402.14740",
        patience=3,
    ),
    Rule(
        "kl_high",
        above("kl", 2.0),
        ("kl",),
        "The policy has left the reference model: above 2 nats per token, rewards say little about it.",
        "Raise kl.coeff, set kl.target to hold a value, or lower optimizer.lr.",
        "rises slowly to a stable value far below 2 nats per token",
        "https://arxiv.org/abs/2210.10760 (reward falls again as the KL grows)",
        patience=5,
    ),
    Rule(
        "kl_runaway",
        above("kl", 2.0),
        ("kl",),
        "The KL to the reference has been above 2 nats per token for 20 steps.",
        "Stop, and go back to a checkpoint from before with a smaller optimizer.lr or a larger kl.coeff.",
        "not above 2 nats per token for 20 steps",
        "https://arxiv.org/abs/2210.10760",
        "stop",
        patience=20,
    ),
    Rule(
        "kl_controller",
        kl_controller_at_work,
        ("kl_coeff",),
        "The controller has raised the KL coefficient fivefold, and the KL is still above its target.",
        "Lower optimizer.lr, or accept a larger kl.target.",
        "below five times the initial coefficient",
        "https://arxiv.org/abs/1909.08593 (adaptive coefficient)",
        "info",
    ),
    Rule(
        "clip_share",
        above("clip_ratio/region_mean", 0.3),
        ("clip_ratio/region_mean",),
        "More than 30 % of the rows or tokens lose their gradient to the clip: updates are too large.",
        "Lower optimizer.lr, plan.epochs_per_batch or plan.minibatches.",
        "below 0.1",
        "https://arxiv.org/abs/1707.06347 (PPO)",
        patience=5,
    ),
    Rule(
        "gradient_spikes",
        gradient_spikes,
        ("grad_norm",),
        "The gradient norm spikes again and again to ten times its median.",
        "Set train.max_grad_norm=1 and reward.clip_range, and look for single rows with huge rewards or ratios.",
        "bounded and steady",
        "https://arxiv.org/abs/1211.5063 (clipping of exploding gradients)",
    ),
    Rule(
        "sampler_gap",
        above("kl_approx", 0.1),
        ("kl_approx",),
        "Sampler and trainer have drifted apart: 0.1 nats per token in the rows trained on.",
        "Set sampler.sync_every=1, lower collector.max_staleness, or set loss.correction=tis.",
        "below 0.01 nats per token on-policy, below 0.1 off-policy",
        "http://joschu.net/blog/kl-approx.html (k3), https://fengyao.notion.site/off-policy-rl (sampler mismatch)",
        patience=3,
    ),
    Rule(
        "parity",
        above("parity/mean", 0.1, n=3),
        ("parity/mean",),
        "Sampler and trainer disagree on the same tokens: wrong weights, types or sampling settings in the sampler.",
        "Run the self-test of the engine, use equal dtypes, and check that weight updates arrive.",
        "below 0.01 in float32, below 0.05 in bfloat16",
        "https://arxiv.org/abs/2506.13585 (MiniMax-M1: mismatch of training and inference)",
    ),
    Rule(
        "effective_sample_size",
        below("ESS", 0.5),
        ("ESS",),
        "The importance weights leave less than half of the rows effective: updates are noise.",
        "Lower sampler.sync_every or collector.max_staleness, use fewer epochs, or set loss.correction=tis.",
        "above 0.5",
        "https://doi.org/10.1080/01621459.1998.10473765 (Liu and Chen 1998: resample below half)",
        patience=3,
    ),
    Rule(
        "log_ratio",
        above("log_ratio_max", math.log(1000)),
        ("log_ratio_max",),
        "Single tokens are a thousand times more likely to trainer or sampler than to the other.",
        "Sync more often, lower optimizer.lr, or mask such tokens: loss.correction=icepop.",
        "clustered around 0",
        "https://arxiv.org/abs/2510.18855 (IcePop)",
        patience=5,
    ),
    Rule(
        "few_tokens_kept",
        below("kept", 0.5),
        ("kept",),
        "Corrections and masks take the gradient from more than half of the tokens.",
        "Sync more often, or widen the bounds of loss.correction.",
        "above 0.9",
        "https://arxiv.org/abs/2510.18855 (IcePop masks about 1 to 2 of 1,000 tokens)",
        patience=5,
    ),
    Rule(
        "sampler_not_updated",
        sampler_not_updated,
        ("kl", "grad_norm"),
        "The sampler has been exactly the reference model for 20 steps, although gradients are taken.",
        "Set sampler.sync_every=1; in your own loop, call update_policy_weights_() after each step.",
        "above 0 after the first update",
        "invariant of the loop",
    ),
    Rule(
        "value_divergence",
        value_divergence,
        ("explained_variance", "loss_critic"),
        "The value function explains the returns worse than their mean: it diverges, or learns nothing.",
        "Lower the critic's learning rate and bound its gradient norm, train it alone for some steps first, or use an "
        "algorithm without a critic.",
        "loss falls, explained variance above 0",
        "https://arxiv.org/abs/2009.01325 (value function initialized from the reward model)",
        patience=5,
    ),
)
