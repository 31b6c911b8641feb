"""Tiny real models and tokenizers for all tests, and isolation of tests."""

from __future__ import annotations

import os

os.environ["HF_HUB_OFFLINE"] = "1"  # read when huggingface_hub is imported
# One thread per process: OpenMP pools of several xdist workers would contend for the same cores
os.environ.setdefault("OMP_NUM_THREADS", "1")

import copy
import random
import signal
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest
import torch
from tensordict import NonTensorData, TensorDict, TensorDictBase
from tokenizers import Tokenizer, decoders, pre_tokenizers, trainers
from tokenizers import models as tokenizer_models
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from support.changed_weights import assert_greedy_tokens_equal, change, log_prob_error  # noqa: F401  fixtures
from support.checkpoints import save_checkpoint
from support.engines import (  # noqa: F401  fixtures
    GROUP,
    SHARED,
    VLLMEngines,
    async_engine,
    engine_checkpoint,
    make_vllm_engine,
    models,
    shared_async_engine,
    vllm,
    vllm_engine,
    vllm_engines,
)
from support.fork_server import ForkServer
from support.hermetic import refuse_remote_connections
from support.ray_cluster import functions_by_value, ray_cluster  # noqa: F401  fixtures
from support.tutorials import WARM_START_STEPS
from torchrl_rloo.data import keys, load_prompts
from torchrl_rloo.data.rows import stack_rows
from torchrl_rloo.embedded import build_model, build_tokenizer, warm_start
from torchrl_rloo.envs.tools import Workspace
from torchrl_rloo.rewards.process_judge import MathJudge
from torchrl_rloo.runtime.lookup import import_room

if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # of a shell's background job; its children would ignore it, too
    signal.signal(signal.SIGINT, signal.default_int_handler)

VOCAB_SIZE = 384  # a multiple of 64, so the model has no id that the tokenizer lacks
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|bot|>", "<|header|>", "<|header_end|>", "<|eot|>", "<s>")
SPECIAL += ("</s>", "[INST]", "[/INST]")

_CHATML_TURN = "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}"
_CHATML_OPEN = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
_ALTERNATE = (
    "{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
)
TEMPLATES = {
    "chatml": "{% for m in messages %}" + _CHATML_TURN + "{% endfor %}" + _CHATML_OPEN,
    "chatml_generation": (
        "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}{% if m['role'] == 'assistant' %}"
        "{% generation %}{{ m['content'] + '<|im_end|>' }}{% endgeneration %}{% else %}"
        "{{ m['content'] + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}" + _CHATML_OPEN
    ),
    "llama3": (
        "{{ '<|bot|>' }}{% for m in messages %}"
        "{{ '<|header|>' + m['role'] + '<|header_end|>\n\n' + m['content'] | trim + '<|eot|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|header|>assistant<|header_end|>\n\n' }}{% endif %}"
    ),
    "mistral": (
        "{{ '<s>' }}{% for m in messages %}" + _ALTERNATE + "{% if m['role'] == 'user' %}"
        "{{ '[INST] ' + m['content'] + ' [/INST]' }}{% else %}{{ ' ' + m['content'] + '</s>' }}{% endif %}{% endfor %}"
    ),
    "llama2": (  # the assistant turn has a space before the end of turn
        "{% for m in messages %}{% if m['role'] == 'user' %}{{ '<s>[INST] ' + m['content'] + ' [/INST]' }}{% else %}"
        "{{ ' ' + m['content'] | trim + ' </s>' }}{% endif %}{% endfor %}"
    ),
    "strips_thinking": (
        "{% for m in messages %}{% if m['role'] == 'assistant' and not loop.last %}"
        "{{ '<|im_start|>assistant\n' + m['content'].split('</think>')[-1] + '<|im_end|>\n' }}{% else %}"
        + _CHATML_TURN
        + "{% endif %}{% endfor %}"
        + _CHATML_OPEN
    ),
}
END_OF_TURN = {"llama3": "<|eot|>", "mistral": "</s>", "llama2": "</s>"}  # other templates: <|im_end|>


