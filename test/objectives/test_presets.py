"""Each published method on one batch, against the formula of its paper written out by hand."""

from __future__ import annotations

import inspect
import math
import statistics
from dataclasses import replace

import pytest
import torch
from tensordict import TensorDict, TensorDictBase
from torchrl.data import LazyStackStorage, ReplayBuffer
from torchrl.modules.llm.policies import LogProbs, Masks, Tokens

from torchrl_rloo.data import keys, stack_rows
from torchrl_rloo.data.rows import action_tokens, gather_actions, ragged
from torchrl_rloo.functional.kl import k1, kl_penalized_reward
from torchrl_rloo.modules.policies import ScoredActions
from torchrl_rloo.objectives import KL, PRESETS, AdaptiveKLCoefficient, Preset, RLOOLoss, make_method, presets
from torchrl_rloo.replay import MCAdvantage

G, PROMPTS = 4, 2
LENGTHS = [3, 5, 1, 4, 2, 6, 3, 4]
REWARDS = [1.0, 0.0, 0.25, 1.0, 0.0, 0.0, 1.0, 0.5]
CONSTANT = 10
N, TOKENS = len(LENGTHS), sum(LENGTHS)


def numbers(seed: int, scale: float) -> list[list[float]]:
    """Return one number for each action token of each row, exact in float32."""
    generator = torch.Generator().manual_seed(seed)
    return [(scale * torch.randn(n, generator=generator)).tolist() for n in LENGTHS]


SAMPLER = [[-abs(x) - 0.2 for x in row] for row in numbers(0, 1.5)]
REFERENCE = [[x + d for x, d in zip(*rows, strict=True)] for rows in zip(SAMPLER, numbers(1, 0.5), strict=True)]
DRIFT = numbers(2, 0.25)  # increase of the log-probs since sampling


class LogProbTable(torch.nn.Module):
    """Policy whose parameters are the log-probs of the action tokens."""

    def __init__(self, log_probs: list[list[float]]) -> None:
        super().__init__()
        rows = [torch.nn.functional.pad(torch.tensor(r, dtype=torch.float64), (0, 8 - len(r))) for r in log_probs]
        self.log_probs = torch.nn.Parameter(torch.stack(rows))

    def score(self, rows: TensorDictBase) -> ScoredActions:
        actions = action_tokens(rows)
        which = torch.stack([row["which"] for row in rows.unbind(0)])
        own = torch.where(actions.mask, self.log_probs[which][:, : actions.mask.shape[1]], 0.0)
        return ScoredActions(log_probs=own, entropy=torch.zeros_like(own), actions=actions)


def full(values: list[float]) -> torch.Tensor:
    """Return the action tokens' values after a prompt of two tokens."""
    return torch.tensor([0.0, 0.0, *values])


