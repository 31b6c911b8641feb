"""TransformersWrapper: a Hugging Face model as policy and as scorer of rows.

It replaces TorchRL's class of the same name. That class sets the first sampled log-prob to 0 and drops a sampled EOS
equal to the padding id. Its log-probs are not those of the sampled distribution, and it scores with full logits.

:class:`RoleAdapters` computes each row with the adapter of its role.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from tensordict import TensorDictBase
from torch import nn
from torchrl.modules.llm.policies import LogProbs, Masks, Tokens

from torchrl_rloo.data import keys
from torchrl_rloo.data.rows import (
    PACKINGS,
    ActionTokens,
    action_tokens,
    entry_of,
    make_tensorclass,
    pad,
    place_actions,
    ragged,
    spread_actions,
    stack_rows,
    to_lazy_stack,
)
from torchrl_rloo.data.templates import encode_conversation, from_history
from torchrl_rloo.engines.exactness import check_rows
from torchrl_rloo.engines.generation import Generated, GenerationConfig, end_of_sequence_ids, generate
from torchrl_rloo.engines.head import (
    Head,
    current_head,
    find_head,
    padded_arguments,
    predicting_states,
    sampled_logits,
    score_positions,
    see_nothing,
)
from torchrl_rloo.engines.root import adopt, call_root, is_distributed
from torchrl_rloo.functional.products import fast_layers
from torchrl_rloo.images.encoder import PassImages
from torchrl_rloo.modules.context_parallel import context_group, owned_inputs
from torchrl_rloo.modules.packing import ActionStates, action_states, check_packing
from torchrl_rloo.modules.turns import (
    ScoredActions,
    TurnPolicy,
    actions_before,
    check_has_router,
    load_balancing_loss,
)
from torchrl_rloo.runtime.lookup import did_you_mean
from torchrl_rloo.runtime.torchrl_arguments import with_torchrl_arguments
from torchrl_rloo.weight_update.rotary import context_length, fix_frequencies


class TransformersWrapper(TurnPolicy):
    """Policy and scorer on a Hugging Face model: samples a turn for each row, or scores the rows' action tokens.

    With ``generate=True`` it reads ``("tokens", "prompt")``, or for rows without it ``("text", "prompt")`` or
    ``("history", "prompt")``. It writes ``"tokens"``, ``"masks"`` and ``"log_probs"`` over the whole trajectory so far,
    and ``"response_truncated"``. Values of earlier turns stay unchanged. An ``input_mode`` of ``"text"`` or
    ``"history"`` also writes the key of that name.

    With ``generate=False`` it reads ``("tokens", "full")`` and ``("masks", "all_assistant_mask")`` and writes
    ``("log_probs", "full")``; losses call :meth:`score`. Rows may have any lengths and numbers of turns.

    A row's ``"seed"`` (int64) makes its tokens independent of the batch and of the policy's random stream; its
    ``num_samples`` samples derive seeds from it. A row's ``"max_new_tokens"`` lowers the general limit.

    Differences from TorchRL: ``input_mode`` defaults to ``"tokens"`` instead of ``"history"``, ``return_log_probs`` is
    always on and ``pad_output`` always off. ``pad_model_input=False`` is ``packing="packed"``. Key names are fixed,
    except ``log_probs_key``.

    Args:
        model: Hugging Face causal language model, also in ``DistributedDataParallel`` or sharded with ``fully_shard``.
            Its training mode is not changed; use ``model.eval()``. Gradient checkpointing that is enabled on it works
            in evaluation mode.
        tokenizer: tokenizer of the model.
        input_mode: source of prompts without ids: ``"tokens"`` (none), ``"text"`` or ``"history"``.
        generate: True generates, False scores.
        generate_kwargs: arguments of :class:`~torchrl_rloo.engines.generation.GenerationConfig`. A scorer takes the
            sampling distribution from them.
        num_samples: samples per row, which give the output batch size ``[B, num_samples]``; None samples once, ``[B]``.
        record_support: write the ids that top-k, top-p and min-p keep at each action token, as ``("support", "ids")``
            and ``("support", "sizes")``. Rows with these keys are scored over exactly those ids, so ratios stay exact
            after weight updates. Other rows are truncated again.
        precision: ``"bfloat16"`` runs the decoder under autocast, with the model's own weights. Log-probs stay
            float32. A model that FSDP casts needs no autocast.
        float32_head: compute logits from float32 hidden states and weights. By default ``precision="bfloat16"`` also
            rounds these to bfloat16; the sums are float32 in both cases.
        head: output head of the model, found by another wrapper. None finds and probes it, which all ranks of a sharded
            model must do together.
        packing: layout of scored rows: ``"none"`` (padded), ``"packed"`` (concatenated) or ``"shared_prefix"``
            (concatenated, with tokens that several rows begin with processed once). Only time and memory differ.

    Raises:
        ValueError: if ``record_support`` is set for a scorer or without truncation, ``num_samples`` is set for a
            scorer, or ``packing`` is unknown or set with ``generate=True``. Also if ``precision`` is unknown, or
            ``float32_head`` has no effect.
        NotImplementedError: if the model cannot be packed exactly, or a row's log-probs depend on the other rows.
            A policy also raises it at its first call if cached decoding is not exact.

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

    @with_torchrl_arguments
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
        precision: Literal["float32", "bfloat16"] = "float32",
        float32_head: bool = False,
        head: Head | None = None,
    ):
        if not isinstance(model, torch.nn.Module):
            raise TypeError(
                f"model={model!r:.80} must be a loaded model; use model, tokenizer = load_model(name) of "
                "torchrl_rloo.modules"
            )
        super().__init__(
            tokenizer=tokenizer,
            input_mode=input_mode,
            generate_kwargs=generate_kwargs,
            num_samples=num_samples,
            stop_ids=end_of_sequence_ids(tokenizer, model),
        )
        if num_samples is not None and not generate:
            raise ValueError(f"num_samples={num_samples} requires generate=True")
        self.model, self.generate = adopt(model), generate
        model = self.model
        fix_frequencies(model)
        self.record_support = record_support
        # Record supports, over which a scorer must later normalize
        if record_support:
            self._check_records_support()
            self.out_keys.append(keys.SUPPORT_IDS[0])
        if precision not in ("float32", "bfloat16"):
            raise ValueError(f"precision={precision!r} must be 'float32' or 'bfloat16'")
        if float32_head and precision == "float32":
            raise ValueError("float32_head=True has no effect with precision='float32'; remove it")
        self.precision, self.float32_head = precision, float32_head
        self.head = self._rounding(find_head(model, warn=not generate) if head is None else head)
        self.packing = packing
        self._check_packing()
        check_rows(model, self.head)
        # A scorer reads finished rows and adds only log-probs
        if not generate:
            self.in_keys, self.out_keys = [keys.TOKENS, keys.ACTION_MASK], ["log_probs"]

    @property
    def context_length(self) -> int | None:
        """Longest sequence that the model accepts, in tokens; None if its configuration has no limit."""
        return context_length(self.model)

    def _check_records_support(self) -> None:
        distribution = self.config.distribution
        if not self.generate:
            raise ValueError("record_support=True requires generate=True; a scorer reads the supports that rows have")
        if distribution.temperature == 0 or not distribution.truncates:
            raise ValueError(
                f"record_support=True requires a distribution that truncates, got {distribution}; set top_k, top_p or "
                "min_p at a temperature above 0, or record_support=False, since the support is the whole vocabulary"
            )

    def _current_head(self) -> Head | None:
        """Return the output head, or the new one after an adapter or resized embeddings replaced it."""
        head = current_head(self.model, self.head, warn=not self.generate)
        if head is not self.head:
            self.head = self._rounding(head)
            self._check_packing()
        return self.head

    def _rounding(self, head: Head | None) -> Head | None:
        rounds = head is not None and self.precision == "bfloat16" and not self.float32_head
        return head if head is None else replace(head, dtype=torch.bfloat16 if rounds else None)

    def _autocast(self) -> AbstractContextManager:
        enabled = self.precision == "bfloat16"
        return torch.autocast(self.model.device.type, torch.bfloat16, enabled=enabled)

    def _fast_layers(self) -> AbstractContextManager:
        # Layers that the backward pass recomputes would then be outside of the context
        if torch.is_grad_enabled() and checkpointing_layers(self.model):
            return nullcontext()
        return fast_layers(self.model)

    def _check_packing(self) -> None:
        if self.packing == "none":
            return
        if self.packing not in PACKINGS:
            raise ValueError(f"packing={self.packing!r} must be one of {PACKINGS}")
        if self.generate:
            raise ValueError(f"packing={self.packing!r} requires generate=False")
        if self.head is None:
            raise NotImplementedError(
                f"packing={self.packing!r} requires a model whose output head can be found; set packing='none'"
            )
        call_root(self.model, check_packing, self.head.decoder)

    def get_new_version(self, **kwargs) -> TransformersWrapper:
        """Return a wrapper of the same model and tokenizer with other settings, e.g. ``generate=False`` to score.

        A scoring version keeps the sampling distribution unless ``generate_kwargs`` is given. A generating version with
        a truncated distribution keeps ``record_support``.
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
            "head": self.head if kwargs.get("model", self.model) is self.model else None,
            "precision": self.precision,
            "float32_head": self.float32_head,
            "packing": "none" if kwargs.get("generate", self.generate) else self.packing,
        }
        return type(self)(kwargs.pop("model", self.model), **(settings | kwargs))

    def forward(
        self, tensordict: TensorDictBase, *, tensordict_out: TensorDictBase | None = None, logits_only: bool = False
    ) -> TensorDictBase:
        """Generate or score, and return the rows with the outputs set, as a lazy stack.

        Args:
            tensordict: rows, batch size ``[B]``.
            tensordict_out: rows to write to; None writes to ``tensordict``.
            logits_only: with ``generate=False``, write ``"logits"`` ``[T, V]`` of each row instead, for TorchRL's
                ``get_dist``. Position ``t`` has the sampled distribution's logits of token ``t``.

        Returns:
            Rows of batch size ``[B]``, or ``[B, num_samples]``.
        """
        if self.generate:
            return super().forward(tensordict, tensordict_out=tensordict_out)
        rows = self._rows(tensordict)
        return self._set_logits(rows) if logits_only else self._set_log_probs(rows, tensordict_out)

    def _sample(self, rows: TensorDictBase, prompts: list[torch.Tensor]) -> list[Generated]:
        members, context = rows.unbind(0), self.context_length
        limits = [self._limit(row, len(prompt), context) for row, prompt in zip(members, prompts, strict=True)]
        limits, length = torch.tensor(limits), max(limits)
        # Use the seeds of the rows if they have any, so that samples do not depend on the batch
        if rows.get(keys.SEED, None) is None:
            uniforms = torch.rand(len(prompts), length, generator=self.generator)
        else:
            uniforms = torch.stack([_row_uniforms(row, length) for row in members])
        with self._autocast():
            return generate(
                self.model,
                prompts,
                self.config.distribution,
                uniforms=uniforms,
                limits=limits,
                stop_ids=self.stop_ids,
                stop_strings=self.config.stop_strings,
                tokenizer=self.tokenizer,
                head=self._current_head(),
                record_support=self.record_support,
                images=[self._image_paths(row) for row in members],
            )

    def _ensure_actions(self, rows: TensorDictBase) -> TensorDictBase:
        """Set ids and action masks on rows that lack them, from prompts or a finished conversation."""
        if rows.get(keys.TOKENS, None, as_list=True) is not None:
            if rows.get(keys.ACTION_MASK, None, as_list=True) is not None:
                return rows
            # Rows with ids only: all tokens after the prompt are actions
            if (prompts := rows.get(keys.PROMPT_TOKENS, None, as_list=True)) is None:
                raise KeyError(
                    f"rows to score have neither {keys.ACTION_MASK} nor {keys.PROMPT_TOKENS}, so their action tokens "
                    "are unknown; set one of the two"
                )
            for row, prompt in zip(rows.unbind(0), prompts, strict=True):
                row.set(keys.ACTION_MASK, torch.arange(len(row[keys.TOKENS])) >= len(prompt))
            return rows
        # Finished conversations: encode them, and mark the assistant's tokens as actions
        if self.input_mode != "history":
            raise KeyError(f"rows to score require {keys.TOKENS}; they have {list(rows.keys())}")
        for row in rows.unbind(0):
            ids, mask = encode_conversation(self.tokenizer, from_history(row["history", "full"]))
            row.set("tokens", make_tensorclass(Tokens, full=torch.tensor(ids)))
            row.set("masks", make_tensorclass(Masks, all_assistant_mask=torch.tensor(mask)))
        return rows

    def score(self, rows: TensorDictBase, *, entropy: bool = True, router_loss: bool = False) -> ScoredActions:
        """Score the rows' action tokens, with gradient if enabled.

        Logits are computed only at action positions, one tile at a time. Rows with supports (``record_support``) are
        scored over these.

        Args:
            rows: rows with token ids and action masks, batch size ``[B]``.
            entropy: compute entropies; their gradient takes time only if it is used.
            router_loss: compute the load-balancing loss of a mixture of experts over the rows' real tokens. Multiply it
                by the model's ``config.router_aux_loss_coef`` and add it to the loss.

        Returns:
            Log-probs and entropies ``[B, A]``, with the positions of the action tokens.

        Raises:
            RuntimeError: if the wrapper has ``generate=True``.
            ValueError: if ``router_loss`` is set with packing or for a model without experts, or supports do not fit
                the rows.
        """
        if self.generate:
            raise RuntimeError("score requires generate=False; use wrapper.get_new_version(generate=False)")
        if router_loss:
            if self.packing != "none":
                raise ValueError(f"router_loss=True requires packing='none', got packing={self.packing!r}")
            check_has_router(self.model)
        rows = self._ensure_actions(to_lazy_stack(rows))
        return call_root(self.model, self._score, rows, entropy, router_loss)

    def _score(self, rows: TensorDictBase, entropy: bool, router_loss: bool) -> ScoredActions:
        actions = action_tokens(rows, self.tokenizer.pad_token_id or 0)
        actions = ActionTokens(*(t.to(self.model.device) for t in actions))
        # Apply the head only to the states that predict action tokens
        head = self._current_head()
        (states, owned), router = self._hidden_states(head, rows, actions, router_loss)
        inputs = self._score_inputs(rows, actions, self.model)
        if owned is not None:
            inputs = owned_inputs(**inputs, owned=owned)
        scored = score_positions(
            self.model, head, actions.tokens, distribution=self.distribution, hidden=states, entropy=entropy, **inputs
        )
        values = [scored.log_probs, *([scored.entropy] if entropy else [])]
        if owned is not None:
            values = [context_group(head.decoder).gather(value, owned) for value in values]
        placed = [place_actions(value, actions) for value in values]
        return ScoredActions(placed[0], placed[1] if entropy else None, actions, router)

    def _hidden_states(
        self, head: Head | None, rows: TensorDictBase, actions: ActionTokens, router_loss: bool
    ) -> tuple[ActionStates, torch.Tensor | None]:
        """Return the states that predict the action tokens, and the router loss or None."""
        tokens, shown = ragged(rows, keys.TOKENS), self._shown_images(rows)
        with self._autocast(), recompute_in_eval(self.model), self._fast_layers():
            blind = shown is not None and not shown.paths and is_distributed(self.model)
            nothing = see_nothing(self.model if head is None else head.decoder, self.images) if blind else None
            if self.packing != "none":
                masks = ragged(rows, keys.ACTION_MASK)
                found = action_states(head.decoder, tokens, masks, self.packing, shown)
                return found if nothing is None else found._replace(hidden=found.hidden + nothing), None
            context = None if head is None else context_group(head.decoder)
            if context is not None and torch.is_grad_enabled():
                raise ValueError(
                    f"packing='none' cannot train with context_parallel={context.size}, which splits packs; use "
                    "packing='packed' or 'shared_prefix'"
                )
            kwargs = {"output_router_logits": True} if router_loss else {}
            ids = actions.tokens
            if shown is not None:
                ids = shown.real(pad(shown.tokens)).to(ids.device)
                kwargs |= padded_arguments(self.model, shown)
            states, out = predicting_states(self.model, head, ids, actions.action_mask, **kwargs)
        states = states if nothing is None else states + nothing
        if not router_loss:
            return ActionStates(states, None), None
        lengths = [len(t) for t in ragged(rows, keys.TOKENS)]
        return ActionStates(states, None), load_balancing_loss(
            self.model, out.router_logits, lengths, actions.tokens.shape[1]
        )

    def _shown_images(self, rows: TensorDictBase) -> PassImages | None:
        """Return the images of a pass, or None for a model without any; those after a row's last action are left out.

        A row without actions needs none, since its image may be what is missing.
        """
        if self.images is None:
            for row in rows.unbind(0):
                self._image_paths(row)  # refuses images
            return None
        masks = ragged(rows, keys.ACTION_MASK)
        stops = [int(mask.nonzero().max()) + 1 if mask.any() else 0 for mask in masks]
        paths = [self._image_paths(row) if stop else [] for row, stop in zip(rows.unbind(0), stops, strict=True)]
        return PassImages(self.images, ragged(rows, keys.TOKENS), paths, stops)

    def _set_log_probs(self, rows: TensorDictBase, out: TensorDictBase | None) -> TensorDictBase:
        scored = self.score(rows, entropy=False)
        target = rows if out is None else to_lazy_stack(out)
        for row, values in zip(target.unbind(0), spread_actions(scored.log_probs, rows, scored.actions), strict=True):
            row.set(self.log_probs_key, make_tensorclass(LogProbs, full=values))
        return target

    def _set_logits(self, rows: TensorDictBase) -> TensorDictBase:
        rows = self._ensure_actions(rows)
        tokens = action_tokens(rows).tokens.to(self.model.device)
        images = self._shown_images(rows)
        if images is not None:
            tokens = images.real(pad(images.tokens)).to(tokens.device)
        shown = {} if images is None else padded_arguments(self.model, images)
        logits = call_root(self.model, sampled_logits, self.model, tokens, self.distribution, **shown)
        for row, values in zip(rows.unbind(0), logits, strict=True):
            row.set("logits", values[: len(row[keys.TOKENS])])
            row.set(keys.ATTENTION_MASK, torch.ones_like(row[keys.TOKENS], dtype=torch.bool))
        return rows


def _row_uniforms(row: TensorDictBase, length: int) -> torch.Tensor:
    """Continue the random stream of a row's seed after its earlier action tokens."""
    used, generator = actions_before(row), torch.Generator().manual_seed(int(entry_of(row, keys.SEED)))
    return torch.rand(used + length, generator=generator)[used:]


class RoleAdapters(TransformersWrapper):
    """Policy and scorer that computes each row with the adapter of its role; the roles share the base weights.

    Rows of conversations with roles have a ``"role_id"`` (:class:`~torchrl_rloo.data.Role`). A batch is split by
    adapter, and the results are in its order. Use it wherever a :class:`TransformersWrapper` is used: in a collector
    and, as ``get_new_version(generate=False)``, in a loss.

    Args:
        model: peft's ``PeftModel`` with an adapter of each name; see :func:`~torchrl_rloo.modules.add_adapter`.
        adapters: name of the adapter of each role, in the order of the environment's ``roles``. None is the base model,
            such as for a frozen judge.
        **kwargs: further arguments of :class:`TransformersWrapper`.

    Raises:
        TypeError: if the model is not a ``PeftModel``.
        ValueError: if the model has no adapter of a name.
        KeyError: at a call, if a row has no ``"role_id"``.
        IndexError: at a call, if ``adapters`` has no entry for a role.
        NotImplementedError: at a score with gradients, if the model has gradient checkpointing, which would recompute
            layers with another adapter.

    Example::

        model = add_adapter(model, {"r": 8, "target_modules": "all-linear"}, "proposer")
        model = add_adapter(model, {"r": 8, "target_modules": "all-linear"}, "solver")
        policy = RoleAdapters(model, ["proposer", "solver", None], tokenizer=tokenizer)  # None: a judge
        loss_fn = RLOOLoss(policy.get_new_version(generate=False))
    """

    def __init__(self, model: torch.nn.Module, adapters: Sequence[str | None], **kwargs: Any):
        known = getattr(model, "peft_config", None)
        if known is None or not hasattr(model, "disable_adapter"):
            raise TypeError(f"model={type(model).__name__} must be a peft PeftModel; use add_adapter(model, ...)")
        if unknown := [name for name in adapters if name is not None and name not in known]:
            hint = did_you_mean(str(unknown[0]), list(known))
            raise ValueError(f"adapters={list(adapters)} must be among those of the model, {list(known)}{hint}")
        super().__init__(model, **kwargs)
        self.adapters = tuple(adapters)

    def get_new_version(self, **kwargs: Any) -> RoleAdapters:
        """Return a policy of the same model and adapters with other settings; see :class:`TransformersWrapper`."""
        return super().get_new_version(**({"adapters": self.adapters} | kwargs))

    def _sample(self, rows: TensorDictBase, prompts: list[torch.Tensor]) -> list[Generated]:
        turns: dict[int, Generated] = {}
        for name, places in self._places(rows).items():
            with adapter_active(self.model, name):
                samples = super()._sample(_select(rows, places), [prompts[i] for i in places])
            turns |= dict(zip(places, samples, strict=True))
        return [turns[i] for i in range(len(prompts))]

    def _score(self, rows: TensorDictBase, entropy: bool, router_loss: bool) -> ScoredActions:
        if torch.is_grad_enabled() and checkpointing_layers(self.model):
            raise NotImplementedError("RoleAdapters cannot train with gradient checkpointing; disable it on the model")
        if router_loss:
            raise NotImplementedError("RoleAdapters has no router_loss; set router_loss=False")
        actions = action_tokens(rows, self.tokenizer.pad_token_id or 0)
        width, order, log_probs, entropies = actions.mask.shape[1], [], [], []
        for name, places in self._places(rows).items():
            with adapter_active(self.model, name):
                scored = super()._score(_select(rows, places), entropy, False)
            missing = (0, width - scored.log_probs.shape[1])
            log_probs.append(F.pad(scored.log_probs, missing))
            if scored.entropy is not None:
                entropies.append(F.pad(scored.entropy, missing))
            order += places
        back = torch.tensor(order).argsort().to(log_probs[0].device)
        actions = type(actions)(*(t.to(self.model.device) for t in actions))
        return ScoredActions(torch.cat(log_probs)[back], torch.cat(entropies)[back] if entropy else None, actions)

    def _places(self, rows: TensorDictBase) -> dict[str | None, list[int]]:
        """Return the rows of each adapter."""
        places: dict[str | None, list[int]] = {}
        for i, row in enumerate(rows.unbind(0)):
            if (role := row.get(keys.ROLE_ID, None)) is None:
                raise KeyError(f"row {i} has no {keys.ROLE_ID!r}; RoleAdapters requires an environment with roles")
            if int(role) >= len(self.adapters):
                raise IndexError(f"row {i} has {keys.ROLE_ID}={int(role)}, but adapters={self.adapters} end before it")
            places.setdefault(self.adapters[int(role)], []).append(i)
        return places


