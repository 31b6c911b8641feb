"""TurnPolicy: base of policies, from prompts to sampled turns on rows.

Token ids on a row are never encoded again. :class:`ScoredActions` are the scores of finished rows.
"""

from __future__ import annotations

import sys
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, Literal, NamedTuple

import torch
from tensordict import TensorDict, TensorDictBase
from torchrl.modules.llm.policies import ChatHistory, LLMWrapperBase, LogProbs, Masks, Text, Tokens

from torchrl_rloo.data import keys
from torchrl_rloo.data.keys import INPUT_MODES
from torchrl_rloo.data.rows import ActionTokens, entry_of, make_tensorclass, set_entries, stack_rows, to_lazy_stack
from torchrl_rloo.data.templates import decode_response, encode_prompt, from_history, to_history
from torchrl_rloo.engines.generation import Generated, GenerationConfig
from torchrl_rloo.engines.turn_rules import TurnRules, check_rules
from torchrl_rloo.functional.sampling import SamplingDistribution, Support
from torchrl_rloo.images.encoder import encoder_of
from torchrl_rloo.images.parts import join_contents


class TurnPolicy(LLMWrapperBase):
    """Base of policies that continue each row by one turn; a subclass implements :meth:`_sample`.

    Args:
        tokenizer: tokenizer that encodes prompts without ids and decodes turns.
        input_mode: source of prompts without ids: ``"tokens"`` (none), ``"text"`` or ``"history"``.
        generate_kwargs: arguments of :class:`~torchrl_rloo.engines.generation.GenerationConfig`; unknown names raise.
        num_samples: samples per row, which give the output batch size ``[B, num_samples]``; None samples once, ``[B]``.
        stop_ids: ids of model and tokenizer that end a turn, unless ``ignore_eos`` is set.

    Attributes:
        stop_ids: all ids that stop sampling, including the ``stop_token_ids`` of ``generate_kwargs``.
        end_ids: those of them that end a turn according to model or tokenizer. After another id, such as a closing tag,
            the chat template still supplies its end of turn.
    """

    generate = True
    # Names and form of the output, for TorchRL's transforms
    tokens_key, masks_key, log_probs_key, text_key, history_key = "tokens", "masks", "log_probs", "text", "history"
    layout, pad_output = torch.strided, False

    def __init__(
        self,
        *,
        tokenizer,
        input_mode: Literal["tokens", "text", "history"],
        generate_kwargs: Mapping[str, Any] | None,
        num_samples: int | None,
        stop_ids: Sequence[int],
    ):
        super().__init__()
        if input_mode not in INPUT_MODES:
            raise ValueError(f"input_mode={input_mode!r} must be one of {INPUT_MODES}")
        if num_samples is not None and num_samples < 1:
            raise ValueError(f"num_samples={num_samples} must be None or at least 1")
        self.tokenizer, self.input_mode, self.num_samples = tokenizer, input_mode, num_samples
        self.generate_kwargs = dict(generate_kwargs or {})
        self.config = GenerationConfig.from_kwargs(generate_kwargs)
        self.images = encoder_of(tokenizer)
        if self.images is not None:
            excluded = tuple(sorted({*self.config.distribution.excluded, *self.images.excluded}))
            self.config = replace(self.config, distribution=replace(self.config.distribution, excluded=excluded))
        check_rules(self.config.distribution, tokenizer)
        # Turns end with the tokenizer's ids, unless ignored, and with those of the settings
        end_ids = () if self.config.ignore_eos else stop_ids
        self.end_ids = tuple(sorted(set(end_ids)))
        self.stop_ids = tuple(sorted({*end_ids, *self.config.stop_token_ids}))
        self.generator = None
        if self.config.seed is not None:
            self.generator = torch.Generator().manual_seed(self.config.seed)
        self._min_batch_size = self._max_batch_size = None
        # Choose the keys by the form in which the policy reads conversations
        self.in_keys = [keys.PROMPT_TOKENS if input_mode == "tokens" else (input_mode, "prompt")]
        self.out_keys = ["tokens", "masks", "log_probs", keys.RESPONSE_TRUNCATED]
        if input_mode != "tokens":
            self.out_keys.append(input_mode)

    @property
    def distribution(self) -> SamplingDistribution:
        """Sampled distribution, which log-probs refer to."""
        return self.config.distribution

    def _score_inputs(
        self, rows: TensorDictBase, actions: ActionTokens, model: torch.nn.Module
    ) -> dict[str, torch.Tensor | Support | TurnRules | None]:
        """Return the positions of action tokens, and what their distribution takes from the rows."""
        d, rules = self.distribution, None
        if d.counts_tokens or d.has_rules:
            vocab_size = model.get_output_embeddings().weight.shape[0]
            rules = TurnRules(d, self.tokenizer, self.stop_ids, vocab_size)
            rules.bind = int(rows[0].get(keys.ORIGIN, torch.tensor(keys.SAMPLED))) != keys.PLACEHOLDER
        return {"positions": actions.action_mask, "support": batch_support(rows, actions), "rules": rules}

    def sampler_state(self) -> dict[str, torch.Tensor]:
        """Return the state of the policy's random stream; empty if it uses torch's global generator."""
        return {} if self.generator is None else {"generator": self.generator.get_state()}

    def load_sampler_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Restore a state returned by :meth:`sampler_state`."""
        if self.generator is not None:
            self.generator.set_state(state["generator"])

    def forward(self, tensordict: TensorDictBase, *, tensordict_out: TensorDictBase | None = None) -> TensorDictBase:
        """Sample a turn for each row, and return the rows with the outputs set, as a lazy stack.

        Args:
            tensordict: rows, batch size ``[B]``.
            tensordict_out: rows to write to; None writes to ``tensordict``. With ``num_samples`` the output is always
                new.

        Returns:
            Rows of batch size ``[B]``, or ``[B, num_samples]``.
        """
        rows = self._rows(tensordict)
        prompts = self._prompts(rows)
        if self.num_samples is None:
            out = self._write(rows, prompts, self._take_turns(rows, prompts))
            return out if tensordict_out is None else tensordict_out.update(out)
        n = self.num_samples
        repeated = stack_rows([_copy_for_sample(row, i) for row in rows.unbind(0) for i in range(n)])
        prompts = [p for p in prompts for _ in range(n)]
        flat = self._write(repeated, prompts, self._sample(repeated, prompts)).unbind(0)
        return stack_rows([stack_rows(flat[i : i + n]) for i in range(0, len(flat), n)])

    @staticmethod
    def _rows(tensordict: TensorDictBase) -> TensorDictBase:
        rows = to_lazy_stack(tensordict)
        if rows.ndim != 1:
            raise ValueError(f"expected rows of batch size [B], got {list(tensordict.batch_size)}; flatten them first")
        return rows

    @abstractmethod
    def _sample(self, rows: TensorDictBase, prompts: list[torch.Tensor]) -> list[Generated]:
        """Sample a turn after each of ``B`` prompts, ids ``[P_i]`` on the CPU."""

    @cached_property
    def greedy(self) -> TurnPolicy:
        """Policy that takes the most likely tokens, for greedy members of groups."""
        return self.get_new_version(generate_kwargs={**self.generate_kwargs, "temperature": 0.0})

    def _take_turns(self, rows: TensorDictBase, prompts: list[torch.Tensor]) -> list[Generated]:
        """Sample turns, or take them from the origin that the row of a guided group names."""
        if rows.get(keys.ORIGIN, None) is None:
            return self._sample(rows, prompts)
        turns = [self._demonstrate(row, prompt) for row, prompt in zip(rows.unbind(0), prompts, strict=True)]
        for policy in (self, self.greedy):
            places = [i for i, turn in enumerate(turns) if turn is None and self._sampler_of(rows[i]) is policy]
            sampled = (
                policy._sample(stack_rows([rows[i] for i in places]), [prompts[i] for i in places]) if places else []
            )
            for i, turn in zip(places, sampled, strict=True):
                turns[i] = turn
        return turns

    def _sampler_of(self, row: TensorDictBase) -> TurnPolicy:
        """Return the policy that samples a row's turn."""
        return self.greedy if int(row.get(keys.ORIGIN, keys.SAMPLED)) == keys.GREEDY else self

    def _demonstrate(self, row: TensorDictBase, prompt: torch.Tensor) -> Generated | None:
        """Return the turn that a row demonstrates, with log-probs of 0; None if it is sampled."""
        if int(row.get(keys.ORIGIN, keys.SAMPLED)) != keys.DEMONSTRATION:
            return None
        ids = entry_of(row, keys.DEMONSTRATION_IDS)
        shown = ids[: self._limit(row, len(prompt), self.context_length)]
        return Generated(shown, torch.zeros(len(shown)), len(shown) < len(ids), versions=self._versions(len(shown)))

    def _versions(self, number: int) -> torch.Tensor | None:
        """Return the policy versions of tokens that were not sampled; None if samples have none."""
        return None

    @property
    def context_length(self) -> int | None:
        """Maximum number of tokens of prompt and turn together; None if it is unknown."""
        return None

    def _limit(self, row: TensorDictBase, length: int, context: int | None) -> int:
        """Return the token limit of a row's turn after a prompt of ``length`` tokens, in the policy's ``context``."""
        limit, row_limit = self.config.max_new_tokens, entry_of(row, keys.MAX_NEW_TOKENS)
        if row_limit is not None:
            if int(row_limit) < 1:
                raise ValueError(f"max_new_tokens of a row is {int(row_limit)}, must be at least 1")
            limit = min(limit, int(row_limit))
        if context is not None:
            if length >= context:
                raise ValueError(
                    f"a prompt of {length} tokens leaves none of the policy's context_length={context}; set "
                    "ChatEnv.context_length, which ends such conversations"
                )
            limit = min(limit, context - length)
        return limit

    def _prompts(self, rows: TensorDictBase) -> list[torch.Tensor]:
        """Return the ids to continue: those on the row, else its encoded text or conversation."""
        prompts = [self._prompt(row) for row in rows.unbind(0)]
        if empty := [i for i, p in enumerate(prompts) if p.numel() == 0]:
            raise ValueError(
                f"the prompts of rows {empty[:5]} are empty; a policy requires at least one token to continue"
            )
        return prompts

    def _prompt(self, row: TensorDictBase) -> torch.Tensor:
        if (ids := entry_of(row, keys.PROMPT_TOKENS)) is not None:
            return ids.cpu()
        if self.input_mode == "text":
            return torch.tensor(encode_prompt(self.tokenizer, row["text", "prompt"]))
        if self.input_mode == "history":
            return torch.tensor(encode_prompt(self.tokenizer, from_history(row["history", "prompt"])))
        raise KeyError(f"input_mode='tokens' requires {keys.PROMPT_TOKENS}; the rows have {list(row.keys())}")

    def _image_paths(self, row: TensorDictBase) -> list[str]:
        """Return the files of a row's images."""
        images = entry_of(row, keys.IMAGES)
        if images is None or not len(images):
            return []
        if self.images is None:
            raise ValueError("a row has images, but the model of the tokenizer reads text only; drop them")
        return self.images.paths(images)

    def _write(self, rows: TensorDictBase, prompts: list[torch.Tensor], turns: list[Generated]) -> TensorDictBase:
        for row, prompt, turn in zip(rows.unbind(0), prompts, turns, strict=True):
            self._write_row(row, prompt, turn)
        return rows

    def _write_row(self, row: TensorDictBase, prompt: torch.Tensor, turn: Generated) -> TensorDictBase:
        # Extend what the row has of earlier turns
        sampled, n = torch.ones_like(turn.tokens, dtype=torch.bool), len(prompt)
        mask, log_probs = _previous_values(row, n)
        if turn.support is not None:
            extend_support(row, int(mask.sum()), turn.support)
        if turn.versions is not None:
            _extend_versions(row, int(mask.sum()), turn.versions)
        full = torch.cat([prompt, turn.tokens])
        masks = {
            "all_attention_mask": torch.ones_like(full, dtype=torch.bool),
            "all_assistant_mask": torch.cat([mask, sampled]),
        }
        turns = {
            "tokens": make_tensorclass(Tokens, prompt=prompt, response=turn.tokens, full=full),
            "masks": make_tensorclass(Masks, **masks),
            "log_probs": make_tensorclass(LogProbs, full=torch.cat([log_probs, turn.log_probs])),
        }
        # Write the turn as ids, and as text or messages if the environment reads these
        set_entries(row, turns | {keys.RESPONSE_TRUNCATED: torch.tensor([turn.truncated])})
        if self.input_mode == "text":
            prompt_text, response = row["text", "prompt"], decode_response(self.tokenizer, turn.tokens)
            row.set("text", Text(prompt=prompt_text, response=response, full=prompt_text + response))
        elif self.input_mode == "history":
            row.set("history", self._history(row["history", "prompt"], turn))
        return row

    def set_empty_outputs(self, row: TensorDictBase) -> TensorDictBase:
        """Set empty outputs on a row that ended before its first turn, so that it can be stacked with others."""
        if keys.ACTION_VERSIONS in self.out_keys and keys.ACTION_VERSIONS not in row.keys():
            row.set(keys.ACTION_VERSIONS, torch.zeros(0, dtype=torch.long))
        if keys.SUPPORT_IDS[0] in self.out_keys and keys.SUPPORT_IDS[0] not in row.keys():
            none = torch.zeros(0, dtype=torch.int32)
            extend_support(row, 0, Support(none, none))
        return row

    def _history(self, prompt, turn: Generated) -> ChatHistory:
        messages = from_history(prompt)
        text = decode_response(self.tokenizer, turn.tokens)
        if messages[-1]["role"] == "assistant":  # the turn continues an unfinished one
            text = join_contents(messages.pop()["content"], text)
        answer = {"role": "assistant", "content": text}
        return ChatHistory(prompt=prompt, response=to_history([[answer]])[0], full=to_history([[*messages, answer]])[0])


