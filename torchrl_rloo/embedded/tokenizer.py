"""Byte-level BPE tokenizer with 320 tokens and a ChatML template, built in milliseconds without a download."""

from __future__ import annotations

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

VOCAB_SIZE = 320  # a multiple of 64, equal to the model's: every id that the model can emit is a token

PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
MARKUP = ("<think>", "</think>", "<tool>", "</tool>")  # one token each, but not special: decoding keeps them
# Required by the processor of Idefics3
IMAGE_TOKENS = ("<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>")

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

_IMAGE_CORPUS = (
    "user",
    "assistant",
    "How many are circles squares triangles rings",
    "What color is the largest",
    "What shape is",
    *("circle", "square", "triangle", "ring", "red", "green", "blue", "black", "none", "unsure") * 3,
    *(" circle square triangle ring red green blue black",) * 2,
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
# Contents may also be lists of parts; an image is one token, which the image encoder expands
IMAGE_CHAT_TEMPLATE = (
    "{% macro show(content) %}"
    "{% if content is string %}{{ content }}{% else %}{% for part in content %}"
    "{{ '<image>' if part['type'] == 'image' else part['text'] }}"
    "{% endfor %}{% endif %}"
    "{% endmacro %}"
) + CHAT_TEMPLATE.replace("message['content']", "show(message['content'])")


def build_tokenizer(*, images: bool = False) -> PreTrainedTokenizerFast:
    """Build the embedded tokenizer, with the same ids on every call and in every process.

    Decoding restores any encoded text without surrogates. Each digit is one token. ``<|endoftext|>`` pads on the left,
    and ``<|im_end|>`` ends a turn. The template takes the roles system, user, assistant and tool, and marks the
    assistant's spans with ``{% generation %}``.

    Args:
        images: True for a vision-language model: with its image tokens, with the words of the shapes task, and with a
            template that also takes contents of text and image parts.

    Returns:
        Tokenizer of ``VOCAB_SIZE`` tokens.
    """
    special = [PAD, START, END, *(IMAGE_TOKENS if images else ())]
    # Train byte-level BPE on the fixed corpus, so that any text has ids
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(MARKUP),
        special_tokens=special,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    core.train_from_iterator(_IMAGE_CORPUS if images else _CORPUS, trainer)
    # Add the markup as tokens that decoding keeps, and the chat template
    core.add_tokens([AddedToken(token, special=False, normalized=False) for token in MARKUP])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token=END, pad_token=PAD, padding_side="left")
    tokenizer.chat_template = IMAGE_CHAT_TEMPLATE if images else CHAT_TEMPLATE
    return tokenizer
