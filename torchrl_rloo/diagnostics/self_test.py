"""Test of weight updates before a run: engines must sample with deliberately changed weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import torch
from tensordict import TensorDict
from torch import nn

from torchrl_rloo.data import keys
from torchrl_rloo.data.rows import stack_rows
from torchrl_rloo.diagnostics.parity import log_prob_gap
from torchrl_rloo.engines.base import Engine, Request
from torchrl_rloo.engines.head import evaluation_mode
from torchrl_rloo.engines.pool import EnginePool
from torchrl_rloo.functional.sampling import SamplingDistribution
from torchrl_rloo.images.encoder import ImageEncoder, digests, encoder_of
from torchrl_rloo.modules.policies import TransformersWrapper
from torchrl_rloo.runtime.ranks import Ranks
from torchrl_rloo.weight_update import WeightSyncError, WeightUpdater

PROMPTS = (
    "The answer is",
    "What is 12+30?",
    "user: Which of the two is larger? Think before you answer.\nassistant:",
    # Long enough to fill blocks of a prefix cache, which the push must invalidate
    "First write down each step, then put the answer in a box. Do not guess before you know. " * 4,
)
IMAGE_SIZE = (96, 64)  # of the image of one more prompt, for vision-language models
PROMPT_TOKENS, NEW_TOKENS = 96, 16  # largest number of tokens of each prompt and its continuation

FLOAT32_GAP = 1e-3  # nats at any token, more than rounding to float32 explains
HALF_PRECISION_GAP = 1.0  # nats at any token, more than rounding to bfloat16 or float16 explains
RELATIVE_GAP = 1e-4  # share of the movement, more than float32 explains where noise makes logits of hundreds of nats
MARGIN = 3.0  # changed weights must move log-probs by this multiple of the tolerance

NOISE_SCALE = 0.2  # share of a tensor's RMS: deep models stay finite, log-probs move by nats
ZERO_CHANGE = 0.05  # noise scale of tensors that are all zeros, as the second factor of a new LoRA adapter


class SelfTest(NamedTuple):
    """Result of :func:`self_test`: largest differences of a sampled token's log-prob, in nats."""

    gap_before: float
    gap_changed: float
    movement: float
    gap_after: float

    def __str__(self) -> str:
        """Summarize a passed test in a sentence."""
        return (
            f"weight updates arrive: changed weights moved the model's log-probs by {self.movement:.2g} nats, and the "
            f"engine's to within {self.gap_changed:.2g} of them"
        )


