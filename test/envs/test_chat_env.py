"""ChatEnv and DatasetChatEnv: specs, ragged rows, ends of trajectories, and resets and steps of a subset of rows."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import pytest
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict, TensorDictBase
from torchrl.envs import Transform
from torchrl.envs.utils import check_env_specs
from torchrl.modules.llm.policies import ChatHistory, LogProbs, Masks, Text, Tokens

from torchrl_rloo.data import encode_prompt, keys, load_prompts
from torchrl_rloo.data.rows import make_tensorclass, ragged, stack_rows
from torchrl_rloo.data.templates import to_history
from torchrl_rloo.envs import ChatEnv, DatasetChatEnv, chat
from torchrl_rloo.envs.stepping import step_rows
from torchrl_rloo.envs.transforms import FeedbackTransform, KLRewardTransform
from torchrl_rloo.modules import TransformersWrapper

MODES = ("tokens", "text", "history")


def length_reward(completions, **_) -> list[float]:
    return [float(len(c[-1]["content"] if isinstance(c, list) else c)) for c in completions]


@pytest.fixture(scope="module")
def make_policy(random_model, bpe) -> Callable[..., TransformersWrapper]:
    def make(input_mode: str = "tokens", **generate_kwargs) -> TransformersWrapper:
        kwargs = {"max_new_tokens": 6, "seed": 0, **generate_kwargs}
        return TransformersWrapper(random_model, tokenizer=bpe, input_mode=input_mode, generate_kwargs=kwargs)

    return make


def act(row: TensorDictBase, ids: list[int], truncated: bool = False) -> TensorDictBase:
    """Return one row with the action of a policy that sampled ``ids``."""
    prompt, new = row[keys.PROMPT_TOKENS], torch.tensor(ids)
    mask = torch.cat([row[keys.ACTION_MASK], torch.ones(len(ids), dtype=torch.bool)])
    log_probs = torch.cat([row[keys.LOG_PROBS], torch.full((len(ids),), -0.5)])
    row.set("tokens", make_tensorclass(Tokens, prompt=prompt, full=torch.cat([prompt, new])))
    row.set("masks", make_tensorclass(Masks, all_assistant_mask=mask))
    row.set("log_probs", make_tensorclass(LogProbs, full=log_probs))
    return row.set(keys.RESPONSE_TRUNCATED, torch.tensor([truncated]))


# specs


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("input_mode", MODES)
def test_specs_of_a_chat_env(input_mode: str, rows: int, bpe, user: Callable, query_rows: Callable) -> None:
    """Use rows of equal prompts, since TorchRL's checker cannot compare ragged rows."""
    env = ChatEnv(bpe, batch_size=rows, input_mode=input_mode)
    check_env_specs(env, tensordict=env.reset(query_rows(*[user("abc")] * rows)))


def again(conversation, row) -> list[dict[str, str]]:
    return [{"role": "user", "content": "again"}]


EXTRAS = {
    "bare": lambda ref: {},
    "rewards": lambda ref: {"rewards": length_reward},
    "feedback": lambda ref: {"rewards": length_reward, "transforms": [FeedbackTransform(again, max_turns=5)]},
    "kl": lambda ref: {"rewards": length_reward, "after_rewards": [KLRewardTransform(ref, 0.1)]},
    "all": lambda ref: {
        "rewards": length_reward,
        "transforms": [FeedbackTransform(again, max_turns=2)],
        "after_rewards": [KLRewardTransform(ref, 0.1)],
    },
}


@pytest.mark.parametrize("extras", EXTRAS)
@pytest.mark.parametrize("input_mode", MODES)
def test_specs_of_a_dataset_env(input_mode: str, extras: str, bpe, user: Callable, make_policy: Callable) -> None:
    data = load_prompts([{"query": user("abc"), "answer": "x"}, {"query": user("abb"), "answer": "y"}])
    kwargs = EXTRAS[extras](make_policy().get_new_version(generate=False))
    env = DatasetChatEnv(data, bpe, prompts_per_batch=2, num_generations=2, input_mode=input_mode, **kwargs)
    reset = env.reset()
    assert len({len(p) for p in ragged(reset, keys.PROMPT_TOKENS)}) == 1, "the test wants equal lengths"
    check_env_specs(env)


