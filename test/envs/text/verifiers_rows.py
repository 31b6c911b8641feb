"""Program of an environment with verifiers: rows of a taskset, of an environment of several turns, and with a tool."""

import os
import sys
from pathlib import Path

HERE = str(Path(__file__).parent)
sys.path.insert(0, HERE)
os.environ["PYTHONPATH"] = os.pathsep.join([HERE, *sys.path])  # of servers of tools

from support.environment_rows import collect  # noqa: E402
from torchrl_rloo.agents import AgentTransform  # noqa: E402
from torchrl_rloo.agents.verifiers import play  # noqa: E402
from torchrl_rloo.collectors import LLMCollector  # noqa: E402
from torchrl_rloo.data import keys  # noqa: E402
from torchrl_rloo.embedded import build_tokenizer  # noqa: E402
from torchrl_rloo.engines import ScriptedEngine, ScriptedTurn  # noqa: E402
from torchrl_rloo.envs.tasks import load_task  # noqa: E402
from torchrl_rloo.modules import vLLMWrapper  # noqa: E402


def play_script(task, prompts, turns, **settings):
    """Return the row of a conversation with these turns, and its texts."""
    tokenizer = build_tokenizer()

    def script(request, index):
        text = tokenizer.decode(request.prompt)
        said = turns[sum(turn in text for turn in turns)]
        return ScriptedTurn([*tokenizer.encode(said, add_special_tokens=False), tokenizer.eos_token_id])

    transforms = [AgentTransform(play, **settings)]
    env = task.env(prompts, tokenizer, prompts_per_batch=1, num_generations=1, transforms=transforms)
    with ScriptedEngine(script) as engine:
        policy = vLLMWrapper(engine, tokenizer=tokenizer, generate_kwargs={"max_new_tokens": 200, "seed": 0})
        collector = LLMCollector(env, policy)
        row = collector.collect()[0]
        collector.shutdown()
    sampled = row["tokens", "full"][row["masks", "all_assistant_mask"]].tolist()
    expected = [[*tokenizer.encode(turn, add_special_tokens=False), tokenizer.eos_token_id] for turn in turns]
    assert sampled == sum(expected, []), "the row has other tokens than the policy sampled"
    return row, tokenizer.decode(row["tokens", "full"])


def main() -> None:
    task = load_task("verifiers")
    # A taskset: its prompts, rewards and metrics
    train, held_out = task.load(name="verifiers_sums", eval_size=4, limit=12)
    assert (len(train), len(held_out)) == (12, 4)
    assert not {row["data"] for row in train.rows} & {row["data"] for row in held_out.rows}
    rows = collect(task, train)
    assert {row["next", "log_extra"]["turns"] for row in rows.unbind(0)} == {1.0}
    (problem,) = train.select([0]).rows
    a, b = (int(n) for n in problem["query"][1]["content"].removeprefix("What is ").rstrip("?").split("+"))
    for answer, reward in ((a + b, 1.0), (a + b + 1, 0.0)):
        row, text = play_script(task, train.select([0]), [f"\\boxed{{{answer}}}"])
        assert float(row[keys.REWARD]) == reward and problem["query"][0]["content"] in text
    # Several turns, of which every one continues the ids of the last
    games, _ = task.load(name="verifiers_guess", eval_size=2, limit=4, seed=1)
    rows = collect(task, games)
    assert int(rows[keys.NUM_TURNS].max()) > 1, "no conversation had several turns"
    row, text = play_script(task, games.select([0]), ["I think", "I believe", "I hope", "I say", "I hear", "I see"])
    assert abs(float(row[keys.REWARD]) + 6 * 0.05) < 1e-6 and text.count("number?") == 5, text
    # A tool, which a server of verifiers runs
    train, _ = task.load(name="verifiers_sums", eval_size=1, limit=2, arguments={"taskset": {"task": {"tool": True}}})
    call = '<tool_call>\n{"name": "adder_add", "arguments": {"a": 40, "b": 2}}\n</tool_call>'
    row, text = play_script(task, train.select([0]), [call, "I read 42"], parser="hermes")
    assert int(row[keys.NUM_TURNS]) == 2 and "tool\n42" in text, text


if __name__ == "__main__":
    main()
