"""Tests of AsyncLLMCollector: the rows of LLMCollector, from independent conversations."""

from __future__ import annotations

import asyncio
import copy
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
from tensordict import TensorDictBase
from torchrl.data import LazyStackStorage, ReplayBuffer, SamplerWithoutReplacement
from torchrl.envs import Transform

from support.waiting import wait_until
from torchrl_rloo.collectors import AsyncLLMCollector, CollectionProgress, LLMCollector
from torchrl_rloo.data import keys, load_prompts
from torchrl_rloo.data.rows import ragged
from torchrl_rloo.data.stop_reasons import stop_reason
from torchrl_rloo.engines.base import EngineDeadError, EngineError
from torchrl_rloo.engines.scripted import ScriptedEngine, ScriptedTurn
from torchrl_rloo.envs import ChatEnv, DatasetChatEnv, event_loop
from torchrl_rloo.envs.transforms import DatasetExhaustedError, FeedbackTransform, KLRewardTransform
from torchrl_rloo.envs.transforms.turn_reward import TurnRewardTransform
from torchrl_rloo.envs.turn_transform import TurnTransform
from torchrl_rloo.modules import TransformersWrapper, vLLMWrapper
from torchrl_rloo.objectives import RLOOLoss
from torchrl_rloo.replay import MCAdvantage
from torchrl_rloo.weight_update import InProcessWeightUpdater, WeightUpdater

PATIENCE = 60.0  # seconds, enough for a slow machine
G = 2  # number of members in a group
PROMPTS = 7


def in_thread(function: Callable[[], object]) -> tuple[threading.Thread, list]:
    """Call a function in a thread. The returned list gets its result or its error."""
    outcome: list = []

    def work() -> None:
        try:
            outcome.append(function())
        except BaseException as error:
            outcome.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread, outcome


def joined(work: tuple[threading.Thread, list]):
    work[0].join(PATIENCE)
    assert not work[0].is_alive(), "it does not end"
    return work[1][0]


def groups_of(rows: TensorDictBase) -> list[int]:
    return [int(row[keys.GROUP_ID]) for row in rows.unbind(0)]


def reasons(rows: TensorDictBase) -> list[str]:
    return [stop_reason(row) for row in rows.unbind(0)]


def words(completions, **_) -> list[float]:
    return [float(sum(len(m["content"]) for m in c)) for c in completions]


def brevity(conversation, row) -> float:
    return -0.25 * len(conversation)


class Seeds(Transform):
    """Seeds that do not depend on the collector."""

    def _reset(self, tensordict: TensorDictBase, tensordict_reset: TensorDictBase) -> TensorDictBase:
        for i, row in enumerate(tensordict_reset.unbind(0)):
            row.set(keys.SEED, torch.tensor(1000 * int(row[keys.GROUP_ID]) + i % G))
        return tensordict_reset


class Gate(TurnTransform):
    """Tool that holds its answer for some groups until it is released. It keeps state for each conversation."""

    def __init__(self, closed: set[int] = frozenset(), turns: int = 2):
        super().__init__()
        self.closed, self.turns = set(closed), turns
        self.waiting: set[int] = set()
        self.state: set[int] = set()

    async def step_row(self, row: TensorDictBase, next_row: TensorDictBase) -> None:
        self.state.add(int(row[keys.TRAJECTORY_ID]))
        group = int(row[keys.GROUP_ID])
        while group in self.closed:
            self.waiting.add(group)
            await asyncio.sleep(0.002)
        if int(next_row[keys.NUM_TURNS]) < self.turns:
            self.chat_env.continue_row(next_row, [{"role": "user", "content": "again"}])

    async def release(self, trajectory_id: int) -> None:
        self.state.discard(trajectory_id)


@pytest.fixture(scope="module")
def data(user: Callable):
    return load_prompts([{"query": user("a" * (i + 1)), "answer": i, "turns": 1 + i % 3} for i in range(PROMPTS)])