@pytest.mark.parametrize("extras", EXTRAS)
@pytest.mark.parametrize("input_mode", MODES)
def test_what_a_step_gives_is_in_the_specs(input_mode: str, extras: str, bpe, prompts, make_policy: Callable) -> None:
    """Check ragged rows and a real policy, unlike TorchRL's checker."""
    kwargs = EXTRAS[extras](make_policy().get_new_version(generate=False))
    env = DatasetChatEnv(prompts, bpe, prompts_per_batch=4, input_mode=input_mode, **kwargs)
    out = env.step(make_policy(input_mode)(env.reset()))
    for spec in (env.full_observation_spec, env.full_reward_spec, env.full_done_spec):
        for key in spec.keys(True, True):
            for row in out["next"].unbind(0):
                assert key in row.keys(True, True), key
                if isinstance(value := row.get(key), torch.Tensor):
                    assert value.dtype == spec[key].dtype, key
                    assert value.ndim == spec[key].ndim - 1, key


# arguments


def test_signatures_are_shown() -> None:
    shown = inspect.signature(DatasetChatEnv).parameters
    assert {"dataset", "prompts_per_batch", "rewards", "max_tokens", "template_kwargs"} <= set(shown)
    assert not {"self", "chat", "args", "kwargs", "batch_size"} & set(shown)
    assert list(inspect.signature(ChatEnv).parameters)[:2] == ["tokenizer", "batch_size"]

    class Mine(ChatEnv):
        def __init__(self, tokenizer, size: int):
            super().__init__(tokenizer, batch_size=size)

    assert list(inspect.signature(Mine).parameters) == ["tokenizer", "size"]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"reward_weights": [1]}, TypeError, "unknown argument 'reward_weights': .*RewardTransform"),
        ({"max_token": 3}, TypeError, "DatasetChatEnv got an unknown argument 'max_token' .did you mean 'max_tokens'"),
        ({"transforms": [FeedbackTransform]}, TypeError, r"transforms\[0\] is the class FeedbackTransform; pass"),
        ({"after_rewards": [3]}, TypeError, r"after_rewards\[0\]=3 must be a torchrl.envs.Transform"),
        ({"rewards": "boxed_acuracy"}, ValueError, "did you mean 'boxed_accuracy'"),
        ({"rewards": "boxed_accuracy"}, ValueError, r"requires \['answer'\], which the dataset does not have"),
    ],
)
def test_wrong_arguments_are_refused_by_name(arguments: dict, error: type, message: str, bpe, user: Callable) -> None:
    with pytest.raises(error, match=message):
        DatasetChatEnv(load_prompts([{"query": user("abc")}]), bpe, prompts_per_batch=1, **arguments)


def test_rewards_by_name_and_where_the_kl_goes(bpe, prompts, make_policy: Callable) -> None:
    env = DatasetChatEnv(prompts, bpe, prompts_per_batch=1, rewards=["boxed_accuracy", {"_target_": "think_format"}])
    assert env.reward_transform.names == ["boxed_accuracy", "think_format"]
    kl = KLRewardTransform(make_policy().get_new_version(generate=False), 0.1)
    with pytest.raises(ValueError, match="put it in after_rewards"):
        DatasetChatEnv(prompts, bpe, prompts_per_batch=1, transforms=[kl])


# reset


def test_text_prompts_are_what_the_tokenizer_makes_of_them(make_tokenizer: Callable, user: Callable) -> None:
    """Apply the rule of load_prompts, which may not know the tokenizer."""
    rows, template = [{"prompt": "abc"}, {"prompt": "bca"}], make_tokenizer()
    bare = make_tokenizer()
    bare.chat_template = None
    for dataset, tokenizer, query in (
        (load_prompts(rows), template, user("abc")),
        (load_prompts(rows, tokenizer=template), template, user("abc")),
        (load_prompts(rows, chat=False), template, "abc"),
        (load_prompts(rows), bare, "abc"),
    ):
        env = DatasetChatEnv(dataset, tokenizer, prompts_per_batch=2, shuffle=False)
        row = env.reset()[0]
        assert row[keys.QUERY] == query
        assert row[keys.PROMPT_TOKENS].tolist() == encode_prompt(tokenizer, query)


