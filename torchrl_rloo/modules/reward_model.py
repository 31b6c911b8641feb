"""RewardModel: scores of rows of tokens by a sequence classifier of one label."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import nn

from torchrl_rloo.data import keys
from torchrl_rloo.data.dtypes import parse_dtype
from torchrl_rloo.data.preferences import CHOSEN, MARGIN, REJECTED
from torchrl_rloo.data.rows import pad, ragged, stack_rows
from torchrl_rloo.modules.checkpointing import checkpointed
from torchrl_rloo.rewards.classifier import scored_ids

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

PAD_TOKEN = "<|pad|>"
_OF_THE_HUB = ("revision", "trust_remote_code", "token", "cache_dir", "subfolder", "local_files_only")


class RewardModel(nn.Module):
    """Scores rows with a Transformers sequence classifier and its own head.

    A model saved with ``model.save_pretrained`` gives the same scores in Transformers. Rows are padded on the right; a
    decoder reads the score at a row's last token that is not the pad token.

    Args:
        model: an ``AutoModelForSequenceClassification`` of one label, e.g. of :func:`load_reward_model`.

    Raises:
        ValueError: if the model has another number of labels, or no pad token.
    """

    def __init__(self, model: PreTrainedModel):
        super().__init__()
        if model.config.num_labels != 1:
            raise ValueError(f"model has {model.config.num_labels} labels; a reward model has one: num_labels=1")
        if model.config.get_text_config().pad_token_id is None:
            raise ValueError("model.config.pad_token_id is None, so rows of unequal length have no last token: set it")
        self.model = model

    def score(self, rows: TensorDictBase) -> torch.Tensor:
        """Score rows of batch size ``[B]`` with token ids; ``[B]`` float32, with gradient if enabled."""
        tokens = ragged(rows, keys.TOKENS)
        lengths = torch.tensor([len(t) for t in tokens])
        ids = pad(tokens, self.model.config.get_text_config().pad_token_id)
        mask = torch.arange(ids.shape[1]) < lengths[:, None]
        device = self.model.device
        with checkpointed(self.model):
            logits = self.model(input_ids=ids.to(device), attention_mask=mask.long().to(device)).logits
        return logits[:, 0].float()


def load_reward_model(
    name: str | os.PathLike, *, dtype: str = "float32", device: str = "cpu", **kwargs: Any
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a sequence classifier of one label in evaluation mode (no dropout), and its tokenizer.

    A causal language model gets a head of one output that starts at zero, so all first scores are 0. It also gets a pad
    token that is not the end of turn, unless it has one: the classifier would overlook a turn's end. A classifier is
    left as it is.

    Args:
        name: a hub id or a local directory, of a causal language model or a classifier.
        dtype: ``"float32"``, ``"bfloat16"``, ...
        device: where to put the model.
        **kwargs: passed to ``AutoModelForSequenceClassification.from_pretrained``; those that locate a model
            (``revision=``, ``trust_remote_code=``, ...) also to its tokenizer and configuration.

    Raises:
        ValueError: for an unknown dtype, or a classifier of several labels.
        OSError: if there is no such model.
    """
    from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer  # takes 2 s

    torch_dtype, where = parse_dtype(dtype), {k: kwargs[k] for k in _OF_THE_HUB if k in kwargs}
    config = AutoConfig.from_pretrained(name, **where)
    trained = any("SequenceClassification" in architecture for architecture in config.architectures or ())
    if trained and config.num_labels != 1:
        raise ValueError(f"{name} is a classifier of {config.num_labels} labels; a reward model has one")
    tokenizer = AutoTokenizer.from_pretrained(name, **where)
    model, info = AutoModelForSequenceClassification.from_pretrained(
        name, dtype=torch_dtype, num_labels=1, output_loading_info=True, **kwargs
    )
    if not trained:
        _zero_head(model, info["missing_keys"])
    _set_pad_token(model, tokenizer, keep=trained)
    tokenizer.padding_side = "right"
    return model.to(device).eval(), tokenizer


def _zero_head(model: PreTrainedModel, missing: Iterable[str]) -> None:
    """Zero the new parameters of the single output."""
    parameters = dict(model.named_parameters())
    for name in set(missing) & parameters.keys():
        if parameters[name].shape[0] == 1:
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
    """Encode pairs as rows to train a reward model on.

    Unlike :func:`~torchrl_rloo.data.encode_preferences`, rows hold the whole output of the chat template, including
    what follows the last turn's end, and plain text as it is: the input of
    :class:`~torchrl_rloo.rewards.classifier.SequenceClassifier`. A row gets its example's ``"margin"``, if any.

    Args:
        examples: pairs of :func:`~torchrl_rloo.data.load_preferences`, or of the same form.
        tokenizer: of the model; its chat template is used, whatever markup the examples were loaded for.

    Returns:
        Ragged rows, batch size ``[P]``, with sub-rows ``"chosen"`` and ``"rejected"``.

    Raises:
        ValueError: if two completions have the same tokens.
    """
    rows = []
    for i, example in enumerate(examples):
        parts = {part: scored_ids(tokenizer, example["prompt"], example[part]) for part in (CHOSEN, REJECTED)}
        if parts[CHOSEN] == parts[REJECTED]:
            raise ValueError(f"example {i}: chosen and rejected have the same tokens, so there is nothing to prefer")
        row = TensorDict({p: TensorDict({keys.TOKENS: torch.tensor(ids)}, []) for p, ids in parts.items()}, [])
        if MARGIN in example:
            row.set(MARGIN, torch.tensor(float(example[MARGIN])))
        rows.append(row)
    return stack_rows(rows)