@pytest.fixture(scope="module")
def make_env(bpe, data) -> Callable[..., DatasetChatEnv]:
    """Make an environment of two groups of two, whose conversations have one to three turns depending on the prompt."""

    def build(*transforms: Transform, after: tuple = (), rewards=words, shuffle: bool = False, **kwargs):
        if not transforms:
            reply = [{"role": "user", "content": "again"}]
            transforms = [FeedbackTransform(lambda c, row: reply if len(c) < 2 * row["turns"] else None)]
        settings = {"prompts_per_batch": 2, "num_generations": G} | kwargs
        return DatasetChatEnv(
            data, bpe, rewards=rewards, transforms=transforms, after_rewards=after, shuffle=shuffle, **settings
        )

    return build


@pytest.fixture
def make(make_env, bpe) -> Iterator[Callable[..., AsyncLLMCollector]]:
    """Make a collector over a scripted engine. Turns have no latency, and by default three tokens of the prompt."""
    engines: list[ScriptedEngine] = []
    collectors: list[AsyncLLMCollector] = []

    def script(request, index) -> ScriptedTurn:
        ids = [30 + (sum(request.prompt) + k) % 60 for k in range(2)]
        return ScriptedTurn([*ids, bpe.eos_token_id], [-0.5, -1.0, -0.25])

    def build(*transforms, play=script, cls=AsyncLLMCollector, env=None, recover=None, engine=None, **kwargs):
        names = ("rewards", "after", "epochs", "max_seconds", "max_tokens", "prompts_per_batch", "shuffle")
        env = env or make_env(*transforms, **{name: kwargs.pop(name) for name in names if name in kwargs})
        engines.append(engine or ScriptedEngine(play))
        bring_back = recover and partial(recover, engines[-1])
        policy = vLLMWrapper(engines[-1], tokenizer=bpe, generate_kwargs={"max_new_tokens": 6}, recover=bring_back)
        collectors.append(cls(env, policy, **kwargs))
        collectors[-1].engine = engines[-1]
        return collectors[-1]

    yield build
    for collector in collectors:
        collector.shutdown()
    for engine in engines:
        engine.close()


def assert_same(ours: TensorDictBase, theirs: TensorDictBase, tolerance: float = 0.0) -> None:
    """Assert that rows have the same entries, floats up to a tolerance. Trajectory ids may differ."""
    assert len(ours) == len(theirs)
    for one, two in zip(ours.unbind(0), theirs.unbind(0), strict=True):
        assert set(one.keys(True, True)) == set(two.keys(True, True))
        for key in one.keys(True, True):
            a, b = one[key], two[key]
            if key == keys.TRAJECTORY_ID:
                continue
            if isinstance(a, torch.Tensor) and a.is_floating_point():
                torch.testing.assert_close(a, b, rtol=0, atol=tolerance, equal_nan=True)
            elif isinstance(a, torch.Tensor):
                assert torch.equal(a, b), key
            else:
                assert a == b, key


# Rows of both collectors


