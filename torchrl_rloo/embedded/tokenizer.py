"""Byte-level BPE tokenizer with 320 tokens and a ChatML template, built in milliseconds without a download."""

from __future__ import annotations

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

VOCAB_SIZE = 320  # a multiple of 64, equal to the model's: every id that the model can emit is a token

PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
MARKUP = ("<think>", "</think>", "<tool>", "</tool>")  # one token each, but not special: decoding keeps them

# Corpus of the merges. Its lines contain no line break or digit, so no merge crosses the template's line breaks and
# numbers remain single digits
_CORPUS = (
    "system",
    "user",
    "assistant",
    "tool",
    "What is",
    "The answer is",
    "Think, then put the answer in \\boxed{}.",
    "Call the tool, then put the answer in \\boxed{}.",
    "Do not guess or answer before you know. First write down each step.",
)

# The assistant's span is what the policy would sample: the content and the end-of-turn token, without the line break
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}"
    "{{ message['content'] + '<|im_end|>' }}"
    "{% endif %}"
    "{{ '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Build the embedded tokenizer, with the same ids on every call and in every process.

    Decoding restores any encoded text without surrogates. Each digit is one token. ``<|endoftext|>`` pads on the left,
    and ``<|im_end|>`` ends a turn. The template takes the roles system, user, assistant and tool, and marks the
    assistant's spans with ``{% generation %}``.

    Returns:
        Tokenizer of ``VOCAB_SIZE`` tokens.
    """
    # Train byte-level BPE on the fixed corpus, so that any text has ids
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(MARKUP),
        special_tokens=[PAD, START, END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    core.train_from_iterator(_CORPUS, trainer)
    # Add the markup as tokens that decoding keeps, and the chat template
    core.add_tokens([AddedToken(token, special=False, normalized=False) for token in MARKUP])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token=END, pad_token=PAD, padding_side="left")
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer
