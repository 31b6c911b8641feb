"""EnvTransform: base of transforms that act in an environment."""

from __future__ import annotations

from typing import NoReturn

from tensordict import TensorDictBase
from torchrl.envs import Transform


class EnvTransform(Transform):
    """Base of environment transforms, which act in ``reset`` and ``step``.

    Raises:
        TypeError: when a replay buffer reads rows through the transform, which would do nothing to them.
    """

    def forward(self, tensordict: TensorDictBase) -> NoReturn:
        """Raise: only a replay buffer calls it."""
        name = type(self).__name__
        raise TypeError(
            f"{name} acts in the steps of an environment and would do nothing in a replay buffer; pass it to "
            "DatasetChatEnv, or a function of collected rows as LLMCollector(postproc=...)"
        )

    def inv(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Pass the policy's rows on; raise in a replay buffer, which calls it for ``append_transform(invert=True)``."""
        return self.forward(tensordict) if self.parent is None else super().inv(tensordict)
