"""Methods and step options of the recipe, and settings that it refuses."""

from __future__ import annotations

import subprocess
import sys
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from tensordict import TensorDict

from support.recipes import load_recipe, run_recipe_here, settings
from support.runs import read_jsonl
from torchrl_rloo.cli.config import LogConfig
from torchrl_rloo.cli.fields import iter_settings
from torchrl_rloo.cli.held_out import EvalSet, longest_conversation
from torchrl_rloo.cli.main import recipe_file
from torchrl_rloo.data.rows import PACKINGS
from torchrl_rloo.embedded import build_model, build_tokenizer
from torchrl_rloo.functional.kl import KL_ESTIMATORS
from torchrl_rloo.modules.loading import QUANTIZATIONS
from torchrl_rloo.objectives import PRESETS
from torchrl_rloo.objectives.kl import PLACES
from torchrl_rloo.rewards.executors import _MODES as MODES
from torchrl_rloo.run.loggers import _BUILDERS as LOGGERS
from torchrl_rloo.run.settings import RESUME
from torchrl_rloo.runtime.lookup import parse_dtype


@pytest.fixture(scope="module")
def overrides(warm_model) -> list[str]:
    return [
        f"model.name={warm_model()}",
        "plan.steps=2",
        "plan.prompts_per_step=4",
        "plan.num_generations=4",
        "plan.minibatches=2",
        "plan.micro_batch_size=6",
        "generate.max_new_tokens=12",
        "kl.coeff=0.01",
        "data.limit=64",
        "data.eval_size=8",
        "eval.every=0",
        "checkpoint.every=0",
        "check.mode=off",
        "reward.functions=[own_rewards.distinct]",  # every group has a signal
    ]


# ------------------------------------------------------------------------------------------------------------- methods
CLIP = {"name": "clip", "low": 0.2}
CONSTANT = {"name": "constant", "length": 12}  # the longest completion
WHITEN = {"name": "whiten", "groups": 4}  # over all groups of a step
METHODS = {  # estimator, normalization of advantages, ratio, surrogate, aggregation, where the method has its KL
    "rloo": ("rloo", None, "none", None, "sequence_sum", "reward"),
    "rloo_trl": ("rloo", None, "sequence", CLIP, "sequence_sum", "reward"),
    "rloo_openrlhf": ("rloo", None, "token", CLIP, "token_mean", "token"),
    "grpo": ("grpo", None, "token", CLIP, "sequence_mean", "loss"),
    "dr_grpo": ("dr_grpo", None, "token", CLIP, CONSTANT, None),
    "dapo": ("grpo", None, "token", CLIP | {"high": 0.28}, "token_mean", None),
    "gspo": ("grpo", None, "sequence_mean", {"name": "clip", "low": 3e-4, "high": 4e-4}, "sequence_mean", None),
    "cispo": ("grpo", None, "token", "cispo", "token_mean", None),
    "reinforce_pp": ("reinforce", WHITEN, "token", CLIP, "token_mean", "token"),
    "reinforce_pp_baseline": ("dr_grpo", WHITEN, "token", CLIP, "token_mean", "loss"),
}


class Reached(Exception):
    """Exception that ends a run when its loss is built."""


@pytest.mark.parametrize("method", METHODS)
def test_a_method_has_its_settings(overrides, importable, tmp_path, monkeypatch, method):
    """The settings of the paper reach advantages, environment and loss, and differ from those of every other method."""
    estimator, normalize, ratio, surrogate, aggregation, kl = METHODS[method]
    recipe, made = load_recipe("rloo"), {}

    def spy(name: str, ends: bool = False):
        original = getattr(recipe, name)

        def call(*args, **kwargs):
            made[name] = kwargs
            if ends:
                raise Reached
            return original(*args, **kwargs)

        monkeypatch.setattr(recipe, name, call)

    spy("MCAdvantage"), spy("RLOOLoss"), spy("KLRewardTransform", ends=True)
    with pytest.raises(Reached):
        run_recipe_here("rloo", *overrides, f"algorithm={method}", "kl.coeff=0.07", f"output_dir={tmp_path}")
    advantage, loss, reward = made["MCAdvantage"], made["RLOOLoss"], made["KLRewardTransform"]
    assert (advantage["estimator"], advantage.get("normalize")) == (estimator, normalize)
    assert (loss["ratio"], loss.get("surrogate"), loss["aggregation"]) == (ratio, surrogate, aggregation)
    where = {
        "reward": reward["kl_to_ref_coeff"],
        "token": advantage["kl"].coeff if "kl" in advantage else 0,
        "loss": loss.get("kl_to_ref_coeff", 0),
    }
    assert where == {"reward": 0, "token": 0, "loss": 0} | {kl or "reward": 0.07}