def test_prompts_that_the_dataset_encoded_are_not_encoded_again(make_tokenizer: Callable, monkeypatch) -> None:
    tokenizer = make_tokenizer()
    dataset = load_prompts([{"prompt": "abc"}, {"prompt": "bcabca"}], chat=True)
    ids = dataset.encode(tokenizer)
    encoded = []
    monkeypatch.setattr(chat, "encode_prompt", lambda *args, **kwargs: encoded.append(args) or [1])
    env = DatasetChatEnv(dataset, tokenizer, prompts_per_batch=2, num_generations=2, shuffle=False)
    assert [t.tolist() for t in ragged(env.reset(), keys.PROMPT_TOKENS)] == [ids[0], ids[0], ids[1], ids[1]]
    assert not encoded

    class Rewrites(Transform):
        def _reset_env_preprocess(self, tensordict: TensorDictBase) -> TensorDictBase:
            for row in tensordict.unbind(0):
                row.set(keys.QUERY, NonTensorData([{"role": "user", "content": "c"}]))
            return tensordict

    env = DatasetChatEnv(dataset, tokenizer, prompts_per_batch=2, transforms=[Rewrites()])
    assert [t.tolist() for t in ragged(env.reset(), keys.PROMPT_TOKENS)] == [[1], [1]], "the query is another"


@pytest.mark.parametrize("input_mode", MODES)
def test_ragged_prompts(input_mode: str, bpe, prompts, query_rows: Callable) -> None:
    queries = [row[keys.QUERY] for row in prompts]
    out = ChatEnv(bpe, batch_size=4, input_mode=input_mode).reset(query_rows(*queries))
    assert len({len(p) for p in ragged(out, keys.PROMPT_TOKENS)}) > 1
    for row, query in zip(out.unbind(0), queries, strict=True):
        n = len(row[keys.PROMPT_TOKENS])
        assert row[keys.PROMPT_TOKENS].tolist() == encode_prompt(bpe, query)
        assert row[keys.ACTION_MASK].tolist() == [False] * n and row[keys.LOG_PROBS].tolist() == [0.0] * n
        assert int(row[keys.NUM_TURNS]) == 0 and row[keys.COMPLETION] == []
        assert not row["done"].any() and not row["terminated"].any() and not row["truncated"].any()
        if input_mode == "text":
            assert isinstance(row["text"], Text)
            assert row["text", "prompt"] == bpe.decode(encode_prompt(bpe, query))
        elif input_mode == "history":
            assert isinstance(row["history"], ChatHistory)
            assert row["history", "prompt"].content == [m["content"] for m in query]


@pytest.mark.parametrize("conversational", [True, False])
@pytest.mark.parametrize("form", ["rows", "stack", "list"])
def test_every_row_has_its_own_prompt(
    form: str, conversational: bool, bpe, user: Callable, query_rows: Callable
) -> None:
    """Use several containers, some of which make a new object of a query at each read."""
    texts = ["abc" * (i + 1) for i in range(12)]
    queries = [user(t) for t in texts] if conversational else texts
    batch = {
        "rows": lambda: query_rows(*queries),
        "stack": lambda: TensorDict({keys.QUERY: NonTensorStack(*queries)}, [12]),
        "list": lambda: TensorDict({keys.QUERY: queries}, [12]),
    }[form]()
    out = ChatEnv(bpe, batch_size=12).reset(batch)
    expected = [encode_prompt(bpe, q) for q in queries]
    assert [p.tolist() for p in ragged(out, keys.PROMPT_TOKENS)] == expected


def test_what_cannot_be_a_prompt_is_refused(bpe, query_rows: Callable, user: Callable) -> None:
    env = ChatEnv(bpe, batch_size=1)
    with pytest.raises(KeyError, match="query"):
        env.reset()
    with pytest.raises(ValueError, match="query"):
        env.reset(query_rows([{"role": "user"}]))


