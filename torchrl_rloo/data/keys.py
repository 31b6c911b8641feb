"""Names of all entries of a row; no other file spells out a key.

A row is one finished trajectory. Keys are TorchRL's wherever TorchRL has one. ``T`` is the row's length in tokens,
``P`` the length of its prompt and ``A`` its number of action tokens. Rows are ragged and are padded only where a
model needs it.

============================  ===========  =======  ==================================================================
key                           shape        dtype    content
============================  ===========  =======  ==================================================================
``QUERY``                     non-tensor   -        prompt as chat messages or plain text
``GROUP_ID``                  ``[]``       int64    one value per draw of a prompt, unique within a buffer
``GROUP_SIZE``                ``[]``       int64    number of members of the row's group
``POLICY_VERSION``            ``[]``       int64    oldest policy version that sampled a token of the row
``TOKENS``                    ``[T]``      int64    exact ids in order: prompt, action, feedback, action, ...
``PROMPT_TOKENS``             ``[P]``      int64    ids before the first action
``ATTENTION_MASK``            ``[T]``      bool     True on real tokens
``ACTION_MASK``               ``[T]``      bool     True exactly on action tokens
``LOG_PROBS``                 ``[T]``      float32  behavior log-prob (nats) on action tokens, 0 elsewhere
``REWARD``                    ``[1, 1]``   float32  the trajectory's return; NaN if every reward function abstained
``REWARDS``                   ``[F]``      float32  score of each of ``F`` reward functions; NaN where it abstained
``DONE``                      ``[1]``      bool     True if the trajectory ended
``TERMINATED``                ``[1]``      bool     True if the policy or the environment ended the trajectory
``TRUNCATED``                 ``[1]``      bool     True if a limit, a failure or a cancellation ended the trajectory
``STOP_REASON``               ``[]``       int64    index into :data:`~torchrl_rloo.data.stop_reasons.STOP_REASONS`
``REF_LOG_PROBS``             ``[T]``      float32  log-prob under the frozen reference on action tokens, 0 elsewhere
``ADVANTAGE``                 ``[1, 1]``   float32  factor of the policy gradient of every action token of the row;
                                                    ``[T, 1]`` where credit is per turn or per token
============================  ===========  =======  ==================================================================

Optional entries:

============================  ===========  =======  ==================================================================
``IMAGES``                    ``[n, 32]``  uint8    SHA-256 of each image of the row, in the order of its tokens
``PROMPT_ID``                 ``[]``       int64    index of the prompt in the dataset, the same in every epoch
``TASK``                      non-tensor   -        name of the prompt's task in a mixture of tasks
``RAW_REWARDS``               ``[F]``      float32  ``REWARDS`` before shaping
``LOG_EXTRA``                 non-tensor   -        values by column that reward functions log next to the completion
``TOKEN_REWARDS``             ``[T]``      float32  reward credited at each token; a turn's reward at its last action
``PROXIMAL_LOG_PROBS``        ``[T]``      float32  log-prob under the training model before the first update of a batch
``PROXIMAL_ENTROPY``          ``[T]``      float32  entropy (nats) of the sampled distribution, from the same pass, on
                                                    action tokens, 0 elsewhere
``SHARP_LOG_PROBS``           ``[T]``      float32  log-prob under the training model at half the temperature
``SUPPORT_IDS``               ``[K]``      int32    ids that the sampler's truncation kept, for all action tokens
``SUPPORT_SIZES``             ``[A]``      int32    number of those ids of each action token; ``K`` is their sum
``ACTION_VERSIONS``           ``[A]``      int64    policy version that sampled each action token
``SAMPLED_MASK``              ``[T]``      bool     action mask before tokens beyond the bound on staleness left it, in
                                                    rows with token rewards
``STATE_VALUE``               ``[T, 1]``   float32  value estimate before each action token, 0 elsewhere
``VALUE_TARGET``              ``[T, 1]``   float32  regression target of the value estimate
``SAMPLE_WEIGHT``             ``[]``       float32  factor of the row's loss
``MULTIPLICITY``              ``[]``       int64    number of identical rows that this row represents
``ORIGIN``                    ``[]``       int64    where the tokens come from: ``SAMPLED`` (0), ``GREEDY`` (1) or
                                                    ``DEMONSTRATION`` (2)
``ROLE``                      non-tensor   -        name of the role, in rows of conversations of several roles
``ROLE_ID``                   ``[]``       int64    index of the role
``CONVERSATION_GROUP``        ``[]``       int64    ``GROUP_ID`` of the conversation that a role's row is part of
``ROLE_RECORD``               non-tensor   -        roles of the samples, before rows are split by role
``TOKEN_COUNT``               ``[]``       int64    tokens of all samples of a row, in its metadata
``VERSION_COUNTS``            ``[n, 2]``   int64    policy versions, and the number of action tokens that each sampled
``ACTION_COUNT``              ``[]``       int64    action tokens of the sample in ``TOKENS``, in a row's metadata
``SURPRISAL``                 ``[]``       float32  sum over them of minus the behavior log-prob (nats), in its metadata
``KL_TO_REF``                 ``[]``       float32  sum over them of behavior minus reference log-prob, in its metadata
``NUM_TOOL_CALLS``            ``[]``       int64    tool calls of the trajectory so far
``TOOLS``                     non-tensor   -        schemas of the tools that the chat template shows the policy
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
IMAGES = "images"
TRAJECTORY_ID = "trajectory_id"  # int64 []: id of a conversation, unique over processes

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
SHARP_LOG_PROBS = ("sharp_log_probs", "full")
SUPPORT_IDS = ("support", "ids")
SUPPORT_SIZES = ("support", "sizes")
ACTION_VERSIONS = "action_versions"
SAMPLED_MASK = "sampled_mask"
STATE_VALUE = "state_value"
VALUE_TARGET = "value_target"
SAMPLE_WEIGHT = "sample_weight"
MULTIPLICITY = "multiplicity"
ORIGIN = "origin"
SAMPLED, GREEDY, DEMONSTRATION, PLACEHOLDER = range(4)  # values of ORIGIN; the last of a rank without rows
DEMONSTRATION_IDS = "demonstration_ids"  # int64 [n]: turn that is taken instead of a sample, until it is
ROLE = "role"
ROLE_ID = "role_id"
CONVERSATION_GROUP = "conversation_group"
ROLE_RECORD = ("next", "role_record")
TOKEN_COUNT = "token_count"
VERSION_COUNTS = "version_counts"
ACTION_COUNT = "action_count"
SURPRISAL = "surprisal"
KL_TO_REF = "kl_to_ref"
COMPLETION_HASH = "completion_hash"
NGRAM_SKETCH = "ngram_sketch"
REPETITION = "ngram_repetition"
NUM_TOOL_CALLS = "num_tool_calls"
TOOLS = "tools"
PREVIOUS_SEGMENTS = "earlier"
TOOLS_SEEN = "tools_seen"  # non-tensor: the schemas that the policy saw at its last turn
INITIAL_MAX_NEW_TOKENS = "own_max_new_tokens"  # int64 []: the row's MAX_NEW_TOKENS before its first turn
STARTED = "started"  # optional, float64 []: time.monotonic() at which the conversation began, in seconds
MAX_NEW_TOKENS = "max_new_tokens"  # optional, int64 []: the row's limit on the tokens of this turn

INPUT_MODES = ("tokens", "text", "history")  # policy inputs: ids only, or ids with text or messages

# Names that a dataset's columns cannot have.
RESERVED = frozenset(
    {QUERY, COMPLETION, GROUP_ID, GROUP_SIZE, POLICY_VERSION, NUM_TURNS, RESPONSE_TRUNCATED, SEED, MAX_NEW_TOKENS}
    | {
        PROMPT_ID,
        "support",
        "proximal_log_probs",
        "proximal_entropy",
        "sharp_log_probs",
        ACTION_VERSIONS,
        SAMPLED_MASK,
        STATE_VALUE,
        VALUE_TARGET,
        SAMPLE_WEIGHT,
        MULTIPLICITY,
        ORIGIN,
        DEMONSTRATION_IDS,
        ROLE_ID,
        CONVERSATION_GROUP,
        TRAJECTORY_ID,
        IMAGES,
        NUM_TOOL_CALLS,
        TOKEN_COUNT,
        VERSION_COUNTS,
        ACTION_COUNT,
        SURPRISAL,
        KL_TO_REF,
        COMPLETION_HASH,
        NGRAM_SKETCH,
        REPETITION,
        PREVIOUS_SEGMENTS,
        TOOLS_SEEN,
        INITIAL_MAX_NEW_TOKENS,
        STARTED,
        "stop_reason",
        "token_rewards",
    }
    | {"tokens", "masks", "log_probs", "text", "history", "next", "advantage", "reward", "rewards", "ref_log_probs"}
    | {"done", "terminated", "truncated", "_reset", "prompts", "completions", "completion_ids", "raw_rewards"}
    | {"trainer_state", "log_extra", "log_metric"}
)