@pytest.mark.parametrize("engine", ["scripted", "transformers"])
def test_rows_are_those_of_lock_step(engine: str, make: Callable, make_env, random_model, bpe) -> None:
    """Rows with several turns, tools, turn rewards and a KL have the same keys, values and order as in lock-step.

    Only log-probs may differ by rounding, where rows share a batch with others.
    """

    def reply(conversation, row):
        return [{"role": "user", "content": f"again {row['answer']}"}] if len(conversation) < 2 * row["turns"] else None

    def build(cls, **kwargs):
        ref = TransformersWrapper(random_model, tokenizer=bpe, generate=False)
        after = (TurnRewardTransform(brevity), KLRewardTransform(ref, 0.1))
        env = make_env(FeedbackTransform(reply), Seeds(), after=after)
        if engine == "scripted":
            return make(cls=cls, env=env, **kwargs)
        policy = TransformersWrapper(random_model, tokenizer=bpe, generate_kwargs={"max_new_tokens": 6})
        return cls(env, policy, **kwargs)

    lock_step, ours = build(LLMCollector), build(AsyncLLMCollector)
    by_group = {}
    for _ in range(3):
        rows = lock_step.collect()
        by_group |= {group: rows[i : i + G] for i, group in enumerate(groups_of(rows)) if i % G == 0}
        assert_same(ours.collect(), rows, 0.0 if engine == "scripted" else 1e-5)
    for name in ("batches", "dialog_turns", "num_tokens", "policy_version"):
        assert getattr(ours, name) == getattr(lock_step, name)
    ahead = build(AsyncLLMCollector, ahead=4, reward_threads=2)
    rows = ahead.collect()
    for i in range(0, len(rows), G):
        assert_same(rows[i : i + G], by_group[groups_of(rows)[i]], 1e-5)
    ours.shutdown()
    ahead.shutdown()


def test_a_seed_gives_the_same_rows(random_model, bpe, make_env) -> None:
    """Derived seeds are not in the rows, and differ between members, groups and collectors."""

    def collect(seed: int) -> list[TensorDictBase]:
        policy = TransformersWrapper(random_model, tokenizer=bpe, generate_kwargs={"max_new_tokens": 6})
        collector = AsyncLLMCollector(make_env(), policy, seed=seed, max_in_flight=3, max_batch_size=2)
        rows = [collector.collect() for _ in range(2)]
        collector.shutdown()
        return rows

    one, two, other = collect(0), collect(0), collect(1)
    for ours, theirs in zip(one, two, strict=True):
        assert_same(ours, theirs, 1e-5)
    assert keys.SEED not in one[0].keys()
    tokens = [tuple(row[keys.TOKENS].tolist()) for rows in (*one, *other) for row in rows.unbind(0)]
    assert len(set(tokens)) > 0.8 * len(tokens)


@pytest.mark.parametrize("ahead", [0, 1, 5])
def test_every_batch_holds_whole_groups_once(ahead: int, make: Callable) -> None:
    collector = make(ahead=ahead, groups_per_batch=3)
    seen: Counter[int] = Counter()
    for _ in range(4):
        groups = groups_of(collector.collect())
        assert len(groups) == 3 * G and groups == sorted(groups)
        assert set(Counter(groups).values()) == {G} and not set(groups) & set(seen)
        seen.update(groups)
    if not ahead:
        assert set(seen) == set(range(12))


@pytest.mark.parametrize("ahead", [0, 2])
def test_it_ends_with_the_datasets_epochs(ahead: int, make: Callable) -> None:
    """With seven prompts and batches of three, the last prompt is not drawn, as in lock-step."""
    batches = list(make(ahead=ahead, groups_per_batch=3, epochs=1))
    assert [len(rows) for rows in batches] == [3 * G] * 2
    assert sorted(set(g for rows in batches for g in groups_of(rows))) == list(range(6))
    collector = make(ahead=ahead, epochs=2, prompts_per_batch=7)
    assert len(list(collector)) == 2
    with pytest.raises(DatasetExhaustedError):
        collector.collect()
    with pytest.raises(ValueError, match="fewer than the 9 prompts"):
        make(groups_per_batch=9, epochs=1).collect()


def test_the_rest_of_a_collector_works(make: Callable) -> None:
    buffer = ReplayBuffer(storage=LazyStackStorage(100), transform=MCAdvantage(G), batch_size=4)
    seen: list[CollectionProgress] = []
    collector = make(replay_buffer=buffer, postproc=lambda rows: rows, progress=seen.append, total_dialog_turns=7)
    assert len(list(collector)) == 2, "turns of 1, 2, 3 and 1, for two members each"
    assert len(buffer) == 8 and seen[-1] == CollectionProgress(4, 4, 8)
    assert all(p.total == 4 and p.finished <= 4 for p in seen)