TRAINED = {
    "packed": ["algorithm=rloo_openrlhf", "train.packing=packed", "kl.coeff=null"],
    "shared_prefix": ["algorithm=grpo", "train.packing=shared_prefix", "kl.coeff=0.1", "kl.target=0.01"],
    "tokens": ["algorithm=cispo", "train.micro_batch_tokens=300"],
    "greedy": ["algorithm=remax"],
    "optimal baseline": ["algorithm=rloo", "advantage.credit=optimal_token", "generate.temperature=0.8"],
    "covariance": ["algorithm=kl_cov", "plan.minibatches=2"],
    "adaptive": [
        *("curriculum.pass_rate={}", "curriculum.adaptive_prompts=2", "kl.target=[0.01,0.02]"),
        "curriculum.refill={oversample: 1.5, mean_range: [0.01, 0.99]}",
    ],
    "proximal": ["algorithm=gspo", "loss.old_log_probs=proximal", "loss.correction=tis"],
}


@pytest.mark.parametrize("options", TRAINED)
def test_options_of_a_step_train(overrides, importable, tmp_path, options):
    more = ["plan.steps=2", "schedule.warmup_steps=1", "checkpoint.every=0", "eval.every=0", *TRAINED[options]]
    run_recipe_here("rloo", *overrides, *more, f"output_dir={tmp_path}")
    steps = read_jsonl(tmp_path / "metrics.jsonl")[1:]
    assert all(r["grad_norm"] > 0 and r["kl_coeff"] > 0 for r in steps)
    assert [name for r in steps for name, value in r.items() if value is None] == []
    adapts = any(setting.startswith("kl.target=") for setting in TRAINED[options])
    assert adapts == (len({r["kl_coeff"] for r in steps}) > 1)
    assert all(r["skipped_zero_adv_batches"] == 0 for r in steps)


