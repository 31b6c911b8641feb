"""ChatEnv: conversations as a batch of rows, token-exact over any number of turns.

Replaces TorchRL's class of the same name. That class re-encodes the conversation's text at every turn, fails on prompts
of unequal length in tokens mode, and never sets ``done``.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from tensordict import TensorDictBase
from torchrl.data import Composite
from torchrl.envs import EnvBase

from torchrl_rloo.data import keys
from torchrl_rloo.data.keys import INPUT_MODES
from torchrl_rloo.data.prompts import PromptDataset
from torchrl_rloo.data.rows import (
    drop_entries,
    make_non_tensor,
    non_tensor_value,
    rows_to_reset,
    set_entries,
    stack_rows,
    to_lazy_stack,
)
from torchrl_rloo.data.segments import TrajectoryIds, stash_segment
from torchrl_rloo.data.stop_reasons import end_row, set_done
from torchrl_rloo.data.templates import (
    Messages,
    answer_turn,
    decode_response,
    encode_messages,
    is_conversation,
    join_conversation,
)
from torchrl_rloo.envs.abstaining import OnTimeLimit
from torchrl_rloo.envs.chat_context import read_turn, write_context, write_turn
from torchrl_rloo.envs.chat_limits import check_limits, long_prompt_error, turn_room, turn_stop_reason
from torchrl_rloo.envs.chat_rows import CONVERSATION_KEYS, STEP_KEYS, make_stepped_row, record_tools
from torchrl_rloo.envs.chat_specs import make_specs
from torchrl_rloo.envs.prompt_ids import PromptIds
from torchrl_rloo.envs.signature import SignedEnv
from torchrl_rloo.runtime.torchrl_arguments import with_torchrl_arguments


class ChatEnv(SignedEnv, EnvBase):
    """Batch of conversations with a language-model policy.

    ``reset`` takes rows with a ``"query"`` (chat messages or plain text) and opens the policy's turn. ``step`` takes
    the policy's turn and ends the trajectory: *terminated* if the policy stopped, *truncated* if it reached a limit.
    A transform such as :class:`~torchrl_rloo.envs.transforms.FeedbackTransform` may answer a terminated turn, which
    opens the next one. Each trajectory ends for one ``"stop_reason"`` (:mod:`torchrl_rloo.data.stop_reasons`).

    A row holds the ``T`` tokens so far: ``("tokens", "prompt")`` int64, ``("masks", "all_assistant_mask")`` bool and
    ``("log_probs", "full")`` float32, each ``[T]``, and the messages after the query as ``"completion"``. The policy
    writes ``("tokens", "full")`` and extends mask and log-probs. Later turns only extend these entries, unless
    ``on_rewrite="split"`` starts a new sample. The environment keeps no state per row, so any subset of rows may be
    stepped (:func:`~torchrl_rloo.envs.step_rows`), also in another process: a conversation's ``"trajectory_id"`` is
    unique over processes, and its ``"started"`` is wall-clock time. A row may bring its ``"trajectory_id"`` to
    ``reset``; otherwise the environment makes one.

    ``tokenizer``, ``batch_size``, ``input_mode`` and ``template_kwargs`` are TorchRL's.

    Args:
        tokenizer: tokenizer whose chat template renders prompts and feedback, and which decodes the policy's turns.
        batch_size: number of rows that ``reset`` makes.
        input_mode: what the policy reads in addition to the ids: ``"tokens"`` nothing, ``"text"``
            ``("text", "prompt")``, ``"history"`` ``("history", "prompt")``. If the policy returns ids, the environment
            uses them in every mode.
        max_tokens: maximum length ``T`` of a trajectory, prompt included; None disables it. The row's
            ``"max_new_tokens"`` tells the policy what is left for its turn. Feedback that leaves no room ends the row.
            A prompt that leaves none is an error of ``reset``, but only ends its row in :meth:`open_rows`.
        max_turn_tokens: maximum tokens of each policy turn; None disables it. The policy's own limit and the
            ``"max_new_tokens"`` that a row brings to ``reset`` also apply.
        max_turns: maximum number of policy turns; a conversation that would continue after them is truncated. None
            disables it.
        max_seconds: maximum wall-clock time of a conversation, checked between turns; None disables it.
        on_time_limit: what to do with a conversation that ``max_seconds`` ends. ``"score"`` scores it like any other;
            ``"abstain"`` leaves it out of the baseline, for tools and engines whose speed is not the policy's doing.
        on_rewrite: what to do if the chat template would now render the past differently from what the policy saw
            (it strips thinking, or the tools changed). ``"keep"`` continues from the ids that the policy saw.
            ``"split"`` continues from the newly rendered conversation; the row then becomes several samples
            (:mod:`torchrl_rloo.data.segments`), each of at most ``max_tokens``.
        template_kwargs: arguments of the chat template. A row's own ``"tools"`` are passed as ``tools``.

    Attributes:
        counts: ``"env/rewritten_turns"``, the number of turns whose past the template would have rendered differently,
            and ``"env/long_prompts"``, the number of prompts that left the policy no token.
        context_length: maximum tokens of the policy's context, which limits trajectories like ``max_tokens``; None
            disables it. It may be set at any time, and :meth:`adapt_to` takes it from a policy.
        end_ids: ids with which the model ends a turn. After one of them, feedback starts without the template's own end
            of turn. :meth:`adapt_to` takes them from a policy.

    Raises:
        KeyError: at ``reset`` if the rows have no ``"query"``; at ``step`` in tokens mode if the policy set no ids.
        ValueError: at ``reset`` if a query is neither text nor messages, or its prompt fills ``max_tokens``; at
            ``step`` if the policy's ids do not extend its prompt, or it removed the mask or the log-probs.

    Example:
        >>> from tensordict import TensorDict
        >>> from torchrl_rloo.embedded import build_tokenizer
        >>> env = ChatEnv(build_tokenizer(), batch_size=2)
        >>> row = env.reset(TensorDict({"query": ["What is 2+3?", "What is 47+38?"]}, [2]))
        >>> [len(t) for t in row.get(("tokens", "prompt"), as_list=True)]
        [8, 10]
    """

    batch_locked = False

    @with_torchrl_arguments
    def __init__(
        self,
        tokenizer,
        *,
        batch_size: int | Sequence[int] = 1,
        input_mode: Literal["tokens", "text", "history"] = "tokens",
        max_tokens: int | None = None,
        max_turn_tokens: int | None = None,
        max_turns: int | None = None,
        max_seconds: float | None = None,
        on_time_limit: OnTimeLimit = "score",
        on_rewrite: Literal["keep", "split"] = "keep",
        template_kwargs: Mapping[str, Any] | None = None,
    ):
        if input_mode not in INPUT_MODES:
            raise ValueError(f"input_mode={input_mode!r} must be one of {INPUT_MODES}")
        check_limits(
            max_tokens=max_tokens,
            max_turn_tokens=max_turn_tokens,
            max_turns=max_turns,
            max_seconds=max_seconds,
            on_time_limit=on_time_limit,
        )
        if on_rewrite not in ("keep", "split"):
            raise ValueError(f"on_rewrite={on_rewrite!r} must be 'keep' or 'split'")
        batch_size = (batch_size,) if isinstance(batch_size, int) else tuple(batch_size)
        if len(batch_size) != 1 or batch_size[0] < 1:
            raise ValueError(f"batch_size={batch_size} must be one positive number of rows")
        super().__init__(batch_size=torch.Size(batch_size), device=None)
        self.tokenizer, self.input_mode, self.max_tokens = tokenizer, input_mode, max_tokens
        self.max_turn_tokens, self.max_turns, self.max_seconds = max_turn_tokens, max_turns, max_seconds
        self.context_length: int | None = None
        self.end_ids: tuple[int, ...] = ()
        self.on_time_limit, self.on_rewrite = on_time_limit, on_rewrite
        self.counts: Counter[str] = Counter()
        self._ids = TrajectoryIds()
        self.dataset: PromptDataset | None = None  # source of the prompts and of their encoded ids
        self.template_kwargs = dict(template_kwargs or {})
        limits = {"limits_tokens": (max_tokens or max_turn_tokens) is not None, "limits_time": max_seconds is not None}
        for name, spec in make_specs(self.batch_size, input_mode, **limits).items():
            setattr(self, name, spec)

    def _set_seed(self, seed: int | None) -> None:
        """Do nothing: the primer draws prompts and the policy samples; the environment is deterministic."""

    @property
    def token_limit(self) -> int | None:
        """Maximum tokens of a trajectory: the smaller of ``max_tokens`` and ``context_length``; None without either."""
        limits = [limit for limit in (self.max_tokens, self.context_length) if limit is not None]
        return min(limits, default=None)

    def adapt_to(self, policy: Any) -> None:
        """Take ``context_length`` and ``end_ids`` from a policy; what it does not have stays as it is.

        Args:
            policy: policy of the conversations, such as a :class:`~torchrl_rloo.modules.turns.TurnPolicy`.

        Raises:
            ValueError: if the policy has another ``input_mode``.
        """
        if (mode := getattr(policy, "input_mode", self.input_mode)) != self.input_mode:
            raise ValueError(
                f"input_mode={mode!r} of the policy cannot be combined with input_mode={self.input_mode!r} of the "
                "environment; pass the same to both"
            )
        if (context := getattr(policy, "context_length", None)) is not None:
            self.context_length = int(context)
        self.end_ids = tuple(getattr(policy, "end_ids", self.end_ids))

    def rand_action(self, tensordict: TensorDictBase | None = None) -> TensorDictBase:
        """Add one random token as the policy's turn, the same in every row; meant for spec checks.

        Args:
            tensordict: rows as ``reset`` returns them; None resets the environment.

        Returns:
            The rows, with the turn set in the entries of ``input_mode``.
        """
        rows = to_lazy_stack(self.reset() if tensordict is None else tensordict)
        token = torch.randint(len(self.tokenizer), (1,))
        for row in rows.unbind(0):
            write_turn(row, token, **self._mode())
        return rows

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs) -> TensorDictBase:
        if tensordict is None or keys.QUERY not in tensordict.keys():
            raise KeyError(
                f"ChatEnv.reset needs rows with a {keys.QUERY!r}: pass a tensordict, or add a DataLoadingPrimer "
                "(DatasetChatEnv has one)"
            )
        rows, encoded = [], self.prompt_ids()
        for row, fresh in zip(tensordict.unbind(0), rows_to_reset(tensordict), strict=True):
            if not fresh:
                rows.append(set_done(drop_entries(row, STEP_KEYS), "running"))
                continue
            rows.append(self.open_row(row, encoded))
            if rows[-1]["done"].any():
                prompt = encoded.encode(row, non_tensor_value(row, keys.QUERY), self._template_arguments(row))
                raise long_prompt_error(self, len(prompt))
        return stack_rows(rows)

    def prompt_ids(self) -> PromptIds:
        """Return an encoder for the prompts of one reset."""
        return PromptIds(self.tokenizer, self.dataset, self.template_kwargs)

    def open_rows(self, rows: TensorDictBase) -> TensorDictBase:
        """Open the conversations of any number of rows; see :meth:`open_row`.

        Args:
            rows: ``[n]`` rows with a ``"query"``.

        Returns:
            The ``[n]`` rows at the policy's first turn. Those whose prompt leaves no token are done.
        """
        encoded = self.prompt_ids()
        return stack_rows([self.open_row(row, encoded) for row in rows.unbind(0)])

    def open_row(self, row: TensorDictBase, encoded: PromptIds) -> TensorDictBase:
        """Put a row at the start of its conversation.

        A prompt that leaves the policy no token ends the row as truncated, with the stop reason ``"total_tokens"``. The
        row then keeps only as many ids of the prompt as fit.

        Args:
            row: row with a ``"query"``; what it has of an earlier conversation is dropped.
            encoded: encoder of the prompts, from :meth:`prompt_ids`.

        Returns:
            The row, or a copy.
        """
        opened_before = keys.NUM_TURNS in row.keys()
        row = drop_entries(row, CONVERSATION_KEYS)
        query = non_tensor_value(row, keys.QUERY)
        prompt, limit = encoded.encode(row, query, self._template_arguments(row)), self.token_limit
        fits = limit is None or len(prompt) < limit
        if not fits:
            self.counts["env/long_prompts"] += 1
            prompt = prompt[:limit]
        end_row(row, "running" if fits else "total_tokens")
        # A row opened before holds this environment's limit and the id of the conversation before, not its own
        if not opened_before and (own := row.get(keys.MAX_NEW_TOKENS, None)) is not None:
            row.set(keys.INITIAL_MAX_NEW_TOKENS, own)
        if opened_before or keys.TRAJECTORY_ID not in row.keys():
            group = row.get(keys.GROUP_ID, None)
            row.set(keys.TRAJECTORY_ID, torch.tensor(self._ids.next(None if group is None else int(group))))
        record_tools(row)
        # Start the conversation without turns
        opened = {
            keys.NUM_TURNS: torch.tensor(0),
            keys.COMPLETION: make_non_tensor([] if is_conversation(query) else ""),
        }
        if self.max_seconds is not None:
            opened[keys.STARTED] = torch.tensor(time.monotonic(), dtype=torch.float64)
        set_entries(row, opened)
        return self._set_context(row, prompt, torch.zeros(len(prompt), dtype=torch.bool), torch.zeros(len(prompt)))

    def _set_context(
        self, row: TensorDictBase, tokens: torch.Tensor, mask: torch.Tensor, log_probs: torch.Tensor
    ) -> TensorDictBase:
        """Set what the policy sees at its turn, and limit the turn to the tokens that the row may still add."""
        write_context(row, tokens, mask, log_probs, **self._mode())
        if (room := turn_room(self, row, len(tokens))) is not None:
            row.set(keys.MAX_NEW_TOKENS, torch.tensor(room))
        return row

    def _mode(self) -> dict[str, Any]:
        """Return what turns ids into the form that the policy reads, and back."""
        return {"tokenizer": self.tokenizer, "input_mode": self.input_mode}

    def _template_arguments(self, row: TensorDictBase, tools: str = keys.TOOLS) -> dict[str, Any]:
        """Return the arguments of the chat template other than the messages."""
        return self.template_kwargs if tools not in row.keys() else {**self.template_kwargs, "tools": row[tools]}

    @classmethod
    def _complete_done(cls, done_spec: Composite, data: TensorDictBase) -> None:
        # A step sets every done entry itself, for any number of rows; the base class requires the whole batch
        if "done" not in data.keys():
            super()._complete_done(done_spec, data)

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        return stack_rows([self.step_row(row) for row in tensordict.unbind(0)])

    def step_row(self, row: TensorDictBase) -> TensorDictBase:
        """Take the policy's turn in one conversation.

        Args:
            row: one row with the policy's turn.

        Returns:
            The state after it: one row of the ``"next"`` entry of a step.
        """
        full, mask, log_probs = read_turn(row, **self._mode())
        turn = full[len(row[keys.PROMPT_TOKENS]) :]
        stepped = make_stepped_row(row, decode_response(self.tokenizer, turn.tolist()))
        end_row(stepped, turn_stop_reason(self, row, len(full), len(turn)))
        return self._set_context(stepped, full, mask, log_probs)

    def continue_row(self, row: TensorDictBase, feedback: Messages) -> bool:
        """Append feedback to a row that was just stepped, in place, and open the policy's next turn.

        Args:
            row: one row of the ``"next"`` entry of a step.
            feedback: the messages that answer the policy's turn.

        Returns:
            False if a limit leaves the policy no further turn; the row then ends as truncated.
        """
        if (limit := self.limit_reached(row)) is not None:
            end_row(row, limit)
            return False
        # Encode only the feedback, unless the template renders another past and the row is to be split
        conversation, tokens = join_conversation(row[keys.QUERY], row[keys.COMPLETION]), row[keys.PROMPT_TOKENS]
        now, last = self._template_arguments(row), int(tokens[-1])
        seen = self._template_arguments(row, keys.TOOLS_SEEN)
        ids, rewritten = answer_turn(
            self.tokenizer,
            conversation,
            feedback,
            last_token=last,
            end_ids=self.end_ids,
            seen_arguments=seen,
            **now,
        )
        mask, log_probs = row[keys.ACTION_MASK], row[keys.LOG_PROBS]
        split = rewritten and self.on_rewrite == "split"
        if split:
            ids = encode_messages(self.tokenizer, [*conversation, *feedback], **now | {"add_generation_prompt": True})
            tokens, mask, log_probs = tokens[:0], mask[:0], log_probs[:0]
        if self.token_limit is not None and len(tokens) + len(ids) >= self.token_limit:
            end_row(row, "total_tokens")
            return False
        # Record the feedback only now that it fits, so that a row that ended above stays as it was
        if split:
            stash_segment(row)
        self.counts["env/rewritten_turns"] += rewritten
        row.set(keys.COMPLETION, make_non_tensor([*row[keys.COMPLETION], *feedback]))
        record_tools(row)
        end_row(row, "running")
        new = torch.tensor(ids, dtype=torch.long)
        self._set_context(
            row,
            torch.cat([tokens, new]),
            torch.cat([mask, torch.zeros(len(new), dtype=torch.bool)]),
            torch.cat([log_probs, torch.zeros(len(new))]),
        )
        return True

    def limit_reached(self, row: TensorDictBase) -> str | None:
        """Return the stop reason of the turn or time limit that forbids another turn, or None.

        Args:
            row: one row of the ``"next"`` entry of a step.
        """
        if self.max_turns is not None and int(row[keys.NUM_TURNS]) >= self.max_turns:
            return "turns"
        if self.max_seconds is not None and time.monotonic() - float(row[keys.STARTED]) >= self.max_seconds:
            return "time"
        return None
