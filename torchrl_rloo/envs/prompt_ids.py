"""The token ids of the prompts of one reset."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from tensordict import TensorDictBase

from torchrl_rloo.data import keys
from torchrl_rloo.data.prompts import PromptDataset
from torchrl_rloo.data.templates import Messages, encode_prompt


class PromptIds:
    """Encodes each distinct query once, and none that its dataset has encoded.

    Args:
        tokenizer: of the policy.
        dataset: whose prompts the rows are, by their ``"prompt_id"``; None: unknown.
        template_kwargs: passed to the chat template.
    """

    def __init__(self, tokenizer, dataset: PromptDataset | None, template_kwargs: Mapping[str, Any]):
        self.tokenizer, self.dataset, self.template_kwargs = tokenizer, dataset, template_kwargs
        self._seen: dict[tuple[int, int], tuple] = {}
        self._of_dataset = None if dataset is None else dataset.encoded(tokenizer, **template_kwargs)

    def ids(self, row: TensorDictBase, query: Messages | str, shown: Mapping[str, Any]) -> torch.Tensor:
        """Return the ids ``[P]`` of a row's query.

        Args:
            row: the row.
            query: its query.
            shown: what the chat template is given: ``template_kwargs``, and the row's tools if it has any.
        """
        known = id(query), id(shown.get("tools"))  # the members of a group hold one and the same query
        if known not in self._seen:
            ids = self._look_up(row, query) if shown is self.template_kwargs else None
            ids = torch.tensor(encode_prompt(self.tokenizer, query, **shown) if ids is None else ids)
            self._seen[known] = query, shown, ids  # holds both, since an id is unique only while its object lives
        return self._seen[known][-1]

    def _look_up(self, row: TensorDictBase, query: Messages | str) -> list[int] | None:
        if self._of_dataset is None or keys.PROMPT_ID not in row.keys():
            return None
        index = int(row[keys.PROMPT_ID])
        unchanged = self.dataset.rows[index][keys.QUERY] == query  # a transform may have rewritten it
        return self._of_dataset[index] if unchanged else None
