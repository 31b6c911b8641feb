"""Teachers, which score what a student sampled: another model, a former self, or an engine such as a vLLM server."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

import torch
from tensordict import TensorDictBase

from torchrl_rloo.data import keys
from torchrl_rloo.data.rows import action_tokens, gather_actions, ragged, stack_rows, to_lazy_stack
from torchrl_rloo.data.segments import refuse_images
from torchrl_rloo.engines.base import Sampler
from torchrl_rloo.engines.head import current_head, predicting_states
from torchrl_rloo.engines.root import call_root
from torchrl_rloo.functional.sampling import SamplingDistribution, process_logits
from torchrl_rloo.modules.policies import ScoredActions, TransformersWrapper, adapter_disabled, recompute_in_eval
from torchrl_rloo.modules.reference import AdapterReference, MovingReference, Scorer


def action_logits(scorer: TransformersWrapper, rows: TensorDictBase) -> torch.Tensor:
    """Return logits ``[N, V]`` of the sampled distribution at the action tokens of rows, in row order, in float32."""
    refuse_images(rows, "action_logits")
    tokens, positions, _ = (t.to(scorer.model.device) for t in action_tokens(to_lazy_stack(rows)))
    head = current_head(scorer.model, scorer.head, warn=False)

    def compute() -> torch.Tensor:
        narrow = torch.autocast(tokens.device.type, torch.bfloat16, enabled=scorer.precision == "bfloat16")
        with narrow, recompute_in_eval(scorer.model):
            states, _ = predicting_states(scorer.model, head, tokens, positions)
            logits = (states if head is None else head.scale * head.projection(states)).float()
        if head is not None and head.softcap is not None:
            logits = head.softcap * (logits / head.softcap).tanh()
        return process_logits(logits, scorer.distribution)

    return call_root(scorer.model, compute)


class Teacher:
    """Scorer of the rows of a student, which may see another prompt than the student did.

    Args:
        scorer: scorer with the student's sampling distribution: a :class:`TransformersWrapper`, a reference, or an
            :class:`EngineScorer`.
        prompts: ids of the prompt that the teacher sees, by the ``"prompt_id"`` of a row, for example with a solved
            problem before the question (self-distillation, arXiv 2601.19897). None shows it the student's.

    Example::

        teacher = Teacher(TransformersWrapper(model, tokenizer=tokenizer, generate=False))
        rows = record_log_probs(teacher, rows, log_probs=keys.REF_LOG_PROBS)
    """

    generate = False

    def __init__(self, scorer: Scorer, prompts: Sequence[Sequence[int]] | None = None):
        self.scorer, self.prompts = scorer, prompts

    def seen(self, rows: TensorDictBase) -> TensorDictBase:
        """Return the rows as the teacher sees them: its prompt, then what follows the student's."""
        if self.prompts is None or keys.PROMPT_ID not in rows.keys():  # the latter of a rank without rows
            return rows
        changed = []
        for row in to_lazy_stack(rows).unbind(0):
            tokens, mask = row[keys.TOKENS], row[keys.ACTION_MASK]
            start = int(row.get(keys.SAMPLED_MASK, mask).long().argmax())  # also if the first actions are stale
            prompt = torch.tensor(self.prompts[int(row[keys.PROMPT_ID])], dtype=tokens.dtype, device=tokens.device)
            new = row.select(keys.SUPPORT_IDS, keys.SUPPORT_SIZES, strict=False)
            new.set(keys.TOKENS, torch.cat([prompt, tokens[start:]]))
            changed.append(new.set(keys.ACTION_MASK, torch.cat([torch.zeros_like(prompt).bool(), mask[start:]])))
        return stack_rows(changed)

    @torch.no_grad()
    def score(self, rows: TensorDictBase) -> ScoredActions:
        """Return the log-probs of the rows' action tokens, at their places in the student's rows."""
        return self.scorer.score(self.seen(rows))._replace(actions=action_tokens(to_lazy_stack(rows)))

    @torch.no_grad()
    def logits(self, rows: TensorDictBase) -> torch.Tensor:
        """Return the teacher's :func:`action_logits`; it must be a model in this process."""
        scorer, off = self.scorer, isinstance(self.scorer, AdapterReference)
        scorer = scorer.scorer if off or isinstance(scorer, MovingReference) else scorer
        with adapter_disabled(scorer.model) if off else nullcontext():
            return action_logits(scorer, self.seen(rows))


class EngineScorer:
    """Scorer of rows by an engine with ``score``, such as a vLLM server that has another, larger model.

    Args:
        engine: engine with the student's vocabulary.
        distribution: sampling distribution of the student.

    Raises:
        ValueError: if the distribution truncates or penalizes, which engines do not apply to tokens that they score.

    Example::

        teacher = Teacher(EngineScorer(VLLMServer("http://teacher:8000"), policy.distribution))
    """

    generate = False

    def __init__(self, engine: Sampler, distribution: SamplingDistribution):
        if distribution.truncates or distribution.repetition_penalty != 1 or distribution.excluded:
            raise ValueError(f"{distribution} cannot be scored by an engine; set only a temperature")
        self.engine, self.distribution = engine, distribution

    def score(self, rows: TensorDictBase) -> ScoredActions:
        """Return the log-probs of the rows' action tokens, without entropies."""
        refuse_images(rows, "EngineScorer")
        actions = action_tokens(to_lazy_stack(rows))
        scores = self.engine.score([ids.tolist() for ids in ragged(rows, keys.TOKENS)], self.distribution.temperature)
        return ScoredActions(gather_actions([torch.tensor(each) for each in scores], actions), None, actions)