@contextmanager
def adapter_active(model: torch.nn.Module, name: str | None) -> Iterator[None]:
    """Make a ``PeftModel`` compute with one adapter within the context, or with its base model if ``name`` is None."""
    if name is None:
        with adapter_disabled(model):
            yield
        return
    before = model.active_adapter
    parameters = [(p, p.requires_grad) for p in model.parameters()]
    try:
        model.set_adapter(name)
        _restore(parameters)  # peft freezes the other adapters
        yield
    finally:
        model.set_adapter(before)
        _restore(parameters)


def _restore(parameters: list[tuple[torch.nn.Parameter, bool]]) -> None:
    for parameter, required in parameters:
        parameter.requires_grad_(required)


def _select(rows: TensorDictBase, places: list[int]) -> TensorDictBase:
    members = rows.unbind(0)
    return stack_rows([members[i] for i in places])


@contextmanager
def recompute_in_eval(model: nn.Module) -> Iterator[None]:
    """Recompute layers that have gradient checkpointing enabled, although the model is in evaluation mode.

    Transformers recomputes a layer only while ``layer.training`` is True, but a policy trains in evaluation mode. The
    context sets the flag for that decision only. The layer runs in evaluation mode, without dropout, in both passes.
    It ignores layers in training mode, and does nothing without gradients.
    """
    layers = [layer for layer in checkpointing_layers(model) if not layer.training] if torch.is_grad_enabled() else []
    functions = [layer._gradient_checkpointing_func for layer in layers]
    for layer, function in zip(layers, functions, strict=True):
        layer.training = True
        layer._gradient_checkpointing_func = partial(_checkpoint_in_eval, layer, function)
    try:
        yield
    finally:
        for layer, function in zip(layers, functions, strict=True):
            layer.training = False
            layer._gradient_checkpointing_func = function


def checkpointing_layers(model: nn.Module) -> list[nn.Module]:
    """Return the layers that have gradient checkpointing enabled."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    return [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer) and m.gradient_checkpointing]


def _checkpoint_in_eval(layer: nn.Module, checkpoint: Callable, function: Callable, *args):
    return checkpoint(partial(_run_in_eval, layer, function), *args)


def _run_in_eval(layer: nn.Module, function: Callable, *args):
    training, layer.training = layer.training, False
    try:
        return function(*args)
    finally:
        layer.training = training


@contextmanager
def adapter_disabled(model: torch.nn.Module) -> Iterator[None]:
    """Make a ``PeftModel`` compute with its base model within the context."""
    parameters = [(p, p.requires_grad) for p in model.parameters()]
    try:
        with model.disable_adapter():
            yield
    finally:  # peft makes the whole adapter trainable when it enables it again
        for p, required in parameters:
            p.requires_grad_(required)