@pytest.mark.parametrize("input_mode", MODES)
def test_a_text_is_the_users_message_in_a_chat(input_mode: str, bpe, query_rows: Callable, user: Callable) -> None:
    """Prompt as with the written-out messages, also in a dataset's environment and after another reset."""
    system = [{"role": "system", "content": "Be brief."}]
    for prompt, query in {"Be brief.": "abc", None: user("abc"), "Be long.": system + user("abc")}.items():
        dataset = load_prompts([{"query": query}], chat=not isinstance(query, str))
        env = ChatEnv(bpe, batch_size=1, input_mode=input_mode, system_prompt=prompt)
        pair = DatasetChatEnv(
            dataset, bpe, prompts_per_batch=1, num_generations=2, input_mode=input_mode, system_prompt=prompt
        )
        expected = user("abc") if prompt is None else system + user("abc")
        for row in (*env.reset(env.reset(query_rows(query))).unbind(0), *pair.reset().unbind(0)):
            assert row[keys.PROMPT_TOKENS].tolist() == encode_prompt(bpe, expected)
            assert row[keys.QUERY] == expected
    plain = ChatEnv(bpe, batch_size=1, input_mode=input_mode).reset(query_rows("abc"))[0]
    expected = user("abc") if input_mode == "history" else "abc"
    assert plain[keys.PROMPT_TOKENS].tolist() == encode_prompt(bpe, expected)


@pytest.mark.parametrize(
    "kwargs", [{"input_mode": "txt"}, {"max_tokens": 1}, {"batch_size": 0}, {"batch_size": (2, 2)}], ids=str
)
def test_arguments_are_checked(kwargs: dict, bpe) -> None:
    with pytest.raises(ValueError, match=next(iter(kwargs))):
        ChatEnv(bpe, **kwargs)


def test_template_arguments_reach_the_template(make_tokenizer: Callable, user: Callable, query_rows: Callable) -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template += "{% if thinking %}<think>{% endif %}"
    env = ChatEnv(tokenizer, batch_size=1, template_kwargs={"thinking": True})
    row = env.reset(query_rows(user("abc")))[0]
    assert tokenizer.decode(row[keys.PROMPT_TOKENS]).endswith("assistant\n<think>")


def test_a_partial_reset_restarts_the_rows_named_and_no_other(bpe, prompts, query_rows: Callable) -> None:
    env = ChatEnv(bpe, batch_size=3)
    rows = env.reset(query_rows(*[row[keys.QUERY] for row in prompts][:3]))
    stepped = env.step(stack_rows([act(row, [40 + i, 41]) for i, row in enumerate(rows.unbind(0))]))
    state = stepped["next"].exclude("reward")
    state = stack_rows([r.set("_reset", torch.tensor([i == 1])) for i, r in enumerate(state.unbind(0))])
    out = env.reset(state)
    for i, (row, first) in enumerate(zip(out.unbind(0), prompts, strict=False)):
        prompt = encode_prompt(bpe, first[keys.QUERY])
        if i == 1:
            assert row[keys.PROMPT_TOKENS].tolist() == prompt and not row["done"].any()
            assert int(row[keys.NUM_TURNS]) == 0 and row[keys.COMPLETION] == []
            assert not row[keys.ACTION_MASK].any() and len(row[keys.LOG_PROBS]) == len(prompt)
        else:
            assert row[keys.PROMPT_TOKENS].tolist() == [*prompt, 40 + i, 41]
            assert int(row[keys.NUM_TURNS]) == 1
            assert row[keys.ACTION_MASK].tolist() == [False] * len(prompt) + [True] * 2


# step


def test_what_ends_a_trajectory(bpe, user: Callable, query_rows: Callable) -> None:
    prompt = encode_prompt(bpe, user("abc"))
    env = ChatEnv(bpe, batch_size=4, max_tokens=len(prompt) + 4)
    rows = env.reset(query_rows(*[user("abc")] * 4)).unbind(0)
    end = bpe.eos_token_id
    actions = [([40, end], False), ([40, 41], True), ([40, 41, 42], False), ([40, 41, 42, 43], True)]
    out = env.step(stack_rows([act(row, ids, cut) for row, (ids, cut) in zip(rows, actions, strict=True)]))
    assert out[keys.DONE].flatten().tolist() == [True] * 4
    assert out[keys.TERMINATED].flatten().tolist() == [True, False, True, False]
    assert out[keys.TRUNCATED].flatten().tolist() == [False, True, False, True]
    assert out[keys.DONE].shape == (4, 1) and out[keys.REWARD].shape == (4, 1, 1)


def test_an_end_of_turn_as_the_last_token_allowed_is_no_truncation(bpe, user: Callable, query_rows: Callable) -> None:
    """Expect no truncation by max_new_tokens or max_tokens if the policy itself ended the turn."""
    limit = len(encode_prompt(bpe, user("abc"))) + 2
    env = ChatEnv(bpe, batch_size=2, max_tokens=limit)
    rows = env.reset(query_rows(user("abc"), user("abc"))).unbind(0)
    out = env.step(stack_rows([act(rows[0], [40, bpe.eos_token_id]), act(rows[1], [40, 41], truncated=True)]))
    assert out[keys.TERMINATED].flatten().tolist() == [True, False]
    assert out[keys.TRUNCATED].flatten().tolist() == [False, True]


@pytest.mark.parametrize("room", [1, 3, 5])
def test_no_trajectory_is_longer_than_max_tokens(room: int, bpe, user: Callable, make_policy: Callable) -> None:
    """Apply the limit to the tokens that the policy samples, not only to its flag."""
    data = load_prompts([{"query": user("abc")}])
    limit = len(encode_prompt(bpe, user("abc"))) + room
    env = DatasetChatEnv(data, bpe, prompts_per_batch=1, num_generations=4, max_tokens=limit)
    out = env.step(make_policy(max_new_tokens=12, ignore_eos=True)(env.reset()))
    assert [len(t) for t in ragged(out["next"], keys.PROMPT_TOKENS)] == [limit] * 4
    assert out[keys.TRUNCATED].all() and not out[keys.TERMINATED].any()


def test_the_ids_of_a_step_are_the_policys(bpe, prompts, make_policy: Callable) -> None:
    env = DatasetChatEnv(prompts, bpe, prompts_per_batch=4, num_generations=2)
    acted = make_policy()(env.reset())
    expected = [
        (r[keys.TOKENS].tolist(), r[keys.ACTION_MASK].tolist(), r[keys.LOG_PROBS].tolist()) for r in acted.unbind(0)
    ]
    for row, (ids, mask, log_probs) in zip(env.step(acted)["next"].unbind(0), expected, strict=True):
        assert row[keys.PROMPT_TOKENS].tolist() == ids
        assert row[keys.ACTION_MASK].tolist() == mask and row[keys.LOG_PROBS].tolist() == log_probs
        assert int(row[keys.NUM_TURNS]) == 1
        (answer,) = row[keys.COMPLETION]
        sampled = [i for i, m in zip(ids, mask, strict=True) if m]
        assert answer == {"role": "assistant", "content": bpe.decode(sampled, skip_special_tokens=True)}


def test_ids_that_do_not_extend_the_prompt_are_refused(bpe, user: Callable, query_rows: Callable) -> None:
    env = ChatEnv(bpe, batch_size=1)
    for wrong in (lambda p: torch.cat([p[:-1], p[-1:] + 1]), lambda p: p[:-1], lambda p: p.flip(0)):
        row = env.reset(query_rows(user("abc")))[0]
        row.set("tokens", Tokens(prompt=row[keys.PROMPT_TOKENS], full=wrong(row[keys.PROMPT_TOKENS])))
        with pytest.raises(ValueError, match="do not extend"):
            env.step(stack_rows([row]))


def test_a_policy_without_log_probs_leaves_them_unknown(bpe, user: Callable, query_rows: Callable) -> None:
    env = ChatEnv(bpe, batch_size=1)
    row = env.reset(query_rows(user("abc")))[0]
    prompt = row[keys.PROMPT_TOKENS]
    row.set("tokens", Tokens(prompt=prompt, full=torch.cat([prompt, torch.tensor([40, 41])])))
    end = env.step(stack_rows([row]))[0]["next"]
    n = len(prompt)
    assert end[keys.ACTION_MASK].tolist() == [False] * n + [True] * 2
    assert (end[keys.LOG_PROBS][:n] == 0).all() and end[keys.LOG_PROBS][n:].isnan().all()


def test_a_policy_of_text_alone_is_encoded_once(bpe, user: Callable, query_rows: Callable) -> None:
    said = "cab ab"
    ids = bpe(said, add_special_tokens=False)["input_ids"]
    env = ChatEnv(bpe, batch_size=1, input_mode="text")
    row = env.reset(query_rows(user("abc")))[0]
    row.set("text", Text(prompt=row["text", "prompt"], full=row["text", "prompt"] + said))
    end = env.step(stack_rows([row]))[0]["next"]
    assert end[keys.PROMPT_TOKENS].tolist() == encode_prompt(bpe, user("abc")) + ids
    assert end[keys.ACTION_MASK].sum() == len(ids)
    env = ChatEnv(bpe, batch_size=1, input_mode="history")
    row = env.reset(query_rows(user("abc")))[0]
    answered = [*user("abc"), {"role": "assistant", "content": said}]
    row.set("history", ChatHistory(prompt=row["history", "prompt"], full=to_history([answered])[0]))
    end = env.step(stack_rows([row]))[0]["next"]
    assert end[keys.PROMPT_TOKENS].tolist() == encode_prompt(bpe, user("abc")) + [*ids, bpe.eos_token_id]
    assert end[keys.COMPLETION] == [{"role": "assistant", "content": said}]


def test_rows_may_be_stepped_in_any_subsets(bpe, prompts, make_policy: Callable) -> None:
    """Expect the same step of a subset as among all rows, on both environments."""
    whole = DatasetChatEnv(prompts, bpe, prompts_per_batch=4, shuffle=False, rewards=length_reward)
    acted = make_policy()(whole.reset())
    copies = [row.copy() for row in acted.unbind(0)]
    expected = whole.step(acted)["next"]
    for env in (whole, whole.base_env):
        for subset in ([0, 1, 2, 3], [2], [3, 1], [0, 2, 3]):
            out = step_rows(env, stack_rows([copies[i].copy() for i in subset]))["next"]
            assert out.batch_size == (len(subset),)
            for row, i in zip(out.unbind(0), subset, strict=True):
                assert row[keys.PROMPT_TOKENS].tolist() == expected[i][keys.PROMPT_TOKENS].tolist()
                assert bool(row["done"]) and row[keys.COMPLETION] == expected[i][keys.COMPLETION]
                if env is whole:
                    assert torch.equal(row["reward"], expected[i]["reward"])


def test_torchrls_rollout_goes_on_with_new_prompts(bpe, prompts, make_policy: Callable) -> None:
    env = DatasetChatEnv(prompts, bpe, prompts_per_batch=2, num_generations=2, rewards=length_reward, shuffle=False)
    out = env.rollout(4, make_policy(), break_when_any_done=False, return_contiguous=False)
    assert out.batch_size == (4, 4)
    assert out[keys.GROUP_ID].tolist() == [[0, 2, 4, 6], [0, 2, 4, 6], [1, 3, 5, 7], [1, 3, 5, 7]]
    for t in range(4):
        for row, i in zip(out[:, t].unbind(0), (0, 0, 1, 1), strict=True):
            query = prompts[(2 * t + i) % 4][keys.QUERY]
            assert row[keys.QUERY] == query
            assert row[keys.TOKENS].tolist()[: len(encode_prompt(bpe, query))] == encode_prompt(bpe, query)
            assert row["next", "done"].all() and int(row["next", keys.NUM_TURNS]) == 1


def test_columns_and_extra_entries_stay_with_their_row(bpe, prompts, make_policy: Callable) -> None:
    env = DatasetChatEnv(prompts, bpe, prompts_per_batch=4, num_generations=2, shuffle=False)
    out = env.step(make_policy()(env.reset()))
    assert [row["answer"] for row in out.unbind(0)] == [p["answer"] for p in prompts for _ in range(2)]
    assert [row[keys.QUERY] for row in out.unbind(0)] == [p[keys.QUERY] for p in prompts for _ in range(2)]


def test_a_prompt_that_ends_in_an_open_turn_is_continued(bpe, user: Callable, query_rows: Callable) -> None:
    """Expect one message: the text of the prompt's open turn, then the sampled text."""
    query = [*user("abc"), {"role": "assistant", "content": "so ca"}]
    env = ChatEnv(bpe, batch_size=1, input_mode="history")
    row = env.reset(query_rows(query))[0]
    assert bpe.decode(row[keys.PROMPT_TOKENS]).endswith("assistant\nso ca")
    sampled = [*bpe("b", add_special_tokens=False)["input_ids"], bpe.eos_token_id]
    end = env.step(stack_rows([act(row, sampled)]))[0]["next"]
    assert end["history", "prompt"].role == ["user", "assistant"]
    assert end["history", "prompt"].content == ["abc", "so cab"]


def test_prompts_per_batch_is_checked(bpe, prompts) -> None:
    with pytest.raises(ValueError, match="prompts_per_batch=0"):
        DatasetChatEnv(prompts, bpe, prompts_per_batch=0)
    with pytest.raises(ValueError, match="num_generations=0"):
        DatasetChatEnv(prompts, bpe, prompts_per_batch=1, num_generations=0)
