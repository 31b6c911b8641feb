"""ChatEnv: conversations as a batch of rows, token-exact over any number of turns.

Replaces TorchRL's class of the same name. That class re-encodes the conversation's text at every turn, fails on prompts
of unequal length in tokens mode, and never sets ``done``.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from tensordict import TensorDict, TensorDictBase
from torchrl.data import Binary, Composite, NonTensor, Unbounded
from torchrl.envs import EnvBase
from torchrl.modules.llm.policies import ChatHistory, LogProbs, Masks, Text, Tokens

from torchrl_rloo.data import keys
from torchrl_rloo.data.keys import INPUT_MODES
from torchrl_rloo.data.prompts import PromptDataset
from torchrl_rloo.data.rows import (
    drop_entries,
    entry_of,
    make_non_tensor,
    make_tensorclass,
    non_tensor_value,
    rows_to_reset,
    set_entries,
    stack_rows,
    to_lazy_stack,
)
from torchrl_rloo.data.segments import SAMPLE_KEYS, TrajectoryIds, stash_segment
from torchrl_rloo.data.stop_reasons import end_row, is_done, set_done
from torchrl_rloo.data.templates import (
    Messages,
    answer_turn,
    decode_response,
    encode,
    encode_messages,
    encode_prompt,
    from_history,
    is_conversation,
    join_conversation,
    to_history,
)
from torchrl_rloo.envs.abstaining import ON_TIME_LIMIT, OnTimeLimit
from torchrl_rloo.envs.signed import SignedEnv
from torchrl_rloo.images.encoder import digests, encoder_of
from torchrl_rloo.images.parts import image_paths
from torchrl_rloo.images.shown import stored_messages
from torchrl_rloo.images.store import ImageError
from torchrl_rloo.runtime.torchrl_arguments import with_torchrl_arguments

_LOGGER = logging.getLogger(__name__)
STEP_KEYS = ("_reset", "next", "done", "terminated", "truncated")
CONVERSATION_KEYS = frozenset({*STEP_KEYS, keys.COMPLETION, *SAMPLE_KEYS, keys.TOOLS_SEEN})
CONVERSATION_KEYS |= {"tokens", "masks", "log_probs", "text", "history"}
_CARRIED_KEYS = (keys.STARTED, keys.TOOLS, keys.TOOLS_SEEN, keys.INITIAL_MAX_NEW_TOKENS, *SAMPLE_KEYS)


class PromptIds:
    """Encoder of one reset's prompts: it encodes each query once, and reuses the ids that the dataset holds."""

    def __init__(self, env: ChatEnv):
        self.tokenizer, self.dataset, self.template_kwargs = env.tokenizer, env.dataset, env.template_kwargs
        system = env.system_prompt
        self._system = [] if system is None else [{"role": "system", "content": system}]
        self._is_chat = bool(self._system) or env.input_mode == "history"
        self._chats: dict[int, tuple] = {}
        self._seen: dict[tuple[int, int], tuple] = {}
        self._dataset_ids = None
        if self.dataset is not None:
            self._dataset_ids = self.dataset.encoded(self.tokenizer, **self.template_kwargs)

    def to_chat(self, query: Messages | str) -> Messages | str:
        """Return a query with the system prompt; a text becomes the user's message if conversations are chats."""
        if id(query) not in self._chats:
            chat = [{"role": "user", "content": query}] if self._is_chat and isinstance(query, str) else query
            if self._system and is_conversation(chat) and not any(m["role"] == "system" for m in chat):
                chat = [*self._system, *chat]
            self._chats[id(query)] = query, chat  # keep both alive, as below
        return self._chats[id(query)][1]

    def encode(self, row: TensorDictBase, query: Messages | str, arguments: Mapping[str, Any]) -> torch.Tensor:
        """Return the ids ``[P]`` of a row's query; ``arguments`` are those of the chat template."""
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
    stepped (:func:`~torchrl_rloo.envs.stepping.step_rows`), also in another process. A conversation's
    ``"trajectory_id"`` is unique over processes. A row may bring its ``"trajectory_id"`` to
    ``reset``; otherwise the environment makes one.

    ``tokenizer``, ``batch_size``, ``input_mode`` and ``template_kwargs`` are TorchRL's.

    Args:
        tokenizer: tokenizer whose chat template renders prompts and feedback, and which decodes the policy's turns.
        batch_size: number of rows that ``reset`` makes.
        input_mode: what the policy reads in addition to the ids: ``"tokens"`` nothing, ``"text"``
            ``("text", "prompt")``, ``"history"`` ``("history", "prompt")``. If the policy returns ids, the environment
            uses them in every mode.
        system_prompt: system message of queries that have none; None adds none. With it, and if ``input_mode`` is
            ``"history"``, a query that is a text is the user's message; else the policy continues the text.
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
        counts: ``"env/rewritten_turns"``, the number of turns whose past the template would have rendered differently;
            ``"env/long_prompts"``, prompts that left the policy no token; ``"env/missing_images"``, prompts whose image
            was missing.
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
        system_prompt: str | None = None,
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
        _check_limits(
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
        self.tokenizer, self.input_mode, self.system_prompt = tokenizer, input_mode, system_prompt
        self.max_tokens, self.max_turn_tokens = max_tokens, max_turn_tokens
        self.max_turns, self.max_seconds = max_turns, max_seconds
        self.context_length: int | None = None
        self.end_ids: tuple[int, ...] = ()
        self.on_time_limit, self.on_rewrite = on_time_limit, on_rewrite
        self.counts: Counter[str] = Counter()
        self._ids = TrajectoryIds()
        self.dataset: PromptDataset | None = None  # source of the prompts and of their encoded ids
        self.template_kwargs = dict(template_kwargs or {})
        limits = {"limits_tokens": (max_tokens or max_turn_tokens) is not None, "limits_time": max_seconds is not None}
        for name, spec in _make_specs(self.batch_size, input_mode, **limits).items():
            setattr(self, name, spec)

    def _set_seed(self, seed: int | None) -> None:
        """Do nothing: the primer draws prompts and the policy samples; the environment is deterministic."""

    @property
    def token_limit(self) -> int | None:
        """Maximum tokens of a trajectory: the smaller of ``max_tokens`` and ``context_length``; None without either."""
        limits = [limit for limit in (self.max_tokens, self.context_length) if limit is not None]
        return min(limits, default=None)

    def adapt_to(self, policy: Any) -> None:
        """Take ``context_length`` and ``end_ids`` from a policy; what it does not have stays as it is."""
        if (mode := getattr(policy, "input_mode", self.input_mode)) != self.input_mode:
            raise ValueError(
                f"input_mode={mode!r} of the policy cannot be combined with input_mode={self.input_mode!r} of the "
                "environment; pass the same to both"
            )
        if (context := getattr(policy, "context_length", None)) is not None:
            self.context_length = int(context)
        self.end_ids = tuple(getattr(policy, "end_ids", self.end_ids))

    def rand_action(self, tensordict: TensorDictBase | None = None) -> TensorDictBase:
        """Add one random token as the policy's turn, the same in every row; meant for spec checks."""
        rows = to_lazy_stack(self.reset() if tensordict is None else tensordict)
        token = torch.randint(len(self.tokenizer), (1,))
        for row in rows.unbind(0):
            self._write_turn(row, token)
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
            if is_done(rows[-1]):
                query = encoded.to_chat(non_tensor_value(row, keys.QUERY))
                prompt = encoded.encode(row, query, self._template_arguments(row))
                raise self._long_prompt_error(len(prompt))
        return stack_rows(rows)

    def prompt_ids(self) -> PromptIds:
        """Return an encoder for the prompts of one reset."""
        return PromptIds(self)

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
        row then keeps only as many ids of the prompt as fit, and no image. A prompt whose image is missing ends it as
        ``"failed"``.
        """
        opened_before = keys.NUM_TURNS in row.keys()
        row = drop_entries(row, CONVERSATION_KEYS)
        own_query = non_tensor_value(row, keys.QUERY)
        if (query := encoded.to_chat(own_query)) is not own_query:
            row.set(keys.QUERY, make_non_tensor(query))
        prompt, reason = self._encode_first(row, query, encoded)
        end_row(row, reason)
        # A row opened before holds this environment's limit and the id of the conversation before, not its own
        if not opened_before and (own := entry_of(row, keys.MAX_NEW_TOKENS)) is not None:
            row.set(keys.INITIAL_MAX_NEW_TOKENS, own)
        if opened_before or keys.TRAJECTORY_ID not in row.keys():
            group = entry_of(row, keys.GROUP_ID)
            row.set(keys.TRAJECTORY_ID, torch.tensor(self._ids.next(None if group is None else int(group))))
        record_tools(row)
        # Start the conversation without turns
        opened = {
            keys.NUM_TURNS: torch.tensor(0),
            keys.COMPLETION: make_non_tensor([] if is_conversation(query) else ""),
        }
        if reason == "running" and not isinstance(query, str) and (paths := image_paths(query)):
            opened[keys.IMAGES] = digests(paths)
        if self.max_seconds is not None:
            opened[keys.STARTED] = torch.tensor(time.monotonic(), dtype=torch.float64)
        set_entries(row, opened)
        return self.set_context(row, prompt, torch.zeros(len(prompt), dtype=torch.bool), torch.zeros(len(prompt)))

    def _encode_first(self, row: TensorDictBase, query: Messages | str, encoded: PromptIds) -> tuple[torch.Tensor, str]:
        """Return the ids of a prompt, and the stop reason of its row: ``"running"`` unless it cannot begin."""
        images = encoder_of(self.tokenizer)
        try:
            prompt = encoded.encode(row, query, self._template_arguments(row))
        except ImageError as error:
            self.counts["env/missing_images"] += 1
            _LOGGER.warning("a prompt cannot be shown to the policy: %s", error)
            return torch.tensor([self.tokenizer.eos_token_id]), "failed"
        if self.token_limit is None or len(prompt) < self.token_limit:
            return prompt, "running"
        self.counts["env/long_prompts"] += 1
        if images is not None:  # a part of an image has no meaning
            prompt = prompt[: [*prompt.tolist(), images.family.image_id].index(images.family.image_id)]
        return prompt[: self.token_limit] if len(prompt) else torch.tensor(
            [self.tokenizer.eos_token_id]
        ), "total_tokens"

    def set_context(
        self, row: TensorDictBase, tokens: torch.Tensor, mask: torch.Tensor, log_probs: torch.Tensor
    ) -> TensorDictBase:
        """Set what the policy sees at its turn, in place, and limit the turn to the tokens that the row may still add.

        All of ``tokens``, ``mask`` and ``log_probs`` are ``[T]``.
        """
        context = {
            "tokens": make_tensorclass(Tokens, prompt=tokens),
            "masks": make_tensorclass(Masks, all_assistant_mask=mask),
            "log_probs": make_tensorclass(LogProbs, full=log_probs),
        }
        set_entries(row, context)
        if self.input_mode == "text":
            row.set("text", Text(prompt=self.tokenizer.decode(tokens)))
        elif self.input_mode == "history":
            conversation = join_conversation(row[keys.QUERY], row[keys.COMPLETION])
            row.set("history", ChatHistory(prompt=to_history([conversation])[0]))
        if (room := self._turn_room(row, len(tokens))) is not None:
            row.set(keys.MAX_NEW_TOKENS, torch.tensor(room))
        return row

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
        """Take the policy's turn in one conversation."""
        full, mask, log_probs = self._read_turn(row)
        turn = full[len(entry_of(row, keys.PROMPT_TOKENS)) :]
        stepped = make_stepped_row(row, decode_response(self.tokenizer, turn.tolist()))
        end_row(stepped, self._turn_stop_reason(row, len(full), len(turn)))
        return self.set_context(stepped, full, mask, log_probs)

    def continue_row(self, row: TensorDictBase, feedback: Messages) -> bool:
        """Append feedback, which may have images, to a row that was just stepped, and open the policy's next turn."""
        if (limit := self.limit_reached(row)) is not None:
            end_row(row, limit)
            return False
        feedback = stored_messages(feedback, encoder_of(self.tokenizer))
        # Encode only the feedback, unless the template renders another past and the row is to be split
        conversation, tokens = join_conversation(row[keys.QUERY], row[keys.COMPLETION]), row[keys.PROMPT_TOKENS]
        now, seen = self._template_arguments(row), self._template_arguments(row, keys.TOOLS_SEEN)
        before = {"last_token": int(tokens[-1]), "end_ids": self.end_ids, "seen_arguments": seen}
        ids, rewritten = answer_turn(self.tokenizer, conversation, feedback, **before, **now)
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
        if paths := image_paths([*conversation, *feedback] if split else feedback):
            images, before = digests(paths), None if split else entry_of(row, keys.IMAGES)
            row.set(keys.IMAGES, images if before is None else torch.cat([before, images]))
        row.set(keys.COMPLETION, make_non_tensor([*row[keys.COMPLETION], *feedback]))
        record_tools(row)
        end_row(row, "running")
        new = torch.tensor(ids, dtype=torch.long)
        self.set_context(
            row,
            torch.cat([tokens, new]),
            torch.cat([mask, torch.zeros(len(new), dtype=torch.bool)]),
            torch.cat([log_probs, torch.zeros(len(new))]),
        )
        return True

    def limit_reached(self, row: TensorDictBase) -> str | None:
        """Return the stop reason of the turn or time limit that forbids another turn, or None."""
        if self.max_turns is not None and int(row[keys.NUM_TURNS]) >= self.max_turns:
            return "turns"
        if self.max_seconds is not None and time.monotonic() - float(row[keys.STARTED]) >= self.max_seconds:
            return "time"
        return None

    # Limits, and the policy's turn in the form that it reads and writes

    def _turn_room(self, row: TensorDictBase, length: int) -> int | None:
        """Return the most tokens that the next turn of a row of ``length`` tokens may have; None for no limit."""
        own = entry_of(row, keys.INITIAL_MAX_NEW_TOKENS)
        limits = [self.max_tokens, self.max_turn_tokens, None if own is None else int(own)]
        if not any(limit is not None for limit in limits):
            return None  # the policy itself keeps to its context
        if self.token_limit is not None:
            limits[0] = max(1, self.token_limit - length)
        return min(limit for limit in limits if limit is not None)

    def _turn_stop_reason(self, row: TensorDictBase, length: int, turn_length: int) -> str:
        """Return the stop reason of a turn that nothing answers; ``length`` counts the row's tokens after it."""
        over_total = -math.inf if self.token_limit is None else length - self.token_limit
        over_turn = -math.inf if self.max_turn_tokens is None else turn_length - self.max_turn_tokens
        # A turn as long as a limit counts as cut off, unless the policy reports that it stopped on its last token
        reported = entry_of(row, keys.RESPONSE_TRUNCATED)
        if reported is None:
            cut_off = max(over_total, over_turn) >= 0
        else:
            cut_off = bool(reported.any()) or max(over_total, over_turn) > 0
        if not cut_off:
            return "answered"
        return "total_tokens" if over_total >= 0 else "turn_tokens"

    def _long_prompt_error(self, length: int) -> ValueError:
        """Return the error for a prompt of ``length`` tokens that leaves the policy no token."""
        shown = {"max_tokens": self.max_tokens, "context_length": self.context_length}
        name = min((name for name, limit in shown.items() if limit is not None), key=lambda name: shown[name])
        return ValueError(
            f"a prompt of {length} tokens leaves the policy none of {name}={shown[name]}; drop long prompts with "
            f"load_prompts(max_prompt_length=...), or raise {name}"
        )

    def _read_turn(self, row: TensorDictBase) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return ids, action mask and log-probs after the policy's turn, each ``[T]``."""
        # Encode a turn that the policy gave as text only, here and never again
        prompt, full = entry_of(row, keys.PROMPT_TOKENS), entry_of(row, keys.TOKENS)
        if full is None:
            full = torch.cat([prompt, torch.tensor(self._encode_reply(row), dtype=torch.long)])
        if len(full) < len(prompt) or not torch.equal(full[: len(prompt)], prompt):
            raise ValueError(
                f"the policy returned {len(full)} ids that do not extend the {len(prompt)} ids of its prompt; "
                f"{keys.TOKENS} must hold the prompt's ids followed by the sampled ones"
            )
        mask, log_probs = entry_of(row, keys.ACTION_MASK), entry_of(row, keys.LOG_PROBS)
        if mask is None or log_probs is None:
            raise ValueError(
                f"the policy removed {keys.ACTION_MASK} or {keys.LOG_PROBS}; it must write both for all ids, or leave "
                "both unchanged. Use TransformersWrapper or vLLMWrapper of torchrl_rloo.modules instead of TorchRL's"
            )
        # Without log-probs of the new ids, write NaN: an unknown value must not pass for a number
        new = len(full) - len(mask)
        if new:
            mask = torch.cat([mask, torch.ones(new, dtype=torch.bool)])
            log_probs = torch.cat([log_probs, torch.full((new,), torch.nan)])
        return full, mask, log_probs

    def _encode_reply(self, row: TensorDictBase) -> list[int]:
        if self.input_mode == "text":
            reply = row["text", "full"][len(row["text", "prompt"]) :]
        elif self.input_mode == "history":
            reply = from_history(row["history", "full"])[-1]["content"] + (self.tokenizer.eos_token or "")
        else:
            raise KeyError(f"the policy must set {keys.TOKENS}; the row has {sorted(map(str, row.keys(True, True)))}")
        return encode(self.tokenizer, reply)

    def _write_turn(self, row: TensorDictBase, turn: torch.Tensor) -> None:
        """Set the ids ``turn`` as the policy's turn, in place, in the entries of ``input_mode``."""
        if self.input_mode == "tokens":
            prompt = row[keys.PROMPT_TOKENS]
            row.set("tokens", Tokens(prompt=prompt, full=torch.cat([prompt, turn])))
            return
        reply = decode_response(self.tokenizer, turn.tolist())
        if self.input_mode == "text":
            row.set("text", Text(prompt=row["text", "prompt"], full=row["text", "prompt"] + reply))
        else:
            history = row["history", "prompt"]
            full = [*from_history(history), {"role": "assistant", "content": reply}]
            row.set("history", ChatHistory(prompt=history, full=to_history([full])[0]))


def make_stepped_row(row: TensorDictBase, reply: str) -> TensorDict:
    """Build the row after a turn, with the entries that last for the whole conversation; it has no context yet."""
    query, completion = non_tensor_value(row, keys.QUERY), non_tensor_value(row, keys.COMPLETION)
    is_text = isinstance(completion, str)
    extended = completion + reply if is_text else [*completion, {"role": "assistant", "content": reply}]
    step = {
        keys.QUERY: make_non_tensor(query),
        keys.COMPLETION: make_non_tensor(extended),
        keys.NUM_TURNS: entry_of(row, keys.NUM_TURNS) + 1,
        keys.TRAJECTORY_ID: entry_of(row, keys.TRAJECTORY_ID),
        "reward": torch.zeros(1, 1),
    }
    step |= {key: value for key, value in row.items() if key in _CARRIED_KEYS}
    return TensorDict._new_unsafe(step, batch_size=torch.Size([]))


def dataset_columns(row: TensorDictBase) -> dict[str, Any]:
    """Return the dataset's columns of a row, its query included, with lists in place of tensors."""
    names = [name for name in row.keys() if name == keys.QUERY or name not in keys.RESERVED]
    return {name: plain_value(row[name]) for name in names}


def plain_value(value: Any) -> Any:
    """Convert a column's entry back to plain Python values."""
    return value.tolist() if isinstance(value, torch.Tensor) else value


def record_tools(row: TensorDictBase) -> None:
    """Note the tools that the policy's context shows, in place; the row may get others before its next turn."""
    if keys.TOOLS in row.keys():
        row.set(keys.TOOLS_SEEN, row.get(keys.TOOLS))


def _check_limits(
    *,
    max_tokens: int | None,
    max_turn_tokens: int | None,
    max_turns: int | None,
    max_seconds: float | None,
    on_time_limit: str,
) -> None:
    """Refuse limits that are too small, and an ``on_time_limit`` that is unknown or lacks its limit."""
    if max_tokens is not None and max_tokens < 2:
        raise ValueError(f"max_tokens={max_tokens} must be at least 2, to hold a prompt and an action")
    for name, value in (("max_turn_tokens", max_turn_tokens), ("max_turns", max_turns)):
        if value is not None and value < 1:
            raise ValueError(f"{name}={value} must be at least 1, or None for no limit")
    if max_seconds is not None and not max_seconds > 0:
        raise ValueError(f"max_seconds={max_seconds} must be above 0, or None for no limit")
    if on_time_limit not in ON_TIME_LIMIT:
        raise ValueError(f"on_time_limit={on_time_limit!r} must be one of {ON_TIME_LIMIT}")
    if on_time_limit == "abstain" and max_seconds is None:
        raise ValueError("on_time_limit='abstain' requires max_seconds; set it")


def _make_specs(
    shape: Sequence[int], input_mode: str, *, limits_tokens: bool, limits_time: bool
) -> dict[str, Composite]:
    """Return the specs of an environment by the names of their attributes; ``shape`` is ``[B]``."""
    ragged = {"shape": (*shape, -1)}
    tokens = Unbounded(**ragged, dtype=torch.int64)
    state = {
        "tokens": Composite(prompt=tokens, shape=shape, data_cls=Tokens),
        "masks": Composite(all_assistant_mask=Binary(**ragged, dtype=torch.bool), shape=shape, data_cls=Masks),
        "log_probs": Composite(full=Unbounded(**ragged), shape=shape, data_cls=LogProbs),
        keys.NUM_TURNS: Unbounded(shape=shape, dtype=torch.int64),
        keys.TRAJECTORY_ID: Unbounded(shape=shape, dtype=torch.int64),
        keys.STOP_REASON[1]: Unbounded(shape=shape, dtype=torch.int64),
        keys.COMPLETION: NonTensor(shape=shape, example_data=[]),
    }
    if limits_tokens:
        state[keys.MAX_NEW_TOKENS] = Unbounded(shape=shape, dtype=torch.int64)
    if limits_time:
        state[keys.STARTED] = Unbounded(shape=shape, dtype=torch.float64)
    # The action is the policy's turn, in the form that it reads
    views = {"text": Text, "history": ChatHistory}
    if input_mode in views:
        state[input_mode] = _without_optional(views[input_mode].default_spec(shape, ["prompt"]))
        action = _without_optional(views[input_mode].default_spec(shape, ["full"]))
    else:
        action = Composite(full=tokens, shape=shape, data_cls=Tokens)
    done = {k: Binary(n=1, shape=(*shape, 1), dtype=torch.bool) for k in ("done", "terminated", "truncated")}
    return {
        "full_observation_spec": Composite(state, shape=shape),
        "full_action_spec": Composite({input_mode: action}, shape=shape),
        "full_reward_spec": Composite(reward=Unbounded(shape=(*shape, 1, 1)), shape=shape),
        "full_done_spec": Composite(done, shape=shape),
        "full_state_spec": Composite({keys.QUERY: NonTensor(shape=shape, example_data="a question")}, shape=shape),
    }


def _without_optional(spec: Composite) -> Composite:
    """Remove from a text or history spec the message fields that plain chats leave unset."""
    for messages in (v for v in spec.values() if isinstance(v, Composite)):
        for field in ("tool_calls", "tool_responses"):
            del messages[field]
    return spec