@pytest.fixture(scope="module")
def batch() -> TensorDictBase:
    rows = []
    for i, n in enumerate(LENGTHS):
        action = torch.tensor([False, False] + [True] * n)
        row = TensorDict(
            {
                "which": torch.tensor(i),
                keys.GROUP_ID: torch.tensor(i // G),
                keys.REWARD: torch.tensor([[REWARDS[i]]]),
                keys.REWARDS: torch.tensor([REWARDS[i]]),
                keys.ORIGIN: torch.tensor(keys.SAMPLED if i % G else keys.GREEDY),
                keys.REF_LOG_PROBS: full(REFERENCE[i]),
            }
        )
        row.set("tokens", Tokens(full=torch.arange(n + 2)))
        row.set("masks", Masks(all_assistant_mask=action, all_attention_mask=torch.ones_like(action)))
        row.set("log_probs", LogProbs(full=full(SAMPLER[i])))
        rows.append(row)
    return stack_rows(rows)


def method_of(name: str, **settings) -> Preset:
    """Build a method with the numbers of a run, and its default KL unless another is given."""
    numbers_of = {"max_new_tokens": CONSTANT, "prompts_per_step": PROMPTS, "num_generations": G}
    numbers_of |= {"reward_weights": [1.0]} if name == "gdpo" else {}
    if name == "pass_at_k":  # four of four members would never fail in this batch
        settings["advantage"] = {"estimator": {"k": 2}} | settings.get("advantage", {})
    # The covariances and the changes of probabilities in this batch are small
    narrow = {"clip_cov": {"covariance": {"low": 0.2}}, "dppo": {"surrogate": {"delta": 0.05}}}.get(name, {})
    settings["loss"] = narrow | settings.get("loss", {})
    return make_method(name, **numbers_of | {"kl": "default"} | settings)


def gradients_of(method: Preset, batch: TensorDictBase) -> list[list[float]]:
    """Return the gradient of the loss with respect to the log-prob of each action token."""
    table = LogProbTable([[x + d for x, d in zip(*r, strict=True)] for r in zip(SAMPLER, DRIFT, strict=True)])
    rows = [row.clone() for row in batch.unbind(0)]
    if coeff := float(method.reward_kl_arguments["kl_to_ref_coeff"]):  # as KLRewardTransform does
        actions = action_tokens(batch)
        kl = k1(*(gather_actions(ragged(batch, key), actions) for key in (keys.LOG_PROBS, keys.REF_LOG_PROBS)))
        for row, reward in zip(rows, kl_penalized_reward(torch.tensor(REWARDS), kl, coeff), strict=True):
            row.set(keys.REWARD, reward.reshape(1, 1))
    transform = MCAdvantage(**method.advantage_arguments)
    buffer = ReplayBuffer(storage=LazyStackStorage(N), transform=transform)
    buffer.extend(stack_rows(rows))
    RLOOLoss(table, **method.loss_arguments)(buffer[:]).loss.backward()
    return [table.log_probs.grad[i, :n].tolist() for i, n in enumerate(LENGTHS)]


# --- the papers ---


def groups_of(values: list[float]) -> list[list[float]]:
    return [values[k * G : (k + 1) * G] for k in range(PROMPTS)]


def leave_one_out(rewards: list[float]) -> list[float]:
    """Return RLOO advantages: the reward minus the mean of the other rewards."""
    return [r - (sum(group) - r) / (G - 1) for group in groups_of(rewards) for r in group]


def subtract_group_mean(rewards: list[float]) -> list[float]:
    """Return Dr. GRPO advantages: the reward minus the mean of the group."""
    return [r - statistics.mean(group) for group in groups_of(rewards) for r in group]


def normalize_by_group(rewards: list[float]) -> list[float]:
    """Return GRPO advantages: normalized by mean and standard deviation of the group."""
    return [(r - statistics.mean(g)) / (statistics.stdev(g) + 1e-4) for g in groups_of(rewards) for r in g]


def whiten_batch(values: list[float]) -> list[float]:
    """Return REINFORCE++ advantages: normalized by mean and standard deviation of the batch."""
    mean, std = statistics.mean(values), statistics.stdev(values)
    return [(value - mean) / (std + 1e-4) for value in values]


def subtract_kl(beta: float) -> list[float]:
    """Return ``r - beta sum_t (log pi_old - log pi_ref)``."""
    return [r - beta * sum(s - f for s, f in zip(SAMPLER[i], REFERENCE[i], strict=True)) for i, r in enumerate(REWARDS)]


def kl_to_go(i: int, t: int, bound: float = math.inf) -> float:
    gaps = [s - f for s, f in zip(SAMPLER[i], REFERENCE[i], strict=True)]
    return sum(min(max(gap, -bound), bound) for gap in gaps[t:])


def ppo(i: int, t: int, advantage: float, low: float = 0.2, high: float = 0.2) -> float:
    """Return d min(rho A, clip(rho) A) / d log pi."""
    rho = math.exp(DRIFT[i][t])
    flat = rho > 1 + high if advantage > 0 else rho < 1 - low
    return 0.0 if flat else rho * advantage


def by_token(formula) -> list[list[float]]:
    return [[formula(i, t) for t in range(n)] for i, n in enumerate(LENGTHS)]


def rloo():
    """Compute 1/N sum_i A_i sum_t grad log pi, A from rewards minus 0.03 KL (Ahmadian et al.)."""
    advantages = leave_one_out(subtract_kl(0.03))
    return by_token(lambda i, t: -advantages[i] / N)


def rloo_trl():
    """Compute 1/N sum_i min(rho_i A_i, clip(rho_i) A_i), rho_i of the whole sequence, KL 0.05 (TRL)."""
    advantages = leave_one_out(subtract_kl(0.05))

    def formula(i, t):
        rho = math.exp(sum(DRIFT[i]))
        flat = rho > 1.2 if advantages[i] > 0 else rho < 0.8
        return 0.0 if flat else -rho * advantages[i] / N

    return by_token(formula)


def rloo_openrlhf():
    """Compute leave-one-out of the rewards, then each token's clamped KL to go, PPO over all tokens (OpenRLHF)."""
    base = leave_one_out(REWARDS)
    return by_token(lambda i, t: -ppo(i, t, base[i] - 0.01 * kl_to_go(i, t, 10.0)) / TOKENS)


def grpo():
    """Compute 1/G sum_i 1/|o_i| sum_t (min(...) - beta (ref/pi - log ref/pi - 1)) (Shao et al., equation 3)."""
    advantages = normalize_by_group(REWARDS)

    def formula(i, t):
        present = SAMPLER[i][t] + DRIFT[i][t]
        kl_gradient = 1 - math.exp(REFERENCE[i][t] - present)
        return (-ppo(i, t, advantages[i]) + 0.04 * kl_gradient) / (N * LENGTHS[i])

    return by_token(formula)


def dr_grpo():
    """Compute the loss without division by the standard deviation or the length (Liu et al.)."""
    advantages = subtract_group_mean(REWARDS)
    return by_token(lambda i, t: -ppo(i, t, advantages[i]) / (N * CONSTANT))


def dapo():
    """Compute 1/sum_i |o_i| sum_it, clip at 1 - 0.2 and 1 + 0.28 (Yu et al., equation 8)."""
    advantages = normalize_by_group(REWARDS)
    return by_token(lambda i, t: -ppo(i, t, advantages[i], 0.2, 0.28) / TOKENS)


def gspo():
    """Compute s_i = (pi / pi_old)^(1 / |o_i|), clipped as a whole (Zheng et al., equations 5 to 7)."""
    advantages = normalize_by_group(REWARDS)

    def formula(i, t):
        ratio = math.exp(sum(DRIFT[i]) / LENGTHS[i])
        flat = ratio > 1 + 4e-4 if advantages[i] > 0 else ratio < 1 - 3e-4
        return 0.0 if flat else -ratio * advantages[i] / (N * LENGTHS[i])

    return by_token(formula)


def cispo():
    """Compute 1/sum |o_i| sum_it sg(clip(rho)) A grad log pi (MiniMax, equation 4)."""
    advantages = normalize_by_group(REWARDS)
    return by_token(lambda i, t: -min(math.exp(DRIFT[i][t]), 5.0) * advantages[i] / TOKENS)


def reinforce_pp():
    """Compute r - beta sum_{k >= t} KL_k, whitened over the tokens of the batch, with PPO (Hu et al.)."""
    raw = by_token(lambda i, t: REWARDS[i] - 0.01 * kl_to_go(i, t))
    flat = iter(whiten_batch([a for row in raw for a in row]))
    advantages = [[next(flat) for _ in row] for row in raw]
    return by_token(lambda i, t: -ppo(i, t, advantages[i][t]) / TOKENS)


def reinforce_pp_baseline():
    """Compute the reward minus the group mean, whitened over the batch, with PPO and k2 in the loss (Hu et al.)."""
    advantages = whiten_batch(subtract_group_mean(REWARDS))

    def formula(i, t):
        gap = SAMPLER[i][t] + DRIFT[i][t] - REFERENCE[i][t]
        return (-ppo(i, t, advantages[i]) + 0.01 * gap) / TOKENS

    return by_token(formula)


def luspo():
    """Compute GSPO's objective times the length of the sequence (Liu et al.)."""
    advantages = normalize_by_group(REWARDS)

    def formula(i, t):
        ratio = math.exp(sum(DRIFT[i]) / LENGTHS[i])
        flat = ratio > 1 + 2.5e-3 if advantages[i] > 0 else ratio < 1 - 2e-3
        return 0.0 if flat else -LENGTHS[i] * ratio * advantages[i] / (N * LENGTHS[i])

    return by_token(formula)


def gmpo():
    """Compute the geometric mean of the ratios, clipped in log space by the advantage's sign (Zhao et al.)."""
    advantages = normalize_by_group(REWARDS)

    def clipped(i, t):
        return min(DRIFT[i][t], 0.4) if advantages[i] > 0 else max(DRIFT[i][t], -0.4)

    def formula(i, t):
        mean = sum(clipped(i, k) for k in range(LENGTHS[i])) / LENGTHS[i]
        return -math.exp(mean) * (clipped(i, t) == DRIFT[i][t]) * advantages[i] / (N * LENGTHS[i])

    return by_token(formula)


def sapo():
    """Compute the gradient of 4 / tau sigmoid(tau (rho - 1)) A, averaged over each sequence."""
    advantages = normalize_by_group(REWARDS)

    def formula(i, t):
        rho, tau = math.exp(DRIFT[i][t]), 1.0 if advantages[i] > 0 else 1.05
        gate = 1 / (1 + math.exp(-tau * (rho - 1)))
        return -4 * gate * (1 - gate) * rho * advantages[i] / (N * LENGTHS[i])

    return by_token(formula)


def dppo():
    """Compute rho A where the probability moved by at most 0.05 in the direction of the advantage."""
    advantages = normalize_by_group(REWARDS)

    def formula(i, t):
        shift = math.exp(SAMPLER[i][t] + DRIFT[i][t]) - math.exp(SAMPLER[i][t])
        return (
            0.0 if abs(shift) > 0.05 and shift * advantages[i] > 0 else -math.exp(DRIFT[i][t]) * advantages[i] / TOKENS
        )

    return by_token(formula)


def vespo():
    """Compute rho^k exp(lambda (1 - rho)) A with the ratio of the whole sequence."""
    advantages = normalize_by_group(REWARDS)

    def formula(i, t):
        k, rate = (2.0, 3.0) if advantages[i] >= 0 else (3.0, 2.0)
        rho = math.exp(sum(DRIFT[i]))
        return -(rho**k) * math.exp(rate * (1 - rho)) * advantages[i] / TOKENS

    return by_token(formula)


def token_covariances(advantages: list[float]) -> dict[tuple[int, int], float]:
    """Return (log pi - mean)(A - mean) of each token, over all tokens (Cui et al.)."""
    places = [(i, t) for i, n in enumerate(LENGTHS) for t in range(n)]
    log_prob = statistics.mean(SAMPLER[i][t] for i, t in places)
    advantage = statistics.mean(advantages[i] for i, _ in places)
    return {(i, t): (SAMPLER[i][t] - log_prob) * (advantages[i] - advantage) for i, t in places}


def clip_cov():
    """Compute PPO without one token whose covariance is in (0.2, 5): a share of 2e-4 is less than one."""
    advantages = normalize_by_group(REWARDS)
    inside = [place for place, c in token_covariances(advantages).items() if 0.2 < c < 5]
    out = max(inside, key=lambda place: torch.tensor(SAMPLER[place[0]][place[1]]).item() * 1e7 % 1)  # of float32
    return by_token(lambda i, t: 0.0 if (i, t) == out else -ppo(i, t, advantages[i]) / TOKENS)


def kl_cov():
    """Compute rho A, and a penalty |log rho| for the token of the largest covariance."""
    advantages = normalize_by_group(REWARDS)
    covariances = token_covariances(advantages)
    largest = max(covariances, key=covariances.get)

    def formula(i, t):
        penalty = math.copysign(1.0, DRIFT[i][t]) if (i, t) == largest else 0.0
        return (penalty - math.exp(DRIFT[i][t]) * advantages[i]) / TOKENS

    return by_token(formula)


def gpg():
    """Compute log pi times the reward minus the group mean; all groups have a signal, so alpha is 1 (Chu et al.)."""
    advantages = subtract_group_mean(REWARDS)
    return by_token(lambda i, t: -advantages[i] / TOKENS)


def gdpo():
    """Compute GRPO's loss with the advantages of each reward, summed, then whitened over the batch."""
    advantages = whiten_batch(normalize_by_group(REWARDS))
    return by_token(lambda i, t: -ppo(i, t, advantages[i]) / (N * LENGTHS[i]))


def maxrl():
    """Compute (r - mean) / mean (Tajwar et al.)."""
    advantages = [(r - statistics.mean(g)) / statistics.mean(g) for g in groups_of(REWARDS) for r in g]
    return by_token(lambda i, t: -advantages[i] / N)


def opo():
    """Compute the reward minus the mean reward of all tokens of the group (Hao et al.)."""
    pairs = list(zip(groups_of(REWARDS), groups_of(LENGTHS), strict=True))
    means = [sum(r * n for r, n in zip(*pair, strict=True)) / sum(pair[1]) for pair in pairs]
    return by_token(lambda i, t: -(REWARDS[i] - means[i // G]) / N)


def remax():
    """Compute the reward minus that of the greedy completion, the first of each group (Li et al.)."""
    advantages = [REWARDS[i] - REWARDS[i // G * G] for i in range(N)]
    return by_token(lambda i, t: -advantages[i] / (N - PROMPTS))


def dro():
    """Compute the gradient of (A - beta log rho)^2 / (2 beta), rho of the sequence (Richemond et al.)."""
    advantages = leave_one_out(REWARDS)
    return by_token(lambda i, t: -(advantages[i] - 0.05 * sum(DRIFT[i])) / N)


def pass_at_k():
    """Compute the analytic advantages of pass@2 (Chen et al., equations 14 and 15)."""
    advantages = []
    for group in groups_of(REWARDS):
        wrong = sum(r < 1 for r in group)
        mean = 1 - math.comb(wrong, 2) / math.comb(G, 2)
        sigma = math.sqrt(mean * (1 - mean))
        of_wrong = (1 - mean - math.comb(wrong - 1, 1) / math.comb(G - 1, 1)) / sigma
        advantages += [(1 - mean) / sigma if r >= 1 else of_wrong for r in group]
    return by_token(lambda i, t: -ppo(i, t, advantages[i]) / TOKENS)


FORMULAS = {
    f.__name__: f
    for f in (
        *(rloo, rloo_trl, rloo_openrlhf, grpo, dr_grpo, dapo, gspo, luspo, gmpo, cispo, sapo, dppo, vespo, clip_cov),
        *(kl_cov, gpg, gdpo, maxrl, opo, remax, dro, pass_at_k, reinforce_pp, reinforce_pp_baseline),
    )
}
WITHOUT_CRITIC = [name for name, preset in PRESETS.items() if not preset.critic]


def test_every_method_without_a_critic_has_its_formula_here():
    assert set(WITHOUT_CRITIC) == set(FORMULAS)


@pytest.mark.parametrize("name", WITHOUT_CRITIC)
def test_the_gradient_is_that_of_the_paper(batch, name):
    ours, expected = gradients_of(method_of(name), batch), FORMULAS[name]()
    for i in range(N):
        assert ours[i] == pytest.approx(expected[i], rel=1e-4, abs=2e-6), f"row {i}"


def test_the_batch_tells_the_methods_apart_and_meets_their_clips():
    """Otherwise the test above would prove little."""
    gradients = {name: [x for row in formula() for x in row] for name, formula in FORMULAS.items()}
    for a in gradients:
        for b in gradients:
            if a < b:
                scale = max(map(abs, gradients[a]))
                different = (abs(x - y) for x, y in zip(gradients[a], gradients[b], strict=True))
                assert max(different) > 0.01 * scale, (a, b)
    for name in ("rloo_trl", "rloo_openrlhf", "dr_grpo", "dapo", "gspo", "reinforce_pp"):
        assert 0 < sum(x == 0 for x in gradients[name]) < TOKENS, name


def test_the_loss_of_ppo_is_the_clip_of_each_token(batch):
    preset = PRESETS["ppo"]
    assert preset.critic
    advantages = numbers(3, 1.0)
    rows = [row.clone() for row in batch.unbind(0)]
    for row, values in zip(rows, advantages, strict=True):
        row.set(keys.ADVANTAGE, full(values)[:, None])
    table = LogProbTable([[x + d for x, d in zip(*r, strict=True)] for r in zip(SAMPLER, DRIFT, strict=True)])
    RLOOLoss(table, **preset.loss_arguments)(stack_rows(rows)).loss.backward()
    for i, n in enumerate(LENGTHS):
        expected = [-ppo(i, t, advantages[i][t]) / TOKENS for t in range(n)]
        assert table.log_probs.grad[i, :n].tolist() == pytest.approx(expected, rel=1e-5, abs=1e-7)


def places_of(method: Preset) -> list[float]:
    """Return the KL coefficients of the reward, the advantage and the loss."""
    token = method.advantage_arguments.get("kl")
    in_loss = method.loss_arguments.get("kl_to_ref_coeff", 0.0)
    return [float(c) for c in (method.reward_kl_arguments["kl_to_ref_coeff"], token.coeff if token else 0.0, in_loss)]


@pytest.mark.parametrize("credit", [{"name": "normalize_then_sum", "weights": [1.0]}, "turn", "token"])
def test_a_kl_in_the_summed_reward_needs_advantages_of_that(credit):
    with pytest.raises(ValueError, match="kl.where='reward' has no effect with advantage.credit="):
        method_of("grpo", advantage={"credit": credit}, kl={"where": "reward", "coeff": 0.1})
    assert method_of("grpo", advantage={"credit": credit}, kl={"where": "loss", "coeff": 0.1}).kl.where == "loss"


@pytest.mark.parametrize("where", ["reward", "token", "loss"])
@pytest.mark.parametrize("name", WITHOUT_CRITIC)
def test_a_kl_can_be_moved_and_keeps_its_coefficient_alone(name, where):
    if PRESETS[name].advantage.get("credit") is not None and where == "reward":
        return  # see the test above
    own = PRESETS[name].kl
    kl = {"where": where} | ({} if own else {"coeff": 0.05})
    if where == "token" and PRESETS[name].loss["ratio"] == "sequence":
        with pytest.raises(ValueError, match="loss.ratio='sequence'; set kl.where='reward' or 'loss'"):
            method_of(name, kl=kl)
        return
    method = method_of(name, kl=kl)
    coeff = own.coeff if own else 0.05
    assert method.kl == (own if own and own.where == where else KL(where, coeff))
    assert places_of(method) == [coeff if place == where else 0.0 for place in ("reward", "token", "loss")]
    RLOOLoss(LogProbTable(SAMPLER), **method.loss_arguments)
    MCAdvantage(**method.advantage_arguments)
    if PRESETS[name].advantage.get("credit") is not None:
        return
    other = method_of(name, kl={"coeff": 0.123})
    assert other.kl == (replace(own, coeff=0.123) if own else KL("reward", 0.123))
    assert places_of(method_of(name, kl=None)) == places_of(method_of(name, kl={"coeff": 0.0})) == [0.0] * 3


def test_a_kl_object_is_taken_as_it_is_and_one_without_a_place_is_off():
    assert method_of("grpo", kl=KL("token", 0.2, clip=3.0)).kl == KL("token", 0.2, clip=3.0)
    assert method_of("grpo", kl={"where": None}).kl is None
    assert method_of("grpo", kl=KL("loss", 0.0)).kl is None
    with pytest.raises(ValueError, match="kl.coeff=0.1 has no effect with kl.where=None"):
        method_of("grpo", kl={"where": None, "coeff": 0.1})


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        (
            "rloo_trl",
            {"loss": {"kl_to_ref_coeff": 0.04}},
            r"loss.kl_to_ref_coeff belongs to kl; set kl.coeff=... \(with",
        ),
        ("rloo_trl", {"advantage": {"token_kl_coeff": 0.01}}, "set kl.coeff=... .*kl.where=token"),
        ("grpo", {"loss": {"kl_to_ref_coeff": 0.1}}, "set kl.coeff=... .*kl.where=loss"),
        ("rloo_openrlhf", {"advantage": {"token_kl_coeff": 0.01}}, "set kl.coeff=..."),
        ("rloo_trl", {"loss": {"kl_to_ref_coeff": 0.04}, "kl": "default"}, "set kl.coeff=..."),
        ("grpo", {"loss": {"kl_estimator": "k1"}}, "set kl.estimator=..."),
        ("rloo_openrlhf", {"advantage": {"kl_clip": 1.0}}, "set kl.clip=..."),
        ("grpo", {"advantage": {"kl": KL("token", 0.1)}}, "advantage.kl belongs to kl; set kl=..."),
    ],
)
def test_a_kl_elsewhere_is_refused_with_the_setting_to_use(name, settings, message):
    with pytest.raises(ValueError, match=message):
        method_of(name, **{"kl": None} | settings)


def test_a_coefficient_that_moves_is_passed_on(batch):
    class Coefficient:
        value = 0.5

        def __float__(self) -> float:
            return self.value

    coefficient = Coefficient()
    method = method_of("grpo", kl={"coeff": coefficient})
    loose = gradients_of(method_of("grpo", kl={"coeff": 0.5}), batch)
    assert gradients_of(method, batch) == loose
    coefficient.value = 0.0
    assert gradients_of(method, batch) != loose


@pytest.mark.parametrize("name", ["rloo", "rloo_openrlhf", "grpo"])
def test_a_target_makes_the_coefficient_adapt_in_its_place(name):
    method = method_of(name, kl={"target": 2.0})
    assert isinstance(method.kl.coeff, AdaptiveKLCoefficient) and method.kl.coeff.target == 2.0
    before = sum(places_of(method))
    assert before == PRESETS[name].kl.coeff
    method.kl.coeff.update(100.0, num_samples=1000)
    assert sum(places_of(method)) == pytest.approx(before * 1.02)


def test_a_mapping_without_a_name_changes_fields_of_the_methods_own_choice():
    assert method_of("dapo", loss={"surrogate": {"low": 0.1}}).loss["surrogate"] == {
        "name": "clip",
        "low": 0.1,
        "high": 0.28,
    }
    assert method_of("cispo", loss={"surrogate": {"high": 2.0}}).loss["surrogate"] == {"name": "cispo", "high": 2.0}
    assert method_of("dapo", loss={"surrogate": {"name": "sapo"}}).loss["surrogate"] == {"name": "sapo"}


def test_numbers_that_a_run_gives_may_be_set():
    assert method_of("dr_grpo").loss["aggregation"] == {"name": "constant", "length": CONSTANT}
    assert method_of("dr_grpo", loss={"aggregation": {"length": 7}}).loss["aggregation"]["length"] == 7
    assert method_of("reinforce_pp").advantage["normalize"] == {"name": "whiten", "groups": PROMPTS}
    gdpo = method_of("grpo", advantage={"credit": "normalize_then_sum"}, reward_weights=[1.0, 2.0], kl=None).advantage
    assert gdpo["credit"]["weights"] == [1.0, 2.0] and gdpo["normalize"]["groups"] == PROMPTS
    off = method_of("grpo", advantage={"credit": "normalize_then_sum", "normalize": None}, reward_weights=[1.0])
    assert off.advantage["normalize"] is None


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"name": "grop"}, r"algorithm='grop' is unknown \(did you mean 'grpo'.*; valid: (?!.* 'ppo').*'rloo'"),
        ({"name": "ppo"}, "algorithm='ppo' needs a critic.*torchrl-rloo run ppo"),
        ({"name": "rloo", "critic": True}, "algorithm='rloo' has no critic; use torchrl-rloo run rloo"),
        ({"name": "ppo", "critic": True, "advantage": {"estimator": "rloo"}}, "advantage.estimator is unknown"),
        ({"loss": {"rato": "token"}}, r"loss.rato is unknown \(did you mean 'ratio'"),
        ({"loss": {"clip_epsilon": 0.2}}, "loss.clip_epsilon is unknown"),
        ({"advantage": {"estimatr": "rloo"}}, r"advantage.estimatr is unknown \(did you mean 'estimator'\?\)"),
        ({"advantage": {"num_generations": 3}}, "advantage.num_generations is unknown"),
        ({"kl": {"coef": 0.1}}, r"kl.coef is unknown \(did you mean 'coeff'\?\)"),
        ({"kl": "on"}, "kl='on' must be None, 'default', a mapping or a KL"),
        ({"kl": {"where": "rewards"}}, r"kl.where='rewards' is unknown \(did you mean 'reward'\?\)"),
        ({"kl": {"coeff": -0.1}}, "kl.coeff=-0.1 must be a finite number of at least 0"),
        ({"kl": {"coeff": 0.1, "estimator": "k4"}}, "kl.estimator='k4' is unknown"),
        ({"kl": {"coeff": 0.1, "clip": 1.0}}, "kl.clip=1.0 has no effect with kl.where='reward'"),
        ({"kl": {"where": "loss", "clip": 1.0}}, "kl.clip=1.0 has no effect with kl.where='loss'"),
        ({"kl": {"where": "token", "clip": 0.0}}, "kl.clip=0.0 must be None or a number above 0"),
        ({"kl": {"coeff": 0.0, "target": 1.0}}, "kl.target=1.0 requires a coefficient to adapt; set kl.coeff above 0"),
        ({"kl": {"coeff": 0.1, "target": 0.0}}, "target=0.0 must be a number above 0"),
        ({"name": "dr_grpo", "max_new_tokens": None}, "loss.aggregation='constant' requires length"),
        ({"name": "reinforce_pp", "prompts_per_step": None}, "advantage.normalize='whiten' requires groups"),
        ({"advantage": {"credit": "normalize_then_sum"}}, "advantage.credit='normalize_then_sum' requires weights"),
        (
            {"advantage": {"normalize": {"name": "whiten", "groups": 3}}},
            "groups=3 must be at most prompts_per_step=2, or no batch would be complete",
        ),
    ],
)
def test_settings_that_are_wrong_are_named(settings, message):
    with pytest.raises(ValueError, match=message):
        method_of(**{"name": "rloo"} | settings)


def test_gdpo_by_name_is_grpo_with_the_credit_of_gdpo():
    arguments = {"reward_weights": [1.0, 2.0], "prompts_per_step": PROMPTS}
    named = make_method("gdpo", **arguments)
    assert named.advantage == make_method("grpo", advantage={"credit": "normalize_then_sum"}, **arguments).advantage
    assert named.loss == PRESETS["grpo"].loss


def test_the_keys_of_an_advantage_are_those_of_the_transform():
    own = set(inspect.signature(MCAdvantage.__init__).parameters) - {"self", "num_generations", "kl"}
    assert set(presets.ADVANTAGE_KEYS) == own
