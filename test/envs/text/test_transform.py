"""TextEnvTransform: groups and seeds, failures and their effects, and closing of every session."""

from __future__ import annotations

import asyncio
import copy
import itertools
import logging
import math
import time
from collections.abc import Callable

import pytest
import torch
from torchrl.envs.utils import check_env_specs

from torchrl_rloo.collectors import LLMCollector
from torchrl_rloo.data import keys, load_prompts
from torchrl_rloo.data.stop_reasons import stop_reason
from torchrl_rloo.engines import ScriptedEngine, ScriptedTurn
from torchrl_rloo.envs.stepping import open_rows
from torchrl_rloo.envs.text import Outcome, TextEnvTransform, TextSession, text_env
from torchrl_rloo.envs.text.games import GuessNumber
from torchrl_rloo.envs.text.transform import seed_dataset
from torchrl_rloo.envs.transforms import FeedbackTransform, RewardTransform
from torchrl_rloo.modules import vLLMWrapper


def transform_of(env) -> TextEnvTransform:
    return next(t for t in env.transform if isinstance(t, TextEnvTransform))


class Echo:
    """Environment that repeats the policy's text twice and counts its closes."""

    made: list[Echo]

    def __init_subclass__(cls) -> None:
        cls.made = []

    def __init__(self):
        self.closed, self.n = 0, 0
        self.made.append(self)

    def reset(self, *, seed=None, options=None):
        self.seed = seed
        return f"game {seed}", {}

    def step(self, action):
        self.n += 1
        return action, 1.0, self.n == 3, False, {"heard": action, "tensor": torch.tensor(2.0), "big": [1]}

    def close(self):
        self.closed += 1


def test_a_group_shares_its_seed_and_its_prompt(play: Callable, tokenizer):
    class Own(Echo): ...

    env = text_env(Own, tokenizer, prompts_per_batch=3, num_generations=2, num_seeds=5, shuffle=False)
    rows = play(env, lambda turn, prompt: f"t{turn}")
    assert [row["env_seed"] for row in rows] == [0, 0, 1, 1, 2, 2]
    assert [row[keys.QUERY][0]["content"] for row in rows] == [f"game {s}" for s in (0, 0, 1, 1, 2, 2)]
    for row in rows:
        encoded = tokenizer.apply_chat_template(row[keys.QUERY], add_generation_prompt=True, return_dict=True)
        assert row[keys.PROMPT_TOKENS].tolist() == list(encoded["input_ids"])
        assert float(row[keys.REWARD]) == 3.0 and stop_reason(row) == "ended"
        assert row[keys.LOG_EXTRA] == {"heard": "t2", "tensor": 2.0}
    assert [e.closed for e in Own.made] == [1] * 6 and not transform_of(env)._held
    assert not any(transform_of(env).counts.values())


def test_sessions_that_disagree_in_a_group_are_an_error(tokenizer):
    games = itertools.count()

    class Random(Echo):
        def reset(self):
            return f"game {next(games)}"

    env = text_env(Random, tokenizer, prompts_per_batch=2, num_generations=2)
    with pytest.raises(ValueError, match="members of a group were opened differently.*'env_seed'"):
        env.reset()
    assert [e.closed for e in Random.made] == [1] * 4


def test_a_system_prompt_is_put_before_the_opening(tokenizer):
    env = text_env(GuessNumber, tokenizer, prompts_per_batch=1, system_prompt="Be brief.")
    assert [m["role"] for m in env.reset()[keys.QUERY][0]] == ["system", "user"]

    class HasOne(Echo):
        def reset(self, seed):
            return [{"role": "system", "content": "Mine."}, {"role": "user", "content": "go"}]

    env = text_env(HasOne, tokenizer, prompts_per_batch=1, system_prompt="Be brief.")
    assert env.reset()[keys.QUERY][0][0]["content"] == "Mine."


def test_an_environment_without_prompts_needs_a_dataset(tokenizer):
    class Silent(Echo):
        def reset(self, seed=None):
            return None

    with pytest.raises(RuntimeError, match="pass a dataset of prompts"):
        text_env(Silent, tokenizer, prompts_per_batch=1).reset()
    dataset = load_prompts([{"query": "Talk."}], chat=True)
    rows = text_env(Silent, tokenizer, prompts_per_batch=1, dataset=dataset).reset()
    assert rows[keys.QUERY][0] == [{"role": "user", "content": "Talk."}]


def test_the_specs_hold(tokenizer):
    torch.manual_seed(0)  # of the check's random action, whose answers must have one length
    env = text_env(GuessNumber, tokenizer, prompts_per_batch=2, num_generations=2)
    check_env_specs(env)
    env.close()
    assert not transform_of(env)._held


# what fails


class Fails(TextSession):
    """Environment that raises or hangs in ``reset`` or at the second ``step``, as the row says."""

    closed: list[str] = []

    async def reset(self, row):
        self.how, self.n = row["how"], 0
        await self.fail("open")
        return "go"

    async def step(self, text):
        self.n += 1
        if self.n == 2:
            await self.fail("step")
        reward = math.inf if self.how == "reward" and self.n == 2 else 1.0
        return Outcome(3 if self.how == "feedback" and self.n == 2 else "more", reward, terminated=self.n == 3)

    async def fail(self, when: str) -> None:
        if self.how == f"{when} raises":
            raise OSError("the game is down")
        if self.how == f"{when} hangs":
            await asyncio.sleep(1000)
        if self.how == f"{when} blocks":
            time.sleep(3)  # blocks the loop, as an async function should not

    async def close(self):
        Fails.closed.append(self.how)
        if self.how == "close raises":
            raise OSError("closed already")


HOW = ["well", "open raises", "open hangs", "step raises", "step hangs", "reward", "feedback", "close raises"]


def test_what_fails_costs_its_own_row_and_is_counted(play: Callable, tokenizer, caplog):
    dataset = load_prompts([{"query": how, "how": how} for how in HOW], chat=True)
    env = text_env(Fails, tokenizer, dataset=dataset, prompts_per_batch=len(HOW), timeout=1.0, shuffle=False)
    Fails.closed.clear()
    with caplog.at_level(logging.ERROR):
        rows = {row["how"]: row for row in play(env, lambda turn, prompt: "go on")}
    for how, row in rows.items():
        fine = how in ("well", "close raises")
        assert stop_reason(row) == ("ended" if fine else "failed"), how
        assert bool(row[keys.TRUNCATED]) != fine
        assert float(row[keys.REWARD]) == 3.0 if fine else row[keys.REWARD].isnan().all()
        assert int(row[keys.NUM_TURNS]) == (3 if fine else 0 if how.startswith("open") else 2)
    assert transform_of(env).counts == {"text_env/failed": 4, "text_env/failed_opens": 2, "text_env/failed_closes": 1}
    assert sorted(Fails.closed) == sorted(HOW)
    assert "the game is down" in caplog.text and "took longer than 1 s" in caplog.text
    assert not transform_of(env)._held


def test_rewards_are_of_those_who_did_not_fail(play: Callable, tokenizer):
    dataset = load_prompts([{"query": how, "how": how} for how in ("well", "step raises", "open raises")], chat=True)
    rewards = RewardTransform(lambda completions, **_: [10.0] * len(completions))
    env = text_env(Fails, tokenizer, dataset=dataset, prompts_per_batch=3, rewards=rewards, shuffle=False)
    values = [float(row[keys.REWARD]) for row in play(env, lambda turn, prompt: "go on")]
    assert values[0] == 13.0 and math.isnan(values[1]) and math.isnan(values[2])


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_failed_openings_end_a_run_once_a_whole_batch_failed(order: tuple[int, ...], play: Callable, tokenizer):
    """A collector opens groups one by one, in any order."""
    hows = ("well", "open raises", "open raises")
    dataset = load_prompts([{"query": how, "how": how} for how in hows], chat=True)
    env = text_env(Fails, tokenizer, dataset=dataset, prompts_per_batch=3, shuffle=False)
    groups = env.primer.draw_groups(3)
    opened = [open_rows(env, groups[i]) for i in order]
    assert [stop_reason(rows[0]) == "failed" for rows in opened] == [i > 0 for i in order]

    never = text_env(Fails, tokenizer, dataset=dataset.select([1, 2]), prompts_per_batch=2, shuffle=False)
    with pytest.raises(RuntimeError, match="none of 2 sessions could be opened.*the game is down"):
        play(never, lambda turn, prompt: "x")


