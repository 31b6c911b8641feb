"""A text environment from the game to the gradient: collectors, evaluation, credit per turn."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torchrl.data import LazyStackStorage, ReplayBuffer

from torchrl_rloo.collectors import LLMCollector
from torchrl_rloo.data import keys, tensor_rows
from torchrl_rloo.data.rows import stack_rows
from torchrl_rloo.envs.text import GuessNumber, TextTask, text_env
from torchrl_rloo.envs.transforms import KLRewardTransform, TurnRewardTransform
from torchrl_rloo.evaluation import Evaluation
from torchrl_rloo.functional.kl import KL_ESTIMATORS
from torchrl_rloo.modules import TransformersWrapper
from torchrl_rloo.objectives import RLOOLoss
from torchrl_rloo.replay import MCAdvantage

GROUP = 4


class Parity:
    """Game whose turns earn unequal rewards under a random policy."""

    def reset(self, *, seed=None):
        self.n, self.seed = 0, seed
        return f"say {'abc'[seed % 3]}", {}

    def step(self, action):
        self.n += 1
        ends = self.n == 2 + len(action) % 3
        return "and then?", float(len(action) % 5) - 1.5, ends or self.n == 4, False, {}


@pytest.fixture(scope="module")
def policy(random_model, bpe) -> TransformersWrapper:
    kwargs = {"max_new_tokens": 24, "seed": 0}
    return TransformersWrapper(random_model, tokenizer=bpe, generate_kwargs=kwargs)


@pytest.fixture(scope="module")
def reference(make_model: Callable, bpe) -> TransformersWrapper:
    return TransformersWrapper(make_model(bpe, seed=5), tokenizer=bpe, generate=False)


@pytest.fixture(scope="module")
def stored(policy, reference, bpe):
    """Return eight multi-turn rows with turn-level advantages, as a loss sees them."""
    env = text_env(
        Parity,
        bpe,
        prompts_per_batch=2,
        num_generations=GROUP,
        after_rewards=[TurnRewardTransform(), KLRewardTransform(reference, 0.1)],
    )
    buffer = ReplayBuffer(storage=LazyStackStorage(8), transform=MCAdvantage(GROUP, credit="turn"))
    rows = LLMCollector(env, policy).collect()
    buffer.extend(tensor_rows(rows))
    assert len({int(row[keys.NUM_TURNS]) for row in rows.unbind(0)}) > 1
    return buffer[:]


def turns_of(row) -> list[list[int]]:
    """Return the indices of each turn's action tokens."""
    turns, inside = [], False
    for place, action in enumerate(row[keys.ACTION_MASK].tolist()):
        if action and not inside:
            turns.append([])
        if action:
            turns[-1].append(place)
        inside = action
    return turns


def test_advantages_by_turn_are_those_of_a_loop(stored):
    """Compute each turn's return minus the mean of those group members that also had that turn."""
    groups: dict[int, list] = {}
    for row in stored.unbind(0):
        groups.setdefault(int(row[keys.GROUP_ID]), []).append(row)
    assert [len(group) for group in groups.values()] == [GROUP, GROUP]
    different = 0
    for group in groups.values():
        earned = [
            [sum(row[keys.TOKEN_REWARDS].double()[t].item() for t in turn) for turn in turns_of(row)] for row in group
        ]
        to_go = [[sum(rewards[k:]) for k in range(len(rewards))] for rewards in earned]
        for i, row in enumerate(group):
            expected = torch.zeros(len(row[keys.TOKENS]), dtype=torch.float64)
            for k, turn in enumerate(turns_of(row)):
                others = [returns[k] for j, returns in enumerate(to_go) if j != i and k < len(returns)]
                expected[turn] = to_go[i][k] - sum(others) / len(others) if others else 0.0
            assert torch.allclose(row[keys.ADVANTAGE][:, 0].double(), expected, atol=1e-6)
            different += len({round(x, 4) for x in expected[row[keys.ACTION_MASK]].tolist()}) > 1
    assert different  # otherwise turns and trajectories would agree


def test_feedback_never_carries_gradient(stored, policy):
    """Expect a zero gradient on every logit that does not predict an action token."""
    model = policy.model
    rows = stack_rows([row.clone() for row in stored.unbind(0)])
    trainer = policy.get_new_version(generate=False)
    loss_fn = RLOOLoss(trainer, ratio="token", kl_to_ref_coeff=0.5, entropy_coeff=0.1)
    hidden = []

    def keep(module, args, output):
        output.last_hidden_state.retain_grad()
        hidden.append(output.last_hidden_state)

    hook = model.get_decoder().register_forward_hook(keep)
    try:
        out = loss_fn(rows)
        out.loss.backward()
    finally:
        hook.remove()
        model.zero_grad()
    (states,) = hidden
    for i, row in enumerate(rows.unbind(0)):
        action = row[keys.ACTION_MASK]
        predicts = torch.cat([action[1:], action.new_zeros(1)])  # state t is read only for the logits of t + 1
        gradient = states.grad[i, : len(action)].abs().sum(-1)
        assert (gradient[~predicts] == 0).all()
        assert (gradient[predicts] > 0).float().mean() > 0.9
        assert (~action).sum() > len(turns_of(row))  # there is feedback between the turns