@pytest.mark.parametrize(
    "kwargs", [{"groups_per_batch": 0}, {"ahead": -1}, {"max_in_flight": 0}, {"reward_threads": 0}]
)
def test_arguments_are_checked(kwargs: dict, make: Callable, random_model) -> None:
    (name, value), *_ = kwargs.items()
    with pytest.raises(ValueError, match=f"{name}={value}"):
        make(**kwargs)
    with pytest.raises(ValueError, match="ahead=1"):
        make(ahead=1, weight_updater=InProcessWeightUpdater(random_model, random_model))


def test_an_environment_without_a_primer_is_refused(make: Callable, bpe) -> None:
    with pytest.raises(ValueError, match="0 DataLoadingPrimers"):
        make(env=ChatEnv(bpe, batch_size=2))


# Number of groups in flight


def test_begun_groups_are_bounded(make: Callable) -> None:
    """No other group is begun while only stuck groups are left."""
    gate = Gate(closed={1, 2})
    collector = make(gate, ahead=3, groups_per_batch=2)
    delivered = [g for _ in range(3) for g in groups_of(collector.collect())[::G]]
    assert not {1, 2} & set(delivered), "stuck ones hold up no other"
    wait_until(lambda: len(collector._complete) == 1 and gate.waiting == {1, 2})
    assert len(collector._undelivered) == 3 == collector.ahead and len(collector.engine.requests) >= 18
    collecting = in_thread(collector.collect)
    wait_until(lambda: len(collector._undelivered) == 5 or collecting[1])
    rows = joined(collecting)
    assert len(collector._undelivered) == 3
    gate.closed.clear()
    late = [rows, *(collector.collect() for _ in range(2))]
    assert {1, 2} <= {g for rows in late for g in groups_of(rows)}, "those begun first come first"


@pytest.mark.parametrize("most", [1, 3])
def test_conversations_in_flight_are_bounded(most: int, make: Callable) -> None:
    under_way: list[int] = []

    class Count(TurnTransform):
        now = 0

        async def step_row(self, row: TensorDictBase, next_row: TensorDictBase) -> None:
            self.now += 1
            under_way.append(self.now)
            await asyncio.sleep(0.01)
            self.now -= 1

    make(Count(), max_in_flight=most, groups_per_batch=6).collect()
    assert max(under_way) == most


# Failures


def test_a_stuck_tool_ends_at_the_time_limit(make: Callable, bpe) -> None:
    """A tool and a request that never answer end at the time limit. Both rows are complete and their state is freed."""
    gate, stuck = Gate(closed={0}), []

    def play(request, index) -> ScriptedTurn:
        if "aa" in bpe.decode(list(request.prompt)) and not stuck:  # a request of the second group
            stuck.append(index)
            return ScriptedTurn([40], latency=1e6)
        return ScriptedTurn([40])

    collector = make(gate, play=play, max_seconds=4.0)  # far more than the other turns take
    rows = collector.collect()
    assert reasons(rows)[:2] == ["time"] * 2 and Counter(reasons(rows[2:])) == {"time": 1, "answered": 1}
    assert rows[keys.TRUNCATED].flatten().tolist() == [r == "time" for r in reasons(rows)]
    by_turns = dict(zip(reasons(rows[2:]), rows[2:][keys.NUM_TURNS].tolist(), strict=True))
    assert by_turns["answered"] == 2
    assert rows[:2][keys.NUM_TURNS].tolist() == [1, 1], "the turns that the tool was to answer are kept"
    assert collector.counts == {"collector/timed_out": 3} and not gate.state
    wait_until(lambda: not collector.engine._running)