def test_what_environment_and_rewards_tell_the_log_stands_together(play: Callable, tokenizer):
    class Own(Echo): ...

    def length(completions, log_extra, **_):
        log_extra("messages", [len(c) for c in completions])
        return [0.0] * len(completions)

    env = text_env(Own, tokenizer, prompts_per_batch=1, rewards=RewardTransform(length))
    row = play(env, lambda turn, prompt: "x")[0]
    assert row[keys.LOG_EXTRA] == {"heard": "x", "tensor": 2.0, "messages": 5}


def test_a_run_that_learns_nothing_is_stopped(play: Callable, tokenizer):
    class NeverOpens(Echo):
        def reset(self, seed):
            raise ZeroDivisionError("no such game")

    env = text_env(NeverOpens, tokenizer, prompts_per_batch=2)
    with pytest.raises(RuntimeError, match="none of 2 sessions could be opened.*no such game"):
        env.reset()

    class AlwaysFails(Echo):
        def step(self, action):
            raise ZeroDivisionError("no such move")

    env = text_env(AlwaysFails, tokenizer, prompts_per_batch=2)
    transform_of(env).max_consecutive_failures = 4
    for _ in range(2):
        play(env, lambda turn, prompt: "x")
    with pytest.raises(RuntimeError, match="failed 4 times in a row"):
        env.reset()


# turns that are not the environment's


def test_a_turn_cut_off_is_not_given_to_the_environment(play: Callable, tokenizer):
    class Own(Echo): ...

    env = text_env(Own, tokenizer, prompts_per_batch=1)
    row = play(env, lambda turn, prompt: "x" if turn == 0 else None)[0]
    assert stop_reason(row) == "turn_tokens" and float(row[keys.REWARD]) == 1.0
    assert Own.made[0].n == 1 and Own.made[0].closed == 1


def test_limits_of_the_conversation_end_it_after_the_turns_reward(play: Callable, tokenizer):
    class Own(Echo): ...

    row = play(text_env(Own, tokenizer, prompts_per_batch=1, max_turns=2), lambda turn, prompt: "x")[0]
    assert stop_reason(row) == "turns" and float(row[keys.REWARD]) == 2.0 and bool(row[keys.TRUNCATED])
    assert row[keys.LOG_EXTRA]["heard"] == "x"


def test_an_opening_without_room_costs_its_row(play: Callable, tokenizer):
    class Long(Echo):
        def reset(self, seed):
            self.seed = seed
            return "x" * 500 if seed == 1 else "x"

    env = text_env(Long, tokenizer, prompts_per_batch=2, num_seeds=2, max_tokens=200, shuffle=False)
    rows = play(env, lambda turn, prompt: "y")
    assert [stop_reason(row) for row in rows] == ["ended", "total_tokens"]
    assert [bool(row[keys.REWARD].isnan()) for row in rows] == [False, True]
    assert env.base_env.counts["env/long_prompts"] == 1


def test_a_row_that_was_reset_elsewhere_is_an_error(make_policy: Callable, tokenizer):
    class Own(Echo): ...

    policy = make_policy(lambda turn, prompt: "x")
    rows = policy(text_env(Own, tokenizer, prompts_per_batch=1).reset())
    other = text_env(Own, tokenizer, prompts_per_batch=1)
    with pytest.raises(KeyError, match=r"trajectory_id=\d+ is unknown; reset its row with this transform"):
        other.step(rows)


