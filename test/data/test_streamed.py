"""Streamed prompts: read as they are drawn, each once an epoch, resumed at the row, refused where all are needed."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import datasets
import pytest
import torch

from support.recipes import run_recipe_here, settings
from torchrl_rloo.data import load_prompts
from torchrl_rloo.data import streamed as module
from torchrl_rloo.data.sampling import MixtureSampler
from torchrl_rloo.embedded import addition_prompts, build_tokenizer
from torchrl_rloo.envs.transforms import DataLoadingPrimer


@pytest.fixture(autouse=True)
def few_at_once(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "_FIRST", 3)


def rows(number: int):
    return ({"prompt": f"{i}?", "answer": i} for i in range(number))


def primer(number: int, buffer: int, seed: int = 0) -> DataLoadingPrimer:
    return DataLoadingPrimer(load_prompts(rows(number), streaming=buffer), seed=seed)


def answers(primer: DataLoadingPrimer, number: int) -> list[int]:
    drawn = [primer.draw()[0] for _ in range(number)]
    assert all(row["query"] == f"{row['answer']}?" and int(row["prompt_id"]) == row["answer"] for row in drawn)
    return [row["answer"] for row in drawn]


@pytest.mark.parametrize("buffer", [1, 2, 7, 50])
def test_an_epoch_has_each_row_once_in_a_random_order_within_the_buffer(buffer: int):
    stream = primer(20, buffer)
    epochs = [answers(stream, 20) for _ in range(3)]
    assert all(sorted(epoch) == list(range(20)) for epoch in epochs)
    assert all(answer < place + buffer for epoch in epochs for place, answer in enumerate(epoch))
    if buffer == 1:
        assert epochs == [list(range(20))] * 3
    else:
        assert epochs[0] != epochs[1] and epochs[0] == answers(primer(20, buffer), 20)
        assert epochs[0] != answers(primer(20, buffer, seed=1), 20)


def test_an_endless_source_is_read_as_far_as_it_is_drawn():
    def endless():
        for i in itertools.count():
            read.append(i)
            yield {"prompt": f"{i}?", "answer": i}

    read: list[int] = []
    stream = DataLoadingPrimer(load_prompts(endless(), streaming=10), seed=0)
    assert len(read) == 3
    for drawn in range(1, 30):
        answers(stream, 1)
        assert len(read) == drawn + 9
    assert stream.sampler.counts == {"stream/rows": 38, "stream/epochs": 0}


@pytest.mark.parametrize("drawn", [0, 1, 13, 20, 47])
def test_a_resumed_stream_draws_what_the_first_one_would_have(drawn: int):
    whole, stopped = primer(20, 6), primer(20, 6)
    expected = answers(whole, 60)
    assert answers(stopped, drawn) == expected[:drawn]
    in_flight = [(answer, group) for group, answer in enumerate(expected[:drawn])][-2:]
    with stopped.with_requeued(in_flight):
        state = stopped.state_dict()
    resumed = primer(20, 6, seed=5)
    resumed.load_state_dict(state)
    assert answers(resumed, len(in_flight) + 60 - drawn) == [a for a, _ in in_flight] + expected[drawn:]


def test_a_changed_source_is_refused():
    stream = primer(20, 6)
    answers(stream, 10)
    state = stream.state_dict()
    shorter = DataLoadingPrimer(load_prompts(rows(9), streaming=6))
    other = ({"prompt": f"{i}?", "answer": i + (i == 12)} for i in range(20))
    for changed in (shorter, DataLoadingPrimer(load_prompts(other, streaming=6))):
        with pytest.raises(ValueError, match="the first 15 rows of the stream have changed"):
            changed.load_state_dict(state)
    with pytest.raises(ValueError, match="the state has buffer=6, this stream 7"):
        primer(20, 7).load_state_dict(state)


@pytest.mark.parametrize(
    "options", [{}, {"chat": True}, {"system_prompt": "Add.", "max_prompt_length": 400}, {"max_prompt_length": 1}]
)
def test_rows_are_those_of_a_whole_read(options: dict, tmp_path: Path):
    """From a file and from an ``IterableDataset``, as messages and without long ones, also those after the first."""
    file, tokenizer = tmp_path / "rows.jsonl", build_tokenizer()
    content = [{"question": f"{'9' * (i % 9)}{i}+1?", "number": i} for i in range(30)]
    file.write_text("".join(json.dumps(row) + "\n" for row in content))
    lazy = datasets.IterableDataset.from_generator(lambda: iter(content))
    if options.get("max_prompt_length") == 1:  # half of them
        lengths = map(len, load_prompts(file, tokenizer=tokenizer).encode(tokenizer))
        options = {"max_prompt_length": sorted(lengths)[15]}
    expected = load_prompts(file, tokenizer=tokenizer, **options)
    assert 10 < len(expected) < 30 if "max_prompt_length" in options and len(options) == 1 else len(expected) == 30
    for source in (file, lazy):
        stream = load_prompts(source, streaming=1, tokenizer=tokenizer, **options)
        assert [stream[stream.draw(torch.Generator())] for _ in range(len(expected))] == list(expected)
        assert stream.columns == ("number",) and stream.conversational


def test_held_out_prompts_are_not_drawn():
    stream = load_prompts(rows(10), streaming=4, exclude={"0?", "5?", "9?"})
    generator = torch.Generator().manual_seed(0)
    for _ in range(2):
        assert sorted(stream[stream.draw(generator)]["answer"] for _ in range(7)) == [1, 2, 3, 4, 6, 7, 8]
    with pytest.raises(ValueError, match="rows="):
        load_prompts(rows(3), streaming=4, exclude={"0?", "1?", "2?"})


def test_the_order_of_a_whole_read_is_that_of_before():
    dataset = load_prompts(rows(20))
    order = torch.randperm(20, generator=torch.Generator().manual_seed(3)).tolist()
    assert answers(DataLoadingPrimer(dataset, seed=3), 20) == order
    dataset.in_order = True
    assert answers(DataLoadingPrimer(dataset, seed=3), 40) == list(range(20)) * 2
    with pytest.raises(ValueError, match="shuffle=False cannot be combined with a sampler"):
        DataLoadingPrimer(dataset, sampler=MixtureSampler([20]))


STREAM = ("data.streaming=8", "data.max_prompt_length=40")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["data.streaming=8"], "data.streaming=8 requires data.max_prompt_length"),
        ([*STREAM, "data.examples=2"], "data.streaming=8 cannot be combined with data.examples=2; set it to 0"),
        ([*STREAM, "data.shuffle=false"], "unlike data.shuffle=false; set data.streaming=1 alone"),
        ([*STREAM, "curriculum.rerolls={}"], "curriculum.rerolls needs all prompts and cannot be combined with"),
        ([*STREAM, "plan.epochs=2"], "plan.epochs needs all prompts"),
        ([*STREAM, "task=mixture", "task.mixture={addition:1,countdown:1}"], "task.mixture needs all prompts"),
        (["data.shuffle=false", "curriculum.pass_rate={}"], "curriculum.pass_rate chooses prompts at random"),
        (["plan.epochs=2", "plan.steps=9"], "plan.steps has no effect"),
    ],
)
def test_settings_that_need_all_prompts_are_refused(overrides: list[str], message: str):
    with pytest.raises(ValueError, match=message):
        settings("rloo", *overrides)


@pytest.mark.parametrize(("epochs", "steps"), [(1, 3), (2, 5), (0.1, 1), (0.8, 2)])
def test_epochs_are_whole_steps(epochs: float, steps: int):
    plan = settings("rloo", f"plan.epochs={epochs}", "plan.prompts_per_step=4").plan
    sizes = {"max_prompt_tokens": 9, "max_new_tokens": 4, "context_length": None, "eval_prompts": 1}
    assert plan.make(train_prompts=10, **sizes).steps == steps


@pytest.mark.parametrize(
    "options",
    [
        ["data.streaming=20", "data.max_prompt_length=60", "data.eval_source=held_out.jsonl", "plan.steps=4"],
        ["data.shuffle=false", "plan.epochs=0.5", "data.eval_size=4"],
    ],
    ids=["streaming", "epochs"],
)
def test_a_run_resumes_to_the_same_bits(options, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warm_model):
    monkeypatch.chdir(tmp_path)
    for name, part, size in (("train", "train", 36), ("held_out", "test", 4)):
        content = [json.dumps(row) + "\n" for row in addition_prompts(part, size=size)]
        Path(f"{name}.jsonl").write_text("".join(content))
    common = ["data.source=train.jsonl", f"model.name={warm_model()}", "plan.prompts_per_step=4", *options]
    common += ["plan.num_generations=2", "generate.max_new_tokens=6", "log.loggers=[]", "check.mode=off"]
    run_recipe_here("rloo", *common, "output_dir=whole")
    run_recipe_here("rloo", *common, "output_dir=parts", "stop_after=2")
    run_recipe_here("rloo", *common, "output_dir=parts")
    steps = [json.loads(line) for line in Path("whole/metrics.jsonl").read_text().splitlines()]
    assert len(steps) == 5
    for name in ("metrics.jsonl", "model/model.safetensors"):
        assert (Path("whole") / name).read_bytes() == (Path("parts") / name).read_bytes()
