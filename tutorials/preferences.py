"""Preference learning on the CPU: a model that makes errors in addition learns from pairs of good and bad answers.

The model is the embedded default after its warm start on a sloppy teacher. Each pair has one problem and two answers:
the preferred one of a clean teacher, and one of the sloppy teacher. Direct preference optimization (arXiv 2305.18290)
needs no reward and no sampling. It reads the pairs, and the model's log-probs before training as the reference.
"""

import torch
from torchrl.data import LazyStackStorage, ReplayBuffer, SamplerWithoutReplacement

from torchrl_rloo.data import encode_preferences, keys, load_preferences, load_prompts
from torchrl_rloo.embedded import addition_demonstrations, addition_prompts, warm_start
from torchrl_rloo.evaluation import Evaluation
from torchrl_rloo.functional.preference import DPO
from torchrl_rloo.modules import TransformersWrapper, load_model, record_log_probs
from torchrl_rloo.objectives import PreferenceLoss, merge_outputs
from torchrl_rloo.rewards import boxed_accuracy

STEPS, PAIRS_PER_STEP = 60, 32
torch.manual_seed(0)

model, tokenizer = load_model(warm_start(seed=0, log=print))
policy = TransformersWrapper(model, tokenizer=tokenizer, generate_kwargs={"max_new_tokens": 32, "seed": 0})
scorer = policy.get_new_version(generate=False)

# Let both teachers answer the same training problems. Pairs without an error of the sloppy teacher have no preferred
# answer: they are dropped, and listed in `dataset.dropped`.
clean, sloppy = (addition_demonstrations(4096, seed=1, clean=is_clean) for is_clean in (True, False))
dataset = load_preferences(
    [{"chosen": good, "rejected": bad} for good, bad in zip(clean, sloppy, strict=True)],
    "chat_template.argilla_chat",
    drop_bad_rows=True,
)
print(dataset)
rows = encode_preferences(dataset, tokenizer)

# The reference is the model before training. Its log-probs are recorded once, so no second model is needed.
for part in ("chosen", "rejected"):
    record_log_probs(scorer, rows[part], log_probs=keys.REF_LOG_PROBS, micro_batch_size=256)
loss_fn = PreferenceLoss(scorer, DPO(beta=0.1), reference="recorded")
# The learning rate is small, because the loss asks for a gap between the answers and not for likely answers. With 3e-4
# and 120 steps the loss falls to 0.00, but both answers become unlikely. The clean one's log-prob falls from -2 to -28,
# and the model can no longer add.
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-5, betas=(0.9, 0.99), weight_decay=0.0)
buffer = ReplayBuffer(
    storage=LazyStackStorage(len(rows)), sampler=SamplerWithoutReplacement(), batch_size=PAIRS_PER_STEP
)
buffer.extend(rows)

# Evaluate on held-out problems, answered greedily and by sampling. The number in the box must be correct.
evaluate = Evaluation(policy, load_prompts(addition_prompts("test", size=256)), boxed_accuracy)
before, _ = evaluate()

# Train on pairs
for step in range(1, STEPS + 1):
    out = loss_fn(buffer.sample())
    out.loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    if step % 20 == 0 or step == 1:
        metrics = merge_outputs([out])
        print(
            f"step {step}: loss {metrics['loss']:.3f}, preferred the clean answer {metrics['rewards/accuracy']:.0%}, "
            f"log-prob of the clean answer {metrics['log_probs/chosen']:.1f}"
        )

after, _ = evaluate()
for name in ("eval/greedy", "eval/sampled"):
    print(f"{name}, held-out accuracy: {before[name]:.3f} before, {after[name]:.3f} after")