@pytest.fixture(scope="session")
def sandboxed() -> None:
    """Skip a test where this system cannot isolate programs."""
    try:
        import_room("sandbox", "this test").Sandbox().close()
    except (ImportError, RuntimeError) as error:
        pytest.skip(str(error))


# Parts of the names of tests that need user namespaces
WORKSPACES = ("test_workspace", "repository", "docs/how-to/tools.md", "envs/tools/workspace.py")


@cache
def missing_workspace() -> str:
    """Return why this system cannot isolate a workspace, or nothing."""
    try:
        Workspace()
    except (ImportError, RuntimeError) as error:
        return str(error)
    return ""


@pytest.hookimpl(tryfirst=True)  # xdist reads the groups in the same hook
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Group tests per worker, by shared engines or by file, with slow groups first."""
    slow = set()
    for item in items:
        if any(name in item.nodeid for name in WORKSPACES) and (missing := missing_workspace()):
            item.add_marker(pytest.mark.skip(missing))
        if item.get_closest_marker("xdist_group") is None:
            shares = set(SHARED) & set(getattr(item, "fixturenames", ()))
            name = GROUP if shares else item.path.relative_to(item.config.rootpath).as_posix()
            item.add_marker(pytest.mark.xdist_group(name))
        if item.get_closest_marker("slow"):
            slow.add(_group(item))
    items.sort(key=lambda item: _group(item) not in slow)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Close the shared engine in this process before tests that may start another."""
    if _group(item) != GROUP:
        VLLMEngines.close()


def _group(item: pytest.Item) -> str:
    return item.get_closest_marker("xdist_group").args[0]


@pytest.fixture(scope="session")
def shared_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of this session that all xdist workers share."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "shared"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(scope="session", autouse=True)
def hermetic(shared_folder: Path) -> None:
    """Isolate tests from the network and the user's caches."""
    refuse_remote_connections()
    os.environ["TORCHRL_RLOO_CACHE"] = str(shared_folder / "cache")


@pytest.fixture(scope="session")
def fork_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkServer]:
    """Server that runs scripts in processes with imports already done."""
    server = ForkServer(tmp_path_factory.mktemp("processes"))
    yield server
    server.close()


@pytest.fixture(scope="session")
def warm_model() -> Callable[[str], Path]:
    """``warm_model(task="addition")``: folder of a short warm start, built once for all workers."""
    return lambda task="addition": warm_start(seed=0, task=task, steps=WARM_START_STEPS[task])


