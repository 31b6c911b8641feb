"""A byte-level BPE tokenizer with 320 tokens and a ChatML template, built in milliseconds without a download."""

from __future__ import annotations

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

VOCAB_SIZE = 320  # a multiple of 64, and exactly the model's: every id the model can emit is a token

PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
MARKUP = ("<think>", "</think>", "<tool>", "</tool>")  # one token each, but text: decoding keeps them

# What the merges are learned from. No line has a newline or a digit in it, so a merge never crosses the template's
# seams and numbers stay single digits.
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

# The assistant's span holds what the policy would sample: the content and the end-of-turn token, not the newline.
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
    """The tokenizer of the embedded default; the same ids on every call and in every process.

    Any text without surrogates survives encoding and decoding. Digits are tokens of their own. ``<|endoftext|>`` pads
    (on the left) and ``<|im_end|>`` ends a turn. The template takes the roles system, user, assistant and tool, and
    marks the assistant's spans with ``{% generation %}``.

    Returns:
        A tokenizer of ``VOCAB_SIZE`` tokens.
    """
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
    core.add_tokens([AddedToken(token, special=False, normalized=False) for token in MARKUP])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token=END, pad_token=PAD, padding_side="left")
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer
