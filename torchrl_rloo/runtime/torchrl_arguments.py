"""TorchRL's arguments of classes that bear its names here, and what to write instead."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple


class Theirs(NamedTuple):
    """Argument of a TorchRL class that ours does not have.

    Attributes:
        instead: what to write here.
        same: values with which TorchRL's class does what ours always does. They are accepted.
    """

    instead: str
    same: tuple[Any, ...] = ()


_LINE_END = "\n"
_FIXED_KEY = "leave it out: torchrl_rloo.data.keys fixes the names of entries"
_OWN_TEMPLATE = "pass it, or its name, as chat_template of load_model, or as model.chat_template of a recipe"
_ON_CPU = "leave it out: rows lie on the CPU, and the policy moves them to its model"
_ROLES = "leave it out: messages name their roles"
_LOADED = "pass load_prompts(rows or hub id), which draws and groups prompts"
_SELECTION = "use TopKSelector, as ReplayBuffer(transform=Compose(MCAdvantage(), TopKSelector(...)))"

_WRAPPER = {
    "input_key": Theirs(_FIXED_KEY, (None,)),
    "attention_mask_key": Theirs(_FIXED_KEY, ("attention_mask",)),
    "tokenizer_kwargs": Theirs("set them on the tokenizer", (None, {})),
    "pad_output": Theirs("use torchrl_rloo.data.pad on entries of the rows, which are ragged", (False,)),
    "inplace": Theirs("pass tensordict_out= to the call", (None, True)),
    "layout": Theirs("leave it out: entries are strided", (None,)),
    "chat_template_name": Theirs(_OWN_TEMPLATE, (None,)),
    "chat_template": Theirs(_OWN_TEMPLATE, (None,)),
    "return_log_probs": Theirs("leave it out: log-probs are always written", (None, True)),
    **{f"{name}_key": Theirs(_FIXED_KEY, (name,)) for name in ("history", "text", "tokens", "masks")},
    "log_probs_key": Theirs("set the attribute log_probs_key of the wrapper", ("log_probs",)),
    "batching": Theirs("leave it out: the collector batches turns", (None, False)),
    "min_batch_size": Theirs("leave it out: turns never wait for others", (None,)),
    "max_batch_size": Theirs("set max_batch_size of LLMCollector", (None,)),
    "batching_timeout": Theirs("leave it out: turns never wait for others", (10.0,)),
    "prefer_tokens": Theirs("leave it out: ids of a row are never encoded again", (True,)),
}

TORCHRL_ARGUMENTS: dict[str, dict[str, Theirs]] = {
    "TransformersWrapper": _WRAPPER
    | {
        "pad_model_input": Theirs("set packing='packed' of a scoring wrapper", (None, True)),
        "device": Theirs("move the model: model.to(device)", (None,)),
    },
    "vLLMWrapper": _WRAPPER
    | {
        "model": Theirs("pass an engine, such as engine=VLLMEngine(name)"),
        "generate": Theirs("score with TransformersWrapper(model, generate=False)", (True,)),
        "pad_model_input": Theirs("leave it out: an engine pads nothing", (None, True, False)),
        "device": Theirs("set the device of the engine", (None,)),
    },
    "ChatEnv": {
        "system_role": Theirs(_ROLES, ("system",)),
        "user_role": Theirs(_ROLES, ("user",)),
        "policy_role": Theirs(_ROLES, ("assistant", None)),
        "data_key": Theirs("put the prompt into the entry 'query'", (None, "query")),
        "device": Theirs(_ON_CPU, (None,)),
    },
    "DatasetChatEnv": {
        "num_envs": Theirs("set prompts_per_batch"),
        "repeats": Theirs("set num_generations"),
        "name": Theirs(_LOADED, (None,)),
        "split": Theirs(_LOADED, (None,)),
        "batch_size_dl": Theirs("set prompts_per_batch", (1,)),
        "group_repeats": Theirs("leave it out: the rows of a prompt are always together", (True,)),
        "apply_template": Theirs("leave it out: the environment applies the chat template", (True, None)),
        "collate_fn": Theirs(_LOADED, (None,)),
        "primers": Theirs(_LOADED, (None,)),
        "ray_backend": Theirs("pass make_primer=RayDataLoadingPrimer", (False,)),
        "dataloader_actor_name": Theirs("pass make_primer=partial(RayDataLoadingPrimer, actor_name=...)", (None,)),
        "data_key": Theirs("set prompt_column of load_prompts", (None, "query")),
        "device": Theirs(_ON_CPU, (None,)),
    },
    "DataLoadingPrimer": {
        "dataloader": Theirs(_LOADED),
        "dataloader_factory": Theirs(_LOADED, (None,)),
        "primers": Theirs("leave it out: the dataset has the columns", (None,)),
        "stack_method": Theirs("leave it out: rows are ragged", (None,)),
        "batch_size": Theirs("set it on the environment", (None,)),
        "repeats": Theirs("set num_generations"),
        "device": Theirs(_ON_CPU, (None,)),
        "group_repeats": Theirs("leave it out: the rows of a prompt are always together", (True,)),
        "use_ray_service": Theirs("use RayDataLoadingPrimer", (False,)),
    },
    "KLRewardTransform": {
        "ref_model": Theirs("pass it as ref"),
        "ref_model_factory": Theirs("pass the model as ref", (None,)),
        "coef": Theirs("set kl_to_ref_coeff"),
        "in_keys": Theirs(_FIXED_KEY, (None,)),
        "out_keys": Theirs(_FIXED_KEY, (None,)),
        "log_prob_key": Theirs(_FIXED_KEY, (("log_probs", "full"),)),
        "device": Theirs("move the model of ref", (None,)),
        "add_to_reward": Theirs("set kl_to_ref_coeff=0, which only records log-probs", (True,)),
        "tokenizer": Theirs("leave it out: conversations are ids", (None,)),
        "assistant_only": Theirs("leave it out: the KL covers action tokens", (True,)),
        "padding_side": Theirs("leave it out: rows are ragged", ("left",)),
        "use_ray_service": Theirs("leave it out", (False,)),
    },
    "AddThinkingPrompt": {
        "cond": Theirs("pass condition=f(conversation, row)"),
        "random_prompt": Theirs("pass the prompt", (False,)),
        "role": Theirs("leave it out: a user message asks", ("user",)),
        "edit_last_turn": Theirs("leave it out: tokens of the policy are never edited", (False,)),
        "zero_reward": Theirs("leave it out: rewards come at the end", (None, False, True)),
        "undo_done": Theirs("leave it out: asking continues the conversation", (True,)),
        "egocentric": Theirs("leave it out: a user message asks", (None, False)),
    },
    "BrowserTransform": {
        "allowed_domains": Theirs("set allowed_hosts"),
        "headless": Theirs("leave it out: the browser has no window", (True,)),
        "tokenizer": Theirs("leave it out: conversations are ids", (None,)),
        "tool_name": Theirs("set result_role", ("tool",)),
    },
    "LLMCollector": {
        "policy_factory": Theirs("pass policy; RayLLMCollector takes a factory", (None,)),
        "yield_only_last_steps": Theirs("leave it out: a row is a whole conversation", (None, True)),
        "yield_completed_trajectories": Theirs("leave it out: only completed trajectories are returned", (None, True)),
        "async_envs": Theirs("leave it out: each conversation advances independently", (None, True)),
        "reset_at_each_iter": Theirs("leave it out: no conversation spans two batches", (False, True)),
        "flatten_data": Theirs("leave it out: batches are flat, [B]", (None, True)),
        "queue": Theirs("iterate over the collector, or pass replay_buffer=", (None,)),
        "track_policy_version": Theirs("leave it out: rows have a policy_version", (True,)),
        "verbose": Theirs("pass progress=", (False,)),
    },
    "RayLLMCollector": {
        "ray_init_config": Theirs("call ray.init() before", (None,)),
        "remote_config": Theirs("set worker_options", (None,)),
        "sync_iter": Theirs(
            "set ahead= or max_staleness=, with which sampling continues while the loop trains", (True,)
        ),
        "num_cpus": Theirs("set worker_options={'num_cpus': ...}", (None,)),
        "num_gpus": Theirs("set worker_options={'num_gpus': ...}", (None,)),
    },
    "LLMCollector.update_policy_weights_": dict.fromkeys(
        ("weights", "policy", "weights_dict", "worker_ids", "model_id"),
        Theirs("leave it out: weight_updater sends the weights of the model that it was given", (None,)),
    ),
    "MCAdvantage": {
        "prompt_key": Theirs("leave it out: 'group_id' tells groups apart", ("group_id",)),
        "rewards_key": Theirs(_FIXED_KEY, (("next", "reward"),)),
        "advantage_key": Theirs(_FIXED_KEY, ("advantage",)),
        "done_key": Theirs(_FIXED_KEY, (("next", "done"),)),
        "verbose": Theirs("read the attribute counts", (False,)),
        "grpo_size": Theirs("set num_generations, and estimator='grpo' for TorchRL's advantages"),
        "trajectory_return": Theirs("leave it out: a row has the sum of its turns' rewards", (None, "sum")),
        "keep_return_bounds": Theirs("use ZeroSignalFilter", (None,)),
        "candidate_group_size": Theirs(_SELECTION, (None,)),
        "candidate_selection_min_size": Theirs(_SELECTION, (None,)),
        "candidate_selector": Theirs(_SELECTION, (None,)),
    },
    "RLOOLoss": {
        "clip_epsilon": Theirs("set surrogate=Clip(low, high)"),
        "kl_mask_threshold": Theirs("set off_policy_mask_threshold", (None,)),
        "entropy_bonus": Theirs("set entropy_coeff, 0 for none"),
        "samples_mc_entropy": Theirs("leave it out: entropies are exact", (1,)),
        "gamma": Theirs("set credit of MCAdvantage", (None,)),
        "reduction": Theirs("set aggregation", (None,)),
        "clip_value": Theirs("leave it out: the loss has no critic", (None,)),
        "device": Theirs("move the model of actor_network", (None,)),
        "masking_strategy": Theirs("leave it out: the action mask of a row decides", ("sft", "rlhf")),
        "ref_log_prob_padding_side": Theirs("leave it out: rows are ragged", ("left",)),
        "ref_log_prob_padding_value": Theirs("leave it out: rows are ragged", (0.0,)),
    },
}


_TOOLS_REMEDY = "use ToolTransform(tools) of torchrl_rloo.envs.transforms"
TEXT_TRANSFORMS = {
    "AddThinkingPrompt": "use AddThinkingPrompt of torchrl_rloo.envs.transforms",
    "BrowserTransform": "use BrowserTransform of torchrl_rloo.envs.transforms",
    "ExecuteToolsInOrder": _TOOLS_REMEDY,
    "IncrementalTokenizer": "leave it out",
    "MCPToolTransform": "use ToolTransform(MCPTools(...)) of torchrl_rloo.envs",
    "PythonInterpreter": "append PythonInterpreter() of torchrl_rloo.envs.tools",
    "SimpleToolTransform": _TOOLS_REMEDY,
    "TemplateTransform": "set template_kwargs of DatasetChatEnv",
    "Tokenizer": "leave it out",
}


def with_torchrl_arguments(function: Callable) -> Callable:
    """Wrap a constructor or a method of :data:`TORCHRL_ARGUMENTS`, so that it answers TorchRL's arguments.

    Values that mean what the class does anyway are dropped. Others raise a ``TypeError`` that says what to write.
    Positional arguments beyond those of the function count as the first of the table.
    """
    owner = function.__qualname__.removesuffix(".__init__")
    theirs, parameters = TORCHRL_ARGUMENTS[owner], inspect.signature(function).parameters
    positional = [p for p in parameters.values() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)][1:]

    @functools.wraps(function)
    def answering(self: Any, *args: Any, **kwargs: Any) -> Any:
        args, extra = args[: len(positional)], args[len(positional) :]
        given = {name: kwargs.pop(name) for name in [n for n in kwargs if n in theirs and n not in parameters]}
        refused = [
            f"{name}={repr(value).partition(_LINE_END)[0]:.60} ({theirs[name].instead})"
            for name, value in [*zip(theirs, extra, strict=False), *given.items()]
            if not any(value is same or value == same for same in theirs[name].same)
        ]
        if refused:
            raise TypeError(f"{owner} lacks arguments of TorchRL's: {'; '.join(refused)}")
        return function(self, *args, **kwargs)

    return answering


def refuse_text_transform(transform: Any) -> None:
    """Raise a ``TypeError`` that names ours for a transform of TorchRL that edits text or writes other versions."""
    name = type(transform).__name__
    if name == "PolicyVersion" and transform.version_type not in (int, "int"):
        raise TypeError(f"version_type={transform.version_type!r} must be int: rows have an integer policy_version")
    if name in TEXT_TRANSFORMS and type(transform).__module__.startswith("torchrl."):
        raise TypeError(f"TorchRL's {name} edits conversations as text, but here they are ids; {TEXT_TRANSFORMS[name]}")
