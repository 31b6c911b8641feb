"""Models with one output: reward models, which score rows, and the critic of PPO, which estimates returns."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import nn

from torchrl_rloo.data import keys
from torchrl_rloo.data.preferences import CHOSEN, MARGIN, REJECTED
from torchrl_rloo.data.rows import ActionTokens, action_tokens, pad, place_actions, ragged, stack_rows, to_lazy_stack
from torchrl_rloo.data.segments import refuse_images
from torchrl_rloo.engines.root import call_root, is_distributed
from torchrl_rloo.modules.policies import recompute_in_eval
from torchrl_rloo.rewards.classifier import scored_ids
from torchrl_rloo.runtime.lookup import HUB_KWARGS, parse_dtype
from torchrl_rloo.weight_update.rotary import fix_frequencies

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


PAD_TOKEN = "<|pad|>"


class RewardModel(nn.Module):
    """Scorer of rows with a Transformers sequence classifier and its head.

    It reads ``("tokens", "full")`` and returns one score per row. Rows are padded on the right, and a decoder's score
    is read at the last token that is not the pad token. A model saved with ``model.save_pretrained`` gives equal scores
    in Transformers.

    Args:
        model: ``AutoModelForSequenceClassification`` with one label, e.g. from :func:`load_reward_model`; or with two,
            the mean of a Gaussian reward and the logarithm of its standard deviation (PURM, arXiv 2503.22480).

    Raises:
        ValueError: if the model has another number of labels, or no pad token.

    Example::

        model, tokenizer = load_reward_model("Qwen/Qwen2.5-0.5B-Instruct")
        rows = encode_pairs(pairs, tokenizer)
        margins = RewardModel(model).score(rows["chosen"]) - RewardModel(model).score(rows["rejected"])  # [P]
    """

    def __init__(self, model: PreTrainedModel):
        super().__init__()
        if model.config.num_labels not in (1, 2):
            raise ValueError(
                f"model has {model.config.num_labels} labels; set num_labels=1, or 2 for a Gaussian reward"
            )
        if model.config.get_text_config().pad_token_id is None:
            raise ValueError("model.config.pad_token_id is None, so the last token of a padded row is unknown; set it")
        fix_frequencies(model)
        self.model, self.is_gaussian = model, model.config.num_labels == 2

    def score(self, rows: TensorDictBase) -> torch.Tensor:
        """Score rows of text, batch size ``[B]``; return float32 ``[B]``, with gradient if enabled."""
        return self.outputs(rows)[:, 0]

    def outputs(self, rows: TensorDictBase) -> torch.Tensor:
        """Return the outputs of rows of text, ``[B, 1]``, or ``[B, 2]`` of a Gaussian reward."""
        refuse_images(rows, "RewardModel")
        tokens = ragged(rows, keys.TOKENS)
        lengths = torch.tensor([len(t) for t in tokens])
        ids = pad(tokens, self.model.config.get_text_config().pad_token_id)
        mask = torch.arange(ids.shape[1]) < lengths[:, None]
        device = self.model.device
        inputs = {"input_ids": ids.to(device), "attention_mask": mask.long().to(device)}
        root = self.model if is_distributed(self.model) else self
        with recompute_in_eval(self.model):
            return call_root(root, lambda: self.model(**inputs).logits.float())


def load_reward_model(
    name: str | os.PathLike, *, dtype: str = "float32", device: str = "cpu", gaussian: bool = False, **kwargs: Any
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a sequence classifier with one label in evaluation mode (no dropout), and its tokenizer.

    A causal language model gets a head with one output that starts at zero, so initial scores are 0. It also gets a pad
    token other than the end of turn, if it has none: the classifier would otherwise ignore the end of turn. A
    classifier stays unchanged.

    Args:
        name: hub id or local directory of a causal language model or classifier.
        dtype: ``"float32"``, ``"bfloat16"``, ...
        device: device of the model.
        gaussian: True for two outputs, mean and log standard deviation, which also begin at 0.
        **kwargs: arguments of ``AutoModelForSequenceClassification.from_pretrained``. Those that locate a model
            (``revision=``, ``trust_remote_code=``, ...) are also passed to its tokenizer and configuration.

    Returns:
        The model and its tokenizer, which pads on the right.

    Raises:
        ValueError: if the dtype is unknown, or a classifier has several labels.
        OSError: if the model does not exist.
    """
    from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer  # takes 2 s

    torch_dtype, where = parse_dtype(dtype), {k: kwargs[k] for k in HUB_KWARGS if k in kwargs}
    config = AutoConfig.from_pretrained(name, **where)
    trained = any("SequenceClassification" in architecture for architecture in config.architectures or ())
    if trained and config.num_labels != 1 + gaussian:
        raise ValueError(
            f"{name} is a classifier of {config.num_labels} labels, but gaussian={gaussian} requires {1 + gaussian}"
        )
    # A new head and pad token are for language models only: a classifier stays unchanged
    tokenizer = AutoTokenizer.from_pretrained(name, **where)
    model, info = AutoModelForSequenceClassification.from_pretrained(
        name, dtype=torch_dtype, num_labels=1 + gaussian, output_loading_info=True, **kwargs
    )
    if not trained:
        _zero_head(model, info["missing_keys"])
    _set_pad_token(model, tokenizer, keep=trained)
    tokenizer.padding_side = "right"
    return model.to(device).eval(), tokenizer


