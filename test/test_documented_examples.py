"""Examples in the documentation of other libraries: each row of docs/coming-from/examples.md with a check runs here.

The code does what the documented code does, in other words and on built-in models and data.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictBase, lazy_stack, set_list_to_stack
from torchrl.data.llm import History, add_chat_template
from torchrl.envs import StepCounter, Transform

from torchrl_rloo.collectors import LLMCollector
from torchrl_rloo.data import encode_prompt, keys, load_prompts
from torchrl_rloo.data.rows import ragged
from torchrl_rloo.embedded import addition_prompts, build_model
from torchrl_rloo.engines import ScriptedEngine, ScriptedTurn
from torchrl_rloo.envs import ChatEnv, DatasetChatEnv
from torchrl_rloo.envs.text import text_env
from torchrl_rloo.envs.tools import PythonInterpreter
from torchrl_rloo.functional import Clip
from torchrl_rloo.functional.advantages import group_centered, group_normalized, leave_one_out
from torchrl_rloo.functional.ratios import mean_log_ratio
from torchrl_rloo.functional.returns import gae
from torchrl_rloo.modules import TransformersWrapper, frozen_copy, vLLMWrapper
from torchrl_rloo.modules.loading import read_chat_template
from torchrl_rloo.rewards import accuracy_reward, get_soft_overlong_punishment
from torchrl_rloo.weight_update import InProcessWeightUpdater

PAGE = Path(__file__).resolve().parents[1] / "docs" / "coming-from" / "examples.md"
GSM8K = [{"question": f"What is {n}+1?", "answer": f"{n}+1 is {n + 1:,}.\n#### {n + 1:,}"} for n in (1, 1233)]


class Parts:
    """Built-in model and tokenizer, and environments on them."""

    def __init__(self, tokenizer: Any):
        self.tokenizer, self.model = tokenizer, build_model(tokenizer, seed=0).eval()

    def policy(self, input_mode: str = "tokens", model: torch.nn.Module | None = None) -> TransformersWrapper:
        kwargs = {"max_new_tokens": 4, "seed": 0}
        model = self.model if model is None else model
        return TransformersWrapper(model, tokenizer=self.tokenizer, input_mode=input_mode, generate_kwargs=kwargs)

    def says(self, *texts: str) -> vLLMWrapper:
        """Return a policy that says these texts, one a turn."""
        turns = [ScriptedTurn([*self.tokenizer(text)["input_ids"], self.tokenizer.eos_token_id]) for text in texts]
        return vLLMWrapper(ScriptedEngine(lambda request, index: turns[index]), tokenizer=self.tokenizer)

    def rows(self, source: Any, rewards: Any, *, policy: Any = None, loading: dict | None = None, **kwargs: Any):
        """Collect one conversation for each row of a source, in order."""
        prompts = load_prompts(source, **(loading or {}))
        settings = {"prompts_per_batch": len(prompts), "shuffle": False, "rewards": rewards} | kwargs
        return LLMCollector(DatasetChatEnv(prompts, self.tokenizer, **settings), policy or self.policy()).collect()


@pytest.fixture(scope="module")
def parts(tokenizer) -> Parts:
    return Parts(tokenizer)


CHECKS: dict[str, tuple[str, Callable[[Parts], None]]] = {}


def example(verdict: str, *names: str) -> Callable:
    """Register the check of examples with a verdict of the page."""

    def register(check: Callable[[Parts], None]) -> Callable:
        CHECKS.update({name: (verdict, check) for name in names})
        return check

    return register


def rewards_of(rows: TensorDictBase) -> list[float]:
    return rows[keys.REWARD].flatten().tolist()


# -------------------------------------------------------------------------------------------------------------- TRL


@example("changed", "RLOOTrainer(model, reward_funcs=accuracy_reward, train_dataset)")
def train_on_accuracy(parts: Parts) -> None:
    rows = [{"prompt": [{"role": "user", "content": f"{n}+1?"}], "solution": f"${n + 1}$"} for n in (1, 2)]
    answers = parts.says(r"\boxed{2}", r"\boxed{2}")
    assert rewards_of(parts.rows(rows, accuracy_reward, policy=answers)) == [1, 0]


@example("runs", "reward_num_unique_chars", "reward_funcs=[reward_func, async_reward_func1, async_reward_func2]")
def several_functions(parts: Parts) -> None:
    def unique(completions, **kwargs):
        return [len(set(text)) for text in completions]

    async def is_said(prompts, completions, **kwargs):
        return [float(bool(text)) for text in completions]

    async def is_long(completion_ids, **kwargs):
        return [float(len(ids)) for ids in completion_ids]

    texts = [{"prompt": "The sky is"}, {"prompt": "The sun is"}]
    rows = parts.rows(texts, [unique, is_said, is_long], policy=parts.says("aab", "a"), loading={"chat": False})
    lengths = [int(mask.sum()) for mask in ragged(rows, keys.ACTION_MASK)]
    assert rows["next", "rewards"].tolist() == [[2, 1, lengths[0]], [1, 1, lengths[1]]]


# ---------------------------------------------------------------------------------------------------------- axolotl


def rand_reward_func(completions, **kwargs) -> list[float]:
    return [random.uniform(0, 1) for _ in completions]


def oai_gsm8k_transform(cfg, *args, **kwargs):
    def transform_fn(example, tokenizer=None):
        number = example["answer"].rpartition("####")[2].strip().replace(",", "")
        return {"prompt": [{"role": "user", "content": example["question"]}], "answer": number}

    return transform_fn, {"remove_columns": ["question"]}


@example("runs", "rand_reward_func", "oai_gsm8k_transform", "math_transform")
def a_transform_and_a_reward(parts: Parts) -> None:
    rows = parts.rows(GSM8K, rand_reward_func, loading={"row_map": f"{__name__}.oai_gsm8k_transform"})
    assert rows["answer"] == ["2", "1234"] and all(0 <= reward <= 1 for reward in rewards_of(rows))


@example("runs", "format_reward")
def a_reward_of_texts(parts: Parts) -> None:
    def format_reward(completions, **kwargs) -> list[float]:
        return [float(len(text) > 10) for text in completions]

    texts = [{"prompt": "Say"}, {"prompt": "Tell"}]
    policy = parts.says("a long answer", "short")
    assert rewards_of(parts.rows(texts, format_reward, policy=policy, loading={"chat": False})) == [1, 0]


@example("changed", "math_solver_rollout", "math_reward")
def a_rollout_in_steps(parts: Parts) -> None:
    """Ask for steps until the final answer; the ids of earlier steps stay as they were sampled."""

    async def solve(row, generate) -> float:
        said = list(row["query"])
        for _ in range(5):
            step = await generate(said)
            said += [{"role": "assistant", "content": step}, {"role": "user", "content": "Next step:"}]
            if match := re.search(r"FINAL ANSWER:\s*(.+)", step):
                return float(match[1].strip() == row["answer"])
        return 0.0

    prompts = load_prompts([{"prompt": [{"role": "user", "content": "2+2?"}], "answer": "4"}])
    env = text_env(solve, parts.tokenizer, prompts_per_batch=1, dataset=prompts)
    (row,) = LLMCollector(env, parts.says("Add.", "FINAL ANSWER: 4")).collect().unbind(0)
    assert float(row[keys.REWARD]) == 1 and int(row[keys.NUM_TURNS]) == 2


# ------------------------------------------------------------------------------------------------ OpenRLHF and verl


@example("runs", "AgentInstance")
def an_agent_with_reset_and_step(parts: Parts) -> None:
    class AgentInstance:
        async def reset(self, states: dict):
            self.steps = 0
            return {"observation": f"{states['observation']} Count."}

        async def step(self, state_dict: dict) -> dict:
            self.steps += 1
            right = state_dict["action_text"] == state_dict["label"]
            return {
                "rewards": torch.tensor(float(right)),
                "environment_feedback": "Once more.",
                "done": right or self.steps == 3,
                "scores": float(right),
                "extra_logs": {"steps": self.steps},
            }

    prompts = load_prompts([{"prompt": "To two.", "label": "two"}])
    env = text_env(AgentInstance, parts.tokenizer, prompts_per_batch=1, dataset=prompts)
    (row,) = LLMCollector(env, parts.says("one", "two")).collect().unbind(0)
    assert [m["content"] for m in row[keys.COMPLETION]] == ["one", "Once more.", "two"]
    assert float(row[keys.REWARD]) == 1 and row[keys.QUERY][-1]["content"].endswith("Count.")


@example("formula", "estimator == ...")
def shape_rewards_per_group(parts: Parts) -> None:
    rewards = torch.rand(3, 4, dtype=torch.float64)
    groups, mean, std = torch.arange(3).repeat_interleave(4), rewards.mean(1, True), rewards.std(1, keepdim=True)
    others = (rewards.sum(1, keepdim=True) - rewards) / 3
    for ours, theirs in (
        (leave_one_out, rewards - others),
        (group_centered, rewards - mean),
        (group_normalized, (rewards - mean) / (std + 1e-4)),  # the documented 1e-9 is TRL's 1e-4 here
    ):
        torch.testing.assert_close(ours(rewards.flatten(), groups).view(3, 4), theirs)


@example("formula", "overlong_buffer_len")
def punish_long_completions(parts: Parts) -> None:
    lengths, limit, buffer = (5, 12, 15, 16), 16, 8
    penalties = [-min(max(length - (limit - buffer), 0), buffer) / buffer for length in lengths]
    assert get_soft_overlong_punishment(limit, buffer)([[1] * length for length in lengths]) == penalties


@example("formula", "policy_loss_type == gspo", "dual_clip")
def clip_ratios(parts: Parts) -> None:
    old, new, mask = torch.randn(2, 5), torch.randn(2, 5), torch.tensor([[1] * 5, [1] * 3 + [0] * 2]).bool()
    mean = ((new - old) * mask).sum(1) / mask.sum(1)
    ratio = mean_log_ratio(new, old, mask)
    torch.testing.assert_close(ratio * mask, mean[:, None] * mask)
    advantages, tokens = torch.tensor([[1.0], [-1.0]]), (new - old).exp()
    clipped = torch.minimum(tokens * advantages, tokens.clamp(0.8, 1.2) * advantages)
    dual = -torch.where(advantages < 0, torch.maximum(clipped, 3 * advantages), clipped)
    torch.testing.assert_close(Clip(0.2, dual=3.0)(new - old, advantages, new, old), dual)


@example("formula", "lastgaelam")
def generalized_advantages(parts: Parts) -> None:
    rewards, values = torch.randn(2, 5), torch.randn(2, 5)
    last, advantages = torch.zeros(2), []
    for t in reversed(range(5)):
        following = values[:, t + 1] if t < 4 else torch.zeros(2)
        last = rewards[:, t] + 0.9 * following - values[:, t] + 0.9 * 0.8 * last
        advantages.insert(0, last)
    advantages = torch.stack(advantages, 1)
    ours = gae(rewards, values, torch.ones(2, 5).bool(), 0.9, 0.8)
    torch.testing.assert_close(ours, (advantages, advantages + values))


# ---------------------------------------------------------------------------------------------------------- TorchRL


CHAT = [[{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi there!"}]]
LLAMA = """{% for m in messages %}{%- if m['role'] == 'user' %}{{ '<s>[INST] ' + m['content'] + ' [/INST]' }}
{%- else %}{% generation %}{{ m['content'] + '</s>' }}{% endgeneration %}{%- endif %}{% endfor %}"""


def parse_llama_text(text: str) -> History:
    found = re.findall(r"<s>\[INST\]\s*(.*?)\s*\[/INST\]\s*(.*?)</s>", text, re.DOTALL)
    roles = ("user", "assistant")
    return lazy_stack([History(role=r, content=c) for pair in found for r, c in zip(roles, pair, strict=True)])


@example("runs", "History.from_chats(...).apply_chat_template(...)", "add_chat_template(...)", "History.from_text(...)")
def templates_of_a_history(parts: Parts) -> None:
    """Use TorchRL's own class on our tokenizer, and its template as that of the tokenizer."""
    add_chat_template("documented", LLAMA, parse_llama_text, ["documented"])
    history = History.from_chats(CHAT)
    kwargs = {"tokenizer": parts.tokenizer, "chat_template_name": "documented", "add_generation_prompt": False}
    out = history.apply_chat_template(**kwargs, return_dict=True, return_assistant_tokens_mask=True)
    said = out["input_ids"][0][out["assistant_masks"][0].bool()]
    assert parts.tokenizer.decode(said).startswith("Hi there!")
    text = history.apply_chat_template(**kwargs, tokenize=False)
    parsed = History.from_text(text, chat_template_name="documented")
    assert list(parsed[0].role) == ["user", "assistant"] and list(parsed[0].content) == ["Hello", "Hi there!"]
    assert (
        parts.tokenizer.apply_chat_template(CHAT, chat_template=read_chat_template("documented"), tokenize=False)
        == text
    )