# ----------------------------------------------------------------------------------------------------- wrong settings
EARLY = [  # refused before torch is imported
    ("generate.top_q=0.5", "did you mean generate.top_p?"),
    ("plan.num_gen=4", "did you mean plan.num_generations?"),
    ("data.max_promt_length=4", "did you mean data.max_prompt_length?"),
    ("collector.max_in_flihgt=3", "did you mean collector.max_in_flight?"),
    ("environment.max_turn=3", "did you mean environment.max_turns?"),
    ("environment.on_time_limit=abstian", "environment.on_time_limit=abstian: unknown (did you mean 'abstain'"),
    ("algorithm=grppo", "algorithm=grppo: unknown (did you mean 'grpo'"),
    ("algorithm=ppo", "use torchrl-rloo run ppo"),
    ("data.source=nowhere.jsonl", "data.source='nowhere.jsonl' is neither a local file or directory"),
    ("data.eval_source=./other", "data.eval_source='./other' is neither"),
    ("model.name=/no/such/model", "model.name='/no/such/model' is neither"),
    ("sampler.sync_every=2", "sampler.sync_every=2 cannot be combined with sampler.share_weights=true"),
    ("sampler.dtype=bfloat16", "sampler.dtype=bfloat16 and"),
    ("collector.max_staleness=1", "collector.max_staleness=1 samples while the model trains"),
    ("collector.on_stale=drop", "collector.on_stale=drop: unknown"),
    ("collector.max_in_flight=0", "collector.max_in_flight=0 must be a number of at least 1"),
    ("collector.max_in_flight={minimum:9,maximum:8}", "must be a number of at least 1, or"),
    ("collector.max_failed_pushes=0", "collector.max_failed_pushes=0 must be at least 1"),
    ("inference.replicas=2", "inference.replicas=2 requires a pool"),
    ("inference=vllm_process inference.per_replica.devices=[0,1]", "must be a list of inference.replicas=1 values"),
    ("curriculum.refill={max_batch:3}", "did you mean curriculum.refill.max_batches?"),
    ("curriculum.refill.max_batches=many", "curriculum.refill.max_batches=many must be an integer"),
    ("curriculum.refill=4", "curriculum.refill=4 must be null or a mapping of settings"),
    ("curriculum.cache={capacity:8}", "curriculum.cache requires curriculum.refill"),
    ("curriculum.adaptive_prompts=4", "curriculum.adaptive_prompts=4 requires curriculum.pass_rate"),
    ("curriculum.refill={oversample:0.5}", "curriculum.refill.oversample=0.5 must be at least 1"),
    ("plan.steps=0", "plan.steps=0 must be at least 1"),
    ("eval.every=-1", "eval.every=-1 must be at least 0"),
    ("eval.batch_size=0", "eval.batch_size=0 must be at least 1"),
    ("eval.num_samples=2 eval.ks=[1,4]", "[4] are not between 1 and num_samples=2"),
    ("threads=-1", "threads=-1 must be at least 1"),
    ("train.max_grad_norm=0", "train.max_grad_norm=0.0 must be above 0"),
    ("generate.temperature=-1", "generate.temperature=-1.0 must be at least 0"),
    ("generate.top_p=1.5", "generate.top_p=1.5 must be between 0 and 1"),
    ("optimizer.betas=[0.9]", "optimizer.betas=[0.9] must be two numbers"),
    ("optimizer.name=adamv", "optimizer.name=adamv: unknown (did you mean 'adam"),
    ("optimizer.kwargs.lr=1", "optimizer.kwargs has lr; set optimizer.lr"),
    ("schedule.name=steplr", "schedule.name=steplr: unknown (did you mean 'StepLR'"),
    ("schedule.kwargs={warmup_steps:1}", "schedule.kwargs has warmup_steps; set schedule.warmup_steps"),
    ("model.dtype=bfloat16", "set model.dtype=float32 and train.precision=bfloat16"),
    ("model.device=cuda train.offload=[activation]", "train.offload=activation: unknown (did you mean 'activations'?)"),
    ("train.offload=[optimizer]", "train.offload=['optimizer'] has no effect with model.device=cpu"),
    ("model.device=cuda train.offload=[parameters]", "train.offload=[parameters] requires train.parallel=fsdp"),
    (
        "model.device=cuda train.parallel=fsdp train.offload=[parameters,optimizer]",
        "parameters also keeps the optimizer's states on the CPU; remove optimizer",
    ),
    ("reward.clip_range=[1]", "reward.clip_range=[1.0] must be [low, high]"),
    ("reward.clip_range=[0,1] advantage.credit=turn", "reward.clip_range=[0.0, 1.0] has no effect with advantage.cr"),
    ("reward.functions=my_rewards.good", "reward.functions must be a list"),
    ("reward.executor.mode=proces", "reward.executor.mode=proces: unknown (did you mean 'process'?)"),
    ("resume=yes", "resume=yes: unknown; valid: auto, extend, never"),
    ("train.packing=pack", "train.packing=pack: unknown (did you mean 'packed'?)"),
    ("train.parallel=fdsp", "train.parallel=fdsp: unknown (did you mean 'fsdp'?)"),
    ("train.precision=bf16", "train.precision=bf16: unknown"),
    ("train.float32_head=true", "train.float32_head=true has no effect with train.precision=float32"),
    ("train.shard_size=2", "train.shard_size=2 requires train.parallel=fsdp"),
    ("train.parallel=ddp inference=vllm", "runs vLLM in the process of rank 0"),
    ("sampler.offload=true", "sampler.offload=true requires sampler.share_weights=false"),
    ("sampler={offload:true,share_weights:false}", "sampler.offload=true has no effect with model.device=cpu"),
    (
        "sampler={offload:true,share_weights:false} model.device=cuda collector.max_staleness=2",
        "sampler.offload=true cannot be combined with collector.max_staleness=2",
    ),
    ("train.tensor_parallel=0", "train.tensor_parallel=0 must be at least 1"),
    ("train.tensor_parallel=2", "rank 0 cannot sample alone with train.tensor_parallel=2"),
    ("train.tensor_parallel=2 sampler.share_weights=false lora={r:4}", "lora cannot be combined with train.tensor_par"),
    ("train.context_parallel=2 train.parallel=ddp", "train.context_parallel=2 requires train.packing=packed"),
    ("train.context_parallel=2 train.packing=packed", "train.context_parallel=2 requires train.parallel=ddp or fsdp"),
    (
        "train.context_parallel=2 train.packing=packed train.parallel=ddp curriculum={cache:{capacity:8},refill:{}}",
        "curriculum.cache scores groups again on rank 0 and cannot be combined with train.context_parallel=2",
    ),
    ("model.dtype=float33", "model.dtype=float33: unknown (did you mean 'float32'"),
    ("sampler.dtype=fp16 sampler.share_weights=false", "sampler.dtype=fp16: unknown"),
    ("log.loggers=[wandb,tensorbored]", "log.loggers=tensorbored: unknown (did you mean 'tensorboard'?)"),
    ("kl.where=token", "kl.where=token has no effect with kl.coeff=0"),
    ("kl.target=0.1 kl.coeff=0", "kl.target=0.1 has no effect with kl.coeff=0"),
    ("reference.sync_every=8", "reference.sync_every=8 has no effect with kl.coeff=0"),
    ("kl.coeff=0.1 reference.share=1", "reference.share=1.0 has no effect with reference.sync_every=0"),
    ("kl.coeff=0.1 reference.sync_every=8 lora={r:2}", "reference.sync_every=8 cannot be combined with lora"),
    ("kl.coeff=0.1 kl.where=rewards", "kl.where=rewards: unknown (did you mean 'reward'?)"),
    ("lora=16", "lora=16 must be null or a mapping of settings"),
    ("model.quantization=nf4", "model.quantization=nf4 requires an adapter"),
    ("model.quantization=nf lora={r:4}", "model.quantization=nf: unknown (did you mean 'nf4'?)"),
    ("task.mixture=addition", "task.mixture=addition must be null or a mapping of settings"),
    ("inference.engine=vllm", "inference.engine=vllm must be null or a mapping of settings"),
    ("inference.engine.dtype=bfloat16", "choose one as well, such as inference=vllm"),
    ("curriculum.rerolls={max_groups:1,max_share:0.2}", "max_groups cannot be combined with max_share"),
    ("inference.sleep=true", "inference.sleep requires an engine, such as inference=vllm"),
    ("inference.self_test=false", "inference.self_test requires an engine"),
]


