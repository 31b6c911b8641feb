"""Does a weight update really arrive? Found out before a run, with weights that are changed for the purpose."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import torch
from tensordict import TensorDict
from torch import nn

from torchrl_rloo.data import keys
from torchrl_rloo.data.rows import stack_rows
from torchrl_rloo.diagnostics.statistics.parity import log_prob_gap
from torchrl_rloo.engines.base import Engine, Request
from torchrl_rloo.engines.head import evaluation_mode
from torchrl_rloo.modules.policies import TransformersWrapper
from torchrl_rloo.weight_update.base import WeightSyncError, WeightUpdater

PROMPTS = (
    "The answer is",
    "What is 12+30?",
    "user: Which of the two is larger? Think before you answer.\nassistant:",
    # long enough to fill blocks of a prefix cache, which must not outlive the weights
    "First write down each step, then put the answer in a box. Do not guess before you know. " * 4,
)
PROMPT_TOKENS, NEW_TOKENS = 96, 16  # at most, of each prompt and of its continuation

FLOAT32_GAP = 1e-3  # nats at any token: what rounding to float32 never explains
HALF_GAP = 1.0  # the same of bfloat16 and float16
MARGIN = 3.0  # the changed weights have to move log-probs by this many times what is tolerated

CHANGE = 0.2  # of a tensor's root mean square; keeps models of many layers finite and moves them by nats
OF_ZEROS = 0.05  # where that is 0, as in a fresh LoRA adapter's second factor


class SelfTest(NamedTuple):
    """What :func:`self_test` measured: largest differences of a sampled token's log-prob, in nats.

    Attributes:
        gap_before: between engine and model with the weights of the time.
        gap_changed: between them with changed weights.
        movement: between the model's changed weights and its own.
        gap_after: between engine and model with the model's own weights again.
    """

    gap_before: float
    gap_changed: float
    movement: float
    gap_after: float

    def __str__(self) -> str:
        """Say what arrived."""
        return (
            f"weight updates arrive: changed weights moved the model's log-probs by {self.movement:.2g} nats, and the "
            f"engine's to within {self.gap_changed:.2g} of them"
        )


@torch.no_grad()
def self_test(
    updater: WeightUpdater,
    model: nn.Module,
    tokenizer: Any,
    engines: Engine | Sequence[Engine],
    *,
    prompts: Sequence[str] | None = None,
    tolerance: float | None = None,
) -> SelfTest:
    """Prove that engines get the model's weights: all of them, each in its place, and with nothing cached of old ones.

    Pushes the present weights, then changed ones, then the present ones again, each time under the engines' present
    version, and compares the log-probs of what the engines sample with the model's. Noise changes every trained
    parameter (of a frozen copy: those of its LoRA adapter, or all), each its own: a common factor would cancel in
    normalized layers, and two tensors that changed places would not show. Afterwards model and engines have the same
    bits as before. Not to be called between a forward pass and its backward pass.

    Args:
        updater: brings the weights of ``model`` to ``engines``.
        model: the training model, whole in this process.
        tokenizer: its tokenizer.
        engines: one or several, of one version, that nothing else samples from meanwhile.
        prompts: to continue; default a few of their own.
        tolerance: largest gap in nats; None for 1e-3, or 3 times the gap with the present weights if that is more, as
            it is in bfloat16.

    Raises:
        WeightSyncError: if a push fails or weights did not arrive; it says when, by how much, and what to look at.
        ValueError: if there are no engines or prompts, or the engines are of different versions.

    Example:
        >>> import copy
        >>> from torchrl_rloo.embedded import build_model, build_tokenizer
        >>> from torchrl_rloo.engines.transformers_engine import TransformersEngine
        >>> from torchrl_rloo.weight_update import InProcessWeightUpdater
        >>> tokenizer = build_tokenizer()
        >>> model, sampler = build_model(tokenizer, seed=0), build_model(tokenizer, seed=1).eval()
        >>> found = self_test(InProcessWeightUpdater(model, sampler), model, tokenizer, TransformersEngine(sampler))
        >>> found.gap_changed < 1e-3 < 0.1 < found.movement
        True
    """
    engines = [engines] if isinstance(engines, Engine) else list(engines)
    version = _common_version(engines)
    probe = _Probe(model, tokenizer, engines, PROMPTS if prompts is None else prompts)
    with evaluation_mode(model):
        _push(updater, version, "the present weights")
        before = probe.gap(probe.sample())
        try:
            with _changed(model):
                _push(updater, version, "changed weights")
                sampled = probe.sample()
                changed, moved = probe.gap(sampled), probe.score(sampled)
        except BaseException:
            with suppress(WeightSyncError):  # what matters is the first failure
                _push(updater, version, "the present weights again")
            raise
        _push(updater, version, "the present weights again")
        movement = float((moved - probe.score(sampled)).abs().max())
        after = probe.gap(probe.sample())
    found = SelfTest(before, changed, movement, after)
    _judge(found, tolerance)
    return found


def _judge(found: SelfTest, tolerance: float | None) -> None:
    limit = max(FLOAT32_GAP, MARGIN * found.gap_before) if tolerance is None else tolerance
    figures = (
        f"{', '.join(f'{name} {value:.2g}' for name, value in found._asdict().items())}, tolerated {limit:.2g} nats"
    )
    if not found.gap_before <= (HALF_GAP if tolerance is None else tolerance):
        raise WeightSyncError(
            f"engine and model differ with the present weights, right after a push ({figures}): the engine has another "
            "model, dtype, head (float32 in the scorer) or log-prob mode, or the push brought nothing; compare the two "
            "with float32 at both ends"
        )
    if not found.movement >= MARGIN * limit:
        raise WeightSyncError(
            f"changed weights moved the model's log-probs too little to tell ({figures}; it takes {MARGIN:g} times "
            "what is tolerated): give a tolerance, or compare with float32 at both ends"
        )
    if not found.gap_changed <= limit:
        arrived = "a part of the" if found.gap_changed < found.movement / 2 else "the"
        raise WeightSyncError(
            f"{arrived} changed weights did not arrive, though the push said so ({figures}): look at the names and the "
            "number of the tensors sent (WeightSource.manifest), at a tied head, at what the prefix cache kept, and at "
            "whether updater and engine are the ones you think"
        )
    if not found.gap_after <= limit:
        raise WeightSyncError(
            f"the present weights did not come back after changed ones ({figures}): the engine may have loaded into "
            "what it keeps packed, or the transport sent an old buffer; restart the engine"
        )


class _Probe:
    """The same requests to all engines, time after time, and the model's log-probs of what comes."""

    def __init__(self, model: nn.Module, tokenizer: Any, engines: Sequence[Engine], prompts: Sequence[str]):
        if not prompts:
            raise ValueError("prompts is empty: give at least one")
        self.scorer = TransformersWrapper(model, tokenizer=tokenizer, generate=False)
        self.engines = engines
        context = min([e.context_length for e in engines if e.context_length] or [PROMPT_TOKENS + NEW_TOKENS])
        new = min(NEW_TOKENS, context // 2)
        ids = [tokenizer(text)["input_ids"][: min(PROMPT_TOKENS, context - new)] for text in prompts]
        self.requests = [Request(prompt, limit=new, seed=i) for i, prompt in enumerate(ids)]

    def sample(self) -> TensorDict:
        """A row for each engine and request, with the engine's log-probs."""
        rows = []
        for engine in self.engines:
            for request, sample in zip(self.requests, engine.generate(self.requests), strict=True):
                n, tokens = len(request.prompt), torch.tensor([*request.prompt, *sample.tokens])
                log_probs = torch.tensor([0.0] * n + list(sample.log_probs))
                row = {keys.TOKENS: tokens, keys.ACTION_MASK: torch.arange(len(tokens)) >= n, keys.LOG_PROBS: log_probs}
                rows.append(TensorDict(row, []))
        return stack_rows(rows)

    def score(self, rows: TensorDict) -> torch.Tensor:
        """The model's log-probs of the sampled tokens, one after the other."""
        scored = self.scorer.score(rows, entropy=False)
        return scored.log_probs[scored.actions.mask].cpu()

    def gap(self, rows: TensorDict) -> float:
        sampled = torch.cat([row[keys.LOG_PROBS][row[keys.ACTION_MASK]] for row in rows.unbind(0)])
        scores = self.score(rows)
        return float(log_prob_gap(sampled[None], scores[None], torch.ones(1, len(scores), dtype=torch.bool)).max)


def _common_version(engines: Sequence[Engine]) -> int:
    versions = {engine.version for engine in engines}
    if len(versions) != 1:
        raise ValueError(f"the engines have versions {sorted(versions)}: give engines of one version, pushed to before")
    return versions.pop()


def _push(updater: WeightUpdater, version: int, what: str) -> None:
    try:
        updater.push_weights(version)
    except Exception as error:
        raise WeightSyncError(f"pushing {what} failed: {type(error).__name__}: {error}") from error


@contextmanager
def _changed(model: nn.Module) -> Iterator[None]:
    """The model with other weights, which it has had back, bit for bit, on leaving."""
    floating = {name: p for name, p in model.named_parameters() if p.is_floating_point()}
    adapter = [p for name, p in floating.items() if ".lora_" in name]  # of a frozen copy of a peft model
    trained = [p for p in floating.values() if p.requires_grad] or adapter or list(floating.values())
    kept = [p.detach().to("cpu", copy=True) for p in trained]
    try:
        for number, p in enumerate(trained):
            generator = torch.Generator(p.device).manual_seed(number)
            noise = torch.randn(p.shape, generator=generator, dtype=torch.float32, device=p.device)
            size = p.float().square().mean().sqrt()
            p.add_(noise.mul_(torch.where(size > 0, CHANGE * size, OF_ZEROS)).to(p.dtype))
        yield
    finally:
        for p, values in zip(trained, kept, strict=True):
            p.copy_(values)
