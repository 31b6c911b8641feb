"""Recorded ids are exactly those that the engine received and returned, for any template and tokenizer."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from tensordict import TensorDictBase
from tokenizers import AddedToken, Tokenizer, decoders, normalizers, pre_tokenizers, trainers
from tokenizers import models as tokenizer_models
from transformers import PreTrainedTokenizerFast

from torchrl_rloo.collectors import LLMCollector
from torchrl_rloo.data import keys, load_prompts, tensor_rows
from torchrl_rloo.data.segments import split_segments
from torchrl_rloo.engines.base import Request
from torchrl_rloo.engines.scripted import ScriptedEngine, ScriptedTurn
from torchrl_rloo.envs import DatasetChatEnv
from torchrl_rloo.envs.transforms import FeedbackTransform
from torchrl_rloo.modules import TransformersWrapper, vLLMWrapper
from torchrl_rloo.objectives import RLOOLoss

VOCAB_SIZE = 384  # a multiple of 64, so the model has no id that the tokenizer lacks
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|bot|>", "<|header|>", "<|header_end|>", "<|eot|>")
SPECIAL += ("<s>", "</s>", "[INST]", "[/INST]", "[TOOLS]", "[/TOOLS]", "[CALLS]", "[RESULTS]", "[/RESULTS]")
SPECIAL += ("<bos>", "<turn>", "<end_of_turn>")

# kinds of templates in use

_CHATML = "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
_CHATML_OPEN = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
CHATML = "{% for m in messages %}" + _CHATML + "{% endfor %}" + _CHATML_OPEN
QWEN = (  # tools in the system message, joined results in a user message, thoughts stripped before a user message
    "{% if tools %}{{ '<|im_start|>system\n' }}{% for t in tools %}{{ t | tojson + '\n' }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endif %}{% set ns = namespace(asked=0) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.asked = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{% if m.role == 'tool' %}"
    "{% if messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}"
    "{{ '\n<tool_response>\n' + m.content + '\n</tool_response>' }}"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}"
    "{% elif m.role == 'assistant' and loop.index0 < ns.asked %}"
    "{{ '<|im_start|>assistant\n' + m.content.split('</think>')[-1].lstrip('\n') + '<|im_end|>\n' }}"
    "{% else %}" + _CHATML + "{% endif %}{% endfor %}" + _CHATML_OPEN
)
LLAMA3 = (  # trimmed text, tools in the first user message
    "{{ '<|bot|>' }}{% for m in messages %}{% set role = 'ipython' if m.role == 'tool' else m.role %}"
    "{{ '<|header|>' + role + '<|header_end|>\n\n' }}"
    "{% if tools and loop.first %}{{ tools | tojson + '\n\n' }}{% endif %}"
    "{{ m.content | trim + '<|eot|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|header|>assistant<|header_end|>\n\n' }}{% endif %}"
)
MISTRAL = (  # alternating user and assistant, results after calls with ids of nine characters
    "{{ '<s>' }}{% set ns = namespace(asks=true) %}{% for m in messages %}"
    "{% if m.role == 'tool' or m.tool_calls %}"
    "{% for call in m.tool_calls or [{'id': m.tool_call_id}] %}{% if call.id | length != 9 %}"
    "{{ raise_exception('ids of calls must have 9 characters') }}{% endif %}{% endfor %}"
    "{% elif (m.role == 'user') != ns.asks %}{{ raise_exception('roles must alternate') }}"
    "{% else %}{% set ns.asks = not ns.asks %}{% endif %}"
    "{% if m.role == 'user' %}{{ '[INST] ' + m.content + '[/INST]' }}"
    "{% elif m.role == 'tool' %}"
    "{{ '[RESULTS] ' + {'content': m.content, 'id': m.tool_call_id} | tojson + '[/RESULTS]' }}"
    "{% elif m.tool_calls %}{{ '[CALLS] ' + m.tool_calls | tojson + '</s>' }}"
    "{% else %}{{ ' ' + m.content | trim + '</s>' }}{% endif %}{% endfor %}"
)
GEMMA = (  # trimmed, alternating, another name of the assistant, no tools
    "{{ '<bos>' }}{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "{{ '<turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' + m.content | trim + '<end_of_turn>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<turn>model\n' }}{% endif %}"
)


@dataclass(frozen=True)
class Kind:
    """Kind of template.

    Args:
        template: Jinja source.
        end: end of a turn.
        tools: True if the template supports tools.
    """

    template: str
    end: str
    tools: bool = True


KINDS = {
    "qwen": Kind(QWEN, "<|im_end|>"),
    "llama3": Kind(LLAMA3, "<|eot|>"),
    "mistral": Kind(MISTRAL, "</s>"),
    "gemma": Kind(GEMMA, "<end_of_turn>", tools=False),
    "chatml": Kind(CHATML, "<|im_end|>"),
}

# adversarial tokenizers


def byte_level(**special: Any) -> Tokenizer:
    """Build a BPE with many merges of three letters, so that most sampled ids are not canonical."""
    rng = random.Random(0)
    core = Tokenizer(tokenizer_models.BPE())
    core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = [chr(c) for c in range(33, 127)] + ["\u0120", "\u010a"]  # byte-level names of space and newline
    tokens = [AddedToken(t, special=True, normalized=False, **special) for t in SPECIAL]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE, special_tokens=tokens, initial_alphabet=alphabet, show_progress=False
    )
    core.train_from_iterator(["".join(rng.choices("abc", k=12)) for _ in range(2000)], trainer)
    return core


def with_prefix() -> Tokenizer:
    """Add a space before every text and after every special token, as SentencePiece does."""
    core = byte_level()
    core.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    core.pre_tokenizer = None
    core.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    core.add_tokens(["\u2581"])
    return core


CORES = {
    "ambiguous": byte_level,
    "swallows": lambda: byte_level(rstrip=True),  # special tokens consume the white space after them
    "prefix": with_prefix,
}


@pytest.fixture(scope="module")
def make_tokenizer() -> Callable[..., PreTrainedTokenizerFast]:
    """``make_tokenizer(kind, core, pad_is_end)``, cached per combination."""
    cores, made = {name: make() for name, make in CORES.items()}, {}

    def make(kind: str, core: str = "ambiguous", pad_is_end: bool = False) -> PreTrainedTokenizerFast:
        if (kind, core, pad_is_end) not in made:
            end = KINDS[kind].end
            pad = end if pad_is_end else "<|endoftext|>"
            tokenizer = PreTrainedTokenizerFast(
                tokenizer_object=copy.deepcopy(cores[core]),
                eos_token=end,
                pad_token=pad,
                additional_special_tokens=[t for t in SPECIAL if t not in (end, pad)],
            )
            tokenizer.chat_template = KINDS[kind].template
            made[kind, core, pad_is_end] = tokenizer
        return made[kind, core, pad_is_end]

    return make


# conversations


@dataclass(frozen=True)
class Talk:
    """Scripted conversation.

    Args:
        question: the first user message.
        turns: policy turns as ids, and whether each ends with the end of turn.
        feedback: source (``"user"``, ``"tool"``, ``"tools"``) and text after every turn but the last.
    """

    question: str
    turns: tuple[tuple[tuple[int, ...], bool], ...]
    feedback: tuple[tuple[str, str], ...]


BITS = ("a", "abc", "cab ", " ", "\n", "<|", "|>", "</", "[", "im_end", "{{ 1 }}", '"', "\\", "</think>", "<think>")
TEXTS = st.lists(st.one_of(st.sampled_from(SPECIAL), st.sampled_from(BITS)), max_size=5).map("".join)
IDS = st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=6)


@st.composite
def talks(draw, kind: str, tokenizer: PreTrainedTokenizerFast) -> Talk:
    """Generate conversations with turns of random ids and of texts, including thoughts."""

    def spelled(text: str) -> list[int]:
        return [i for c in text for i in tokenizer(c, add_special_tokens=False)["input_ids"]]

    thoughts = st.builds(lambda a, b: spelled(f"<think>{a}</think>\n\n{b}"), TEXTS, TEXTS)
    n = draw(st.integers(1, 8))
    turns = [(tuple(draw(st.one_of(IDS, TEXTS.map(spelled), thoughts))), draw(st.booleans())) for _ in range(n)]
    turns = [(ids or (tokenizer.eos_token_id,), ends) for ids, ends in turns]
    who = st.sampled_from(["user", "tool", "tools"] if KINDS[kind].tools else ["user"])
    feedback = draw(st.lists(st.tuples(who, TEXTS), min_size=n - 1, max_size=n - 1))
    return Talk(draw(TEXTS), tuple(turns), tuple(feedback))


def messages_of(who: str, text: str) -> list[dict[str, str]]:
    if who == "user":
        return [{"role": "user", "content": text}]
    return [
        {"role": "tool", "content": text, "name": "f", "tool_call_id": f"abcdefgh{i}"}
        for i in range(2 if who == "tools" else 1)
    ]


def prompts_of(talks: list[Talk]) -> list[dict[str, Any]]:
    """Return dataset rows with distinct, nonempty prompts."""
    return [{"query": messages_of("user", f"q{i}{talk.question}"), "talk": i} for i, talk in enumerate(talks)]


class Play:
    """Conversations of a scripted engine, which records its requests, through a collector."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, talks: list[Talk], input_mode: str, on_rewrite: str):
        self.tokenizer, self.talks = tokenizer, talks
        self.order: list[tuple[int, int]] = []  # conversation and turn of each request
        self.engine = ScriptedEngine(self.script)
        data = prompts_of(talks)
        env = DatasetChatEnv(
            load_prompts(data),
            tokenizer,
            prompts_per_batch=len(talks),
            shuffle=False,
            transforms=[FeedbackTransform(self.respond)],
            input_mode=input_mode,
            on_rewrite=on_rewrite,
        )
        kwargs = {"max_new_tokens": 10_000, "seed": 0}
        policy = vLLMWrapper(self.engine, tokenizer=tokenizer, input_mode=input_mode, generate_kwargs=kwargs)
        try:
            self.rows = LLMCollector(env, policy).collect()
        finally:
            self.engine.close()
        self.rewritten = env.base_env.counts["env/rewritten_turns"]

    def ids(self, i: int, k: int) -> list[int]:
        """Return the k-th policy turn of a conversation."""
        ids, ends = self.talks[i].turns[k]
        return [*ids, self.tokenizer.eos_token_id] if ends and ids[-1] != self.tokenizer.eos_token_id else [*ids]

    def log_probs(self, i: int, k: int) -> list[float]:
        return [-0.5 * (i + 1) - 0.25 * k - 0.125 * j for j in range(len(self.ids(i, k)))]

    def script(self, request: Request, index: int) -> ScriptedTurn:
        i = request.session[0]  # every talk is a group
        k = sum(owner == i for owner, _ in self.order)
        self.order.append((i, k))
        return ScriptedTurn(self.ids(i, k), self.log_probs(i, k))

    def respond(self, conversation: list[dict[str, str]], row: TensorDictBase) -> list[dict[str, str]] | None:
        feedback, taken = self.talks[row["talk"]].feedback, sum(m["role"] == "assistant" for m in conversation)
        return messages_of(*feedback[taken - 1]) if taken <= len(feedback) else None

    def requests(self, i: int) -> list[list[int]]:
        """Return the requests of a conversation, one per turn."""
        asked = zip(self.order, self.engine.requests, strict=True)
        return [list(request.prompt) for (owner, _), request in asked if owner == i]

    def contexts(self, i: int) -> Iterator[list[int]]:
        """Return the context between turns; after a split, the whole prompt."""
        seen: list[int] = []
        for k, prompt in enumerate(self.requests(i)):
            extends = prompt[: len(seen)] == seen
            yield prompt[len(seen) :] if extends else prompt
            seen = [*prompt, *self.ids(i, k)]