def test_a_sync_action_or_observe_blocks_no_event_loop(play: Callable, tokenizer):
    called: list[str] = []

    class Own(Echo): ...

    def slow(value):
        with pytest.raises(RuntimeError, match="no running event loop"):
            asyncio.get_running_loop()
        called.append(value)
        return value

    env = text_env(Own, tokenizer, prompts_per_batch=1, action=slow, observe=slow)
    assert stop_reason(play(env, lambda turn, prompt: "x")[0]) == "ended"
    assert called[1:] == ["x", "x", "x", "x", "x"], "the opening, three actions, two observations"


def test_what_another_transform_answers_is_not_the_environments(play: Callable, tokenizer):
    class Own(Echo): ...

    def tool(conversation, row):
        if conversation[-1]["content"] == "tool":
            return [{"role": "tool", "content": "42"}]

    env = text_env(Own, tokenizer, prompts_per_batch=1, transforms=[FeedbackTransform(tool)])
    row = play(env, lambda turn, prompt: "tool" if turn in (0, 2) else "x")[0]
    assert [m["content"] for m in row[keys.COMPLETION]] == ["tool", "42", "x", "x", "tool", "42", "x", "x", "x"]
    assert float(row[keys.REWARD]) == 3.0 and int(row[keys.NUM_TURNS]) == 5


def test_counts_survive_a_restart(tokenizer):
    first = text_env(GuessNumber, tokenizer, prompts_per_batch=1)
    transform_of(first).counts["text_env/failed_opens"] = 3
    second = text_env(GuessNumber, tokenizer, prompts_per_batch=1)
    second.load_state_dict(first.state_dict())
    assert transform_of(second).counts == {"text_env/failed_opens": 3}


def test_wrong_settings_are_refused(tokenizer):
    with pytest.raises(ValueError, match="timeout=0"):
        text_env(GuessNumber, tokenizer, prompts_per_batch=1, timeout=0)
    with pytest.raises(ValueError, match="max_consecutive_failures=0 must be at least 1"):
        TextEnvTransform(GuessNumber, max_consecutive_failures=0)
    with pytest.raises(ValueError, match="num_seeds=5 .* cannot be combined with dataset"):
        text_env(GuessNumber, tokenizer, prompts_per_batch=1, num_seeds=5, dataset=seed_dataset(2))


def test_an_opening_that_the_template_refuses_costs_its_row(play: Callable, tokenizer):
    class Talks(Echo):
        def reset(self, seed):
            return [{"role": "narrator" if seed == 1 else "user", "content": "x"}], {}

    tokenizer = copy.deepcopy(tokenizer)
    refuse = (
        "{% for m in messages %}{% if m['role'] == 'narrator' %}{{ raise_exception('who?') }}{% endif %}{% endfor %}"
    )
    tokenizer.chat_template = refuse + tokenizer.chat_template
    env = text_env(Talks, tokenizer, prompts_per_batch=2, num_seeds=2, shuffle=False)
    rows = play(env, lambda turn, prompt: "y")
    assert [stop_reason(row) for row in rows] == ["ended", "failed"]
    assert transform_of(env).counts["text_env/failed_opens"] == 1 and [made.closed for made in Talks.made] == [1, 1]


def test_what_stands_for_a_prompt_takes_little_room(play: Callable, tokenizer):
    env = text_env(GuessNumber, tokenizer, prompts_per_batch=1, max_tokens=48)
    assert stop_reason(play(env, lambda turn, prompt: "3")[0]) == "ended"


def test_a_conversation_that_is_cut_before_the_first_step_has_no_metrics(tokenizer):
    """Rewards and loops read ``log_extra`` of every row, so it is there, and empty."""
    engine = ScriptedEngine(lambda request, index: ScriptedTurn([5], finish="length"))
    env = text_env(GuessNumber, tokenizer, prompts_per_batch=1)
    (row,) = LLMCollector(env, vLLMWrapper(engine, tokenizer=tokenizer)).collect().unbind(0)
    assert row[keys.LOG_EXTRA] == {} and stop_reason(row) == "turn_tokens"
