"""Exchange with TorchRL: each row of docs/coming-from/torchrl.md works, or raises with a reason."""

from __future__ import annotations

import ast
import copy
import inspect
import re
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from tensordict import NonTensorData, TensorDict, TensorDictBase, lazy_stack
from torch.utils.data import DataLoader
from torchrl.collectors.llm import LLMCollector as TheirCollector
from torchrl.collectors.llm import vLLMUpdater
from torchrl.data import (
    ContentBase,
    LazyStackStorage,
    LazyTensorStorage,
    ListStorage,
    ReplayBuffer,
    SamplerWithoutReplacement,
)
from torchrl.data.llm import History, add_chat_template
from torchrl.data.llm.topk import TopKRewardSelector
from torchrl.envs import RewardScaling, StepCounter, TransformedEnv
from torchrl.envs import llm as their_envs
from torchrl.envs.llm import transforms as their_transforms
from torchrl.envs.utils import check_env_specs
from torchrl.modules import llm as their_modules
from torchrl.objectives import llm as their_objectives
from torchrl.trainers.algorithms.grpo import GRPOTrainer
from transformers import Qwen2ForSequenceClassification

from torchrl_rloo.collectors import LLMCollector
from torchrl_rloo.data import encode_prompt, keys, load_prompts
from torchrl_rloo.data.rows import stack_rows, tensor_rows
from torchrl_rloo.data.stop_reasons import stop_reason
from torchrl_rloo.data.templates import from_history, to_history
from torchrl_rloo.embedded import build_model
from torchrl_rloo.engines import ScriptedEngine, ScriptedTurn, TransformersEngine
from torchrl_rloo.envs import ChatEnv, DatasetChatEnv, text
from torchrl_rloo.envs.tasks.registry import load_task
from torchrl_rloo.envs.transforms import (
    AddThinkingPrompt,
    BrowserTransform,
    DataLoadingPrimer,
    FeedbackTransform,
    KLRewardTransform,
)
from torchrl_rloo.functional import Clip
from torchrl_rloo.modules import RewardModel, TransformersWrapper, frozen_copy, vLLMWrapper
from torchrl_rloo.modules.loading import read_chat_template
from torchrl_rloo.objectives import RLOOLoss
from torchrl_rloo.ray import RayLLMCollector
from torchrl_rloo.replay import MCAdvantage, RowStorage
from torchrl_rloo.runtime.torchrl_arguments import TORCHRL_ARGUMENTS
from torchrl_rloo.training import accumulate, optimizer_step
from torchrl_rloo.weight_update import InProcessWeightUpdater

PAGE = Path(__file__).resolve().parents[1] / "docs" / "coming-from" / "torchrl.md"


class Parts:
    """Our environment, policies and rows on a small model."""

    def __init__(self, model: torch.nn.Module, tokenizer):
        self.model, self.tokenizer = model, tokenizer
        questions = [{"query": [{"role": "user", "content": f"What is {a}+3?"}], "answer": str(a + 3)} for a in (1, 2)]
        self.prompts = load_prompts(questions)

    def env(self, input_mode: str = "history", **kwargs: Any) -> DatasetChatEnv:
        settings = {"prompts_per_batch": 2, "num_generations": 2, "rewards": count_up, "input_mode": input_mode}
        return DatasetChatEnv(self.prompts, self.tokenizer, **(settings | kwargs))

    def policy(self, input_mode: str = "history") -> TransformersWrapper:
        kwargs = {"max_new_tokens": 4, "seed": 0}
        return TransformersWrapper(self.model, tokenizer=self.tokenizer, input_mode=input_mode, generate_kwargs=kwargs)

    def scorer(self, input_mode: str = "tokens") -> TransformersWrapper:
        return self.policy(input_mode).get_new_version(generate=False)

    def their_policy(self, input_mode: str, generate: bool = True) -> their_modules.TransformersWrapper:
        kwargs = {"input_mode": input_mode, "generate": generate, "return_log_probs": True, "pad_output": False}
        return their_modules.TransformersWrapper(self.model, tokenizer=self.tokenizer, **kwargs)

    def their_env(self, input_mode: str) -> their_envs.DatasetChatEnv:
        loader = DataLoader([{"query": "What is 2+3?"}], collate_fn=lambda b: {"query": [x["query"] for x in b]})
        settings = {"batch_size": (1,), "tokenizer": self.tokenizer, "input_mode": input_mode}
        return their_envs.DatasetChatEnv.from_dataloader(loader, **settings)

    def rows(self) -> TensorDictBase:
        return LLMCollector(self.env(), self.policy()).collect()

    def trained_rows(self) -> TensorDictBase:
        return tensor_rows(MCAdvantage(2).inv(self.rows()))


def count_up(completions: list, **columns: Any) -> list[float]:
    return [float(i) for i in range(len(completions))]


def buffer(transform: Any, storage: Any = None) -> ReplayBuffer:
    storage = LazyStackStorage(16) if storage is None else storage
    return ReplayBuffer(storage=storage, batch_size=4, sampler=SamplerWithoutReplacement(), transform=transform)


@pytest.fixture(scope="module")
def parts(tokenizer) -> Parts:
    return Parts(build_model(tokenizer, seed=0).eval(), tokenizer)


class Row(NamedTuple):
    """Row of the table: a check that passes, or an expected error."""

    check: Callable[[Parts], None]
    error: type[Exception] | None = None
    message: str = ""


ROWS: dict[str, Row] = {}


def works(*names: str) -> Callable:
    """Register the check of rows that work; it receives each of several names."""

    def register(check: Callable) -> Callable:
        ROWS.update({name: Row(partial(check, name=name) if len(names) > 1 else check) for name in names})
        return check

    return register


def refused(name: str, error: type[Exception], message: str) -> Callable:
    """Register the check of a row that raises an error."""

    def register(check: Callable) -> Callable:
        ROWS[name] = Row(check, error, message)
        return check

    return register


@works("GRPOLoss", "DAPO", "CISPOLoss")
def their_loss_on_our_rows(parts: Parts, name: str) -> None:
    rows = parts.trained_rows()
    loss = getattr(their_objectives, name)(parts.scorer())(rows)
    assert loss.loss_objective.requires_grad and float(loss.ESS) == pytest.approx(1, abs=1e-4)


@works("GRPOLoss(masking_strategy=)")
def their_mask_of_several_turns(parts: Parts) -> None:
    """Give the loss of ours, whose mask a row has; ``"generic"`` trains on the prompt and the feedback as well."""
    again = FeedbackTransform(lambda conversation, row: [{"role": "user", "content": "again"}], max_turns=2)
    rows = LLMCollector(parts.env("tokens", transforms=[again]), parts.policy("tokens")).collect()
    rows = tensor_rows(MCAdvantage(2).inv(rows))
    for row in rows.unbind(0):
        row[keys.LOG_PROBS] = row[keys.LOG_PROBS] - 0.1 * row[keys.ACTION_MASK] * torch.arange(len(row[keys.TOKENS]))
    settings = {"clip_epsilon": 0.2, "aggregation": "token_mean", "entropy_bonus": False}
    theirs = {
        strategy: float(
            their_objectives.GRPOLoss(parts.scorer(), masking_strategy=strategy, **settings)(rows).loss_objective
        )
        for strategy in ("sft", "rlhf", "generic")
    }
    ours = float(RLOOLoss(parts.scorer(), ratio="token", surrogate=Clip(0.2), aggregation="token_mean")(rows).loss)
    assert theirs["sft"] == theirs["rlhf"] == pytest.approx(ours, rel=1e-5)
    assert abs(theirs["generic"] - ours) > 1e-2


@works("MCAdvantage")
def their_advantages_of_our_groups(parts: Parts) -> None:
    rows, out = parts.rows(), buffer(their_objectives.MCAdvantage(grpo_size=2, prompt_key=keys.GROUP_ID))
    out.extend(tensor_rows(rows))
    assert sorted(float(a) for row in out.sample() for a in row[keys.ADVANTAGE]) == pytest.approx(
        [-0.707107] * 2 + [0.707107] * 2
    )


@works("LossModule.set_keys(advantage=)")
def their_way_to_rename_the_advantage(parts: Parts) -> None:
    rows, loss = parts.trained_rows(), RLOOLoss(parts.scorer())
    expected = float(loss(rows).loss)
    for row in rows.unbind(0):
        row.rename_key_(keys.ADVANTAGE, "adv")
    loss.set_keys(advantage="adv")
    assert "adv" in loss.in_keys and keys.ADVANTAGE not in loss.in_keys
    assert float(loss(rows).loss) == expected
    assert len(accumulate(loss, rows, micro_batch_size=2)) == 2
    with pytest.raises(ValueError, match="action is not an accepted tensordict key"):
        loss.set_keys(action="ids")


@refused("SFTLoss", KeyError, '"history"')
def their_sft_loss_wants_conversations(parts: Parts) -> None:
    their_objectives.SFTLoss(parts.scorer(), tokenizer=parts.tokenizer)(tensor_rows(parts.rows()))


@works("TransformersWrapper, scoring for GRPOLoss")
def their_scorer_in_their_loss(parts: Parts) -> None:
    loss = their_objectives.GRPOLoss(parts.their_policy("tokens", generate=False))(parts.trained_rows())
    assert float(loss.ESS) == pytest.approx(1, abs=1e-4)


