"""ValueHead: critic that estimates the return of a trajectory before each action token."""

from __future__ import annotations

import copy

import torch
from tensordict import TensorDictBase
from torch import nn

from torchrl_rloo.data.rows import ActionTokens, action_tokens, place_actions, to_lazy_stack
from torchrl_rloo.engines.root import call_root
from torchrl_rloo.modules.checkpointing import recompute_in_eval
from torchrl_rloo.rotary import fix_frequencies


class ValueHead(nn.Module):
    """Critic of PPO: a Hugging Face decoder with a linear head of one output.

    The estimate for an action token is read at the position before it, so it does not depend on the token. The head is
    float32 and starts at zero, so all initial estimates are 0.

    Args:
        model: causal language model with ``get_decoder()``.
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

    def values(self, rows: TensorDictBase) -> tuple[torch.Tensor, ActionTokens]:
        """Estimate the return before each action token, with gradient if enabled.

        Args:
            rows: rows with token ids and action masks, batch size ``[B]``.

        Returns:
            Values ``[B, A]`` float32, 0 beyond a row's action tokens, and the positions of action tokens.
        """
        return call_root(self, self._values, rows)

    def _values(self, rows: TensorDictBase) -> tuple[torch.Tensor, ActionTokens]:
        actions = ActionTokens(*(t.to(self.projection.weight.device) for t in action_tokens(to_lazy_stack(rows))))
        with recompute_in_eval(self.trunk):
            hidden = self.trunk(input_ids=actions.tokens, use_cache=False).last_hidden_state
        before = hidden[:, :-1][actions.action_mask[:, 1:]]
        return place_actions(self.projection(before.float())[:, 0], actions), actions