def _zero_head(model: PreTrainedModel, missing: Iterable[str]) -> None:
    """Zero the newly initialized parameters of the output."""
    parameters = dict(model.named_parameters())
    for name in set(missing) & parameters.keys():
        if parameters[name].shape[0] <= 2:
            nn.init.zeros_(parameters[name])


def _set_pad_token(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, *, keep: bool) -> None:
    config = model.config.get_text_config()
    if keep and config.pad_token_id is not None:
        return
    if tokenizer.pad_token_id is None or tokenizer.pad_token_id == tokenizer.eos_token_id:
        tokenizer.add_special_tokens({"pad_token": PAD_TOKEN})
        if len(tokenizer) > model.get_input_embeddings().num_embeddings:
            model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    config.pad_token_id = model.config.pad_token_id = tokenizer.pad_token_id


def encode_pairs(examples: Iterable[Mapping[str, Any]], tokenizer: PreTrainedTokenizerBase) -> TensorDictBase:
    """Encode pairs as rows for training a reward model.

    Rows have the whole output of the chat template, or unchanged plain text, as
    :class:`~torchrl_rloo.rewards.classifier.SequenceClassifier` reads them. Unlike rows of
    :func:`~torchrl_rloo.data.encode_preferences`, they include the tokens after the end of the last turn. A row keeps
    the ``"margin"`` of its example, if any.

    Args:
        examples: pairs as :func:`~torchrl_rloo.data.load_preferences` returns them.
        tokenizer: tokenizer of the model. Its chat template is used, whatever the ``markup`` of the examples.

    Returns:
        Ragged rows, batch size ``[P]``, with sub-rows ``"chosen"`` and ``"rejected"``.

    Raises:
        ValueError: if the two completions of a pair have the same tokens.
    """
    rows = []
    for i, example in enumerate(examples):
        parts = {part: scored_ids(tokenizer, example["prompt"], example[part]) for part in (CHOSEN, REJECTED)}
        if parts[CHOSEN] == parts[REJECTED]:
            raise ValueError(f"example {i}: chosen and rejected have the same tokens; drop the example")
        row = TensorDict({p: TensorDict({keys.TOKENS: torch.tensor(ids)}, []) for p, ids in parts.items()}, [])
        if MARGIN in example:
            row.set(MARGIN, torch.tensor(float(example[MARGIN])))
        rows.append(row)
    return stack_rows(rows)


class ValueHead(nn.Module):
    """Critic of PPO: a Hugging Face decoder with a linear head of one output.

    The estimate for an action token is read at the position before it, so it does not depend on the token. The head is
    float32 and starts at zero, so all initial estimates are 0. On a reward model it starts as the model's ``score``, so
    the first estimates are the scores of unfinished rows.

    Args:
        model: causal language model, or classifier with one label such as of :func:`load_reward_model`, that has
            ``get_decoder()``.
        share_trunk: use the model's decoder instead of a copy. The value loss then also trains the decoder, but only
            the head's parameters belong to this module.

    Raises:
        TypeError: if ``model.get_decoder()`` is missing or returns the model itself.

    Example:
        >>> from tensordict import TensorDict
        >>> from torchrl_rloo.embedded import build_model, build_tokenizer
        >>> critic = ValueHead(build_model(build_tokenizer(), seed=0).eval())
        >>> mask = torch.tensor([[False, False, True, True]])
        >>> entries = {("tokens", "full"): torch.arange(4)[None], ("masks", "all_assistant_mask"): mask}
        >>> critic.values(TensorDict(entries, [1]))[0].tolist()
        [[0.0, 0.0]]
    """

    def __init__(self, model: nn.Module, *, share_trunk: bool = False):
        super().__init__()
        decoder = model.get_decoder() if hasattr(model, "get_decoder") else None
        if decoder is None or decoder is model:
            raise TypeError(f"model must have a decoder that get_decoder() returns; it is a {type(model).__name__}")
        fix_frequencies(model)
        if share_trunk:
            self.__dict__["trunk"] = decoder  # not a submodule, or an optimizer would get its weights twice
        else:
            self.trunk = copy.deepcopy(decoder)
        hidden_size = model.config.get_text_config().hidden_size
        device = next(decoder.parameters()).device
        self.projection = nn.utils.skip_init(nn.Linear, hidden_size, 1, device=device, dtype=torch.float32)
        nn.init.zeros_(self.projection.weight)
        nn.init.zeros_(self.projection.bias)
        scorer = getattr(model, "score", None)
        if isinstance(scorer, nn.Linear) and scorer.out_features == 1:
            self.projection.load_state_dict(scorer.state_dict(), strict=False)  # which may lack a bias

    def values(self, rows: TensorDictBase) -> tuple[torch.Tensor, ActionTokens]:
        """Estimate the return before each action token, with gradient if enabled.

        Args:
            rows: rows with token ids and action masks, batch size ``[B]``.

        Returns:
            Values ``[B, A]`` float32, 0 beyond a row's action tokens, and the positions of action tokens.

        Raises:
            ValueError: if a row has images.
        """
        refuse_images(rows, "ValueHead")
        return call_root(self, self._values, rows)

    def _values(self, rows: TensorDictBase) -> tuple[torch.Tensor, ActionTokens]:
        actions = ActionTokens(*(t.to(self.projection.weight.device) for t in action_tokens(to_lazy_stack(rows))))
        with recompute_in_eval(self.trunk):
            hidden = self.trunk(input_ids=actions.tokens, use_cache=False).last_hidden_state
        before = hidden[:, :-1][actions.action_mask[:, 1:]]
        return place_actions(self.projection(before.float())[:, 0], actions), actions