def failing(bpe, fails: Callable[[int, int], bool]) -> Callable:
    """Return a script that fails if ``fails(turn, number)``. Requests are numbered within each turn."""
    seen: Counter[int] = Counter()

    def play(request, index) -> ScriptedTurn:
        turn = list(request.prompt).count(bpe.eos_token_id)  # a prompt has one
        seen[turn] += 1
        error = EngineError("the prompt is too long") if fails(turn, seen[turn]) else None
        return ScriptedTurn([40 + index % 20, bpe.eos_token_id], [-1.0, -0.5], error=error)

    return play


def test_a_failed_turn_ends_its_conversation(make: Callable, make_env, random_model, bpe) -> None:
    """Rewards and the loss accept rows that failed at the first or the second turn."""
    gate = Gate(turns=2)
    ref = TransformersWrapper(random_model, tokenizer=bpe, generate=False)
    env = make_env(gate, after=(TurnRewardTransform(brevity), KLRewardTransform(ref, 0.1)))
    buffer = ReplayBuffer(
        storage=LazyStackStorage(8), sampler=SamplerWithoutReplacement(), transform=MCAdvantage(G), batch_size=4
    )
    collector = make(env=env, play=failing(bpe, lambda turn, number: number == 1), replay_buffer=buffer)
    rows = collector.collect()
    assert Counter(reasons(rows)) == {"failed": 2, "answered": 2} and not gate.state
    assert collector.counts == {"collector/failed_turns": 2}
    turns = sorted(rows[keys.NUM_TURNS].tolist())
    assert turns == [0, 1, 2, 2]
    for row in rows.unbind(0):
        n = int(row[keys.NUM_TURNS])
        assert sum(m["role"] == "assistant" for m in row[keys.COMPLETION]) == n
        assert int(row[keys.ACTION_MASK].sum()) == 2 * n == len(row[keys.ACTION_VERSIONS])
        assert len(row[keys.TOKENS]) == len(row[keys.LOG_PROBS]) == len(row[keys.REF_LOG_PROBS])
        failed, earned = stop_reason(row) == "failed", row[keys.TOKEN_REWARDS]
        assert bool(row[keys.REWARD].isnan()) == failed and bool(row[keys.REWARDS].isnan().all()) == failed
        if failed:
            assert torch.equal(earned.isnan(), row[keys.ACTION_MASK]), "no turn of it is rewarded"
        else:
            assert int(earned.count_nonzero()) == n, "no turn is rewarded twice"
    assert len({frozenset(row.keys(True, True)) for row in rows.unbind(0)}) == 1
    policy = TransformersWrapper(random_model, tokenizer=bpe, generate=False)
    loss = RLOOLoss(policy)(buffer.sample())
    assert loss.loss_objective.isfinite()


def test_failures_in_a_row_end_the_run(make: Callable, bpe) -> None:
    collector = make(play=failing(bpe, lambda turn, number: True), max_consecutive_failures=6)
    assert reasons(collector.collect()) == ["failed"] * 4
    with pytest.raises(RuntimeError, match="6 consecutive turns.*too long") as raised:
        collector.collect()
    assert isinstance(raised.value.__cause__, EngineError)


def test_a_dead_engine_is_brought_back_once(make: Callable, bpe) -> None:
    recovered = []

    def recover(engine: ScriptedEngine) -> None:
        recovered.append(threading.current_thread().name)
        engine.restart()

    collector = make(Gate(turns=2), recover=recover, prompts_per_batch=6)
    collector.engine.kill()
    collecting = in_thread(collector.collect)
    rows = joined(collecting)
    assert reasons(rows) == ["answered"] * 12 and recovered == [collecting[0].name], "by who collects"
    assert not collector.counts


def test_a_death_without_a_way_back_loses_no_group(make: Callable) -> None:
    gate = Gate(closed={1})
    collector = make(gate, ahead=2)
    delivered = groups_of(joined(in_thread(collector.collect)))[::G]
    collector.engine.kill()
    gate.closed.clear()
    for _ in range(2):
        with pytest.raises(EngineDeadError):
            for _ in range(3):  # groups may have completed before
                delivered += groups_of(collector.collect())[::G]
    collector.engine.restart()
    delivered += [g for _ in range(4) for g in groups_of(collector.collect())[::G]]
    assert 1 in delivered and len(delivered) == len(set(delivered))
    collector.cancel()
    assert not gate.state


