"""vLLMWrapper: a policy that samples with an engine, under the same contract as TransformersWrapper.

It replaces TorchRL's class of the same name. That class requires vLLM objects and scores with vLLM's prompt log-probs.
It ignores seeds and limits of rows, and does not report the policy version of a token.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Any, Literal

import torch
from tensordict import TensorDictBase

from torchrl_rloo.data import keys
from torchrl_rloo.engines.base import MAX_ABORTS, Engine, EngineError, Request, Sample, check_sample
from torchrl_rloo.engines.generation import Generated, end_of_sequence_ids
from torchrl_rloo.images.encoder import ImageEncoder
from torchrl_rloo.modules.policies import TransformersWrapper
from torchrl_rloo.modules.turns import TurnPolicy, actions_before
from torchrl_rloo.runtime.torchrl_arguments import with_torchrl_arguments


class vLLMWrapper(TurnPolicy):  # noqa: N801  TorchRL's name
    """Policy that generates turns with any :class:`~torchrl_rloo.engines.Engine`; the name is TorchRL's.

    It reads and writes the keys of :class:`TransformersWrapper`, including ``"seed"`` and ``"max_new_tokens"`` of rows.
    It also writes ``"action_versions"``, the policy version that sampled each action token. Log-probs refer to the
    sampled distribution. Common prefixes of rows share computation. A turn that a pause aborts continues after the
    pause; one that is aborted 100 times in a row fails. Every answer of the engine is checked, and one that contradicts
    :class:`~torchrl_rloo.engines.Sample` fails its turn.

    Every request has a seed, from its row or from the policy's random stream. A turn therefore does not depend on other
    requests of the engine.

    TorchRL's ``model`` is ``engine``; ``generate_kwargs``, ``num_samples`` and ``input_mode`` are as in
    :class:`TransformersWrapper`. The policy never scores: ``get_new_version(generate=False, model=...)`` returns a
    scorer.

    Args:
        engine: engine that samples the turns. The wrapper does not close it.
        tokenizer: tokenizer of the model.
        input_mode: source of prompts without ids: ``"tokens"`` (none), ``"text"`` or ``"history"``.
        generate_kwargs: arguments of :class:`~torchrl_rloo.engines.generation.GenerationConfig`; unknown names raise.
        num_samples: samples per row, which give the output batch size ``[B, num_samples]``; None samples once, ``[B]``.

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

    @with_torchrl_arguments
    def __init__(
        self,
        engine: Engine,
        *,
        tokenizer,
        input_mode: Literal["tokens", "text", "history"] = "tokens",
        generate_kwargs: Mapping[str, Any] | None = None,
        num_samples: int | None = None,
    ):
        if not isinstance(engine, Engine):
            raise TypeError(
                f"engine={type(engine).__name__} must be a torchrl_rloo.engines.Engine; use e.g. VLLMEngine or "
                "VLLMServer"
            )
        super().__init__(
            tokenizer=tokenizer,
            input_mode=input_mode,
            generate_kwargs=generate_kwargs,
            num_samples=num_samples,
            stop_ids=(*end_of_sequence_ids(tokenizer), *engine.stop_ids),
        )
        self.engine = engine
        self._newest_version = 0
        self._images_agree = False  # True once the engine's images were compared with the scorer's
        self.out_keys.append(keys.ACTION_VERSIONS)

    @property
    def context_length(self) -> int | None:
        """Context of the engine in tokens; None if it does not report one."""
        return self.engine.context_length

    def get_new_version(self, **kwargs) -> TurnPolicy:
        """Return a policy of the same engine and tokenizer with other settings.

        ``generate=False`` with ``model=``, the training model, returns a :class:`TransformersWrapper` that scores under
        the same distribution, since engines return log-probs of samples only.
        """
        settings = {"tokenizer": self.tokenizer, "input_mode": self.input_mode, "generate_kwargs": self.generate_kwargs}
        if not kwargs.get("generate", True):
            if "model" not in kwargs:
                raise ValueError("generate=False requires the training model; pass model=")
            return TransformersWrapper(kwargs.pop("model"), **(settings | kwargs))
        settings["num_samples"] = self.num_samples
        kwargs.pop("generate", None)
        return type(self)(kwargs.pop("engine", self.engine), **(settings | kwargs))

    def _sample(self, rows: TensorDictBase, prompts: list[torch.Tensor]) -> list[Generated]:
        return [_to_generated(sample) for sample in self._generate(self._requests(rows, prompts))]

    async def turn(self, row: TensorDictBase, sample: Callable[[Request], Awaitable[Sample]]) -> TensorDictBase:
        """Continue one row, which has a seed and no batch dimensions, by one turn, and return it.

        ``sample`` samples a request; another call continues an aborted turn. If an answer is invalid, or the engine
        aborts the turn again and again, the row is unchanged and ``EngineError`` is raised.
        """
        prompt = self._prompt(row)
        if (shown := self._demonstrate(row, prompt)) is not None:
            return self._write_row(row, prompt, shown)
        request, sampled = self._sampler_of(row)._request(row, prompt, self._turn_seed(row)), None
        for _ in range(MAX_ABORTS):
            part = _remaining_request(request, sampled)
            sampled = self._join(sampled, await sample(part), part)
            if not _is_aborted(request, sampled):
                return self._write_row(row, prompt, _to_generated(sampled))
        raise self._only_aborts()

    def _versions(self, number: int) -> torch.Tensor:
        return torch.full((number,), self.engine.version)

    def _requests(self, rows: TensorDictBase, prompts: list[torch.Tensor]) -> list[Request]:
        """Return one request per row, seeded by the row's seed and turn, or from the policy's random stream."""
        seeds = [self._turn_seed(row) for row in rows.unbind(0)]
        if None in seeds:
            seeds = torch.randint(2**62, (len(seeds),), generator=self.generator).tolist()
        return [self._request(*parts) for parts in zip(rows.unbind(0), prompts, seeds, strict=True)]

    def _request(self, row: TensorDictBase, prompt: torch.Tensor, seed: int) -> Request:
        paths, ids = self._image_paths(row), prompt.tolist()
        if paths and not self._images_agree:
            check_image_settings(self.engine, self.images)
            self._images_agree = True
        return Request(
            prompt=ids,
            limit=self._limit(row, len(prompt), self.context_length),
            seed=seed,
            distribution=self.distribution,
            stop_ids=self.stop_ids,
            stop_strings=self.config.stop_strings,
            session=_session(row),
            images=self.images.spans(ids, paths) if paths else (),
        )

    @staticmethod
    def _turn_seed(row: TensorDictBase) -> int | None:
        seed = row.get(keys.SEED, None)
        return None if seed is None else _derive_seed(int(seed), actions_before(row))

    def _generate(self, requests: list[Request]) -> list[Sample]:
        """Sample, and continue aborted turns until they finish."""
        samples: list[Sample | None] = [None] * len(requests)
        unfinished = range(len(requests))
        for _ in range(MAX_ABORTS):
            parts = [_remaining_request(requests[i], samples[i]) for i in unfinished]
            answers = self.engine.generate(parts)
            if len(answers) != len(parts):
                raise EngineError(f"the engine answered {len(answers)} of {len(parts)} requests; answer each once")
            for i, part, answer in zip(unfinished, parts, answers, strict=True):
                samples[i] = self._join(samples[i], answer, part)
            unfinished = [i for i in unfinished if _is_aborted(requests[i], samples[i])]
            if not unfinished:
                return samples
        raise self._only_aborts()

    def _only_aborts(self) -> EngineError:
        name = type(self.engine).__name__
        return EngineError(f"{name} aborted a turn {MAX_ABORTS} times in a row; check what pauses it, or restart it")

    def _join(self, first: Sample | None, answer: Any, request: Request) -> Sample:
        """Check the answer to a part of a turn, and join it to the parts before.

        The turn ends at a stop string that spans the parts, which the engine cannot detect.
        """
        # Versions only grow, also over a restart of the engine
        self._newest_version = newest = max(self._newest_version, self.engine.version)
        vocab_size = self.engine.vocab_size or len(self.tokenizer)
        rest = check_sample(answer, request, vocab_size=vocab_size, version=newest)
        if first is None or _is_sampled_at_once(request):
            return rest
        tokens, log_probs = first.tokens + rest.tokens, first.log_probs + rest.log_probs
        sample = Sample(tokens, log_probs, rest.finish, first.versions + rest.versions)
        cut, strings = len(first.tokens), self.config.stop_strings
        # A stop string spans at most this many tokens: a character has at most four bytes, a byte one token
        longest = cut + 4 * max(map(len, strings), default=0)
        for n in range(cut + 1, min(len(sample.tokens), longest) + 1):
            text = self.tokenizer.decode(sample.tokens[:n])
            if any(string in text for string in strings):
                return Sample(sample.tokens[:n], sample.log_probs[:n], "stop", sample.versions[:n])
        return sample


