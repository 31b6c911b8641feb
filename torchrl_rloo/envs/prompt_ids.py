"""PromptIds: the token ids of the prompts of one reset."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from tensordict import TensorDictBase

from torchrl_rloo.data import keys
from torchrl_rloo.data.prompts import PromptDataset
from torchrl_rloo.data.templates import Messages, encode_prompt


class PromptIds:
    """Encoder that encodes each distinct query once and reuses the ids that its dataset already holds.

    Args:
        tokenizer: the policy's tokenizer.
        dataset: source of the rows' prompts, indexed by ``"prompt_id"``; None if unknown.
        template_kwargs: arguments of the chat template.
    """

    def __init__(self, tokenizer, dataset: PromptDataset | None, template_kwargs: Mapping[str, Any]):
        self.tokenizer, self.dataset, self.template_kwargs = tokenizer, dataset, template_kwargs
        self._seen: dict[tuple[int, int], tuple] = {}
        self._dataset_ids = None if dataset is None else dataset.encoded(tokenizer, **template_kwargs)

    def encode(self, row: TensorDictBase, query: Messages | str, arguments: Mapping[str, Any]) -> torch.Tensor:
        """Return the ids ``[P]`` of a row's query.

        Args:
            row: row that may have a ``"prompt_id"``.
            query: the row's query.
            arguments: arguments of the chat template: ``template_kwargs``, and the row's tools if it has any.
        """
        key = id(query), id(arguments.get("tools"))  # the members of a group share one query object
        if key not in self._seen:
            ids = self._look_up(row, query) if arguments is self.template_kwargs else None
            ids = torch.tensor(encode_prompt(self.tokenizer, query, **arguments) if ids is None else ids)
            self._seen[key] = query, arguments, ids  # keep both alive: an id is unique only while its object lives
        return self._seen[key][-1]

    def _look_up(self, row: TensorDictBase, query: Messages | str) -> list[int] | None:
        if self._dataset_ids is None or keys.PROMPT_ID not in row.keys():
            return None
        index = int(row[keys.PROMPT_ID])
        unchanged = self.dataset.rows[index][keys.QUERY] == query  # a transform may have rewritten it
        return self._dataset_ids[index] if unchanged else None