def test_an_error_of_the_environment_is_raised_and_loses_no_group(make: Callable) -> None:
    class Broken(Transform):
        broken = True

        def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
            if self.broken and int(tensordict[0][keys.GROUP_ID]) == 1:
                raise ZeroDivisionError("a bug")
            return next_tensordict

    broken = Broken()
    collector = make(broken)
    with pytest.raises(ZeroDivisionError, match="a bug"):
        collector.collect()
    broken.broken = False
    assert [g for _ in range(3) for g in groups_of(collector.collect())[::G]] == list(range(6))


def test_a_session_that_does_not_start_holds_up_no_other(make: Callable) -> None:
    started = threading.Event()

    class Sessions(TurnTransform):
        held: set[int] = set()  # noqa: RUF012

        async def step_row(self, row: TensorDictBase, next_row: TensorDictBase) -> None:
            pass

        def _reset(self, tensordict: TensorDictBase, tensordict_reset: TensorDictBase) -> TensorDictBase:
            if int(tensordict_reset[0][keys.GROUP_ID]) == 0:
                assert started.wait(PATIENCE)
            self.held |= set(tensordict_reset[keys.TRAJECTORY_ID].tolist())
            return tensordict_reset

        async def release(self, trajectory_id: int) -> None:
            self.held.discard(trajectory_id)

    sessions = Sessions()
    collector = make(sessions, ahead=1, groups_per_batch=1)
    assert groups_of(collector.collect())[0] == 1 and groups_of(collector.collect())[0] == 2
    assert collector.cancel([0]) == 1
    collector.collect()
    wait_until(lambda: collector._complete or not collector._undelivered)
    started.set()
    wait_until(lambda: not sessions.held, what="a release of what was opened after its group was cancelled")


# Cancellation


def test_groups_can_be_given_up(make: Callable) -> None:
    gate = Gate(closed={1, 2})
    collector = make(gate, groups_per_batch=2, ahead=1)
    collecting = in_thread(collector.collect)
    wait_until(lambda: gate.waiting == {1, 2})
    assert collector.cancel([1, 77]) == 1
    delivered = groups_of(joined(collecting))[::G]
    assert delivered == [0, 3] and collector.counts == {"collector/cancelled_groups": 1}
    assert collector.cancel() == 1 and len(gate.state) == 0
    gate.closed.clear()
    assert set(groups_of(collector.collect())) < {4, 5, 6}


def test_a_group_that_is_cancelled_while_its_state_is_freed_keeps_none(make: Callable) -> None:
    class Slow(Gate):
        releasing, may_release = threading.Event(), threading.Event()

        async def release(self, trajectory_id: int) -> None:
            self.releasing.set()
            while not self.may_release.is_set():
                await asyncio.sleep(0.002)
            await super().release(trajectory_id)

    slow = Slow(turns=1)
    collector = make(slow, groups_per_batch=1)
    collecting = in_thread(collector.collect)
    assert slow.releasing.wait(PATIENCE)
    cancelling = in_thread(collector.cancel)
    wait_until(lambda: not collector._tasks)  # its task was cancelled
    slow.may_release.set()
    assert joined(cancelling) == 1
    joined(collecting)  # another group
    assert not slow.state


def test_an_interrupted_collector_continues(make: Callable) -> None:
    gate = Gate(closed={1})
    collector = make(gate)
    caught = []

    def interrupt(progress: CollectionProgress) -> None:
        if not caught:
            caught.append(progress)
            raise KeyboardInterrupt

    collector.progress = interrupt
    with pytest.raises(KeyboardInterrupt):
        collector.collect()
    gate.closed.clear()
    assert groups_of(collector.collect()) == [0, 0, 1, 1]