@pytest.mark.parametrize(("bad", "message"), EARLY, ids=[bad for bad, _ in EARLY])
def test_a_wrong_setting_is_refused_at_once(bad, message):
    with pytest.raises((ValueError, FileNotFoundError)) as raised:
        settings("rloo", *bad.split())
    assert message in str(raised.value)


@pytest.mark.parametrize("text", ["Think, then {answer}: it's [easy]", "a=b", r"C:\\dir\\", "'quoted, too'"])
def test_text_needs_no_extra_quotes(text):
    cfg = settings("rloo", f"data.system_prompt={text}")
    assert cfg.data.system_prompt == text.strip("'")


def test_rerolls_begin_and_are_limited_in_groups():
    cfg = settings("rloo", "curriculum.rerolls={max_groups:2,start_fraction:0.5}")
    task, rewards = SimpleNamespace(make_sampler=lambda prompts: None), SimpleNamespace(returns=lambda raw: None)
    plan = SimpleNamespace(prompts_per_step=16, num_generations=8, steps=100)
    rerolls = cfg.curriculum.make_sampler(task, range(50), rewards, plan)
    assert (rerolls.spacing, rerolls.start) == (16 / 2, 0.5 * 100 * 16)


def test_a_table_may_show_one_completion_of_each_prompt():
    rows = TensorDict({"prompt_id": torch.tensor([7, 7, 3, 3, 5]), "row": torch.arange(5)}, [5])
    for options, shown in (({}, [0, 1, 2]), ({"unique_prompts": True}, [0, 2, 4])):
        assert LogConfig(samples=3, **options).choose(rows)["row"].tolist() == shown


def test_the_address_of_an_environment_is_no_path():
    assert settings("rloo", "task=openenv", "data.source=http://127.0.0.1:8000").data.source.endswith(":8000")


def test_choices_are_those_of_the_library():
    settings = {s.name: s.limits.replace("`", "").split(", ") for s in iter_settings(load_recipe("rloo").Config)}
    assert set(settings["algorithm"]) == {name for name, preset in PRESETS.items() if not preset.critic}
    assert settings["train.packing"] == [*PACKINGS] and settings["resume"] == [*RESUME]
    assert settings["kl.where"] == [*PLACES] and set(settings["kl.estimator"]) == set(KL_ESTIMATORS)
    assert set(settings["reward.executor.mode"]) == {"inline", *MODES}
    assert set(settings["log.loggers"]) == set(LOGGERS) and settings["model.quantization"] == [*QUANTIZATIONS]
    assert all(parse_dtype(name).is_floating_point for name in settings["model.dtype"])