def test_kl_counts_action_tokens_alone(stored, policy, reference):
    rows = stack_rows([row.clone() for row in stored.unbind(0)])
    expected, kl = [], KL_ESTIMATORS["k1"]
    for row in rows.unbind(0):
        assert (row[keys.REF_LOG_PROBS][~row[keys.ACTION_MASK]] == 0).all()
        earned = row[keys.TOKEN_REWARDS].double().sum()
        actions = [t for turn in turns_of(row) for t in turn]
        spent = sum(float(kl(row[keys.LOG_PROBS][t], row[keys.REF_LOG_PROBS][t])) for t in actions)
        assert float(row[keys.REWARD]) == pytest.approx(float(earned) - 0.1 * spent, abs=1e-4)
        expected += [float(KL_ESTIMATORS["k3"](row[keys.LOG_PROBS][t], row[keys.REF_LOG_PROBS][t])) for t in actions]
    for row in rows.unbind(0):  # entries at other tokens are never read
        row[keys.REF_LOG_PROBS][~row[keys.ACTION_MASK]] = torch.nan
        row[keys.LOG_PROBS][~row[keys.ACTION_MASK]] = torch.nan
    trainer = policy.get_new_version(generate=False)
    loss = RLOOLoss(trainer, ratio="token", kl_to_ref_coeff=0.5, kl_estimator="k3", aggregation="token_mean")(rows)
    assert float(loss.loss_kl_to_ref) == pytest.approx(0.5 * sum(expected) / len(expected), rel=1e-4)
    assert float(loss.kl_to_ref) == pytest.approx(sum(expected) / len(expected), rel=1e-4)


def test_a_step_of_rloo_makes_what_earned_more_likelier(make_model: Callable, bpe):
    """Give the policy a reward for ending at once, so that one turn decides."""

    class Short:
        def reset(self, seed=None):
            self.n = 0
            return "say"

        def step(self, action):
            self.n += 1
            return "more", -float(len(action)), self.n == 2

    model = make_model(bpe, seed=1, end_bias=6.0)
    policy = TransformersWrapper(model, tokenizer=bpe, generate_kwargs={"max_new_tokens": 24, "seed": 0})
    env = text_env(Short, bpe, prompts_per_batch=1, num_generations=32, after_rewards=[TurnRewardTransform()])
    collector = LLMCollector(env, policy)
    loss_fn = RLOOLoss(policy.get_new_version(generate=False), ratio="token")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    returns = []
    for _ in range(6):
        buffer = ReplayBuffer(storage=LazyStackStorage(32), transform=MCAdvantage(32, credit="turn"))
        rows = collector.collect()
        returns.append(float(rows[keys.REWARD].mean()))
        buffer.extend(tensor_rows(rows))
        optimizer.zero_grad()
        loss_fn(buffer[:]).loss_objective.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    assert returns[-1] > returns[0] + 0.5 * abs(returns[0]), returns


def bisect(turn: int, prompt: str) -> str:
    low, high = 1, 16
    for guess, answer in zip(*[iter(prompt.split("<|im_start|>")[2:])] * 2, strict=False):
        number = int(guess.removeprefix("assistant\n").split("<")[0])
        low, high = (number + 1, high) if "higher" in answer else (low, number - 1)
    return str((low + high) // 2)


def game() -> GuessNumber:
    return GuessNumber(1, 16, max_turns=5)


def test_a_task_gives_games_that_training_has_not_seen(make_policy: Callable, tokenizer):
    task = TextTask(game, name="guess", num_seeds=50)
    train, held_out = task.load(eval_size=6)
    seeds = [{row["env_seed"] for row in part.rows} for part in (train, held_out)]
    assert [len(s) for s in seeds] == [50, 6] and not seeds[0] & seeds[1]
    evaluation = Evaluation(
        make_policy(bisect),
        held_out,
        task.make_scorer(),
        num_samples=2,
        extract=None,
        batch_size=5,
        make_transforms=task.make_transforms,
    )
    metrics = evaluation.run().metrics
    assert metrics["eval/greedy"] == pytest.approx(metrics["eval/sampled"]) and 0.75 < metrics["eval/greedy"] <= 1.0


def test_a_tasks_rows_can_come_from_a_dataset(play: Callable, tokenizer):
    rows = [{"query": f"game {i}", "low": i, "high": i + 2, "secret": i + 1} for i in range(1, 9)]
    train, held_out = TextTask(game).load(rows, eval_size=2)
    assert (len(train), len(held_out)) == (6, 2)
    env = TextTask(game).env(held_out, tokenizer, prompts_per_batch=2, num_generations=2)

    def upwards(turn: int, prompt: str) -> str:
        return str(int(prompt.split("number from ")[1].split()[0]) + turn)

    for row in play(env, upwards):
        assert row[keys.QUERY][0]["content"] == f"Guess a number from {row['low']} to {row['high']}."
        assert int(row[keys.NUM_TURNS]) == 2 and float(row[keys.REWARD]) == pytest.approx(0.95)
