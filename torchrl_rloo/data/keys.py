"""The names of everything a row carries; no other file spells a key out.

A row is one finished trajectory. Keys are TorchRL's wherever TorchRL has one. ``T`` is the row's own length in tokens
and ``P`` the length of its prompt; rows are ragged and are padded only where a model needs it.

============================  ===========  =======  ==================================================================
key                           shape        dtype    content
============================  ===========  =======  ==================================================================
``QUERY``                     non-tensor   -        the prompt: chat messages or plain text
``GROUP_ID``                  ``[]``       int64    one value per draw of a prompt, unique within a buffer
``GROUP_SIZE``                ``[]``       int64    number of members of the row's group
``POLICY_VERSION``            ``[]``       int64    oldest policy version that sampled a token of the row
``TOKENS``                    ``[T]``      int64    exact ids in order: prompt, action, feedback, action, ...
``PROMPT_TOKENS``             ``[P]``      int64    ids before the first action
``ATTENTION_MASK``            ``[T]``      bool     True on real tokens
``ACTION_MASK``               ``[T]``      bool     True exactly on action tokens
``LOG_PROBS``                 ``[T]``      float32  behaviour log-prob (nats) on action tokens, 0 elsewhere
``REWARD``                    ``[1, 1]``   float32  the trajectory's return; NaN if every reward function abstained
``REWARDS``                   ``[F]``      float32  what each of ``F`` reward functions gave; NaN where it abstained
``DONE``, ``TERMINATED``,     ``[1]``      bool     ``TRUNCATED``: a token, turn or time limit ended the trajectory
``TRUNCATED``
``STOP_REASON``               ``[]``       int64    place in :data:`~torchrl_rloo.data.stop_reasons.STOP_REASONS`
``REF_LOG_PROBS``             ``[T]``      float32  log-prob under the frozen reference on action tokens, 0 elsewhere
``ADVANTAGE``                 ``[1, 1]``   float32  multiplies the policy gradient of every action token of the row;
                              or ``[T,1]``          one value for each token where credit is per turn or per token
============================  ===========  =======  ==================================================================

Optional entries, each written by the part that has a use for it:

============================  ===========  =======  ==================================================================
``PROMPT_ID``                 ``[]``       int64    which prompt of the dataset was drawn, the same in every epoch
``TASK``                      non-tensor   -        name of the task that the prompt is from, in a mixture of several
``RAW_REWARDS``               ``[F]``      float32  ``REWARDS`` before shaping
``LOG_EXTRA``                 non-tensor   -        values by column that reward functions want beside the completion
``TOKEN_REWARDS``             ``[T]``      float32  reward credited at each token; a turn's reward at its last action
``PROXIMAL_LOG_PROBS``        ``[T]``      float32  log-prob under the training model before the first update of a batch
``PROXIMAL_ENTROPY``          ``[T]``      float32  entropy (nats) of the distribution sampled from, in the same pass; 0
                                                    except on action tokens
``SUPPORT_IDS``               ``[K]``      int32    ids that the sampler's truncation left, of all action tokens
``SUPPORT_SIZES``             ``[A]``      int32    how many of those each action token has; ``K`` is their sum
``ACTION_VERSIONS``           ``[A]``      int64    policy version that sampled each action token
``STATE_VALUE``               ``[T, 1]``   float32  value estimate before each action token, 0 elsewhere
``VALUE_TARGET``              ``[T, 1]``   float32  the return that the value estimate should have had
``SAMPLE_WEIGHT``             ``[]``       float32  multiplies the row's loss
``MULTIPLICITY``              ``[]``       int64    how many identical rows this one stands for
``NUM_TOOL_CALLS``            ``[]``       int64    tool calls of the trajectory so far
``TOOLS``                     non-tensor   -        schemas of the tools, which the chat template shows the policy
``PREVIOUS_SEGMENTS``         TensorDict   -        samples of the trajectory before the one in ``TOKENS``, where the
                                                    template rewrote the past (:mod:`torchrl_rloo.data.segments`)
============================  ===========  =======  ==================================================================
"""

