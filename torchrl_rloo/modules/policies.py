"""TransformersWrapper: a Hugging Face model as policy and as scorer of rows.

Replaces TorchRL's class under the same contract, since that one forces the first sampled log-prob to 0, drops a
sampled EOS equal to the padding id, reports log-probs of another distribution than the sampled one, and scores with
full logits.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from tensordict import TensorDictBase
from torchrl.modules.llm.policies import ChatHistory, LLMWrapperBase, LogProbs, Masks, Text, Tokens

from torchrl_rloo.data import keys
from torchrl_rloo.data.keys import INPUT_MODES
from torchrl_rloo.data.rows import (
    LAYOUTS,
    ActionTokens,
    action_tokens,
    as_lazy,
    collection,
    place_actions,
    ragged,
    spread_actions,
    stack_rows,
)
from torchrl_rloo.data.templates import (
    decode_response,
    encode_conversation,
    encode_prompt,
    from_history,
    to_history,
)
from torchrl_rloo.modules.generation import Generated, GenerationConfig, end_of_sequence_ids, generate
from torchrl_rloo.modules.head import find_head, predicting_states, sampled_logits, score_positions
from torchrl_rloo.modules.packing import action_hidden, check_packing
from torchrl_rloo.modules.scoring import (
    ScoredActions,
    batch_support,
    check_has_router,
    extend_support,
    load_balancing_loss,
)


class TransformersWrapper(LLMWrapperBase):
    """Generates turns with a Hugging Face model, or scores the action tokens of rows.

    With ``generate=True`` it continues each row's ``("tokens", "prompt")`` and writes ``tokens``, ``masks`` and
    ``log_probs`` (:class:`Tokens`, :class:`Masks`, :class:`LogProbs`), over the whole trajectory so far: ids, masks and
    log-probs that the row brings along are kept as they are. Without ids, the first turn's prompt is encoded from
    ``("text", "prompt")`` or ``("history", "prompt")``; the text or history output is then written too.
    With ``generate=False`` it writes ``("log_probs", "full")``; :meth:`score` is the same for a loss.

    Rows may have any lengths and any numbers of turns. A prompt that ends inside a turn is simply continued.

    Args:
        model: a Hugging Face causal language model. Its train/eval mode is left alone; a policy wants ``model.eval()``.
        tokenizer: its tokenizer.
        input_mode: ``"tokens"``, ``"text"`` or ``"history"``: where a prompt without ids comes from.
        generate: whether to generate or to score.
        generate_kwargs: see :class:`~torchrl_rloo.modules.generation.GenerationConfig`; unknown names are refused. In
            scoring, the distribution that log-probs are of.
        num_samples: samples of each row; the output then has batch size ``[B, num_samples]``.
        record_support: also write which ids top-k, top-p and min-p left at each action token, as ``("support", "ids")``
            and ``("support", "sizes")``. Rows that carry them are scored over exactly those ids, so that the ratio of
            two policies stays exact after the weights have moved; without them the scorer truncates anew.
        layout: how rows are laid out to be scored: ``"padded"`` to a rectangle, ``"packed"`` end to end, or
            ``"shared_prefix"``: packed, with a prompt of several rows read once. They differ in time and memory alone.

    Raises:
        ValueError: if ``record_support`` is asked of a scoring wrapper or a distribution that truncates nothing; for an
            unknown ``layout``, or one that a generating wrapper has no use for.
        NotImplementedError: for a packed ``layout`` of a model that cannot be packed exactly.

    A row's own ``"seed"`` (int64) makes its tokens independent of the rest of the batch and of the policy's stream (its
    ``num_samples`` get seeds of their own from it); its own ``"max_new_tokens"`` lowers the general limit.

    Example:
        >>> from tensordict import TensorDict
        >>> from torchrl_rloo.embedded import build_model, build_tokenizer
        >>> tokenizer = build_tokenizer()
        >>> policy = TransformersWrapper(
        ...     build_model(tokenizer, seed=0), tokenizer=tokenizer, generate_kwargs={"max_new_tokens": 4, "seed": 0}
        ... )
        >>> prompt = torch.tensor(tokenizer("What is 2+3?")["input_ids"])
        >>> row = TensorDict({("tokens", "prompt"): prompt[None]}, [1])
        >>> out = policy(row)
        >>> bool(out[0]["masks", "all_assistant_mask"].sum() == len(out[0]["tokens", "response"]))
        True
    """

    def __init__(
        self,
        model: torch.nn.Module,
        *,
        tokenizer,
        input_mode: Literal["tokens", "text", "history"] = "tokens",
        generate: bool = True,
        generate_kwargs: Mapping[str, Any] | None = None,
        num_samples: int | None = None,
        record_support: bool = False,
        layout: Literal["padded", "packed", "shared_prefix"] = "padded",
    ):
        super().__init__()
        if input_mode not in INPUT_MODES:
            raise ValueError(f"input_mode={input_mode!r} must be one of {INPUT_MODES}")
        if num_samples is not None and (num_samples < 1 or not generate):
            raise ValueError(f"num_samples={num_samples} must be at least 1, and needs generate=True")
        self.model, self.tokenizer = model, tokenizer
        self.input_mode, self.generate, self.num_samples = input_mode, generate, num_samples
        self.generate_kwargs = dict(generate_kwargs or {})
        self.config = GenerationConfig.from_kwargs(generate_kwargs)
        self.record_support = record_support
        if record_support:
            self._check_records_support()
        self.head = find_head(model, warn=not generate)
        self.layout = layout
        if layout != "padded":
            self._check_layout()
        own = () if self.config.ignore_eos else end_of_sequence_ids(tokenizer, model)
        self.stop_ids = tuple(sorted({*own, *self.config.stop_token_ids}))
        self.generator = None
        if self.config.seed is not None:
            self.generator = torch.Generator().manual_seed(self.config.seed)
        self.pad_output = False
        self._min_batch_size = self._max_batch_size = None
        self.in_keys = [keys.PROMPT_TOKENS if input_mode == "tokens" else (input_mode, "prompt")]
        self.out_keys = ["tokens", "masks", "log_probs", keys.RESPONSE_TRUNCATED] if generate else ["log_probs"]
        if generate and input_mode != "tokens":
            self.out_keys.append(input_mode)
        if record_support:
            self.out_keys.append(keys.SUPPORT_IDS[0])
        if not generate:
            self.in_keys = [keys.TOKENS, keys.ACTION_MASK]

    def _check_records_support(self) -> None:
        distribution = self.config.distribution
        if not self.generate:
            raise ValueError("record_support=True needs generate=True: a scorer reads the supports that rows carry")
        if distribution.temperature == 0 or not distribution.truncates:
            raise ValueError(
                f"record_support=True needs a distribution that truncates, got {distribution}: set top_k, top_p or "
                "min_p at a temperature above 0, or leave record_support out, since every token is in the support"
            )

    def _check_layout(self) -> None:
        if self.layout not in LAYOUTS:
            raise ValueError(f"layout={self.layout!r} must be one of {LAYOUTS}")
        if self.generate:
            raise ValueError(f"layout={self.layout!r} is of rows to score: it needs generate=False")
        if self.head is None:
            raise NotImplementedError(f"layout={self.layout!r} needs a model whose output head is found; use 'padded'")
        check_packing(self.head.decoder)

    @property
    def distribution(self):
        """The distribution that is sampled, and that log-probs are of."""
        return self.config.distribution

    def get_new_version(self, **kwargs) -> TransformersWrapper:
        """The same model and tokenizer with other settings, e.g. ``generate=False`` to score.

        When the new version scores, the present sampling distribution is kept unless ``generate_kwargs`` is given.
        ``record_support`` is kept for a version that generates from a truncated distribution.
        """
        config = GenerationConfig.from_kwargs(kwargs.get("generate_kwargs", self.generate_kwargs))
        truncates = config.distribution.truncates and config.distribution.temperature > 0
        settings = {
            "tokenizer": self.tokenizer,
            "input_mode": self.input_mode,
            "generate": self.generate,
            "generate_kwargs": self.generate_kwargs,
            "num_samples": self.num_samples if kwargs.get("generate", self.generate) else None,
            "record_support": self.record_support and kwargs.get("generate", self.generate) and truncates,
            "layout": "padded" if kwargs.get("generate", self.generate) else self.layout,
        }
        return type(self)(kwargs.pop("model", self.model), **(settings | kwargs))

    def sampler_state(self) -> dict[str, torch.Tensor]:
        """State of the policy's own random stream; empty when it draws from torch's global one."""
        return {} if self.generator is None else {"generator": self.generator.get_state()}

    def load_sampler_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Restores :meth:`sampler_state`."""
        if self.generator is not None:
            self.generator.set_state(state["generator"])

    def forward(
        self, tensordict: TensorDictBase, *, tensordict_out: TensorDictBase | None = None, logits_only: bool = False
    ) -> TensorDictBase:
        """Generates or scores, and returns the rows with the outputs set (as a lazy stack: rows are ragged).

        Args:
            tensordict: rows, batch size ``[B]``.
            tensordict_out: where to write; default the rows themselves.
            logits_only: with ``generate=False``, write ``"logits"`` ``[T, V]`` of each row instead: what TorchRL's
                ``get_dist`` builds on. Position ``t`` holds the sampled distribution's logits of token ``t``.
        """
        rows = as_lazy(tensordict)
        if rows.ndim != 1:
            raise ValueError(f"expected rows of batch size [B], got {list(tensordict.batch_size)}: flatten them first")
        if not self.generate:
            return self._set_logits(rows) if logits_only else self._set_log_probs(rows, tensordict_out)
        prompts = self._prompts(rows)
        if self.num_samples is None:
            out = self._write(rows, prompts, self._sample(rows, prompts))
            return out if tensordict_out is None else tensordict_out.update(out)
        n = self.num_samples
        repeated = stack_rows([_sample_of(row, i) for row in rows.unbind(0) for i in range(n)])
        prompts = [p for p in prompts for _ in range(n)]
        flat = self._write(repeated, prompts, self._sample(repeated, prompts)).unbind(0)
        return stack_rows([stack_rows(flat[i : i + n]) for i in range(0, len(flat), n)])

    def _prompts(self, rows: TensorDictBase) -> list[torch.Tensor]:
        """Ids to continue: those the row brings, else the encoded text or conversation."""
        if rows.get(keys.PROMPT_TOKENS, None, as_list=True) is not None:
            prompts = [p.cpu() for p in ragged(rows, keys.PROMPT_TOKENS)]
        elif self.input_mode == "text":
            prompts = [torch.tensor(encode_prompt(self.tokenizer, row["text", "prompt"])) for row in rows.unbind(0)]
        elif self.input_mode == "history":
            queries = [from_history(row["history", "prompt"]) for row in rows.unbind(0)]
            prompts = [torch.tensor(encode_prompt(self.tokenizer, q)) for q in queries]
        else:
            raise KeyError(f"input_mode='tokens' needs {keys.PROMPT_TOKENS}; the rows have {list(rows.keys())}")
        if empty := [i for i, p in enumerate(prompts) if p.numel() == 0]:
            raise ValueError(
                f"the prompts of rows {empty[:5]} are empty; a policy needs at least one token to continue"
            )
        return prompts

    def _sample(self, rows: TensorDictBase, prompts: list[torch.Tensor]) -> list[Generated]:
        limits = torch.full((len(prompts),), self.config.max_new_tokens)
        if (own := rows.get(keys.MAX_NEW_TOKENS, None)) is not None:
            if int(own.min()) < 1:
                raise ValueError(f"max_new_tokens of a row is {int(own.min())}, must be at least 1")
            limits = torch.minimum(limits, own.reshape(-1).cpu())
        length = int(limits.max())
        if rows.get(keys.SEED, None) is None:
            uniforms = torch.rand(len(prompts), length, generator=self.generator)
        else:
            uniforms = torch.stack([_own_uniforms(row, length) for row in rows.unbind(0)])
        return generate(
            self.model,
            prompts,
            self.config,
            uniforms=uniforms,
            limits=limits,
            stop_ids=self.stop_ids,
            tokenizer=self.tokenizer,
            head=self.head,
            record_support=self.record_support,
        )

    def _write(self, rows: TensorDictBase, prompts: list[torch.Tensor], turns: list[Generated]) -> TensorDictBase:
        for row, prompt, turn in zip(rows.unbind(0), prompts, turns, strict=True):
            sampled, n = torch.ones_like(turn.tokens, dtype=torch.bool), len(prompt)
            mask, log_probs = row.get(keys.ACTION_MASK, None), row.get(keys.LOG_PROBS, None)
            if mask is None or log_probs is None or len(mask) != n:
                mask, log_probs = torch.zeros(n, dtype=torch.bool), torch.zeros(n)
            mask, log_probs = mask.cpu(), log_probs.cpu()
            if turn.support is not None:
                extend_support(row, int(mask.sum()), turn.support)
            full = torch.cat([prompt, turn.tokens])
            row.set("tokens", collection(Tokens, prompt=prompt, response=turn.tokens, full=full))
            row.set(
                "masks",
                collection(
                    Masks,
                    all_attention_mask=torch.ones_like(full, dtype=torch.bool),
                    all_assistant_mask=torch.cat([mask, sampled]),
                ),
            )
            row.set("log_probs", collection(LogProbs, full=torch.cat([log_probs, turn.log_probs])))
            row.set(keys.RESPONSE_TRUNCATED, torch.tensor([turn.truncated]))
            if self.input_mode == "text":
                prompt_text, response = row["text", "prompt"], decode_response(self.tokenizer, turn.tokens)
                row.set("text", Text(prompt=prompt_text, response=response, full=prompt_text + response))
            elif self.input_mode == "history":
                row.set("history", self._history(row["history", "prompt"], turn))
        return rows

    def _history(self, prompt, turn: Generated) -> ChatHistory:
        messages = from_history(prompt)
        text = decode_response(self.tokenizer, turn.tokens)
        if messages[-1]["role"] == "assistant":  # an unfinished turn was continued
            text = messages.pop()["content"] + text
        answer = {"role": "assistant", "content": text}
        return ChatHistory(prompt=prompt, response=to_history([[answer]])[0], full=to_history([[*messages, answer]])[0])

    def _with_actions(self, rows: TensorDictBase) -> TensorDictBase:
        """The rows with ids and action masks: their own, or those of a finished conversation that somebody wrote."""
        if rows.get(keys.TOKENS, None, as_list=True) is not None:
            if rows.get(keys.ACTION_MASK, None, as_list=True) is not None:
                return rows
            if (prompts := rows.get(keys.PROMPT_TOKENS, None, as_list=True)) is None:
                raise KeyError(
                    f"rows to score have neither {keys.ACTION_MASK} nor {keys.PROMPT_TOKENS}, so their action tokens "
                    "are unknown: set one of the two"
                )
            for row, prompt in zip(rows.unbind(0), prompts, strict=True):
                row.set(keys.ACTION_MASK, torch.arange(len(row[keys.TOKENS])) >= len(prompt))
            return rows
        if self.input_mode != "history":
            raise KeyError(f"rows to score need {keys.TOKENS}; they have {list(rows.keys())}")
        for row in rows.unbind(0):
            ids, mask = encode_conversation(self.tokenizer, from_history(row["history", "full"]))
            row.set("tokens", collection(Tokens, full=torch.tensor(ids)))
            row.set("masks", collection(Masks, all_assistant_mask=torch.tensor(mask)))
        return rows

    def score(self, rows: TensorDictBase, *, entropy: bool = True, router_loss: bool = False) -> ScoredActions:
        """Log-probs and entropies of the rows' action tokens, with gradient if enabled.

        Logits are computed at action positions only, a tile at a time. Rows that carry supports (``record_support``)
        are scored over those.

        Args:
            rows: batch size ``[B]``, with token ids and action masks.
            entropy: whether to compute entropies; their gradient costs something only where it is used.
            router_loss: whether to compute the load-balancing loss of a mixture of experts, over the rows' real tokens;
                add it to the loss times the model's ``config.router_aux_loss_coef``.

        Raises:
            ValueError: for ``router_loss`` of a model without experts, or supports that do not fit the rows.
        """
        if self.generate:
            raise RuntimeError("this wrapper generates; score with wrapper.get_new_version(generate=False)")
        if router_loss:
            check_has_router(self.model)
        rows = self._with_actions(as_lazy(rows))
        actions = action_tokens(rows, self.tokenizer.pad_token_id or 0)
        actions = ActionTokens(*(t.to(self.model.device) for t in actions))
        states = router = None
        if self.layout != "padded":
            if router_loss:
                raise ValueError(f"router_loss=True needs layout='padded', this wrapper has {self.layout!r}")
            masks = ragged(rows, keys.ACTION_MASK)
            states = action_hidden(self.head.decoder, ragged(rows, keys.TOKENS), masks, self.layout)
        elif router_loss:
            states, out = predicting_states(
                self.model, self.head, actions.tokens, actions.action_mask, output_router_logits=True
            )
            lengths = [len(t) for t in ragged(rows, keys.TOKENS)]
            router = load_balancing_loss(self.model, out.router_logits, lengths, actions.tokens.shape[1])
        scored = score_positions(
            self.model,
            self.head,
            actions.tokens,
            actions.action_mask,
            self.distribution,
            hidden=states,
            support=batch_support(rows, actions),
            entropy=entropy,
        )
        entropies = place_actions(scored.entropy, actions) if entropy else None
        return ScoredActions(place_actions(scored.log_probs, actions), entropies, actions, router)

    def _set_log_probs(self, rows: TensorDictBase, out: TensorDictBase | None) -> TensorDictBase:
        scored = self.score(rows, entropy=False)
        target = rows if out is None else as_lazy(out)
        for row, values in zip(target.unbind(0), spread_actions(scored.log_probs, rows, scored.actions), strict=True):
            row.set("log_probs", collection(LogProbs, full=values))
        return target

    def _set_logits(self, rows: TensorDictBase) -> TensorDictBase:
        rows = self._with_actions(rows)
        tokens = action_tokens(rows).tokens.to(self.model.device)
        logits = sampled_logits(self.model, tokens, self.distribution)
        for row, values in zip(rows.unbind(0), logits, strict=True):
            row.set("logits", values[: len(row[keys.TOKENS])])
            row.set(keys.ATTENTION_MASK, torch.ones_like(row[keys.TOKENS], dtype=torch.bool))
        return rows


def _own_uniforms(row: TensorDictBase, length: int) -> torch.Tensor:
    """Numbers of the row's own stream, from where its earlier action tokens left it."""
    mask = row.get(keys.ACTION_MASK, None)
    used = 0 if mask is None else int(mask.sum())
    return torch.rand(used + length, generator=torch.Generator().manual_seed(int(row[keys.SEED])))[used:]


def _sample_of(row: TensorDictBase, index: int) -> TensorDictBase:
    """A copy of a row for one of its samples, with a stream of its own if the row has a seed."""
    row = row.copy()
    if (seed := row.get(keys.SEED, None)) is not None:
        row.set(keys.SEED, torch.tensor((int(seed) + index * 0x9E3779B97F4A7C1) % 2**62))
    return row
