"""ToolTransform: runs the tool calls of the policy's turns; BrowserTransform: a browser as its tool."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import torch
from tensordict import NonTensorData, TensorDictBase
from torchrl.data import Composite, NonTensor, Unbounded

from torchrl_rloo.data import keys
from torchrl_rloo.data.rows import rows_to_reset, to_lazy_stack
from torchrl_rloo.data.stop_reasons import end_row, stop_reason
from torchrl_rloo.data.templates import Messages, shows_images
from torchrl_rloo.envs.activity import spending
from torchrl_rloo.envs.chat import plain_value
from torchrl_rloo.envs.tools.browser import Browser
from torchrl_rloo.envs.tools.parsers import (
    MalformedCall,
    Parser,
    ToolCall,
    ToolResult,
    resolve_parser,
    without_thinking,
)
from torchrl_rloo.envs.tools.python import PythonInterpreter
from torchrl_rloo.envs.tools.session import ToolSession
from torchrl_rloo.envs.tools.tool import Tool, ToolRegistry
from torchrl_rloo.envs.turn_transform import TurnTransform
from torchrl_rloo.images.encoder import encoder_of
from torchrl_rloo.images.parts import join_contents
from torchrl_rloo.runtime import event_loop
from torchrl_rloo.runtime.call_pool import CallLimit
from torchrl_rloo.runtime.torchrl_arguments import with_torchrl_arguments

_LOGGER = logging.getLogger(__name__)


class ToolTransform(TurnTransform):
    """Transform that runs the tool calls of each finished turn of the policy, and answers it with their results.

    A result may be an image or have some (:class:`~torchrl_rloo.envs.tools.Tool`). A vision-language model sees them in
    the messages of ``result_role``; any other model reads ``[image WxH]``.

    The calls of a turn run concurrently; results keep the order of the calls. The policy sees a failed call's error as
    its result, starting with ``Error:``. A turn without calls is left as an answer. Calls are not run for a turn
    that a limit cut off, or after which the environment allows no other turn.

    Each row gets ``"num_tool_calls"``, int64 ``[]``, and with ``show_schemas`` also ``"tools"``, the schemas.
    ``("next", "tokens", "prompt")`` grows by the ids of the results.

    Args:
        tools: :class:`~torchrl_rloo.envs.tools.Tool` objects, functions to make them from, or a registry.
        parser: parser of calls: a name in :data:`~torchrl_rloo.envs.tools.parsers.PARSERS`, or a function from a turn's
            text to its calls. The text has special tokens, except for the one that ends the turn, and no thinking.
        timeout: time limit of a call in seconds. The tool's own limit and the rest of the environment's
            ``max_seconds`` also apply.
        max_calls_per_turn: maximum calls of a turn; further calls are refused.
        max_calls: maximum calls of a trajectory, failed ones included; further calls are refused. A turn with only
            refused calls truncates the conversation with the stop reason ``"tool_calls"``. None disables the limit.
        max_parallel: maximum concurrent calls of a turn.
        max_concurrent: maximum concurrent calls by tool name, over all conversations and collectors that use this
            transform, such as ``{"python": 8}``. Further calls wait, which does not count as time of the call. Tools
            without an entry are limited by the threads for sync functions only
            (:func:`~torchrl_rloo.runtime.event_loop.set_call_threads`).
        max_output_chars: maximum characters of a result that the policy sees.
        result_role: ``"tool"`` answers with one message of that role per result, with its ``name`` and a
            ``tool_call_id`` of nine characters. ``"user"``, for templates without tools, answers with one user message
            that has each result between ``<tool_response>`` tags. These are plain text even if the tokenizer has such
            tokens.
        show_schemas: whether to pass the tools' schemas to the chat template; use False if prompts describe the tools.
        tools_column: dataset column with a row's tool names (a list, one name, or None for all tools); None gives every
            row all tools.

    Attributes:
        counts: per tool ``"tools/NAME/calls"``, and of those ``"tools/NAME/failed"`` (raised), ``"tools/NAME/invalid"``
            (arguments did not fit) and ``"tools/NAME/timed_out"``. Over all tools ``"tools/unknown"`` (tool does not
            exist), ``"tools/malformed"`` (could not be parsed) and ``"tools/refused"`` (beyond a limit).
            ``"tools/failed"`` counts conversations that this transform failed, e.g. by a parser that raised.

    Raises:
        ValueError: for an unknown parser, role or tool, a limit of 0 or less, or conflicting tools; at ``reset``, if
            ``tools_column`` names an unknown tool, or the chat template shows no images of a tool that returns some.
        RuntimeError: at ``reset`` with ``show_schemas``, if it does not come after a :class:`DataLoadingPrimer`.

    Example:
        >>> from torchrl_rloo.envs.tools.calculator import calculator
        >>> from torchrl_rloo.envs.tools.parsers import RegexParser
        >>> parser = RegexParser(r"<tool>(?P<expression>[^<]*)</tool>", tool="calculator")
        >>> ToolTransform([calculator], parser, show_schemas=False, max_calls=1).tools["calculator"].name
        'calculator'
    """

    part = "tools"

    def __init__(
        self,
        tools: Iterable[Tool | Callable[..., Any]] | ToolRegistry,
        parser: str | Parser = "hermes",
        *,
        timeout: float = 30.0,
        max_calls_per_turn: int = 8,
        max_calls: int | None = None,
        max_parallel: int = 8,
        max_concurrent: Mapping[str, int] | None = None,
        max_output_chars: int = 10_000,
        result_role: Literal["tool", "user"] = "tool",
        show_schemas: bool = True,
        tools_column: str | None = None,
    ):
        super().__init__()
        limits = {"timeout": timeout, "max_calls_per_turn": max_calls_per_turn, "max_calls": max_calls}
        for name, value in (limits | {"max_parallel": max_parallel, "max_output_chars": max_output_chars}).items():
            if value is not None and not value > 0:
                raise ValueError(f"{name}={value} must be above 0")
        if result_role not in ("tool", "user"):
            raise ValueError(f"result_role={result_role!r} must be 'tool' or 'user'")
        self.tools = tools if isinstance(tools, ToolRegistry) else ToolRegistry(tools)
        self._limits = self._make_limits(max_concurrent or {})
        self.parser, self.timeout, self.result_role = resolve_parser(parser), timeout, result_role
        self.max_calls_per_turn, self.max_calls, self.max_parallel = max_calls_per_turn, max_calls, max_parallel
        self.max_output_chars, self.show_schemas, self.tools_column = max_output_chars, show_schemas, tools_column
        self._sessions: dict[int, ToolSession] = {}
        self._choices: dict[tuple[str, ...] | None, tuple[ToolRegistry, list]] = {}

    def _make_limits(self, max_concurrent: Mapping[str, int]) -> dict[str, CallLimit]:
        if unknown := sorted(set(max_concurrent) - set(self.tools)):
            raise ValueError(f"max_concurrent has unknown tools {unknown}: use names from {list(self.tools)}")
        if wrong := {name: value for name, value in max_concurrent.items() if value < 1}:
            raise ValueError(f"max_concurrent={wrong} must be at least 1")
        return {name: CallLimit(value) for name, value in max_concurrent.items()}

    async def step_row(self, row: TensorDictBase, next_row: TensorDictBase) -> None:
        """Run the calls of a turn that nothing else answered; see :meth:`TurnTransform.step_row`."""
        before = int(row[keys.NUM_TOOL_CALLS])
        next_row.set(keys.NUM_TOOL_CALLS, torch.tensor(before))
        if stop_reason(next_row) != "answered":
            return
        calls = self.parser(self._turn_text(row, next_row))
        if not calls:
            return
        # End the conversation where no further turn, or no further call, is allowed
        limit = self.chat_env.limit_reached(next_row)
        if limit is None and self.max_calls is not None and before >= self.max_calls:
            limit = "tool_calls"
            self.counts["tools/refused"] += len(calls)
        if limit is not None:
            end_row(next_row, limit)
            return
        # Run the calls that the limits allow; the policy is told about the refused ones
        allowed = self.max_calls_per_turn
        if self.max_calls is not None:
            allowed = min(allowed, self.max_calls - before)
        results = await self._run(calls[:allowed], row, next_row)
        next_row.set(keys.NUM_TOOL_CALLS, torch.tensor(before + len(results)))
        self.chat_env.continue_row(next_row, self._messages(calls, results, before))

    def _turn_text(self, row: TensorDictBase, next_row: TensorDictBase) -> str:
        """Return the turn's text with its special tokens, without its thinking and the token that ends it."""
        tokenizer = self.chat_env.tokenizer
        ids = next_row[keys.PROMPT_TOKENS][len(row[keys.PROMPT_TOKENS]) :].tolist()
        if not tokenizer.decode(ids[-1:], skip_special_tokens=True):
            ids = ids[:-1]
        text = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return without_thinking(text)

    async def _run(
        self, calls: list[ToolCall | MalformedCall], row: TensorDictBase, next_row: TensorDictBase
    ) -> list[ToolResult]:
        """Run calls, at most ``max_parallel`` at a time, and count their outcomes."""
        session, free = self._session(row), asyncio.Semaphore(self.max_parallel)
        seconds = self.chat_env.max_seconds
        deadline = float("inf") if seconds is None else float(next_row[keys.STARTED]) + seconds

        async def run_one(call: ToolCall | MalformedCall) -> ToolResult:
            async with free:
                return await session.call(call, deadline=deadline)

        with spending("tools"):
            results = await asyncio.gather(*map(run_one, calls))
        # Count outcomes, and log only the first failure of a tool
        for result in results:
            if result.outcome in ("unknown", "malformed"):
                self.counts[f"tools/{result.outcome}"] += 1
                continue
            self.counts[f"tools/{result.name}/calls"] += 1
            if result.outcome != "ok":
                name = f"tools/{result.name}/{result.outcome}"
                self.counts[name] += 1
                if self.counts[name] == 1 and result.outcome in ("failed", "timed_out"):
                    _LOGGER.warning(
                        "a call of tool %s failed; further failures are only counted: %s", result.name, result.text
                    )
        return results

    def _session(self, row: TensorDictBase) -> ToolSession:
        trajectory = int(row[keys.TRAJECTORY_ID])
        session = self._sessions.get(trajectory)
        if session is None:
            columns = {k: plain_value(row[k]) for k in row.keys() if k not in keys.RESERVED and k != keys.TOOLS}
            tools, _ = self._choice(row)
            session = ToolSession(
                tools,
                columns,
                timeout=self.timeout,
                max_chars=self.max_output_chars,
                limits=self._limits,
                store=getattr(encoder_of(self.chat_env.tokenizer), "store", None),
            )
            self._sessions[trajectory] = session
        return session

    def _messages(self, calls: list[ToolCall | MalformedCall], results: list[ToolResult], before: int) -> Messages:
        # Add one result for all refused calls, so that many of them do not fill the context
        results, refused = list(results), len(calls) - len(results)
        if refused:
            self.counts["tools/refused"] += refused
            most = f"{self.max_calls_per_turn} calls a turn"
            if len(results) < self.max_calls_per_turn:
                most = f"{self.max_calls} calls in all"
            results.append(ToolResult("", f"Error: the other {refused} calls were not made: at most {most}", "failed"))
        # Write the results in the form that the template takes
        if self.result_role == "user":
            shown = [join_contents("<tool_response>\n", r.parts or r.text, "\n</tool_response>") for r in results]
            return [{"role": "user", "content": join_contents(*shown, between="\n")}]
        return [
            {
                "role": "tool",
                "name": result.name or "unknown",
                "content": result.parts or result.text,
                "tool_call_id": getattr(call, "id", None) or f"call{(before + k) % 100_000:05d}",
            }
            for k, (call, result) in enumerate(zip(calls, results))  # noqa: B905  (refused calls share one result)
        ]

    async def release(self, trajectory_id: int) -> None:
        """Close the tool states of a conversation."""
        session = self._sessions.pop(trajectory_id, None)
        if session is not None:
            await session.close()

    def close(self) -> None:
        """Close the tool states of all conversations."""
        if self._sessions:
            event_loop.run(self._release_all())

    async def _release_all(self) -> None:
        await asyncio.gather(*map(self.release, list(self._sessions)))

    def _choice(self, row: TensorDictBase) -> tuple[ToolRegistry, list[dict[str, Any]]]:
        """Return the tools of a row and their schemas; rows with the same tools share both objects."""
        names = None if self.tools_column is None else plain_value(row[self.tools_column])
        chosen = names if names is None else (names,) if isinstance(names, str) else tuple(names)
        if chosen not in self._choices:
            try:
                tools = self.tools if chosen is None else self.tools.select(chosen)
            except ValueError as error:
                raise ValueError(f"tools_column={self.tools_column!r}: {error}") from None
            self._choices[chosen] = tools, tools.schemas()
        return self._choices[chosen]

    def _reset_env_preprocess(self, tensordict: TensorDictBase | None) -> TensorDictBase | None:
        if tensordict is None or not self.show_schemas:
            return tensordict
        rows = to_lazy_stack(tensordict)
        for row in rows.unbind(0):
            row.set(keys.TOOLS, NonTensorData(self._choice(row)[1]))
        return rows

    def _check_images(self) -> None:
        """Raise if the chat template cannot show what tools are known to return."""
        names, tokenizer = [tool.name for tool in self.tools.values() if tool.returns_images], self.chat_env.tokenizer
        if names and encoder_of(tokenizer) is not None and not shows_images(tokenizer, self.result_role):
            other = "user" if self.result_role == "tool" else "tool"
            raise ValueError(
                f"tools {names} return images, but the chat template shows none in messages of result_role="
                f"{self.result_role!r}; set it to {other!r}, or change the tools"
            )

    def _reset(self, tensordict: TensorDictBase, tensordict_reset: TensorDictBase) -> TensorDictBase:
        self._check_images()
        for row, fresh in zip(tensordict_reset.unbind(0), rows_to_reset(tensordict), strict=True):
            if self.show_schemas and row.get(keys.TOOLS, None) is None:
                raise RuntimeError(
                    "the rows have no tool schemas; put the ToolTransform after the DataLoadingPrimer in a "
                    "DatasetChatEnv, or set show_schemas=False"
                )
            if fresh:
                self._choice(row)  # raises for an unknown tool, also without schemas
                row.set(keys.NUM_TOOL_CALLS, torch.tensor(0))
        return tensordict_reset

    def transform_observation_spec(self, observation_spec: Composite) -> Composite:
        """Add the number of calls, and the schemas if the chat template shows them."""
        shape = self.parent.batch_size
        observation_spec[keys.NUM_TOOL_CALLS] = Unbounded(shape=shape, dtype=torch.int64)
        if self.show_schemas:
            for name in (keys.TOOLS, keys.TOOLS_SEEN):
                observation_spec[name] = NonTensor(shape=shape, example_data=[])
        return observation_spec


def as_transform(item: Any) -> Any:
    """Return the :class:`ToolTransform` of a tool, and anything else unchanged.

    Blocks of Python are the calls of a :class:`PythonInterpreter`, as of TorchRL's transform of that name, and its
    results are a user's messages.
    """
    if isinstance(item, PythonInterpreter):
        return ToolTransform([item], "python", result_role="user", show_schemas=False)
    return ToolTransform([item]) if isinstance(item, Tool) else item


class BrowserTransform(ToolTransform):
    """:class:`ToolTransform` with a :class:`~torchrl_rloo.envs.tools.Browser`, whose process ends with the environment.

    Differences from TorchRL's class of the same name: conversations have separate pages and cookies, and hosts are
    enforced for all requests of a page.

    Args:
        allowed_hosts: see :class:`~torchrl_rloo.envs.tools.Browser`.
        parser: see :class:`ToolTransform`.
        screenshots: see :class:`~torchrl_rloo.envs.tools.Browser`.
        **kwargs: further arguments of :class:`ToolTransform`.

    Attributes:
        browser: the tool.

    Example::

        env = DatasetChatEnv(
            prompts, tokenizer, prompts_per_batch=8, transforms=[BrowserTransform(["en.wikipedia.org"])], max_turns=8
        )
    """

    @with_torchrl_arguments
    def __init__(
        self,
        allowed_hosts: Sequence[str],
        parser: str | Parser = "hermes",
        *,
        screenshots: bool = False,
        **kwargs: Any,
    ):
        browser = Browser(allowed_hosts, screenshots=screenshots)
        super().__init__([browser], parser, **kwargs)
        self.browser = browser

    def close(self) -> None:
        """Close the pages of all conversations, and the browser."""
        super().close()
        self.browser.shut_down()