BAD = [
    ("algorithm=dapo kl.coeff=null kl.where=loss", "the method has no default KL; set kl.coeff"),
    ("reward.functions=[]", "reward.functions=[] leaves nothing to learn from"),
    (
        "environment.max_turns=3",
        "environment.max_turns=3 is ignored by task=addition, whose conversations have one turn",
    ),
    ("task=guessing environment.on_time_limit=abstain", "on_time_limit='abstain' requires max_seconds"),
    ("data.chat=false", "chat=False requires text prompts"),
    ("plan.minibatches=3", "minibatches=3 must divide the rows per step, 4 prompts x 4 completions = 16"),
    ("plan.num_generations=1", "estimator='rloo' compares the rows of a group"),
    ("loss.correction=tis loss.old_log_probs=proximal", "ratio='sequence'"),
    ("plan.prompts_per_step=100000", "prompts_per_step=100000 exceeds the"),
    ("generate.max_new_tokens=5000", "exceeds the model's context of 2048"),
    ("generate.temperature=0", "temperature=0"),
    ("data.eval_source=other/data", "source='embedded' has its own held-out prompts"),
    ("eval.scorer=own_rewards.broken", "scorer broken failed on all 16 completions"),
    ("advantage.estimatr=rloo", "estimatr"),
    ("loss.ratio=tokens", "ratio='tokens'"),
    ("kl.coeff=null algorithm=dapo reference.sync_every=8", "reference.sync_every=8 has no effect: dapo has no KL"),
    ("loss.entropy_coeff={targt:1}", "loss.entropy_coeff.targt is unknown (did you mean 'target'?)"),
    ("loss.clip_epsilon=-0.1", "clip_epsilon"),
    ("reward.weights=[1,2]", "weights=[1.0, 2.0] must have one number for each of 1 reward functions"),
    ("schedule.warmup_steps=100000", "warmup_steps=100000 must be between 0 and"),
    ("schedule.name=StepLR", "schedule 'StepLR': missing 1 required positional argument: 'step_size'"),
    ("optimizer.name=sgd optimizer.betas=[0.9,0.9]", "has no effect with optimizer 'sgd', which has no betas"),
    ("optimizer.name=muon optimizer.kwargs.momentun=0.8", "(did you mean 'momentum'?)"),
]


@pytest.mark.parametrize(("bad", "message"), BAD, ids=[bad for bad, _ in BAD])
def test_impossible_settings_are_refused(overrides, importable, tmp_path, bad, message):
    with pytest.raises((ValueError, RuntimeError, FileNotFoundError)) as raised:
        run_recipe_here("rloo", *overrides, *bad.split(), f"output_dir={tmp_path}")
    assert message in str(raised.value)


def test_a_wrong_setting_is_one_line_and_exit_code_one(tmp_path):
    command = [sys.executable, str(recipe_file("rloo")), "plan.num_gen=4"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr == "error: unknown setting plan.num_gen: did you mean plan.num_generations?\n"


# ------------------------------------------------------------------------------------------------- lengths of engines
SINGLE, OPEN, LIMITED = ([], {}), ([None], {"max_tokens": None}), ([None], {"max_tokens": 80})  # transforms, limits
LENGTHS = [([SINGLE], 52), ([SINGLE, LIMITED], 80), ([LIMITED, SINGLE], 80), ([SINGLE, OPEN], None), ([OPEN], None)]


@pytest.mark.parametrize(("kinds", "longest"), LENGTHS)
def test_the_longest_conversation_counts_feedback_up_to_its_limit(kinds, longest):
    plan, model = SimpleNamespace(longest_row=52), build_model(build_tokenizer(), seed=0)
    sets = {
        str(name): EvalSet(None, None, None, lambda made=transforms: made, chat, 1, [])
        for name, (transforms, chat) in enumerate(kinds)
    }
    assert longest_conversation(plan, sets, model) == longest
    model.config.rope_parameters = {"rope_type": "longrope"}  # of which vLLM chooses the factors by this length
    assert longest_conversation(plan, sets, model) is None


@pytest.mark.parametrize("name", ["vllm", "vllm_process", "vllm_lora", "ray_vllm"])
def test_an_engine_has_the_length_of_the_run_unless_it_is_set(name, monkeypatch):
    monkeypatch.setattr("hydra.utils.instantiate", nullcontext)  # keeps the settings of the engine
    monkeypatch.setattr("torchrl_rloo.ray.start_together", lambda starts: [start() for start in starts])
    place = "inference.engine" + (".make_engine" if name == "ray_vllm" else "")
    for overrides, length in (([], 52), ([f"{place}.max_model_len=80"], 80)):
        cfg = settings("rloo", f"inference={name}", "inference.pool=null", *overrides).inference
        arguments = cfg.make_engine("folder", 52)
        assert arguments.get("make_engine", arguments)["max_model_len"] == length