@torch.no_grad()
def self_test(
    updater: WeightUpdater,
    model: nn.Module,
    tokenizer: Any,
    engines: Engine | Sequence[Engine] | None,
    *,
    tolerance: float | None = None,
    ranks: Ranks | None = None,
) -> SelfTest:
    """Test that engines receive all of the model's weights, in the right tensors, and cache nothing of old ones.

    It pushes the current weights, then changed ones, then the current ones again, which spends three versions. After
    each push it compares the engines' log-probs of their samples with the model's.

    Independent noise changes every trained parameter; in a frozen model, those of its LoRA adapter, or all. A common
    factor would cancel in normalized layers and hide swapped tensors. Afterwards model and engines are bit-identical
    to before. Do not call it between a forward pass and its backward pass.

    Args:
        updater: updater that pushes the weights of ``model`` to ``engines``.
        model: training model; a sharded one requires ``ranks``.
        tokenizer: tokenizer of the model.
        engines: one or several engines, or a pool of them. Nothing else may sample from them during the test. None on
            ranks other than 0.
        tolerance: largest gap in nats. None takes the largest of 1e-3, 3 times the gap before (more in bfloat16), and
            1e-4 of the movement.
        ranks: ranks that train the model together, all of which call this function. None is a single process.

    Returns:
        The gaps before, with changed weights and after, and the movement of the model's log-probs.

    Raises:
        WeightSyncError: if a push fails or weights do not arrive, with the gaps and their likely causes.
        ValueError: if there are no engines.

    Example:
        >>> import copy
        >>> from torchrl_rloo.embedded import build_model, build_tokenizer
        >>> from torchrl_rloo.engines.transformers_engine import TransformersEngine
        >>> from torchrl_rloo.weight_update import InProcessWeightUpdater
        >>> tokenizer = build_tokenizer()
        >>> model, sampler = build_model(tokenizer, seed=0), build_model(tokenizer, seed=1).eval()
        >>> result = self_test(InProcessWeightUpdater(model, sampler), model, tokenizer, TransformersEngine(sampler))
        >>> result.gap_changed < 1e-3 < 0.1 < result.movement
        True
    """
    if isinstance(engines, EnginePool):
        engines = [member.target for member in engines.members]
    ranks = Ranks.single() if ranks is None else ranks
    engines = [engines] if isinstance(engines, Engine) else list(engines or [])
    if not engines and ranks.is_main:
        raise ValueError("engines=[] must have at least one engine")
    probe = _Probe(model, tokenizer, engines, ranks)
    with evaluation_mode(model):
        # Compare with the current weights: the gap here is rounding
        _push(updater, "the current weights")
        before = probe.gap(probe.sample())
        # Compare with changed weights, and restore the current ones even if that fails
        try:
            with _changed(model):
                _push(updater, "changed weights")
                sampled = probe.sample()
                changed, moved = probe.gap(sampled), probe.score(sampled)
        except BaseException:
            with suppress(WeightSyncError):  # raise the first failure
                _push(updater, "the current weights again")
            raise
        _push(updater, "the current weights again")
        movement = float((moved - probe.score(sampled)).abs().max())
        after = probe.gap(probe.sample())
    found = SelfTest(before, changed, movement, after)
    _check_result(found, tolerance)
    return found


def _check_result(found: SelfTest, tolerance: float | None) -> None:
    limit = max(FLOAT32_GAP, MARGIN * found.gap_before, RELATIVE_GAP * found.movement)
    limit = limit if tolerance is None else tolerance
    figures = (
        f"{', '.join(f'{name} {value:.2g}' for name, value in found._asdict().items())}, tolerance {limit:.2g} nats"
    )
    # Check in the order of the pushes, because each check presumes those before it
    if not found.gap_before <= (HALF_PRECISION_GAP if tolerance is None else tolerance):
        raise WeightSyncError(
            f"engine and model differ with the current weights, right after a push ({figures}): the engine has another "
            "model, dtype, head (float32 in the scorer) or log-prob mode, or the push had no effect; compare the two "
            "in float32"
        )
    if not found.movement >= MARGIN * limit:
        raise WeightSyncError(
            f"changed weights moved the model's log-probs too little to test ({figures}; required: {MARGIN:g} times "
            "the tolerance); set tolerance, or compare engine and model in float32"
        )
    if not found.gap_changed <= limit:
        arrived = "part of the" if found.gap_changed < found.movement / 2 else "the"
        raise WeightSyncError(
            f"{arrived} changed weights did not arrive, although the push succeeded ({figures}); check the names and "
            "number of the tensors sent (WeightSource.manifest), a tied head, the prefix cache, and that the updater "
            "pushes to this engine"
        )
    if not found.gap_after <= limit:
        raise WeightSyncError(
            f"the current weights did not return after the changed ones ({figures}): the engine may have loaded into "
            "packed copies, or the transport sent an old buffer; restart the engine"
        )


def _image_request(tokenizer: Any, encoder: ImageEncoder, limit: int, distribution: SamplingDistribution) -> Request:
    """Return a request with an image, without which weights of the connector would not be tested."""
    from PIL import Image

    path = encoder.store.add(Image.linear_gradient("L").resize(IMAGE_SIZE).convert("RGB"))
    ids = tokenizer(encoder.expand(f"{encoder.family.placeholder}What is this?", [path]))["input_ids"]
    return Request(ids, limit, len(PROMPTS), distribution, images=encoder.spans(ids, [path]))