@example("changed", 'env.reset(TensorDict({"query": "Hello!"}, ...))')
def the_loop_of_a_policy_and_an_environment(parts: Parts) -> None:
    env, llm = ChatEnv(parts.tokenizer, input_mode="history"), parts.policy("history")
    obs, done = env.reset(TensorDict({"query": "Hello!"}, batch_size=env.batch_size, device=env.device)), False
    prompt = [{"role": "user", "content": "Hello!"}]
    assert obs[0][keys.PROMPT_TOKENS].tolist() == encode_prompt(parts.tokenizer, prompt)
    while not done:
        obs = env.step(llm(obs))["next"]
        done = bool(obs["done"].all())
    assert [message.role for message in obs[0]["history", "prompt"].unbind(0)] == ["user", "assistant"]


@example("changed", "LLMCollector(env, policy=policy, weight_updater=vLLMUpdater(), track_policy_version=True)")
def versions_of_a_policy(parts: Parts) -> None:
    model = build_model(parts.tokenizer, seed=0)
    policy = parts.policy(model=frozen_copy(model))
    prompts = load_prompts(addition_prompts("train", size=8))
    env = DatasetChatEnv(prompts, parts.tokenizer, prompts_per_batch=2)
    updater = InProcessWeightUpdater(model, policy.model)
    collector = LLMCollector(
        env, policy=policy, weight_updater=updater, track_policy_version=True, total_dialog_turns=4
    )
    collector.update_policy_weights_(state_dict=model.state_dict())
    assert collector.policy_version_tracker.version == 1
    assert [data["policy_version"].tolist() for data in collector] == [[1, 1], [1, 1]]


