"""Input modes of ChatEnv: entries in which the policy reads its context and writes its turn."""

from __future__ import annotations

import torch
from tensordict import TensorDictBase
from torchrl.modules.llm.policies import ChatHistory, LogProbs, Masks, Text, Tokens

from torchrl_rloo.data import keys
from torchrl_rloo.data.rows import make_tensorclass, set_entries
from torchrl_rloo.data.templates import (
    decode_response,
    encode,
    from_history,
    is_conversation,
    join_conversation,
    to_history,
)


def write_context(
    row: TensorDictBase,
    tokens: torch.Tensor,
    mask: torch.Tensor,
    log_probs: torch.Tensor,
    *,
    tokenizer,
    input_mode: str,
) -> TensorDictBase:
    """Set what the policy sees at its turn, in place: all ids so far, and text or History as ``input_mode`` says.

    Args:
        row: row with its query and completion.
        tokens: ids ``[T]`` of the row.
        mask: action mask ``[T]``.
        log_probs: log-probs ``[T]`` of the ids.
        tokenizer: the environment's tokenizer.
        input_mode: one of ``keys.INPUT_MODES``.

    Raises:
        ValueError: if the policy reads History but the query is plain text.
    """
    context = {
        "tokens": make_tensorclass(Tokens, prompt=tokens),
        "masks": make_tensorclass(Masks, all_assistant_mask=mask),
        "log_probs": make_tensorclass(LogProbs, full=log_probs),
    }
    set_entries(row, context)
    if input_mode == "text":
        row.set("text", Text(prompt=tokenizer.decode(tokens)))
    elif input_mode == "history":
        query, completion = row[keys.QUERY], row[keys.COMPLETION]
        if not is_conversation(query):
            raise ValueError(
                f"input_mode='history' requires queries that are chat messages, got {query!r:.100}; pass "
                "[{'role': 'user', 'content': ...}], or set input_mode='text'"
            )
        row.set("history", ChatHistory(prompt=to_history([join_conversation(query, completion)])[0]))
    return row


def read_turn(row: TensorDictBase, *, tokenizer, input_mode: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return ids, action mask and log-probs after the policy's turn, each ``[T]``.

    Args:
        row: row with the policy's turn.
        tokenizer: the environment's tokenizer.
        input_mode: one of ``keys.INPUT_MODES``.

    Raises:
        KeyError: if the policy set no ids in tokens mode.
        ValueError: if the policy's ids do not extend its prompt, or it removed the mask or the log-probs.
    """
    # Encode a turn that the policy gave as text only, here and never again
    prompt, full = row[keys.PROMPT_TOKENS], row.get(keys.TOKENS, None)
    if full is None:
        full = torch.cat([prompt, torch.tensor(_encode_reply(row, tokenizer, input_mode), dtype=torch.long)])
    if len(full) < len(prompt) or not torch.equal(full[: len(prompt)], prompt):
        raise ValueError(
            f"the policy returned {len(full)} ids that do not extend the {len(prompt)} ids of its prompt; "
            f"{keys.TOKENS} must hold the prompt's ids followed by the sampled ones"
        )
    mask, log_probs = row.get(keys.ACTION_MASK, None), row.get(keys.LOG_PROBS, None)
    if mask is None or log_probs is None:
        raise ValueError(
            f"the policy removed {keys.ACTION_MASK} or {keys.LOG_PROBS}; it must write both for all ids, or leave "
            "both unchanged. Use TransformersWrapper or vLLMWrapper of torchrl_rloo.modules instead of TorchRL's"
        )
    # Without log-probs of the new ids, write NaN: an unknown value must not pass for a number
    new = len(full) - len(mask)
    if new:
        mask = torch.cat([mask, torch.ones(new, dtype=torch.bool)])
        log_probs = torch.cat([log_probs, torch.full((new,), torch.nan)])
    return full, mask, log_probs


def _encode_reply(row: TensorDictBase, tokenizer, input_mode: str) -> list[int]:
    if input_mode == "text":
        reply = row["text", "full"][len(row["text", "prompt"]) :]
    elif input_mode == "history":
        reply = from_history(row["history", "full"])[-1]["content"] + (tokenizer.eos_token or "")
    else:
        raise KeyError(f"the policy must set {keys.TOKENS}; the row has {sorted(map(str, row.keys(True, True)))}")
    return encode(tokenizer, reply)


def write_turn(row: TensorDictBase, turn: torch.Tensor, *, tokenizer, input_mode: str) -> None:
    """Set the ids ``turn`` as the policy's turn, in place, in the entries of ``input_mode``."""
    if input_mode == "tokens":
        prompt = row[keys.PROMPT_TOKENS]
        row.set("tokens", Tokens(prompt=prompt, full=torch.cat([prompt, turn])))
        return
    reply = decode_response(tokenizer, turn.tolist())
    if input_mode == "text":
        row.set("text", Text(prompt=row["text", "prompt"], full=row["text", "prompt"] + reply))
    else:
        history = row["history", "prompt"]
        full = [*from_history(history), {"role": "assistant", "content": reply}]
        row.set("history", ChatHistory(prompt=history, full=to_history([full])[0]))
