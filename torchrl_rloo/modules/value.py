"""ValueHead: estimates of a trajectory's return before each of its action tokens."""

from __future__ import annotations

import copy

import torch
from tensordict import TensorDictBase
from torch import nn

from torchrl_rloo.data.rows import ActionTokens, action_tokens, as_lazy, place_actions
from torchrl_rloo.modules.checkpointing import checkpointed


class ValueHead(nn.Module):
    """Critic of PPO: a Hugging Face decoder with a linear head of one output.

    The estimate for an action token is read at the position before it, so it does not depend on the token. The head is
    float32 and starts at zero, so all first estimates are 0.

    Args:
        model: a causal language model with ``get_decoder()``.
        share_trunk: use the model's own decoder instead of a copy. The value loss then trains it as well, but only the
            head's parameters belong to this module.

    Raises:
        TypeError: if ``get_decoder()`` finds no decoder.
    """

    def __init__(self, model: nn.Module, *, share_trunk: bool = False):
        super().__init__()
        decoder = model.get_decoder() if hasattr(model, "get_decoder") else None
        if decoder is None or decoder is model:
            raise TypeError(f"model has no decoder to be found by get_decoder(); it is a {type(model).__name__}")
        if share_trunk:
            self.__dict__["trunk"] = decoder  # not a submodule: an optimizer must not be given its weights twice
        else:
            self.trunk = copy.deepcopy(decoder)
        hidden_size = model.config.get_text_config().hidden_size
        device = next(decoder.parameters()).device
        self.projection = nn.utils.skip_init(nn.Linear, hidden_size, 1, device=device, dtype=torch.float32)
        nn.init.zeros_(self.projection.weight)
        nn.init.zeros_(self.projection.bias)

    def values(self, rows: TensorDictBase) -> tuple[torch.Tensor, ActionTokens]:
        """Estimate the return before each action token, with gradient if enabled.

        Args:
            rows: batch size ``[B]``, with token ids and action masks.

        Returns:
            ``values [B, A]`` float32, 0 beyond a row's own action tokens, and the positions of action tokens.
        """
        actions = ActionTokens(*(t.to(self.projection.weight.device) for t in action_tokens(as_lazy(rows))))
        with checkpointed(self.trunk):
            hidden = self.trunk(input_ids=actions.tokens, use_cache=False).last_hidden_state
        before = hidden[:, :-1][actions.action_mask[:, 1:]]
        return place_actions(self.projection(before.float())[:, 0], actions), actions