QUERY = "query"
COMPLETION = "completion"  # non-tensor: the messages after the prompt, or the completion's text for a text prompt
GROUP_ID = "group_id"
GROUP_SIZE = "group_size"
POLICY_VERSION = "policy_version"
NUM_TURNS = "num_turns"  # int64 []: policy turns taken so far
TRAJECTORY_ID = "trajectory_id"  # int64 []: of a conversation, unique within an environment of this process

TOKENS = ("tokens", "full")
PROMPT_TOKENS = ("tokens", "prompt")
RESPONSE_TOKENS = ("tokens", "response")
ATTENTION_MASK = ("masks", "all_attention_mask")
ACTION_MASK = ("masks", "all_assistant_mask")
LOG_PROBS = ("log_probs", "full")
RESPONSE_TRUNCATED = "response_truncated"  # bool [1]: the last turn hit its token limit before a stop
SEED = "seed"  # optional, int64 []: seed of the row's own random stream

DONE = ("next", "done")
TERMINATED = ("next", "terminated")
TRUNCATED = ("next", "truncated")
STOP_REASON = ("next", "stop_reason")
REWARD = ("next", "reward")
REWARDS = ("next", "rewards")
REF_LOG_PROBS = ("next", "ref_log_probs", "full")
ADVANTAGE = "advantage"
PROMPT_ID = "prompt_id"
TASK = "task"
RAW_REWARDS = ("next", "raw_rewards")
LOG_EXTRA = ("next", "log_extra")
TOKEN_REWARDS = ("next", "token_rewards", "full")
PROXIMAL_LOG_PROBS = ("proximal_log_probs", "full")
PROXIMAL_ENTROPY = ("proximal_entropy", "full")
SUPPORT_IDS = ("support", "ids")
SUPPORT_SIZES = ("support", "sizes")
ACTION_VERSIONS = "action_versions"
STATE_VALUE = "state_value"
VALUE_TARGET = "value_target"
SAMPLE_WEIGHT = "sample_weight"
MULTIPLICITY = "multiplicity"
NUM_TOOL_CALLS = "num_tool_calls"
TOOLS = "tools"
PREVIOUS_SEGMENTS = "earlier"
TOOLS_SEEN = "tools_seen"  # non-tensor: the schemas that the policy saw at its last turn
OWN_MAX_NEW_TOKENS = "own_max_new_tokens"  # int64 []: what MAX_NEW_TOKENS was when the row came to its environment
STARTED = "started"  # optional, float64 []: seconds of time.monotonic() at which the conversation began
MAX_NEW_TOKENS = "max_new_tokens"  # optional, int64 []: the row's own limit on the tokens of this turn

INPUT_MODES = ("tokens", "text", "history")  # what a policy reads: ids alone, or the text or messages beside them

RESERVED = frozenset(
    {QUERY, COMPLETION, GROUP_ID, GROUP_SIZE, POLICY_VERSION, NUM_TURNS, RESPONSE_TRUNCATED, SEED, MAX_NEW_TOKENS}
    | {
        PROMPT_ID,
        "support",
        "proximal_log_probs",
        "proximal_entropy",
        ACTION_VERSIONS,
        STATE_VALUE,
        VALUE_TARGET,
        SAMPLE_WEIGHT,
        MULTIPLICITY,
        TRAJECTORY_ID,
        NUM_TOOL_CALLS,
        PREVIOUS_SEGMENTS,
        TOOLS_SEEN,
        OWN_MAX_NEW_TOKENS,
        STARTED,
        "stop_reason",
        "token_rewards",
    }
    | {"tokens", "masks", "log_probs", "text", "history", "next", "advantage", "reward", "rewards", "ref_log_probs"}
    | {"done", "terminated", "truncated", "_reset", "prompts", "completions", "completion_ids", "raw_rewards"}
    | {"trainer_state", "log_extra", "log_metric"}
)  # names that a dataset's own columns cannot have