def test_shutdown_leaves_nothing_behind(make: Callable) -> None:
    gate = Gate(closed=set(range(9)))
    tasks = lambda: event_loop.run(_count_tasks())  # noqa: E731
    before, threads = tasks(), threading.active_count()

    def play(request, index) -> ScriptedTurn:
        return ScriptedTurn([40], latency=1e6 if index < 2 else 0)

    collector = make(gate, play=play, ahead=4, groups_per_batch=1)
    collecting = in_thread(collector.collect)
    wait_until(lambda: len(gate.state) == 8 and len(collector.engine._running) == 2)
    collector.shutdown()
    assert isinstance(joined(collecting), RuntimeError)
    assert not gate.state and not collector._undelivered
    wait_until(lambda: not collector.engine._running and tasks() == before)
    collector.engine.close()
    wait_until(lambda: threading.active_count() <= threads)
    collector.shutdown()
    assert list(collector) == []


async def _count_tasks() -> int:
    return len(asyncio.all_tasks())


# Versions


class Bump(WeightUpdater):
    """Updater that changes only the version of an engine."""

    def __init__(self, engine: ScriptedEngine):
        self.engine = engine

    def _send(self, version: int) -> None:
        self.engine.version = version


def test_a_row_has_the_oldest_version_that_sampled_it(make: Callable, bpe) -> None:
    """The staleness of a group that lasts over updates is that of its oldest turn."""
    gate = Gate(closed={0})
    collector = make(gate, ahead=1, groups_per_batch=1)
    collector.weight_updater = Bump(collector.engine)
    for version in range(3):
        rows = collector.collect()
        assert groups_of(rows) == [version + 1] * 2 and rows[keys.POLICY_VERSION].tolist() == [version] * 2
        collector.update_policy_weights_()
    gate.closed.clear()
    wait_until(lambda: 0 in collector._complete)
    rows = collector.collect()
    assert groups_of(rows) == [0, 0] and rows[keys.POLICY_VERSION].tolist() == [0, 0]
    assert set(torch.cat(ragged(rows, keys.ACTION_VERSIONS)).tolist()) == {0, 3}


def test_in_process_weights_change_between_batches(random_model, bpe, make_env) -> None:
    """Rows are on-policy under the weights of their version, except for turns after an update."""
    trained, sampler = copy.deepcopy(random_model), copy.deepcopy(random_model)
    policy = TransformersWrapper(sampler, tokenizer=bpe, generate_kwargs={"max_new_tokens": 6})
    env = make_env(Gate(turns=1))
    updater = InProcessWeightUpdater(trained, sampler)
    collector = AsyncLLMCollector(env, policy, ahead=4, weight_updater=updater, sync_every=1)
    weights = {0: copy.deepcopy(trained)}
    for version in range(4):
        for row in (rows := collector.collect()).unbind(0):
            scorer = policy.get_new_version(model=weights[int(row[keys.POLICY_VERSION])], generate=False)
            scored = scorer.score(row.unsqueeze(0))
            behaviour = row[keys.LOG_PROBS][row[keys.ACTION_MASK]]
            torch.testing.assert_close(scored.log_probs.detach()[0], behaviour, rtol=0, atol=1e-5)
        assert int(rows[keys.POLICY_VERSION].max()) <= version
        with torch.no_grad():
            trained.lm_head.bias.add_(torch.linspace(-1, 1, len(trained.lm_head.bias)))
        weights[version + 1] = copy.deepcopy(trained)
    collector.shutdown()


# Checkpoints