def actions_before(row: TensorDictBase) -> int:
    """Count the action tokens of a row's earlier turns."""
    mask, earlier = entry_of(row, keys.ACTION_MASK), entry_of(row, keys.PREVIOUS_SEGMENTS)
    return (0 if mask is None else int(mask.sum())) + (0 if earlier is None else int(earlier["mask"].sum()))


def _previous_values(row: TensorDictBase, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the action mask and log-probs of a prompt of ``length`` ids, zeros if the row has neither."""
    mask, log_probs = entry_of(row, keys.ACTION_MASK), entry_of(row, keys.LOG_PROBS)
    if mask is None and log_probs is None:
        return torch.zeros(length, dtype=torch.bool), torch.zeros(length)
    for key, values in ((keys.ACTION_MASK, mask), (keys.LOG_PROBS, log_probs)):
        if values is None or len(values) != length:
            raise ValueError(
                f"a prompt of {length} ids has {'no' if values is None else len(values)} values of {key}; extend the "
                "masks and log_probs of earlier turns with the ids, or delete both"
            )
    return mask.cpu(), log_probs.cpu()


def _extend_versions(row: TensorDictBase, before: int, versions: torch.Tensor) -> None:
    earlier = row.get(keys.ACTION_VERSIONS, versions[:0])
    if len(earlier) != before:
        raise ValueError(
            f"a row has {before} action tokens, but {keys.ACTION_VERSIONS!r} of {len(earlier)}; keep the two together"
        )
    row.set(keys.ACTION_VERSIONS, torch.cat([earlier.cpu(), versions]))


def _copy_for_sample(row: TensorDictBase, index: int) -> TensorDictBase:
    """Copy a row for one of its samples, with a separate seed if the row has one."""
    row = row.copy()
    if (seed := row.get(keys.SEED, None)) is not None:
        row.set(keys.SEED, torch.tensor((int(seed) + index * 0x9E3779B97F4A7C1) % 2**62))
    return row


class ScoredActions(NamedTuple):
    """Log-probs of rows' action tokens under a model.

    Attributes:
        log_probs: ``[B, A]`` float32 in nats, left-aligned, 0 beyond a row's action tokens, with gradient.
        entropy: ``[B, A]`` float32 in nats, entropy of the scored distribution, with gradient; None if not requested.
        actions: positions of the action tokens.
        router_loss: scalar load-balancing loss of a mixture of experts; None if not requested.
    """

    log_probs: torch.Tensor
    entropy: torch.Tensor | None
    actions: ActionTokens
    router_loss: torch.Tensor | None = None


def row_support(row: TensorDictBase) -> Support | None:
    """Return the recorded supports of a row's action tokens, or None."""
    ids, sizes = entry_of(row, keys.SUPPORT_IDS), entry_of(row, keys.SUPPORT_SIZES)
    if ids is None or sizes is None:
        return None
    mask = row.get(keys.ACTION_MASK, None)
    actions = 0 if mask is None else int(mask.sum())
    if len(sizes) != actions or int(sizes.sum()) != len(ids) or (actions and int(sizes.min()) < 1):
        raise ValueError(
            f"a row with {actions} action tokens has {len(sizes)} support sizes with sum {int(sizes.sum())} and "
            f"{len(ids)} support ids; every action token requires one size of at least 1, and every size its ids"
        )
    return Support(ids, sizes)


def extend_support(row: TensorDictBase, actions_before: int, support: Support) -> None:
    """Append the supports of a new turn to those of a row's earlier turns, in place."""
    before = row_support(row) if actions_before else None
    if before is None and actions_before:
        raise ValueError(
            f"record_support=True, but a row has {actions_before} action tokens without {keys.SUPPORT_IDS}; record "
            "the supports of all its turns"
        )
    if before is not None:
        support = Support(*(torch.cat([old.cpu(), new]) for old, new in zip(before, support, strict=True)))
    entries = dict(zip(("ids", "sizes"), support, strict=True))
    row.set(keys.SUPPORT_IDS[0], TensorDict._new_unsafe(entries, batch_size=torch.Size([])))


def batch_support(rows: TensorDictBase, actions: ActionTokens) -> Support | None:
    """Return the supports of all action tokens in row order, on the device of ``actions``, or None."""
    supports = [row_support(row) for row in rows.unbind(0)]
    if without := [i for i, support in enumerate(supports) if support is None]:
        if len(without) == len(supports):
            return None
        raise ValueError(
            f"rows {without[:5]} have no {keys.SUPPORT_IDS} but others do; score the two kinds in separate batches"
        )
    # Check that every sampled token is in its support
    device = actions.tokens.device
    ids, sizes = (torch.cat(part).to(device) for part in zip(*supports, strict=True))
    sampled = actions.tokens[actions.action_mask]
    token_index = torch.arange(len(sizes), device=device).repeat_interleave(sizes.long(), output_size=len(ids))
    hits = torch.zeros_like(sampled).index_add_(0, token_index, (ids == sampled[token_index]).to(sampled.dtype))
    if not bool((hits > 0).all()):
        at = int((hits == 0).nonzero()[0])
        raise ValueError(f"action token {int(sampled[at])}, number {at} of the batch, is not in its recorded support")
    return Support(ids, sizes)


def check_has_router(model: torch.nn.Module) -> None:
    """Raise a ValueError if the model is not a mixture of experts with a load-balancing loss."""
    model = _without_adapters(model)
    if not hasattr(_modeling_module(model), "load_balancing_loss_func") or not getattr(model, "num_experts", None):
        raise ValueError(
            f"router_loss=True requires a mixture of experts with a load-balancing loss; model type "
            f"{model.config.model_type!r} has none"
        )


def load_balancing_loss(
    model: torch.nn.Module, router_logits: tuple[torch.Tensor, ...], lengths: Sequence[int], width: int
) -> torch.Tensor:
    """Compute the model family's load-balancing loss (Fedus et al. 2021, arXiv 2101.03961) over real tokens."""
    model, device = _without_adapters(model), router_logits[0].device
    real = torch.arange(width, device=device) < torch.tensor(lengths, device=device)[:, None]
    function = _modeling_module(model).load_balancing_loss_func
    return function(router_logits, model.num_experts, model.num_experts_per_tok, real.long())


def _without_adapters(model: torch.nn.Module) -> torch.nn.Module:
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _modeling_module(model: torch.nn.Module):
    """Return the Python module of the model's class."""
    return sys.modules[type(model).__module__]
