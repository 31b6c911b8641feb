"""BrowserTransform: a browser as the policy's tool."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torchrl_rloo.envs.tools.browser import Browser
from torchrl_rloo.envs.tools.parsers import Parser
from torchrl_rloo.envs.transforms.tools import ToolTransform


class BrowserTransform(ToolTransform):
    """:class:`ToolTransform` with a :class:`~torchrl_rloo.envs.tools.Browser`, whose process ends with the environment.

    Differences from TorchRL's class of the same name: conversations have separate pages and cookies, pages are text
    with numbered items instead of selectors, and hosts are enforced for all requests of a page.

    Args:
        allowed_hosts: see :class:`~torchrl_rloo.envs.tools.Browser`.
        parser: see :class:`ToolTransform`.
        browser: further arguments of :class:`~torchrl_rloo.envs.tools.Browser`.
        tools: further tools.
        **kwargs: further arguments of :class:`ToolTransform`.

    Attributes:
        browser: the tool.

    Example::

        env = DatasetChatEnv(
            prompts, tokenizer, prompts_per_batch=8, transforms=[BrowserTransform(["en.wikipedia.org"])], max_turns=8
        )
    """

    def __init__(
        self,
        allowed_hosts: Sequence[str],
        parser: str | Parser = "hermes",
        *,
        browser: dict[str, Any] | None = None,
        tools: Sequence[Any] = (),
        **kwargs: Any,
    ):
        made = Browser(allowed_hosts, **(browser or {}))
        super().__init__([made, *tools], parser, **kwargs)
        self.browser = made

    def close(self) -> None:
        """Close the pages of all conversations, and the browser."""
        super().close()
        self.browser.shut_down()