@pytest.fixture(scope="session")
def checkpoint(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """Folder of ``model`` and ``tokenizer`` in Hugging Face format. Do not change it."""
    return save_checkpoint(tmp_path_factory.mktemp("checkpoint"), model, tokenizer)


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    """Tokenizer of the embedded default model."""
    return build_tokenizer()


@pytest.fixture(scope="session")
def model(tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
    """Embedded default model with random weights. Do not change it."""
    return build_model(tokenizer, seed=0).eval()


@pytest.fixture(scope="session")
def ambiguous_core() -> Tokenizer:
    """Byte-level BPE with many merges of three letters, so that most sampled ids are not canonical."""
    rng = random.Random(0)
    words = ["".join(rng.choices("abc", k=12)) for _ in range(2000)]
    core = Tokenizer(tokenizer_models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    ascii_alphabet = [chr(c) for c in range(33, 127)] + ["\u0120", "\u010a"]  # byte-level names of space and newline
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE, special_tokens=list(SPECIAL), initial_alphabet=ascii_alphabet, show_progress=False
    )
    core.train_from_iterator(words, trainer)
    assert core.get_vocab_size() == VOCAB_SIZE
    return core


@pytest.fixture(scope="session")
def make_tokenizer(ambiguous_core: Tokenizer) -> Callable[..., PreTrainedTokenizerFast]:
    """``make_tokenizer(template="chatml", pad_is_eos=False)``: ambiguous BPE with a chat template."""

    def make(template: str = "chatml", pad_is_eos: bool = False) -> PreTrainedTokenizerFast:
        end = END_OF_TURN.get(template, "<|im_end|>")
        pad = end if pad_is_eos else "<|endoftext|>"
        made = PreTrainedTokenizerFast(
            tokenizer_object=copy.deepcopy(ambiguous_core),
            eos_token=end,
            pad_token=pad,
            additional_special_tokens=[t for t in SPECIAL if t not in (end, pad)],
        )
        made.chat_template = TEMPLATES[template]
        return made

    return make


@pytest.fixture(scope="session")
def make_model() -> Callable[..., PreTrainedModel]:
    """``make_model(tokenizer, seed=0, end_bias=0.0, scale=3.0)``: random Qwen2 with a biased, untied head.

    ``scale`` makes the distribution more peaked than with initial weights. At ``end_bias=8`` a turn of a plain softmax
    ends after about four tokens, at 14 nearly always at once.
    """

    def make(tokenizer: PreTrainedTokenizerFast, seed: int = 0, end_bias: float = 0.0, scale: float = 3.0):
        made = build_model(tokenizer, seed)
        tied = made.lm_head.weight.detach()
        made.config.tie_word_embeddings = False
        made.lm_head = torch.nn.Linear(tied.shape[1], tied.shape[0])
        with torch.no_grad():
            made.lm_head.weight.copy_(tied * scale)
            made.lm_head.bias.zero_()
            made.lm_head.bias[tokenizer.eos_token_id] = end_bias
        return made.eval()

    return make


@pytest.fixture(scope="session")
def user() -> Callable[[str], list[dict[str, str]]]:
    """``user(text)``: a conversation of one user message."""
    return lambda text: [{"role": "user", "content": text}]


@pytest.fixture(scope="session")
def prompt_rows() -> Callable[..., TensorDictBase]:
    """``prompt_rows(*ids, **columns)``: rows to continue, with one entry of each column per row."""

    def make(*prompts: list[int], **columns: list) -> TensorDictBase:
        rows = [TensorDict({keys.PROMPT_TOKENS: torch.tensor(p, dtype=torch.long)}, []) for p in prompts]
        for name, values in columns.items():
            for row, value in zip(rows, values, strict=True):
                row.set(name, value if isinstance(value, torch.Tensor) else torch.tensor(value))
        return stack_rows(rows)

    return make


@pytest.fixture(scope="session")
def query_rows() -> Callable[..., TensorDictBase]:
    """``query_rows(*queries)``: rows to reset an environment with."""
    return lambda *queries: stack_rows([TensorDict({keys.QUERY: NonTensorData(q)}, []) for q in queries])


@pytest.fixture(scope="session")
def prompts(user: Callable[[str], list[dict[str, str]]]):
    """Four chat prompts of unequal lengths, with columns ``answer`` and ``turns``, the number of turns."""
    texts = {"a": 1, "abc abc": 2, "say bcab or cab": 3, "what of abcabcabcab, c?": 2}
    return load_prompts([{"query": user(t), "answer": t[-1], "turns": n} for t, n in texts.items()])


@pytest.fixture(scope="session")
def bpe(make_tokenizer: Callable[..., PreTrainedTokenizerFast]) -> PreTrainedTokenizerFast:
    """Ambiguous tokenizer whose pad token is its end of turn."""
    return make_tokenizer(pad_is_eos=True)


@pytest.fixture(scope="module")
def random_model(make_model: Callable[..., PreTrainedModel], bpe: PreTrainedTokenizerFast) -> PreTrainedModel:
    """Random model whose turns end after about six tokens."""
    return make_model(bpe, end_bias=7.0)


@pytest.fixture(scope="session")
def math_judge() -> MathJudge:
    """Judge of mathematical answers that tests share: its process takes two seconds to start."""
    return MathJudge()


@pytest.fixture
def one_judge(math_judge: MathJudge, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shared judge of the rewards in a test; copies of rewards have separate judges."""
    monkeypatch.setattr("torchrl_rloo.rewards.accuracy.MathJudge", lambda timeout: math_judge)
