"""vLLMWrapper: a policy that samples with an engine, under the same contract as TransformersWrapper.

It replaces TorchRL's class of the same name, which requires vLLM's own objects, scores with log-probs of whole prompts
from vLLM, ignores seeds and limits of rows, and does not report the weights that sampled a token.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Any, Literal

import torch
from tensordict import TensorDictBase

from torchrl_rloo.data import keys
from torchrl_rloo.engines.base import Engine, EngineDeadError, Request, Sample
from torchrl_rloo.engines.generation import Generated, end_of_sequence_ids
from torchrl_rloo.modules.policies import TransformersWrapper
from torchrl_rloo.modules.turns import TurnPolicy, actions_before

_logger = logging.getLogger(__name__)


class vLLMWrapper(TurnPolicy):  # noqa: N801  TorchRL's name
    """Generates turns with any :class:`~torchrl_rloo.engines.Engine`; the name is TorchRL's.

    It reads and writes the keys of :class:`TransformersWrapper`, and ``"action_versions"``: the policy version that
    sampled each action token. Log-probs are of the sampled distribution. Rows with a common prefix share the engine's
    work on it. A turn that a pause aborted is continued after the pause.

    TorchRL's arguments: ``model`` is ``engine``; ``generate_kwargs``, ``num_samples`` and ``input_mode`` are as in
    :class:`TransformersWrapper`. It never scores: ``get_new_version(generate=False, model=...)`` makes a scorer.

    Args:
        engine: samples the turns. The wrapper does not close it.
        tokenizer: the model's tokenizer.
        input_mode: ``"tokens"``, ``"text"`` or ``"history"``: source of prompts without ids.
        generate_kwargs: see :class:`~torchrl_rloo.engines.generation.GenerationConfig`; unknown names are refused.
        num_samples: samples of each row; the output then has batch size ``[B, num_samples]``.
        recover: restarts a dead engine with its current weights, e.g. ``EngineUpdater.restart``. The turns are then
            sampled again from the same seeds. None raises the engine's error.

    A row's own ``"seed"`` and ``"max_new_tokens"`` apply as in TransformersWrapper. Every request has a seed, from the
    row or drawn from the policy's stream, so that a turn does not depend on the engine's other requests.

    Example:
        >>> from tensordict import TensorDict
        >>> from torchrl_rloo.embedded import build_model, build_tokenizer
        >>> from torchrl_rloo.engines import TransformersEngine
        >>> tokenizer = build_tokenizer()
        >>> engine = TransformersEngine(build_model(tokenizer, seed=0))
        >>> policy = vLLMWrapper(engine, tokenizer=tokenizer, generate_kwargs={"max_new_tokens": 4, "seed": 0})
        >>> prompt = torch.tensor(tokenizer("What is 2+3?")["input_ids"])
        >>> out = policy(TensorDict({("tokens", "prompt"): prompt[None]}, [1]))
        >>> out[0]["action_versions"].unique().tolist()
        [0]
    """

    def __init__(
        self,
        engine: Engine,
        *,
        tokenizer,
        input_mode: Literal["tokens", "text", "history"] = "tokens",
        generate_kwargs: Mapping[str, Any] | None = None,
        num_samples: int | None = None,
        recover: Callable[[], None] | None = None,
    ):
        if not isinstance(engine, Engine):
            raise TypeError(
                f"engine={type(engine).__name__} must be a torchrl_rloo.engines.Engine: use VLLMEngine, "
                "VLLMServer or another of them"
            )
        super().__init__(
            tokenizer=tokenizer,
            input_mode=input_mode,
            generate_kwargs=generate_kwargs,
            num_samples=num_samples,
            stop_ids=(*end_of_sequence_ids(tokenizer), *engine.stop_ids),
        )
        self.engine, self.recover = engine, recover
        self.out_keys.append(keys.ACTION_VERSIONS)

    def get_new_version(self, **kwargs) -> TurnPolicy:
        """Return a policy of the same engine and tokenizer with other settings.

        ``generate=False`` with ``model=``, the training model, returns a :class:`TransformersWrapper` that scores under
        the same distribution; engines return log-probs of their own samples only.
        """
        own = {"tokenizer": self.tokenizer, "input_mode": self.input_mode, "generate_kwargs": self.generate_kwargs}
        if not kwargs.get("generate", True):
            if "model" not in kwargs:
                raise ValueError("generate=False scores with the training model: pass model= as well")
            return TransformersWrapper(kwargs.pop("model"), **(own | kwargs))
        own |= {"num_samples": self.num_samples, "recover": self.recover}
        kwargs.pop("generate", None)
        return type(self)(kwargs.pop("engine", self.engine), **(own | kwargs))

    def _sample(self, rows: TensorDictBase, prompts: list[torch.Tensor]) -> list[Generated]:
        return [_generated(sample) for sample in self._generate(self._requests(rows, prompts))]

    async def turn(self, row: TensorDictBase, sample: Callable[[Request], Awaitable[Sample]]) -> TensorDictBase:
        """Continue one row by one turn.

        Args:
            row: without batch dimensions, with its own seed.
            sample: samples a request. An aborted turn is continued by another call.

        Returns:
            The row, with all outputs set at the end.
        """
        prompt = self._prompt(row)
        request = self._request(row, prompt, self._own_seed(row))
        sampled = await sample(request)
        while _is_cut(request, sampled):
            sampled = self._joined(sampled, await sample(_rest(request, sampled)))
        return self._write_row(row, prompt, _generated(sampled))

    def _requests(self, rows: TensorDictBase, prompts: list[torch.Tensor]) -> list[Request]:
        """Return one request per row, seeded by the row's seed and turn, or from the policy's stream."""
        seeds = [self._own_seed(row) for row in rows.unbind(0)]
        if None in seeds:
            seeds = torch.randint(2**62, (len(seeds),), generator=self.generator).tolist()
        return [self._request(*each) for each in zip(rows.unbind(0), prompts, seeds, strict=True)]

    def _request(self, row: TensorDictBase, prompt: torch.Tensor, seed: int) -> Request:
        return Request(
            prompt=prompt.tolist(),
            limit=self._limit(row),
            seed=seed,
            distribution=self.distribution,
            stop_ids=self.stop_ids,
            stop_strings=self.config.stop_strings,
        )

    @staticmethod
    def _own_seed(row: TensorDictBase) -> int | None:
        seed = row.get(keys.SEED, None)
        return None if seed is None else _mix(int(seed), actions_before(row))

    def _generate(self, requests: list[Request]) -> list[Sample]:
        """Sample, and continue aborted turns to their end."""
        samples = self._attempt(requests)
        while cut := [i for i, (r, s) in enumerate(zip(requests, samples, strict=True)) if _is_cut(r, s)]:
            rests = self._attempt([_rest(requests[i], samples[i]) for i in cut])
            for i, rest in zip(cut, rests, strict=True):
                samples[i] = self._joined(samples[i], rest)
        return samples

    def _attempt(self, requests: list[Request]) -> list[Sample]:
        """Sample requests; restart a dead engine once."""
        try:
            return self.engine.generate(requests)
        except EngineDeadError as error:
            if self.recover is None:
                raise
            _logger.warning("restarting a dead engine: %s", error)
            self.recover()
            return self.engine.generate(requests)

    def _joined(self, first: Sample, rest: Sample) -> Sample:
        """Join a continued turn, and end it at a stop string across the cut, which the engine could not see."""
        tokens, log_probs = first.tokens + rest.tokens, first.log_probs + rest.log_probs
        sample = Sample(tokens, log_probs, rest.finish, first.versions + rest.versions)
        cut, strings = len(first.tokens), self.config.stop_strings
        longest = cut + 4 * max(map(len, strings), default=0)  # a character has at most four bytes, a byte one token
        for n in range(cut + 1, min(len(sample.tokens), longest) + 1):
            text = self.tokenizer.decode(sample.tokens[:n])
            if any(string in text for string in strings):
                return Sample(sample.tokens[:n], sample.log_probs[:n], "stop", sample.versions[:n])
        return sample


def _is_cut(request: Request, sample: Sample) -> bool:
    return sample.finish == "abort" and len(sample.tokens) < request.limit


def _rest(request: Request, sample: Sample) -> Request:
    """Return the request for the rest of an aborted turn."""
    done = len(sample.tokens)
    return replace(
        request,
        prompt=[*request.prompt, *sample.tokens],
        limit=request.limit - done,
        seed=_mix(request.seed, done) if done else request.seed,
    )


def _mix(seed: int, position: int) -> int:
    """Derive the seed of what follows ``position`` tokens; position 0 keeps the seed."""
    step = 0x2545F4914F6CDD1D  # differs from the step between samples of a row, so that no two share a seed
    return (seed + position * step) % 2**62


def _generated(sample: Sample) -> Generated:
    return Generated(
        tokens=torch.tensor(sample.tokens, dtype=torch.long),
        log_probs=torch.tensor(sample.log_probs, dtype=torch.float32),
        truncated=sample.finish != "stop",
        versions=torch.tensor(sample.versions, dtype=torch.long),
    )