@example("changed", "env = base_env.append_transform(PythonInterpreter())")
def code_blocks_are_run(parts: Parts) -> None:
    base_env = ChatEnv(
        tokenizer=parts.tokenizer,
        system_prompt="Decorate your code with ```python``` tags.",
        user_role="user",
        system_role="system",
        batch_size=[1],
        input_mode="history",
    )
    env = base_env.append_transform(PythonInterpreter())
    env.set_seed(0)
    with set_list_to_stack(True):
        reset_data = env.reset(TensorDict(query="Square 2.", batch_size=[1]))
    action = "Here is code:\n```python\ndef square(x):\n    return x * x\nprint('square of 2:', square(2))\n```\n"
    history = reset_data["history"]
    history.full = history.prompt.append(History(role=["assistant"], content=[action], batch_size=[1]), inplace=False)
    _, next_data = env.step_and_maybe_reset(reset_data)
    (shown,) = next_data["history"].prompt.apply_chat_template(
        tokenizer=parts.tokenizer, chat_template=parts.tokenizer.chat_template, add_generation_prompt=True
    )
    assert shown.startswith("<|im_start|>system\nDecorate")
    assert "<|im_start|>user\n<tool_response>\nsquare of 2: 4\n</tool_response><|im_end|>" in shown
    assert shown.endswith("<|im_start|>assistant\n")


