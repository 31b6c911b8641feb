"""TransformersWrapper: a Hugging Face model as policy and as scorer of rows.

Replaces TorchRL's class of the name, which sets the first sampled log-prob to 0, drops a sampled EOS equal to the
padding id, reports log-probs of a distribution other than the sampled one, and scores with full logits.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from tensordict import TensorDictBase
from torchrl.modules.llm.policies import LogProbs, Masks, Tokens

from torchrl_rloo.data import keys
from torchrl_rloo.data.rows import (
    PACKINGS,
    ActionTokens,
    action_tokens,
    as_lazy,
    collection,
    place_actions,
    ragged,
    spread_actions,
)
from torchrl_rloo.data.templates import encode_conversation, from_history
from torchrl_rloo.engines.generation import Generated, GenerationConfig, end_of_sequence_ids, generate
from torchrl_rloo.engines.head import Head, current_head, find_head, predicting_states, sampled_logits, score_positions
from torchrl_rloo.modules.checkpointing import checkpointed
from torchrl_rloo.modules.packing import action_hidden, check_packing
from torchrl_rloo.modules.scoring import ScoredActions, batch_support, check_has_router, load_balancing_loss
from torchrl_rloo.modules.turns import TurnPolicy, actions_before


class TransformersWrapper(TurnPolicy):
    """Policy and scorer on a Hugging Face model: samples a turn for each row, or scores the rows' action tokens.

    ``generate=True`` reads ``("tokens", "prompt")``, and where a row has none ``("text", "prompt")`` or ``("history",
    "prompt")``. It writes ``"tokens"``, ``"masks"`` and ``"log_probs"`` over the whole trajectory so far (those of
    earlier turns stay as they are), ``"response_truncated"``, and ``"text"`` or ``"history"`` in these modes.
    ``generate=False`` reads ``("tokens", "full")`` and ``("masks", "all_assistant_mask")`` and writes ``("log_probs",
    "full")``; a loss calls :meth:`score`. Rows may have any lengths and numbers of turns.

    TorchRL's arguments: ``generate_kwargs``, ``generate`` and ``num_samples`` are the same; ``input_mode`` is
    ``"tokens"`` by default instead of ``"history"``; ``return_log_probs`` is always on and ``pad_output`` always off;
    ``pad_model_input=False`` is ``packing="packed"``; names of keys are fixed but for the attribute ``log_probs_key``.

    Args:
        model: a Hugging Face causal language model. Its train/eval mode is left alone; a policy wants ``model.eval()``.
            Gradient checkpointing that is enabled on it works in evaluation mode.
        tokenizer: its tokenizer.
        input_mode: ``"tokens"``, ``"text"`` or ``"history"``: where a prompt without ids comes from.
        generate: generate, or score.
        generate_kwargs: see :class:`~torchrl_rloo.engines.generation.GenerationConfig`; a scorer takes its sampling
            distribution from them.
        num_samples: samples of each row; the output then has batch size ``[B, num_samples]``.
        record_support: write the ids that top-k, top-p and min-p left at each action token, as ``("support", "ids")``
            and ``("support", "sizes")``. Rows that carry them are scored over exactly those ids, so that ratios stay
            exact after the weights have moved; other rows are truncated again.
        packing: layout of scored rows: ``"none"`` padded to a rectangle, ``"packed"`` end to end, ``"shared_prefix"``
            packed with the prompt of several rows read once. They differ only in time and memory.

    Raises:
        ValueError: for ``record_support`` of a scorer or of a distribution that truncates nothing; for an unknown
            ``packing``, or one other than ``"none"`` with ``generate=True``.
        NotImplementedError: for packing a model that cannot be packed exactly.

    A row's own ``"seed"`` (int64) makes its tokens independent of the batch and of the policy's stream; its
    ``num_samples`` derive seeds from it. Its own ``"max_new_tokens"`` lowers the general limit.

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
        >>> scores = policy.get_new_version(generate=False).score(out).log_probs[0]  # with unchanged weights
        >>> torch.allclose(scores, out[0]["log_probs", "full"][out[0]["masks", "all_assistant_mask"]], atol=1e-5)
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
        packing: Literal["none", "packed", "shared_prefix"] = "none",
    ):
        super().__init__(
            tokenizer=tokenizer,
            input_mode=input_mode,
            generate_kwargs=generate_kwargs,
            num_samples=num_samples,
            stop_ids=end_of_sequence_ids(tokenizer, model),
        )
        if num_samples is not None and not generate:
            raise ValueError(f"num_samples={num_samples} needs generate=True")
        self.model, self.generate = model, generate
        self.record_support = record_support
        if record_support:
            self._check_records_support()
            self.out_keys.append(keys.SUPPORT_IDS[0])
        self.head = find_head(model, warn=not generate)
        self.packing = packing
        self._check_packing()
        if not generate:
            self.in_keys, self.out_keys = [keys.TOKENS, keys.ACTION_MASK], ["log_probs"]

    def _check_records_support(self) -> None:
        distribution = self.config.distribution
        if not self.generate:
            raise ValueError("record_support=True needs generate=True: a scorer reads the supports that rows carry")
        if distribution.temperature == 0 or not distribution.truncates:
            raise ValueError(
                f"record_support=True needs a distribution that truncates, got {distribution}: set top_k, top_p or "
                "min_p at a temperature above 0, or leave record_support out, since every token is in the support"
            )

    def _current_head(self) -> Head | None:
        """Return the output head, found again if an adapter or resized embeddings have replaced it."""
        head = current_head(self.model, self.head, warn=not self.generate)
        if head is not self.head:
            self.head = head
            self._check_packing()
        return head

    def _check_packing(self) -> None:
        if self.packing == "none":
            return
        if self.packing not in PACKINGS:
            raise ValueError(f"packing={self.packing!r} must be one of {PACKINGS}")
        if self.generate:
            raise ValueError(f"packing={self.packing!r} packs rows to score; set generate=False")
        if self.head is None:
            raise NotImplementedError(
                f"packing={self.packing!r} needs a model whose output head is found; set packing='none'"
            )
        check_packing(self.head.decoder)

    def get_new_version(self, **kwargs) -> TransformersWrapper:
        """Return a wrapper of the same model and tokenizer with other settings, e.g. ``generate=False`` to score.

        A version that scores keeps the sampling distribution unless ``generate_kwargs`` is given. One that generates
        from a truncated distribution keeps ``record_support``.
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
            "packing": "none" if kwargs.get("generate", self.generate) else self.packing,
        }
        return type(self)(kwargs.pop("model", self.model), **(settings | kwargs))

    def forward(
        self, tensordict: TensorDictBase, *, tensordict_out: TensorDictBase | None = None, logits_only: bool = False
    ) -> TensorDictBase:
        """Generate or score, and return the rows with the outputs set, as a lazy stack.

        Args:
            tensordict: rows, batch size ``[B]``.
            tensordict_out: rows to write to; None for ``tensordict``.
            logits_only: with ``generate=False``, write ``"logits"`` ``[T, V]`` of each row instead, for TorchRL's
                ``get_dist``. Position ``t`` holds the sampled distribution's logits of token ``t``.
        """
        if self.generate:
            return super().forward(tensordict, tensordict_out=tensordict_out)
        rows = self._rows(tensordict)
        return self._set_logits(rows) if logits_only else self._set_log_probs(rows, tensordict_out)

    def _sample(self, rows: TensorDictBase, prompts: list[torch.Tensor]) -> list[Generated]:
        limits = self._limits(rows)
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
            head=self._current_head(),
            record_support=self.record_support,
        )

    def _with_actions(self, rows: TensorDictBase) -> TensorDictBase:
        """Return the rows with ids and action masks: their own, or those of a finished conversation."""
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
        """Score the rows' action tokens, with gradient if enabled.

        Logits exist at action positions only, a tile at a time. Rows that carry supports (``record_support``) are
        scored over those.

        Args:
            rows: batch size ``[B]``, with token ids and action masks.
            entropy: compute entropies; their gradient costs time only where it is used.
            router_loss: compute the load-balancing loss of a mixture of experts over the rows' real tokens; add it to
                the loss times the model's ``config.router_aux_loss_coef``.

        Raises:
            ValueError: for ``router_loss`` of a model without experts or with packing, or supports that do not fit the
                rows.
        """
        if self.generate:
            raise RuntimeError("this wrapper generates; score with wrapper.get_new_version(generate=False)")
        if router_loss:
            if self.packing != "none":
                raise ValueError(f"router_loss=True needs packing='none', this wrapper has {self.packing!r}")
            check_has_router(self.model)
        rows = self._with_actions(as_lazy(rows))
        actions = action_tokens(rows, self.tokenizer.pad_token_id or 0)
        actions = ActionTokens(*(t.to(self.model.device) for t in actions))
        head = self._current_head()
        states, router = self._hidden_states(head, rows, actions, router_loss)
        scored = score_positions(
            self.model,
            head,
            actions.tokens,
            actions.action_mask,
            self.distribution,
            hidden=states,
            support=batch_support(rows, actions),
            entropy=entropy,
        )
        entropies = place_actions(scored.entropy, actions) if entropy else None
        return ScoredActions(place_actions(scored.log_probs, actions), entropies, actions, router)

    def _hidden_states(
        self, head: Head | None, rows: TensorDictBase, actions: ActionTokens, router_loss: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the states that predict the action tokens, and the router loss if asked for."""
        with checkpointed(self.model):
            if self.packing != "none":
                masks = ragged(rows, keys.ACTION_MASK)
                return action_hidden(head.decoder, ragged(rows, keys.TOKENS), masks, self.packing), None
            asked = {"output_router_logits": True} if router_loss else {}
            states, out = predicting_states(self.model, head, actions.tokens, actions.action_mask, **asked)
        if not router_loss:
            return states, None
        lengths = [len(t) for t in ragged(rows, keys.TOKENS)]
        return states, load_balancing_loss(self.model, out.router_logits, lengths, actions.tokens.shape[1])

    def _set_log_probs(self, rows: TensorDictBase, out: TensorDictBase | None) -> TensorDictBase:
        scored = self.score(rows, entropy=False)
        target = rows if out is None else as_lazy(out)
        for row, values in zip(target.unbind(0), spread_actions(scored.log_probs, rows, scored.actions), strict=True):
            row.set(self.log_probs_key, collection(LogProbs, full=values))
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
    """Continue the row's own stream after its earlier action tokens."""
    used = actions_before(row)
    return torch.rand(used + length, generator=torch.Generator().manual_seed(int(row[keys.SEED])))[used:]
