"""Training, scoring and sampling on a device that is not the CPU: ``python -m support.device_cases``."""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Callable

import torch
from tensordict import TensorDict

from support.other_device import held, other_device, register
from torchrl_rloo.data import keys, stack_rows
from torchrl_rloo.embedded import build_model, build_tokenizer
from torchrl_rloo.functional.log_probs import token_log_probs
from torchrl_rloo.modules import TransformersWrapper, ValueHead, record_log_probs
from torchrl_rloo.objectives import RLOOLoss, SFTLoss, ValueLoss, merge_outputs
from torchrl_rloo.training import accumulate, optimizer_step

TOKENIZER = build_tokenizer()
BASE = build_model(TOKENIZER, seed=0).eval()
Case = Callable[[torch.device], list[torch.Tensor]]


def model_on(device: torch.device):
    model = copy.deepcopy(BASE).to(device)
    model.tie_weights()  # the move makes new parameters of another class
    return model


def rows():
    generator, made = torch.Generator().manual_seed(0), []
    for i in range(6):
        prompt, length = 5 + i // 2, 8 + i // 2 + i
        shared = torch.Generator().manual_seed(i // 2)
        ids = torch.randint(5, 40, (prompt,), generator=shared)
        ids = torch.cat([ids, torch.randint(5, 40, (length - prompt,), generator=generator)])
        actions = torch.arange(length) >= prompt
        noise = torch.where(actions, -4 * torch.rand(length, generator=generator), 0.0)
        row = {keys.TOKENS: ids, keys.ACTION_MASK: actions, keys.ATTENTION_MASK: torch.ones_like(actions)}
        row |= {keys.LOG_PROBS: noise, keys.PROXIMAL_LOG_PROBS: 0.98 * noise, keys.REF_LOG_PROBS: 1.05 * noise}
        row |= {
            keys.PROXIMAL_ENTROPY: -noise,
            keys.STATE_VALUE: noise[:, None],
            keys.VALUE_TARGET: 0.5 * noise[:, None],
        }
        row |= {keys.ADVANTAGE: torch.randn(1, 1, generator=generator), keys.TRUNCATED: torch.tensor([i == 1])}
        made.append(TensorDict(row))
    return stack_rows(made)


def gradients(module) -> list[torch.Tensor]:
    return [p.grad.clone() for p in module.parameters() if p.grad is not None]


def policy_loss(packing: str, **settings) -> Case:
    def case(device: torch.device) -> list[torch.Tensor]:
        model = model_on(device)
        policy = TransformersWrapper(model, tokenizer=TOKENIZER, generate=False, packing=packing)
        outputs = accumulate(RLOOLoss(policy, **settings), rows(), max_tokens=60)
        found, metrics = gradients(model), merge_outputs(outputs)
        norm = optimizer_step(model, torch.optim.AdamW(model.parameters()), max_grad_norm=1.0)
        return [*found, norm, torch.tensor([metrics[name] for name in sorted(metrics)])]

    return case


def demonstrations(device: torch.device) -> list[torch.Tensor]:
    model = model_on(device)
    accumulate(SFTLoss(TransformersWrapper(model, tokenizer=TOKENIZER, generate=False)), rows())
    return gradients(model)


def values(device: torch.device) -> list[torch.Tensor]:
    head = ValueHead(model_on(device))
    accumulate(ValueLoss(head), rows())
    return gradients(head)


def recording(device: torch.device) -> list[torch.Tensor]:
    batch = rows()
    record_log_probs(TransformersWrapper(model_on(device), tokenizer=TOKENIZER, generate=False), batch)
    return [row[keys.PROXIMAL_LOG_PROBS] for row in batch.unbind(0)]


def head(device: torch.device) -> list[torch.Tensor]:
    torch.manual_seed(0)
    hidden, weight = (torch.randn(n, 16).to(device).requires_grad_() for n in (20, 50))
    scored = token_log_probs(hidden, weight, torch.randint(50, (20,)).to(device), top_k=3)
    (scored.log_probs * torch.arange(20.0).to(device)).sum().backward()
    return [*scored, hidden.grad, weight.grad]


def sampling(**settings) -> Case:
    def case(device: torch.device) -> list[torch.Tensor]:
        policy = TransformersWrapper(
            model_on(device), tokenizer=TOKENIZER, generate_kwargs={"max_new_tokens": 20, "seed": 0, **settings}
        )
        texts = ("What is 2+3?", "1+1", "What is 2+3?")
        prompts = [TensorDict({keys.PROMPT_TOKENS: torch.tensor(TOKENIZER(t)["input_ids"])}) for t in texts]
        out = policy(stack_rows(prompts)).unbind(0)
        return [row[key].float() for row in out for key in (keys.TOKENS, keys.LOG_PROBS)]

    return case


CASES: dict[str, Case] = {
    "padded": policy_loss("none"),
    "packed": policy_loss("packed"),
    "shared prefix": policy_loss("shared_prefix", ratio="token", aggregation="token_mean"),
    "all terms": policy_loss("none", kl_to_ref_coeff=0.1, entropy_coeff=0.01, kl_to_inference_coeff=0.1),
    "proximal": policy_loss(
        "none", ratio="token", old_log_probs="proximal", high_entropy_fraction=0.5, correction="sequence_truncate"
    ),
    "masked rows": policy_loss("none", mask_truncated_completions=True, off_policy_mask_threshold=0.5),
    "demonstrations": demonstrations,
    "values": values,
    "recording": recording,
    "head": head,
    "sampling": sampling(top_k=5, temperature=0.7),
    "sampling with a penalty": sampling(top_p=0.9, repetition_penalty=1.2),
}


def compare(case: Case) -> str:
    """Return how a case differs between the CPU and the other device; empty if it does not."""
    expected = case(torch.device("cpu"))
    try:
        with other_device() as device:
            found = case(device)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    for a, b in zip(found, expected, strict=True):
        a, b = held(a.detach()), b.detach()
        scale = max(1.0, float(b.abs().max())) if b.numel() else 1.0
        if a.shape != b.shape or not torch.allclose(a, b, rtol=1e-3, atol=1e-4 * scale):
            return f"values of shape {tuple(b.shape)} differ"
    return ""


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    register()
    print(json.dumps({name: compare(case) for name, case in CASES.items()}))