@example("runs", "a reward transform", "StepCounter(max_steps=1)")
def a_reward_of_an_own_transform(parts: Parts) -> None:
    """Score the last message of the history with the shape ``[*bsz, 1, 1]``."""

    class Length(Transform):
        def _step(self, tensordict, next_tensordict):
            texts = [row["history", "full"][..., -1].content for row in tensordict.unbind(0)]
            reward = torch.tensor([float(len(text)) for text in texts])
            return next_tensordict.set("reward", reward.unsqueeze(-1).unsqueeze(-1))

    env = DatasetChatEnv(
        load_prompts(addition_prompts("train", size=8)),
        parts.tokenizer,
        prompts_per_batch=2,
        input_mode="history",
        transforms=[Length()],
    ).append_transform(StepCounter(max_steps=1))
    rows = LLMCollector(env, parts.policy("history")).collect()
    assert rewards_of(rows) == [len(completion[0]["content"]) for completion in rows[keys.COMPLETION]]


# ------------------------------------------------------------------------------------------------------------- page


@pytest.mark.parametrize("name", CHECKS)
def test_an_example(parts: Parts, name: str) -> None:
    CHECKS[name][1](parts)


def test_the_page_has_these_examples_and_no_others() -> None:
    page = PAGE.read_text()
    rows = re.findall(r"^\| `([^|]+?)` \| (runs|changed|formula) \|", page, re.MULTILINE)
    others = re.findall(r"^\| [^|]+ \| (command|other test|no) \|", page, re.MULTILINE)
    assert dict(rows) == {name: verdict for name, (verdict, _) in CHECKS.items()}
    assert len(rows) + len(others) == len(re.findall(r"^\| (?!Example|---)", page, re.MULTILINE))