@refused("TransformersWrapper, scoring for RLOOLoss", ValueError, r"must have a score\(rows\) method")
def their_scorer_in_our_loss(parts: Parts) -> None:
    RLOOLoss(parts.their_policy("tokens", generate=False))


@refused("TransformersWrapper, sampling", ValueError, "it must write both for all ids.*torchrl_rloo.modules")
def their_policy_in_our_environment(parts: Parts) -> None:
    LLMCollector(parts.env(), parts.their_policy("history")).collect()


@refused("vLLMWrapper", ValueError, "model must be a string, vllm.LLM")
def their_vllm_policy_on_our_engine(parts: Parts) -> None:
    their_modules.vLLMWrapper(TransformersEngine(parts.model), tokenizer=parts.tokenizer)


@refused("RemoteTransformersWrapper", TypeError, "must be a torchrl_rloo.engines.Engine")
def their_policy_in_an_actor(parts: Parts) -> None:
    remote = their_modules.RemoteTransformersWrapper
    vLLMWrapper(remote.__new__(remote), tokenizer=parts.tokenizer)  # its constructor starts Ray


@refused("vllm.LLM as the engine of vLLMWrapper", TypeError, "must be a torchrl_rloo.engines.Engine")
def what_their_vllm_policy_takes_in_ours(parts: Parts) -> None:
    vLLMWrapper(parts.model, tokenizer=parts.tokenizer)


@works("RetrieveLogProb")
def their_reference_log_probs(parts: Parts) -> None:
    for mode, kwargs in {"tokens": {}, "history": {"tokenizer": parts.tokenizer}}.items():
        kwargs |= {"assistant_only": mode == "history", "log_probs_full_key": ("ref_log_probs", "full")}
        rows = their_transforms.RetrieveLogProb(parts.scorer(mode), **kwargs)(parts.rows())
        for row in rows.unbind(0):
            torch.testing.assert_close(row[keys.REF_LOG_PROBS].detach(), row[keys.LOG_PROBS], rtol=0, atol=1e-5)


@works("RetrieveKL")
def their_kl_of_two_models(parts: Parts) -> None:
    reference = parts.scorer()
    reference.log_probs_key = "ref_log_probs"
    models = {"gen_model": parts.scorer(), "ref_model": reference}
    rows = their_transforms.RetrieveKL(**models, assistant_only=False, add_to_reward=False)(parts.rows())
    assert all(float(row["next", "kl_penalty"].abs().max()) < 1e-5 for row in rows.unbind(0))


@works("KLComputation")
def their_kl_of_recorded_log_probs(parts: Parts) -> None:
    rows = parts.rows()
    for row in rows.unbind(0):
        row["next", "log_probs"] = row["log_probs"].clone()
        row["next", "ref_log_probs"] = row["log_probs"].clone()
    rows = their_transforms.KLComputation(add_to_reward=False)(rows)
    assert all(not row["next", "kl_penalty"].any() for row in rows.unbind(0))


@refused("KLRewardTransform", AttributeError, "action_key")
def their_kl_reward(parts: Parts) -> None:
    transform = their_transforms.KLRewardTransform(parts.scorer(), coef=0.1, tokenizer=parts.tokenizer)
    LLMCollector(parts.env("tokens", after_rewards=[transform]), parts.policy("tokens")).collect()


@works("as_padded_tensor", "as_nested_tensor")
def their_batches(parts: Parts, name: str) -> None:
    rows = [TensorDict({"ids": row[keys.TOKENS][k:]}) for k, row in enumerate(parts.rows().unbind(0))]
    batch = getattr(their_transforms, name)(rows)["ids"]
    assert all(torch.equal(ids[-len(row["ids"]) :], row["ids"]) for ids, row in zip(batch.unbind(0), rows, strict=True))


@works("Tokenizer")
def their_tokenizer_in_a_buffer(parts: Parts) -> None:
    rows = parts.rows()
    for row in rows.unbind(0):
        row["note"] = "What is 2+3?"
    rows = their_transforms.Tokenizer(in_keys=["note"], out_keys=["ids"], tokenizer=parts.tokenizer)(rows)
    assert rows[0]["ids"].tolist() == encode_prompt(parts.tokenizer, "What is 2+3?")


@refused("TemplateTransform", TypeError, "set template_kwargs of DatasetChatEnv")
def their_template(parts: Parts) -> None:
    parts.env().append_transform(their_transforms.TemplateTransform(parts.tokenizer))