def special_of(tokenizer: PreTrainedTokenizerFast, ids: list[int]) -> list[str]:
    """Return the special tokens among the ids, in order."""
    known = {i: token.content for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    return [known[i] for i in ids if i in known]


def check_samples(play: Play, rows: TensorDictBase, i: int, members: list[list[int]]) -> None:
    """Check that rows are the samples of a conversation with these turns, bit for bit."""
    requests = play.requests(i)
    for row, turns in zip(rows.unbind(0), members, strict=True):
        ids, mask, log_probs = requests[turns[0]], [False] * len(requests[turns[0]]), [0.0] * len(requests[turns[0]])
        for k in turns:
            assert requests[k][: len(ids)] == ids, "the past never changes"
            between = len(requests[k]) - len(ids)
            sampled = play.ids(i, k)
            ids = requests[k] + sampled
            mask += [False] * between + [True] * len(sampled)
            log_probs += [0.0] * between + play.log_probs(i, k)
        assert row[keys.TOKENS].tolist() == ids
        assert row[keys.ACTION_MASK].tolist() == mask and row[keys.ATTENTION_MASK].all()
        assert row[keys.LOG_PROBS].tolist() == log_probs
        assert row[keys.PROMPT_TOKENS].tolist() == requests[turns[0]]
        assert row[keys.ACTION_VERSIONS].tolist() == [0] * sum(mask)


def check_context(play: Play, i: int, kind: str) -> None:
    """Check that context has the template's special tokens and no others, whatever the texts contain."""
    talk, tokenizer = play.talks[i], play.tokenizer
    messages = [{"role": "user", "content": "b"}]
    marked = []
    for k in range(len(talk.turns)):
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        marked.append(special_of(tokenizer, tokenizer(text, add_special_tokens=False)["input_ids"]))
        if k < len(talk.feedback):
            answer = messages_of(talk.feedback[k][0], "b")
            calls = [{"id": m["tool_call_id"], "function": {"name": "f"}} for m in answer if m["role"] == "tool"]
            said = {"role": "assistant", "content": "b"} | ({"tool_calls": calls} if calls else {})
            messages = [*messages, said, *answer]
    for k, context in enumerate(play.contexts(i)):
        expected = marked[k]
        if k and len(context) < len(
            play.requests(i)[k]
        ):  # added ids; they include the end of turn if it was not sampled
            new = expected[len(marked[k - 1]) :]
            new = [t for t in new if t != "[CALLS]"]
            assert new[0] == tokenizer.eos_token
            expected = new[1:] if play.ids(i, k - 1)[-1] == tokenizer.eos_token_id else new
        assert special_of(tokenizer, context) == expected


def shows(kind: str, text: str) -> str:
    """Return the text of feedback as the context shows it."""
    return text.strip() if kind in ("llama3", "gemma") else text


@st.composite
def cases(draw, make: Callable[..., PreTrainedTokenizerFast]) -> tuple:
    kind, core = draw(st.sampled_from(list(KINDS))), draw(st.sampled_from(list(CORES)))
    tokenizer = make(kind, core, draw(st.booleans()))
    conversations = draw(st.lists(talks(kind, tokenizer), min_size=1, max_size=3))
    return kind, core, tokenizer, conversations, draw(st.sampled_from(keys.INPUT_MODES))


def thoughtful(play: Play, i: int) -> list[int]:
    """Return the turns after which a Qwen-like template strips thoughts that it showed before."""
    talk, thoughts, out = play.talks[i], False, []
    for k, (who, _) in enumerate(talk.feedback):
        said = play.tokenizer.decode(play.ids(i, k), skip_special_tokens=True)
        kept = said.split("</think>")[-1]
        thoughts |= "".join(kept.split()) != "".join(said.split())
        if who == "user" and thoughts:
            out.append(k)
            thoughts = False
    return out


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_recorded_is_what_the_engine_was_given_and_returned(make_tokenizer: Callable, data) -> None:
    kind, core, tokenizer, conversations, input_mode = data.draw(cases(make_tokenizer))
    event(f"{kind} {core} {input_mode}")
    play = Play(tokenizer, conversations, input_mode, "keep")
    for i, (row, talk) in enumerate(zip(play.rows.unbind(0), conversations, strict=True)):
        assert int(row[keys.NUM_TURNS]) == len(talk.turns) and row[keys.TERMINATED].all()
        check_samples(play, play.rows[i : i + 1], i, [list(range(len(talk.turns)))])
        check_context(play, i, kind)
        texts = [f"q{i}{talk.question}", *(text for _, text in talk.feedback)]
        if core == "ambiguous":
            for k, context in enumerate(play.contexts(i)):
                quoted = kind == "mistral" and k and talk.feedback[k - 1][0] != "user"
                text = texts[k].replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") if quoted else texts[k]
                assert shows(kind, text) in tokenizer.decode(context)
    strips = sum(len(thoughtful(play, i)) for i in range(len(conversations))) if kind == "qwen" else 0
    assert play.rewritten == strips


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_split_samples_are_what_the_engine_was_given_and_returned(make_tokenizer: Callable, data) -> None:
    """A rewrite by the template starts a new sample; every sampled token is in exactly one sample."""
    core = data.draw(st.sampled_from(list(CORES)))
    tokenizer = make_tokenizer("qwen", core, data.draw(st.booleans()))
    conversations = data.draw(st.lists(talks("qwen", tokenizer), min_size=1, max_size=3))
    play = Play(tokenizer, conversations, data.draw(st.sampled_from(keys.INPUT_MODES)), "split")
    for i, (row, talk) in enumerate(zip(play.rows.unbind(0), conversations, strict=True)):
        ends = [0, *(k + 1 for k in thoughtful(play, i)), len(talk.turns)]
        members = [list(range(a, b)) for a, b in zip(ends, ends[1:], strict=False)]
        event(f"{len(members)} samples")
        check_samples(play, split_segments(play.rows[i : i + 1]), i, members)
        check_context(play, i, "qwen")
        conversation = [*row[keys.QUERY], *row[keys.COMPLETION]]
        shown, turn = [], 0
        for m, message in enumerate(conversation):
            if message["role"] == "assistant":
                if turn in ends[1:-1]:
                    text = tokenizer.apply_chat_template(conversation[:m], tokenize=False, add_generation_prompt=True)
                    shown.append((tokenizer.decode(play.requests(i)[turn]), text))
                turn += 1
        assert all(
            a == b if core == "ambiguous" else _without_whitespace(a) == _without_whitespace(b) for a, b in shown
        )


def _without_whitespace(text: str) -> str:
    return "".join(text.split())


# a real model


def collect_with_model(tokenizer, model, conversations: list[Talk], on_rewrite: str) -> tuple:
    """Collect finished trajectories with a real model on scripted questions and feedback."""

    def respond(conversation, row) -> list[dict[str, str]] | None:
        feedback, taken = conversations[row["talk"]].feedback, sum(m["role"] == "assistant" for m in conversation)
        return messages_of(*feedback[taken - 1]) if taken <= len(feedback) else None

    kwargs = {"max_new_tokens": 6, "seed": 1, "temperature": 0.9, "stop_strings": ["ab"]}
    policy = TransformersWrapper(model, tokenizer=tokenizer, generate_kwargs=kwargs)
    data = prompts_of(conversations)
    env = DatasetChatEnv(
        load_prompts(data),
        tokenizer,
        prompts_per_batch=len(data),
        num_generations=2,
        shuffle=False,
        transforms=[FeedbackTransform(respond)],
        on_rewrite=on_rewrite,
    )
    return LLMCollector(env, policy).collect(), policy, env


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_the_ratio_is_one_on_policy(make_tokenizer: Callable, make_model: Callable, data) -> None:
    """The loss's log-probs equal the sampler's over any turns, templates and splits."""
    kind, on_rewrite = data.draw(st.sampled_from(list(KINDS))), data.draw(st.sampled_from(["keep", "split"]))
    tokenizer = copy.deepcopy(make_tokenizer(kind, pad_is_end=data.draw(st.booleans())))
    if kind == "qwen":  # a random model has no thoughts to strip, but samples "a"
        tokenizer.chat_template = tokenizer.chat_template.replace("</think>", "a")
    model = make_model(tokenizer, seed=2, end_bias=9.0)
    conversations = data.draw(st.lists(talks(kind, tokenizer), min_size=1, max_size=3))
    rows, policy, env = collect_with_model(tokenizer, model, conversations, on_rewrite)
    rewritten = env.base_env.counts["env/rewritten_turns"]
    assert kind == "qwen" or not rewritten
    out = tensor_rows(split_segments(rows))
    assert len(out) == len(rows) + (rewritten if on_rewrite == "split" else 0)
    event(f"{kind} {on_rewrite}, {len(out)} samples")
    scorer = policy.get_new_version(generate=False)
    scored = scorer.score(out)
    behaviour = torch.cat([row[keys.LOG_PROBS][row[keys.ACTION_MASK]] for row in out.unbind(0)])
    torch.testing.assert_close(scored.log_probs[scored.actions.mask], behaviour, rtol=0, atol=1e-5)
    for row in out.unbind(0):
        row.set(keys.ADVANTAGE, torch.ones(1, 1))
        assert (row[keys.LOG_PROBS][~row[keys.ACTION_MASK]] == 0).all()
    loss = RLOOLoss(scorer)(out)
    assert loss.ESS.item() == pytest.approx(1, abs=1e-5) and loss.log_ratio_max.item() <= 1e-5
