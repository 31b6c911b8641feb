from __future__ import annotations

import math
import pickle
import subprocess
import sys
from typing import Any

import cloudpickle
import pytest

from torchrl_rloo.rewards.lengths import SoftOverlong
from torchrl_rloo.rewards.protocol import RewardBatch, call_reward, reward_name
from torchrl_rloo.rewards.registry import REWARDS, TRL_NAMES, load_reward
from torchrl_rloo.rewards.runner import RewardRunner
from torchrl_rloo.runtime.lookup import is_async

BOXES = [r"It is \boxed{7}.", r"<think>x</think>\boxed{8}", "7", ""]
SETTINGS: dict[str, dict[str, Any]] = {  # of each reward that requires some
    "cosine_scaled": {"max_len": 10, "correctness": "boxed_accuracy"},
    "ensemble": {"functions": ["boxed_accuracy", "think_format"]},
    "for_task": {"task": "math", "function": "boxed_accuracy"},
    "json_schema": {"schema": {"type": "integer"}},
    "length_budget": {"function": "boxed_accuracy", "budget": 3},
    "multiple_choice": {"choices": "789", "column": "letter"},
    "regex_format": {"pattern": ".*boxed.*"},
    "soft_overlong": {"max_completion_len": 4, "soft_punish_cache": 3},
    "shuffled": {"function": "boxed_accuracy"},
    "stop_properly": {"function": "boxed_accuracy", "coefficient": -0.5},
}
# Rewards of other columns, services and models have separate tests
OTHERS: dict[str, dict[str, Any]] = {
    "sequence_classifier": {"model": "a/reward-model"},
    "code_tests": {},
    "countdown": {},
    "instruction_following": {},
    "llm_judge": {"base_url": "http://127.0.0.1:9/v1", "model": "judge"},
    "remote_scorer": {"url": "http://127.0.0.1:9/score"},
}
LOCAL = sorted(REWARDS.keys() - OTHERS)


def batch() -> RewardBatch:
    columns = {
        "answer": ["7"] * 4,
        "solution": ["7"] * 4,
        "letter": ["7"] * 4,
        "task": ["math", "math", "code", "math"],
    }
    return RewardBatch(["?"] * 4, BOXES, [[1] * 2, [1, 1, 1, 1, 2], [3], []], columns, [False, True, False, False])


PICKLERS = [pickle, cloudpickle]
pytestmark = pytest.mark.usefixtures("one_judge")


def settings_of(name: str) -> dict[str, Any]:
    return {"_target_": name, **SETTINGS.get(name, {})}


@pytest.mark.parametrize("name", LOCAL)
def test_pickled_it_gives_the_same_scores(name):
    reward = load_reward(settings_of(name))
    scores = call_reward(reward, batch()).scores
    assert len(scores) == 4 and all(s is None or math.isfinite(s) for s in scores)
    assert any(s is not None for s in scores)
    for pickler in PICKLERS if name == "accuracy" else PICKLERS[:1]:  # each copy of a judge starts a process
        copy = pickle.loads(pickler.dumps(reward))
        assert call_reward(copy, batch()).scores == scores
        assert reward_name(copy) == reward_name(reward)
        assert getattr(copy, "whole_batch", False) == getattr(reward, "whole_batch", False)


@pytest.mark.parametrize("name", OTHERS)
def test_the_others_pickle(name):
    reward = load_reward({"_target_": name, **OTHERS[name]})
    for pickler in PICKLERS:
        copy = pickle.loads(pickler.dumps(reward))
        assert type(copy) is type(reward) and reward_name(copy) == reward_name(reward)


@pytest.mark.parametrize("name", LOCAL)
def test_rows_are_scored_alike_in_any_batch(name):
    reward, rows = load_reward(settings_of(name)), batch()
    if not getattr(reward, "whole_batch", False):
        one_by_one = [call_reward(reward, rows.select([i])).scores[0] for i in range(4)]
        assert call_reward(reward, rows).scores == one_by_one


def test_a_callable_is_given_back():
    reward = SoftOverlong(4, 2)
    assert load_reward(reward) is reward and load_reward(len) is len


def test_trls_names_stand_for_the_same_rewards():
    assert set(TRL_NAMES.values()) <= set(REWARDS.values())
    assert load_reward("think_format_reward") is load_reward("think_format")
    reward = load_reward({"_target_": "get_soft_overlong_punishment", "max_completion_len": 8, "soft_punish_cache": 4})
    assert reward(["?"], ["..."], [[1] * 6]) == [-0.5]


def test_names_and_paths_of_functions_and_classes():
    from torchrl_rloo.rewards.matching import boxed_accuracy

    assert load_reward("boxed_accuracy") is boxed_accuracy
    assert load_reward("torchrl_rloo.rewards.matching.boxed_accuracy") is boxed_accuracy
    assert load_reward({"_target_": "boxed_accuracy"}) is boxed_accuracy
    assert reward_name(load_reward("torchrl_rloo.rewards.lengths.RepetitionPenalty")) == "repetition_penalty"


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A user's module."""
    (tmp_path / "users_module.py").write_text(
        """
import asyncio
NOT_CALLABLE = 3
def scaled(completions, by=1.0, **kwargs): return [by * len(c) for c in completions]
def anything(**kwargs): return [1.0] * len(kwargs["completions"])
def make_constant(value, n=1):
    return Constant(value)
def make_nothing(): return 3
class Constant:
    def __init__(self, value): self.value = value
    def __call__(self, completions, **kwargs): return [self.value] * len(completions)
class Named(Constant):
    def __init__(self, value, name="mine"): self.value, self.__name__ = value, name
async def waits(completions, **kwargs):
    await asyncio.sleep(0)
    return [float(len(c)) for c in completions]
class Judge:
    whole_batch = True
    concurrency = 2
    async def __call__(self, completions, scale=1.0, **kwargs): return [scale] * len(completions)
judge = Judge()
whole = lambda completions, **kwargs: [1.0] * len(completions)
whole.whole_batch = True
"""
    )
    (tmp_path / "needs_more.py").write_text("import no_such_module_at_all")
    monkeypatch.syspath_prepend(str(tmp_path))


def scores(spec, n: int = 2) -> list[float | None]:
    return call_reward(load_reward(spec), RewardBatch(["?"] * n, ["ab"] * n, [[1]] * n)).scores


def test_settings_of_a_reward_function_are_bound_to_it(own):
    reward = load_reward({"_target_": "users_module.scaled", "by": 0.5})
    assert scores(reward) == [1, 1] and reward_name(reward) == "scaled"
    assert scores({"_target_": "users_module.anything"}) == [1, 1]


def test_a_function_that_makes_rewards_is_called(own):
    assert scores({"_target_": "users_module.make_constant", "value": 3}) == [3, 3]


def test_another_log_name_leaves_the_function_alone(own):
    import users_module

    renamed = load_reward({"_target_": "users_module.scaled", "name": "length_of_text"})
    assert reward_name(renamed) == "length_of_text" and reward_name(users_module.scaled) == "scaled"
    assert reward_name(load_reward({"_target_": "users_module.Constant", "value": 1, "name": "one"})) == "one"
    assert reward_name(load_reward({"_target_": "users_module.Named", "value": 1, "name": "given"})) == "given"
    assert load_reward({"_target_": "users_module.whole", "name": "all"}).whole_batch is True
    waiting = load_reward({"_target_": "users_module.waits", "name": "slow"})
    assert is_async(waiting) and reward_name(pickle.loads(pickle.dumps(waiting))) == "slow"


def test_an_object_of_a_module_under_two_names(own):
    first = load_reward({"_target_": "users_module.judge", "name": "first"})
    second = load_reward({"_target_": "users_module.judge", "scale": 2.0, "name": "second"})
    assert (reward_name(first), reward_name(second)) == ("first", "second")
    for judge in (first, second):
        assert is_async(judge) and judge.whole_batch is True and judge.concurrency == 2
    batch = RewardBatch(["?"], ["ab"], [[1]])
    assert RewardRunner([first, second])(batch).scores == [[1.0], [2.0]]


def test_specs_inside_specs():
    spec = {
        "_target_": "for_task",
        "task": "math",
        "function": {"_target_": "stop_properly", "coefficient": 0.5, "function": "boxed_accuracy"},
    }
    reward = load_reward(spec)
    assert reward_name(reward) == "math_stop_properly_boxed_accuracy"
    assert call_reward(reward, batch()).scores == [1, 0, None, 0]


@pytest.mark.parametrize(
    ("spec", "error", "message"),
    [
        ("acuracy", ValueError, "unknown reward 'acuracy' .did you mean 'accuracy'.*valid: .*think_format"),
        ("no_module_at_all.reward", ValueError, "there is no module 'no_module_at_all'"),
        ("users_module.scale", ValueError, "module 'users_module' has no 'scale' .did you mean 'scaled'"),
        ("users_module.scaled.more", ValueError, "there is no module 'users_module.scaled'"),
        ("users_module.NOT_CALLABLE", TypeError, "is 3; it must be callable"),
        ("needs_more.reward", ModuleNotFoundError, "no_such_module_at_all"),
        ("soft_overlong", ValueError, "SoftOverlong requires the settings max_completion_len, soft_punish_cache"),
        ({"_target_": "soft_overlong", "max_completion_len": 4}, ValueError, "requires the settings soft_punish_cache"),
        (
            {"_target_": "repetition_penalty", "ngramsize": 4},
            ValueError,
            "unknown setting 'ngramsize'.*'ngram_size'.*max_pen",
        ),
        ({"_target_": "boxed_accuracy", "column": "a"}, None, None),  # it accepts any keyword
        ({"_target_": "users_module.make_nothing"}, TypeError, "make_nothing returned 3; it must return a callable"),
        ({"_target_": "users_module.make_constant"}, ValueError, "make_constant requires the settings value"),
        ({"function": "accuracy"}, TypeError, "_target_=None"),
        (3, TypeError, "reward=3 must be a callable, a name"),
        ("", ValueError, "unknown reward ''"),
        ({"_target_": "shuffled", "function": "acuracy"}, ValueError, "unknown reward 'acuracy'"),
    ],
)
def test_what_is_refused(own, spec, error, message):
    if error is None:
        assert callable(load_reward(spec))
    else:
        with pytest.raises(error, match=message):
            load_reward(spec)


def test_the_registry_imports_neither_torch_nor_what_it_names():
    code = (
        "import sys, torchrl_rloo.rewards.registry as r; [r.load_reward(n) for n in ('think_format', 'numeric_match')];"
        "r.load_reward({'_target_': 'stop_properly', 'function': 'multiple_choice'}); r.load_reward('a/model');"
        "print(sorted({'torch', 'jsonschema', 'math_verify', 'transformers'} & sys.modules.keys()))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout.strip() == "[]", result.stderr