def check_image_settings(engine: Engine, encoder: ImageEncoder) -> None:
    """Raise a ValueError unless an engine sees images as the scorer does."""
    own, wanted = engine.image_settings, encoder.settings()
    if own is None:
        raise ValueError(f"{type(engine).__name__} samples from text only; use an engine of the vision-language model")
    different = sorted(name for name in own.keys() | wanted.keys() if own.get(name) != wanted.get(name))
    if different:
        pairs = ", ".join(f"{name}={own.get(name)!r} instead of {wanted.get(name)!r}" for name in different)
        raise ValueError(
            f"{type(engine).__name__} sees images differently from the scorer: {pairs}; start it with the folder of "
            "the trained model and without settings for images, or use another engine"
        )


def _session(row: TensorDictBase) -> tuple[int, ...]:
    """Return the ids for routing: the group's at the first turn, whose prompt its members share."""
    group, trajectory = row.get(keys.GROUP_ID, None), row.get(keys.TRAJECTORY_ID, None)
    if group is None or trajectory is None:
        return ()
    return (int(group), int(trajectory)) if int(row.get(keys.NUM_TURNS, 0)) else (int(group),)


def _is_aborted(request: Request, sample: Sample) -> bool:
    return sample.finish == "abort" and len(sample.tokens) < request.limit


def _is_sampled_at_once(request: Request) -> bool:
    """Return whether an aborted turn starts again, since an engine would count its first part as the prompt."""
    return request.distribution.counts_tokens or request.distribution.has_rules


def _remaining_request(request: Request, sample: Sample | None) -> Request:
    """Return the request for the rest of a turn."""
    if sample is None or not (done := len(sample.tokens)) or _is_sampled_at_once(request):
        return request
    return replace(
        request,
        prompt=[*request.prompt, *sample.tokens],
        limit=request.limit - done,
        seed=_derive_seed(request.seed, done),
    )


def _derive_seed(seed: int, position: int) -> int:
    """Derive the seed of the tokens after ``position`` tokens; position 0 keeps the seed."""
    step = 0x2545F4914F6CDD1D  # differs from the step between samples of a row, so seeds do not collide
    return (seed + position * step) % 2**62


def _to_generated(sample: Sample) -> Generated:
    return Generated(
        tokens=torch.tensor(sample.tokens, dtype=torch.long),
        log_probs=torch.tensor(sample.log_probs, dtype=torch.float32),
        truncated=sample.finish != "stop",
        versions=torch.tensor(sample.versions, dtype=torch.long),
    )