def test_draws_that_were_put_back_come_first(make_env) -> None:
    env = make_env(epochs=1)
    primer = env.primer
    drawn = [(int(r[0][keys.PROMPT_ID]), int(r[0][keys.GROUP_ID])) for r in primer.draw_groups(5)]
    primer.requeue(drawn[3:])
    primer.requeue(drawn[:2])
    assert primer.remaining() == 2 + 4
    state = copy.deepcopy(env.state_dict())
    again = [
        (int(row[keys.PROMPT_ID]), int(row[keys.GROUP_ID])) for _ in range(3) for row in env.reset().unbind(0)[::G]
    ]
    assert again == [*drawn[:2], *drawn[3:], (5, 5), (6, 6)] and primer.remaining() == 0
    other = make_env(epochs=1)
    other.load_state_dict(state)
    assert groups_of(other.reset())[::G] == [0, 1]
    with other.primer.with_requeued(drawn[:2]):
        assert other.primer.remaining() == 6
    assert other.primer.remaining() == 4


@pytest.mark.parametrize("cls", [AsyncLLMCollector, LLMCollector])
@pytest.mark.parametrize("stop", range(5))
def test_a_resumed_run_loses_and_repeats_no_group(stop: int, cls: type, make: Callable) -> None:
    """After a stop at any point of a batch, groups in flight are drawn again under the same ids."""
    kwargs = {"epochs": 2, "prompts_per_batch": 2, "shuffle": True}
    expected = {}
    for rows in make(Gate(turns=2), **kwargs):
        expected |= {int(row[keys.GROUP_ID]): int(row[keys.PROMPT_ID]) for row in rows.unbind(0)}
    gate = Gate(closed=set(range(stop, 99)), turns=2)
    collector = make(gate, ahead=stop, **kwargs)
    delivered: list[int] = []
    for _ in range(stop // 2):
        delivered += groups_of(collector.collect())
    collecting = in_thread(collector.collect)
    wait_until(lambda: len(gate.waiting | set(collector._complete)) == 2 + stop)
    state = copy.deepcopy(collector.state_dict())
    collector.shutdown()
    assert isinstance(joined(collecting), RuntimeError)
    resumed = make(Gate(turns=2), cls=cls, **kwargs)
    resumed.load_state_dict(state)
    for rows in resumed:
        delivered += groups_of(rows)
        assert {g: expected[g] for g in groups_of(rows)} == {
            int(row[keys.GROUP_ID]): int(row[keys.PROMPT_ID]) for row in rows.unbind(0)
        }
    assert Counter(delivered) == dict.fromkeys(range(14), G)


def test_a_state_may_be_taken_while_conversations_run(make: Callable) -> None:
    """Each of many states taken in another thread resumes with exactly the undelivered groups."""
    collector = make(Gate(turns=3), ahead=3, epochs=4, prompts_per_batch=4)
    states, delivered = [], []
    done = threading.Event()

    def watch() -> None:
        while not done.is_set():
            with collector._draw_lock:  # keeps deliveries from changing the state
                states.append((set(delivered), collector.batches, copy.deepcopy(collector.state_dict())))
            time.sleep(0.001)

    watching = in_thread(watch)
    for _ in range(7):
        delivered += set(groups_of(collector.collect()))
    done.set()
    assert joined(watching) is None and len(states) > 1
    assert sorted(delivered) == list(range(28))
    for _, batches, state in states[:: max(1, len(states) // 4)]:
        if state["batches"] != batches:
            continue
        resumed = make(Gate(turns=1), epochs=4, prompts_per_batch=4)
        resumed.load_state_dict(state)
        rest = [g for rows in resumed for g in set(groups_of(rows))]
        assert len(rest) == len(set(rest)) and len(rest) in (28 - 4 * batches, 24 - 4 * batches)


def test_loading_a_state_cancels_groups_in_flight(make: Callable) -> None:
    gate = Gate(closed={1})
    collector = make(gate, ahead=2)
    state = copy.deepcopy(collector.state_dict())
    collector.collect()
    collector.load_state_dict(state)
    gate.closed.clear()
    assert set(groups_of(collector.collect())) | set(collector._undelivered) == {0, 1, 2, 3} and not collector.counts