class _Probe:
    """Fixed requests to all engines, and the model's log-probs of their samples."""

    def __init__(self, model: nn.Module, tokenizer: Any, engines: Sequence[Engine], ranks: Ranks):
        self.scorer = TransformersWrapper(model, tokenizer=tokenizer, generate=False)
        self.engines, self.ranks = engines, ranks
        context = min([e.context_length for e in engines if e.context_length] or [PROMPT_TOKENS + NEW_TOKENS])
        new = min(NEW_TOKENS, context // 2)
        ids = [tokenizer(text)["input_ids"][: min(PROMPT_TOKENS, context - new)] for text in PROMPTS]
        distribution = self.scorer.distribution
        self.requests = [Request(prompt, new, i, distribution) for i, prompt in enumerate(ids)]
        if (encoder := encoder_of(tokenizer)) is not None and all(
            e.image_settings == encoder.settings() for e in engines
        ):
            request = _image_request(tokenizer, encoder, new, distribution)
            self.requests += [request] if len(request.prompt) + new <= context else []

    def sample(self) -> TensorDict:
        """Sample one row per engine and request, with the engine's log-probs; the same rows on all ranks."""
        return self.ranks.broadcast(self._sample)

    def _sample(self) -> TensorDict:
        rows = []
        for engine in self.engines:
            for request, sample in zip(self.requests, engine.generate(self.requests), strict=True):
                n, tokens = len(request.prompt), torch.tensor([*request.prompt, *sample.tokens])
                log_probs = torch.tensor([0.0] * n + list(sample.log_probs))
                row = {keys.TOKENS: tokens, keys.ACTION_MASK: torch.arange(len(tokens)) >= n, keys.LOG_PROBS: log_probs}
                if request.images:
                    row[keys.IMAGES] = digests([image.path for image in request.images])
                rows.append(TensorDict(row, []))
        return stack_rows(rows)

    def score(self, rows: TensorDict) -> torch.Tensor:
        """Return the model's log-probs of all sampled tokens, concatenated."""
        scored = self.scorer.score(rows, entropy=False)
        return scored.log_probs[scored.actions.mask].cpu()

    def gap(self, rows: TensorDict) -> float:
        sampled = torch.cat([row[keys.LOG_PROBS][row[keys.ACTION_MASK]] for row in rows.unbind(0)])
        scores = self.score(rows)
        return float(log_prob_gap(sampled[None], scores[None], torch.ones(1, len(scores), dtype=torch.bool)).max)


def _push(updater: WeightUpdater, what: str) -> None:
    try:
        updater.push_weights()
    except Exception as error:
        raise WeightSyncError(f"pushing {what} failed: {type(error).__name__}: {error}") from error


@contextmanager
def _changed(model: nn.Module) -> Iterator[None]:
    """Change the model's weights within the context, and restore them bit for bit on exit."""
    floating = {name: p for name, p in model.named_parameters() if p.is_floating_point()}
    adapter = [p for name, p in floating.items() if ".lora_" in name]  # in a frozen copy of a peft model
    trained = [p for p in floating.values() if p.requires_grad] or adapter or list(floating.values())
    trained = [p.to_local() if hasattr(p, "to_local") else p for p in trained]  # the shard of this rank
    kept = [p.detach().to("cpu", copy=True) for p in trained]
    try:
        for number, p in enumerate(trained):
            generator = torch.Generator(p.device).manual_seed(number)
            noise = torch.randn(p.shape, generator=generator, dtype=torch.float32, device=p.device)
            size = p.float().square().mean().sqrt()
            p.add_(noise.mul_(torch.where(size > 0, NOISE_SCALE * size, ZERO_CHANGE)).to(p.dtype))
        yield
    finally:
        for p, values in zip(trained, kept, strict=True):
            p.copy_(values)