@refused("LLMEnv", KeyError, "prompt")
def their_environment_of_texts(parts: Parts) -> None:
    with warnings.catch_warnings(action="ignore"):  # TorchRL deprecated it
        env = their_envs.LLMEnv(batch_size=(1,), has_attention=False)
    env.step(parts.policy("text")(env.reset(TensorDict({env.str_key: ["What is 2+3?"]}, [1]))))


@refused("LLMHashingEnv", KeyError, "prompt")
def their_environment_of_single_tokens(parts: Parts) -> None:
    env = their_envs.LLMHashingEnv(vocab_size=len(parts.tokenizer), tokenizer=parts.tokenizer)
    parts.policy("text")(env.reset(TensorDict({"observation": torch.tensor([5, 6])}, [])).unsqueeze(0))


@works("add_chat_template")
def their_named_templates(parts: Parts) -> None:
    add_chat_template(
        "exchange", "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    )
    tokenizer = copy.deepcopy(parts.tokenizer)
    tokenizer.chat_template = read_chat_template("exchange")
    history = to_history([[{"role": "user", "content": "1+1?"}]])
    theirs = history.apply_chat_template(tokenizer=tokenizer, chat_template_name="exchange", tokenize=False)
    assert theirs == ["1+1?"] and encode_prompt(tokenizer, from_history(history[0])) == encode_prompt(tokenizer, "1+1?")


@works("History.from_text")
def their_parser_of_our_text(parts: Parts) -> None:
    for row in parts.rows().unbind(0):
        history = History.from_text(parts.tokenizer.decode(row[keys.TOKENS]), chat_template_name="chatml_format")
        assert from_history(history)[0] == row[keys.QUERY][0] and history.role[1] == "assistant"


@works("History")
def their_conversations(parts: Parts) -> None:
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    chat = [{"role": "user", "content": "1+2?"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    assert from_history(to_history([chat])[0]) == from_history(History.from_chats([chat])[0]) == chat
    answer = {"role": "tool", "name": "add", "content": "3"}
    assert from_history(to_history([[*chat, answer]])[0]) == [*chat, {"role": "tool", "content": "3"}]


@refused("PythonInterpreter and the other tool transforms", TypeError, r"PythonInterpreter edits .*append PythonInterp")
def their_tools(parts: Parts) -> None:
    parts.env(transforms=[their_transforms.PythonInterpreter(tokenizer=parts.tokenizer)])


@refused("AddThinkingPrompt", TypeError, "use AddThinkingPrompt of torchrl_rloo.envs.transforms")
def their_thinking_prompt(parts: Parts) -> None:
    parts.env(transforms=[their_transforms.AddThinkingPrompt(cond=lambda td: True)])


@works("ChatEnv")
def our_policy_in_their_environment(parts: Parts) -> None:
    for mode in ("history", "text", "tokens"):
        env = their_envs.ChatEnv(batch_size=(1,), tokenizer=parts.tokenizer, input_mode=mode)
        row = env.reset(TensorDict({"query": ["What is 2+3?"]}, [1]))
        assert (mode, "prompt") in env.step(parts.policy(mode)(row))["next"].keys(True)


@refused("DatasetChatEnv", ValueError, "LLMCollector requires one; use DatasetChatEnv")
def their_dataset_in_our_collector(parts: Parts) -> None:
    LLMCollector(parts.their_env("history"), parts.policy()).collect()


@refused("DataLoadingPrimer", ValueError, "LLMCollector requires one; use DatasetChatEnv")
def their_primer_in_our_environment(parts: Parts) -> None:
    loader = DataLoader([{"query": "What is 2+3?"}], collate_fn=lambda b: {"query": [x["query"] for x in b]})
    env = TransformedEnv(ChatEnv(parts.tokenizer), their_transforms.DataLoadingPrimer(loader, batch_size=(1,)))
    LLMCollector(env, parts.policy("tokens")).collect()


@works("LLMCollector")
def our_environment_and_policy_in_their_collector(parts: Parts) -> None:
    out = buffer(MCAdvantage(2))
    settings = {"yield_completed_trajectories": True, "total_dialog_turns": 4, "replay_buffer": out}
    for _ in TheirCollector(parts.env(), policy=parts.policy(), **settings):
        pass
    rows = out.sample()
    assert sorted(float(a) for row in rows for a in row[keys.ADVANTAGE]) == [-1, -1, 1, 1]
    assert float(RLOOLoss(parts.scorer())(rows).ESS) == pytest.approx(1, abs=1e-4)


@refused("vLLMUpdater and other updaters", TypeError, "must be a torchrl_rloo.weight_update.WeightUpdater")
def their_updater_in_our_collector(parts: Parts) -> None:
    LLMCollector(parts.env(), parts.policy(), weight_updater=vLLMUpdater())


@refused("LLMCollector(weight_updater=ours)", TypeError, "must be a subclass of WeightUpdaterBase")
def our_updater_in_their_collector(parts: Parts) -> None:
    updater = InProcessWeightUpdater(parts.model, parts.model)
    TheirCollector(parts.env(), policy=parts.policy(), dialog_turns_per_batch=4, weight_updater=updater)


@works("PolicyVersion")
def their_policy_version(parts: Parts) -> None:
    env = parts.env()
    env.append_transform(their_transforms.PolicyVersion())
    updater = InProcessWeightUpdater(parts.model, parts.model)
    collector = LLMCollector(env, parts.policy(), weight_updater=updater, sync_every=1)
    assert [collector.collect()[keys.POLICY_VERSION].tolist() for _ in range(3)] == [[k] * 4 for k in range(3)]
    with pytest.raises(TypeError, match="version_type='uuid' must be int"):
        env.append_transform(their_transforms.PolicyVersion("uuid"))


@works("StepCounter")
def their_limit_on_steps(parts: Parts) -> None:
    """End conversations in a collector as in a rollout, with a reason that is ours."""
    engine = ScriptedEngine(lambda request, index: ScriptedTurn([5 + index % 3, parts.tokenizer.eos_token_id]))
    policy = vLLMWrapper(engine, tokenizer=parts.tokenizer)
    for steps, turns in ((1, 1), (2, 2), (9, 4)):
        again = FeedbackTransform(lambda completion, row: [{"role": "user", "content": "again"}], max_turns=4)
        env = parts.env("tokens", transforms=[again]).append_transform(StepCounter(max_steps=steps))
        rows = LLMCollector(env, policy).collect()
        assert rows[keys.NUM_TURNS].tolist() == [turns] * 4 and rows[keys.TRUNCATED].all()
        assert {stop_reason(row) for row in rows.unbind(0)} == {"turns"}
        assert rows[keys.REWARD].flatten().tolist() == [0, 1] * 2
    assert env.rollout(5, policy).batch_size == (4, 4)


@works("RewardScaling")
def their_reward_scaling(parts: Parts) -> None:
    env = parts.env()
    env.append_transform(RewardScaling(0.0, 2.0))
    rows = LLMCollector(env, parts.policy()).collect()
    assert rows[keys.REWARD].flatten().tolist() == [0, 2] * 2  # a call for each group


@works("check_env_specs")
def their_check_of_specs(parts: Parts) -> None:
    check_env_specs(parts.env())


@works("EnvBase.rollout")
def their_rollout(parts: Parts) -> None:
    assert parts.env().rollout(2, parts.policy()).batch_size == (4, 1)


@works("LazyStackStorage", "ListStorage")
def their_storages(parts: Parts, name: str) -> None:
    storage = {"LazyStackStorage": LazyStackStorage, "ListStorage": ListStorage}[name](16)
    out = buffer(MCAdvantage(2), storage)
    out._collate_fn = stack_rows
    out.extend(tensor_rows(parts.rows()))
    assert float(RLOOLoss(parts.scorer())(out.sample()).ESS) == pytest.approx(1, abs=1e-4)


@refused("LazyTensorStorage", RuntimeError, "Failed to stack tensors")
def their_storage_of_rectangles(parts: Parts) -> None:
    rows = parts.rows()
    rows[0].set(keys.TOKENS, rows[0][keys.TOKENS][:-1])
    buffer(MCAdvantage(2), LazyTensorStorage(16)).extend(tensor_rows(rows))


@refused("TopKRewardSelector", TypeError, "Expected a string as prompt")
def their_selection(parts: Parts) -> None:
    selector = TopKRewardSelector(total_dialog_turns=2, topk_size=1, prompt_key=keys.QUERY)
    buffer(selector).extend(parts.rows().unsqueeze(-1))


@works("TorchRLBufferDataset")
def their_dataset_of_our_buffer(parts: Parts) -> None:
    rows, out = parts.rows(), buffer(MCAdvantage(2))
    rows[0].set(keys.TOKENS, rows[0][keys.TOKENS][:-1])
    out.extend(tensor_rows(rows))
    with pytest.raises(RuntimeError, match="Failed to stack"):  # it reads batches as rectangles
        next(iter(their_modules.TorchRLBufferDataset(out, batch_size=4)))
    dataset = their_modules.TorchRLBufferDataset(out, batch_size=1, num_batches=4)
    for samples in (dataset, dataset.as_hf_dataset()):
        found = {int(sample["trajectory_id"]): sample for sample in samples}
        for row in out[:].unbind(0):
            sample = found.pop(int(row[keys.TRAJECTORY_ID]))
            for key in (keys.TOKENS, keys.LOG_PROBS, keys.ACTION_MASK, keys.REWARD):
                assert torch.equal(sample[".".join(key)], row[key])
            assert torch.equal(sample[keys.ADVANTAGE], row[keys.ADVANTAGE])
        assert not found


@works("HFRewardModelWrapper")
def their_reward_model(parts: Parts) -> None:
    """Score our rows with it one by one, as ``postproc``, to the scores of our reward model."""
    sizes = parts.model.config.to_dict() | {"num_labels": 1, "pad_token_id": parts.tokenizer.pad_token_id}
    model = Qwen2ForSequenceClassification(type(parts.model.config)(**sizes)).eval()
    wrapper = their_modules.HFRewardModelWrapper(model, inference_mode=True)

    def score(rows: TensorDictBase) -> TensorDictBase:
        for row in rows.unbind(0):
            row[keys.REWARD] = wrapper(row.unsqueeze(0))["reward"].view(1, 1)
        return rows

    rows = LLMCollector(parts.env(), parts.policy(), postproc=score).collect()
    torch.testing.assert_close(rows[keys.REWARD].flatten(), RewardModel(model).score(rows).detach())
    advantages = MCAdvantage(2).inv(rows)[keys.ADVANTAGE].view(2, 2)
    assert advantages.any() and torch.allclose(advantages.sum(1), torch.zeros(2), atol=1e-6)


@works("ContentBase")
def their_parts_of_a_message(parts: Parts) -> None:
    text, image = (
        {"type": "text", "text": "What is 2+3?"},
        {"type": "image", "url": "sum.png", "mime_type": "image/png"},
    )
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": [text, image]}]
    theirs = [
        History(role="system", content="Be brief."),
        History(role="user", content=lazy_stack([ContentBase(**text), ContentBase(**image)])),
    ]
    ours = to_history([chat])[0]
    assert isinstance(ours[1].content, ContentBase)
    assert from_history(ours) == from_history(lazy_stack(theirs)) == chat
    # A template that reads parts renders both alike, and a policy of text continues a text part as the text
    chat = [chat[0], {"role": "user", "content": [text]}]
    ours = to_history([chat])[0]
    tokenizer = copy.deepcopy(parts.tokenizer)
    tokenizer.chat_template = tokenizer.chat_template.replace(
        "message['content']", "(message['content'] if message['content'] is string else message['content'][0]['text'])"
    )
    plain = [chat[0], {"role": "user", "content": text["text"]}]
    ids = ours.apply_chat_template(tokenizer=tokenizer, chat_template=tokenizer.chat_template, tokenize=True)
    assert ids.flatten().tolist() == encode_prompt(tokenizer, chat) == encode_prompt(parts.tokenizer, plain)
    after = []
    for own, query in ((Parts(parts.model, tokenizer), chat), (parts, plain)):
        row = TensorDict({keys.QUERY: NonTensorData(query), keys.SEED: torch.tensor(3)}, [])
        env = ChatEnv(own.tokenizer, input_mode="history")
        after.append(env.step(own.policy()(env.reset(lazy_stack([row]))))[0])
    assert torch.equal(after[0][keys.TOKENS], after[1][keys.TOKENS])
    with_parts, with_text = (from_history(row["next", "history", "prompt"]) for row in after)
    assert with_parts[:2] == chat and with_text[:2] == plain and with_parts[2] == with_text[2]


class Loop:
    """Model and parts of an RLOO loop, the same for each instance; ``settings`` are those of the collector."""

    def __init__(self, parts: Parts, **settings: Any):
        own = Parts(build_model(parts.tokenizer, seed=0).eval(), parts.tokenizer)
        self.model, sampler = own.model, Parts(frozen_copy(own.model), parts.tokenizer)
        updater = InProcessWeightUpdater(self.model, sampler.model)
        self.collector = LLMCollector(own.env(), sampler.policy(), weight_updater=updater, **settings)
        sampler = SamplerWithoutReplacement()
        self.buffer = ReplayBuffer(storage=RowStorage(), sampler=sampler, transform=MCAdvantage(), batch_size=2)
        self.loss = RLOOLoss(own.scorer())
        self.optimizer = torch.optim.AdamW(own.model.parameters(), lr=1e-3)

    def trainer(self, **kwargs: Any) -> GRPOTrainer:
        """Return TorchRL's trainer of these parts for three batches of four rows."""
        settings = {"collector": self.collector, "loss_module": self.loss, "optimizer": self.optimizer}
        settings |= {"replay_buffer": self.buffer, "weight_sync_sender": self.collector}
        settings |= {"empty_replay_buffer_on_weight_update": True, "progress_bar": False, "total_frames": 12}
        with warnings.catch_warnings(action="ignore"):  # it is experimental
            return GRPOTrainer(**(settings | kwargs))


@works("GRPOTrainer")
def our_parts_in_their_trainer(parts: Parts) -> None:
    """Train to the weights of our loop, in two optimizer steps a batch: bit for bit, or to rounding with clipping."""
    start = build_model(parts.tokenizer, seed=0).state_dict()
    for clip, tolerance in ((None, 0.0), (1.0, 1e-5)):  # the two sum the norm of the gradient in another order
        ours, theirs = Loop(parts), Loop(parts)
        torch.manual_seed(0)  # for the buffer's shuffling
        for _ in range(3):
            ours.buffer.extend(tensor_rows(ours.collector.collect()))
            for batch in ours.buffer:
                accumulate(ours.loss, batch)
                optimizer_step(ours.model, ours.optimizer, max_grad_norm=clip)
            ours.buffer.empty()
            ours.collector.update_policy_weights_()
        ours.collector.shutdown()
        torch.manual_seed(0)
        theirs.trainer(clip_norm=clip).train()
        assert theirs.collector.policy_version == 3 and theirs.collector.closed
        weights = theirs.model.state_dict()
        torch.testing.assert_close(weights, ours.model.state_dict(), rtol=0, atol=tolerance)
        assert not any(torch.equal(weights[name], start[name]) for name in start)


@refused("GRPOTrainer(async_collection=True)", NotImplementedError, "set ahead= or max_staleness=")
def their_way_to_collect_in_the_background(parts: Parts) -> None:
    Loop(parts).trainer(async_collection=True).train()


def test_their_trainer_trains_on_rows_that_are_sampled_ahead(parts: Parts) -> None:
    oldest, loop = [], Loop(parts, max_staleness=1)

    def observe(rows: TensorDictBase) -> TensorDictBase:
        oldest.append(int((loop.collector.policy_version - rows[keys.POLICY_VERSION]).max()))
        return rows

    loop.collector.postproc = observe
    loop.trainer().train()
    assert oldest == [0, 1, 1]


@pytest.mark.parametrize("name", ROWS)
def test_row(parts: Parts, name: str) -> None:
    check, error, message = ROWS[name]
    if error is None:
        check(parts)
    else:
        with pytest.raises(error, match=re.compile(message, re.DOTALL)):
            check(parts)


def test_the_page_has_these_rows_and_no_others() -> None:
    cells = re.findall(r"^\| `([^|]+?)`([^|]*?) \| (works|refused) \|", PAGE.read_text(), re.MULTILINE)
    claimed = {name + rest.replace("`", ""): verdict for name, rest, verdict in cells}
    assert claimed == {name: "works" if row.error is None else "refused" for name, row in ROWS.items()}


def test_environments_of_datasets_have_the_tasks_of_the_page() -> None:
    section = PAGE.read_text().partition("## Environments of datasets")[2]
    rows = re.findall(r"^\| (`\w+Env`.*?) \| `task=(\w+)`", section, re.MULTILINE)
    assert len(rows) == 4
    for names, task in rows:
        assert all(hasattr(their_envs, name) for name in re.findall(r"\w+", names)) and load_task(task).name == task
    assert hasattr(their_envs, "make_mlgym") and hasattr(text, "MLGymWrapper")


# ----------------------------------------------------------------------------------------------------------- arguments

OURS = (TransformersWrapper, vLLMWrapper, ChatEnv, DatasetChatEnv, DataLoadingPrimer, KLRewardTransform)
OURS += (AddThinkingPrompt, BrowserTransform, LLMCollector, RayLLMCollector, MCAdvantage, RLOOLoss)
CALLS = {cls.__name__: cls for cls in OURS}
CALLS["LLMCollector.update_policy_weights_"] = partial(LLMCollector.update_policy_weights_, None)
THEIRS = {cls.__name__: cls for cls in (their_modules.TransformersWrapper, their_modules.vLLMWrapper, TheirCollector)}
THEIRS |= {name: getattr(their_envs, name) for name in ("ChatEnv", "DatasetChatEnv")}
THEIRS |= {name: getattr(their_transforms, name) for name in ("DataLoadingPrimer", "KLRewardTransform")}
THEIRS |= {"AddThinkingPrompt": their_transforms.AddThinkingPrompt, "MCAdvantage": their_objectives.MCAdvantage}
THEIRS |= {"RLOOLoss": their_objectives.GRPOLoss}


def is_accepted(owner: str, name: str, value: Any) -> bool:
    """Return whether an argument of TorchRL is accepted; other arguments may still be missing."""
    try:
        CALLS[owner](**{name: value})
    except (TypeError, AttributeError) as error:
        if "lacks arguments of TorchRL's" in str(error):
            assert TORCHRL_ARGUMENTS[owner][name].instead in str(error) and "\n" not in str(error)
            return False
        assert "unexpected keyword" not in str(error)
    return True


def test_each_argument_of_torchrl_is_accepted_or_answered() -> None:
    assert set(CALLS) == set(TORCHRL_ARGUMENTS)
    for owner, arguments in TORCHRL_ARGUMENTS.items():
        for name, theirs in arguments.items():
            assert not is_accepted(owner, name, object()), (owner, name)
            assert all(is_accepted(owner, name, value) for value in theirs.same), (owner, name)
        if owner in THEIRS:  # the names are those of the installed TorchRL, and none is missing
            known = set(inspect.signature(THEIRS[owner].__init__).parameters) - {"self", "kwargs"}
            assert set(arguments) <= known and known - set(arguments) <= set(inspect.signature(CALLS[owner]).parameters)


def test_arguments_of_the_page_have_its_verdicts() -> None:
    cells = re.findall(r"^\| `([\w.]+)\((\w+)=(.+?)\)` \| (accepted|error) \|", PAGE.read_text(), re.MULTILINE)
    assert len(cells) == len(re.findall(r"\| (?:accepted|error) \|", PAGE.read_text())) > 20
    for owner, name, value, verdict in cells:
        assert is_accepted(owner, name, ast.literal_eval(value)) == (verdict == "accepted"), (owner, name)


def test_other_ways_of_torchrl_are_answered(parts: Parts) -> None:
    loader = DataLoader([{"query": "1+1?"}])
    with pytest.raises(TypeError, match=r"dataset is a DataLoader; pass load_prompts"):
        DataLoadingPrimer(loader)
    for cls in (ChatEnv, DatasetChatEnv):
        with pytest.raises(TypeError, match=r"from_dataloader is TorchRL's; use DatasetChatEnv\(load_prompts"):
            cls.from_dataloader(loader, tokenizer=parts.tokenizer, repeats=4)
    with pytest.raises(TypeError, match="model='Qwen/Qwen3-0.6B' must be a loaded model; use .*load_model"):
        TransformersWrapper("Qwen/Qwen3-0.6B", tokenizer=parts.tokenizer)
    with pytest.raises(TypeError, match="num_envs=2 .set prompts_per_batch.; repeats=4 .set num_generations."):
        DatasetChatEnv(num_envs=2, repeats=4, tokenizer=parts.tokenizer)
    with pytest.raises(TypeError, match="MCAdvantage lacks arguments of TorchRL's: prompt_key='query' .*group_id"):
        MCAdvantage(4, "query")
    with pytest.raises(ValueError, match="prompt=<function .* must be a text"):
        AddThinkingPrompt(lambda td: True)
    with pytest.raises(TypeError, match=r"allowed_domains=\['pytorch.org'\] .set allowed_hosts"):
        BrowserTransform(allowed_domains=["pytorch.org"])
    for transform in (their_transforms.PythonInterpreter(), their_transforms.TemplateTransform(parts.tokenizer)):
        for env in (parts.env(), ChatEnv(parts.tokenizer)):
            with pytest.raises(TypeError, match="edits conversations as text, but here they are ids"):
                env.append_transform(transform)


def test_a_collector_knows_the_names_of_torchrl(parts: Parts) -> None:
    updater = InProcessWeightUpdater(parts.model, parts.model)
    names = (
        "track_policy_version",
        "yield_completed_trajectories",
        "yield_only_last_steps",
        "flatten_data",
        "async_envs",
    )
    collector = LLMCollector(parts.env, policy=parts.policy(), weight_updater=updater, **dict.fromkeys(names, True))
    assert collector.policy_version_tracker.version == 0
    collector.update_policy_weights_()
    assert collector.policy_version_tracker.version == 1
    assert collector.collect()[keys.POLICY_VERSION].tolist() == [1] * 4
    for weights in (parts.model, parts.scorer(), parts.model.state_dict(), TensorDict.from_module(parts.model)):
        collector.update_policy_weights_(weights)
    collector.update_policy_weights_(state_dict=parts.model.state_dict())
    assert collector.policy_version == 6
    for weights in (frozen_copy(parts.model), frozen_copy(parts.model).state_dict(), {}):
        with pytest.raises(ValueError, match="weights must be those of the training model"):
            collector.update_policy_weights_(weights)
    assert collector.policy_version == 6
    with pytest.raises(NotImplementedError, match="set ahead= or max_staleness="):
        collector.start()
    collector.shutdown()
