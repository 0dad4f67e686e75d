//! The names, each with what it is here.

use super::Fate::{But, Instead, Is, Same, Sets, Words};
use super::{Fate, Name};

const fn name(theirs: &'static str, section: &'static str, fate: Fate) -> Name {
    Name { theirs, section, fate }
}

/// The reference's word for each estimator that is one of ours.
const ESTIMATORS: Fate = Words(
    "estimator",
    &[
        ("grpo", "grpo"),
        ("reinforce_plus_plus", "reinforce++"),
        ("reinforce_plus_plus_baseline", "reinforce++-baseline"),
        ("on_policy_distillation", "opd"),
    ],
);
const LOCAL: &str =
    "a judge that this process runs is `model`, one that answers elsewhere `engine`";
const DEVICES: &str = "say which devices a process has: `gpus = [0, 1]` in `[engines.NAME]` or in \
                       the section of its stage";
const CLIENT: &str = "the client says that with each request, and each row keeps it";
const PARALLEL: &str = "that is Megatron's: `oclaw train` is one process";
const PYTHON: &str = "no Python function is called: each stage is a command, and a table \
                      can be changed between two";
const METRICS: &str = "nothing is sent to a service: `oclaw train --metrics FILE`, `oclaw report`";
const ONE: &[&str] = &["1"];

/// Of a section: what is accepted there. Of "": what is nowhere.
pub(super) const NAMES: &[Name] = &[
    // The advantage.
    name("advantage-estimator", "advantage", ESTIMATORS),
    name("advantage-estimator", "train", ESTIMATORS),
    name("lambd", "advantage", Is("lambda")),
    name("openclaw-combine-w-opd", "advantage", Is("w-opd")),
    name("openclaw-combine-w-opd", "train", Is("w-opd")),
    name("openclaw-combine-w-rl", "advantage", Is("w-rl")),
    name("openclaw-combine-w-rl", "train", Is("w-rl")),
    name(
        "disable-rewards-normalization",
        "advantage",
        Same(&[], "without `group-by` no reward is normalised"),
    ),
    name(
        "disable-rewards-normalization",
        "train",
        Same(&[], "`oclaw advantage` normalises none without `group-by`"),
    ),
    name(
        "disable-grpo-std-normalization",
        "",
        Instead("estimators that take off the mean alone are `rloo` and `reinforce++-baseline`"),
    ),
    name(
        "normalize-advantages",
        "",
        Instead(
            "advantages are whitened over the batch under `estimator = \"reinforce++\"`, and never else",
        ),
    ),
    name(
        "n-samples-per-prompt",
        "advantage",
        Same(ONE, "each turn is an answer of its own; equal requests are one group by `group-by`"),
    ),
    name("n-samples-per-prompt", "train", Same(ONE, "each turn is an answer of its own")),
    name(
        "disable-compute-advantages-and-returns",
        "",
        Instead("top-k distillation alone is `estimator = \"topk-kl\"`"),
    ),
    // The loss.
    name(
        "eps-clip",
        "train",
        But("clip-low", "the upper bound is that of `clip-high`, whether it is given or not"),
    ),
    name("eps-clip-high", "train", Is("clip-high")),
    name("eps-clip-c", "train", Is("dual-clip")),
    name("value-clip", "", Instead("there is no critic")),
    name("use-kl-loss", "train", Same(&[], "the KL counts as soon as `kl-coef` is above 0")),
    name("kl-loss-coef", "train", Is("kl-coef")),
    name("kl-loss-type", "train", Is("kl")),
    name("use-unbiased-kl", "", Instead("`[train] kl-unbiased` weights the KL by the ratio")),
    name(
        "ref-load",
        "",
        Instead("the KL is to the model that training began from: `[train] model`"),
    ),
    name(
        "ref-update-interval",
        "",
        Instead("the KL is to the model that training began from, always"),
    ),
    name("use-rollout-logprobs", "train", Sets("old-log-probs", "rollout")),
    name("use-tis", "train", Sets("importance", "tis")),
    name("tis-clip", "train", Is("importance-high")),
    name("tis-clip-low", "train", Is("importance-low")),
    name(
        "custom-tis-function-path",
        "",
        Instead("the corrections there are: `importance = \"tis\"`, `\"icepop\"`, `\"off\"`"),
    ),
    name("use-opsm", "", Instead("`[train] opsm-delta` turns it on, 1e-4 by default there")),
    name("calculate-per-token-loss", "train", Sets("reduction", "token")),
    name(
        "loss-type",
        "train",
        Same(&["policy_loss"], "a loss of your own has no place; the estimator chooses the terms"),
    ),
    name(
        "custom-loss-function-path",
        "",
        Instead(
            "the reference's combined loss is `estimator = \"combine\"`, its top-k distillation `\"hybrid\"`",
        ),
    ),
    name("distill-topk", "teacher-lp", Is("topk")),
    name("distill-subset-mode", "train", Is("subset")),
    name("get-mismatch-metrics", "train", Same(&[], "`log_prob_gap` is in the metrics, always")),
    // The optimiser and the batch.
    name("optimizer", "train", Same(&["adam"], "AdamW it is")),
    name("adam-beta1", "train", Same(&["0.9"], "it is 0.9")),
    name("adam-beta2", "train", Same(&["0.98"], "it is 0.98")),
    name("adam-eps", "train", Same(&["1e-8", "1e-08"], "it is 1e-8")),
    name("lr-decay-style", "train", Is("schedule")),
    name("clip-grad", "train", Is("clip-norm")),
    name("rollout-batch-size", "train", Is("batch-turns")),
    name("global-batch-size", "train", Is("batch-turns")),
    name("num-steps-per-rollout", "train", Same(ONE, "a batch is one step; `epochs` repeats it")),
    name(
        "train-epochs",
        "train",
        But("epochs", "the batch is gone through so often, not filled with copies"),
    ),
    name(
        "num-rollout",
        "",
        Instead("training goes on as long as there are turns: stop it by a signal"),
    ),
    name(
        "use-dynamic-batch-size",
        "train",
        Same(&[], "sequences are packed up to `tokens-per-pass`"),
    ),
    name("max-tokens-per-gpu", "train", Is("tokens-per-pass")),
    name("log-probs-chunk-size", "", Instead("memory is bounded by `[train] tokens-per-pass`")),
    name("max-weight-staleness", "train", Is("max-staleness")),
    // Folders.
    name("hf-checkpoint", "train", Is("model")),
    name("hf-checkpoint", "serve", Is("model")),
    name("hf-checkpoint", "teacher-lp", Is("tokenizer")),
    name("load", "", Instead("training resumes at OUT/latest by itself")),
    name("save", "train", Is("out")),
    name("save-hf", "train", Is("out")),
    name(
        "save-interval",
        "train",
        Same(ONE, "each step is a policy on the disk; `keep` says how many stay"),
    ),
    name(
        "megatron-to-hf-mode",
        "train",
        Same(&["bridge", "raw"], "policies are Hugging Face folders"),
    ),
    name("prm-teacher-load", "teacher-lp", Is("model")),
    name("save-debug-rollout-data", "", Instead("`oclaw export --to slime` writes these files")),
    name("load-debug-rollout-data", "", Instead("`oclaw import` reads record files")),
    // The judge: the reference's PRM.
    name("prm-enable", "judge", Same(&[], "the judge runs when it is started")),
    name("prm-enable", "hint", Same(&[], "the stage runs when it is started")),
    name("prm-m", "judge", Is("votes")),
    name("prm-m", "hint", Is("votes")),
    name("hint-m", "hint", Is("votes")),
    name("prm-temperature", "judge", Is("temperature")),
    name("prm-temperature", "hint", Is("temperature")),
    name("prm-max-new-tokens", "judge", Is("max-tokens")),
    name("prm-max-new-tokens", "hint", Is("max-tokens")),
    name("prm-max-tokens", "judge", Is("max-tokens")),
    name("prm-max-tokens", "hint", Is("max-tokens")),
    name("prm-model-path", "judge", Is("model")),
    name("prm-model-path", "hint", Is("model")),
    name("prm-host", "", Instead(LOCAL)),
    name("prm-port", "", Instead(LOCAL)),
    name("prm-router-ip", "", Instead(LOCAL)),
    name("prm-router-port", "", Instead(LOCAL)),
    name("teacher-lp-max-concurrency", "teacher-lp", Is("at-once")),
    name("openclaw-opd-teacher-lp-max-concurrency", "teacher-lp", Is("at-once")),
    name("reward-key", "", Instead("the reward is `reward_explicit`, else the judge's `score`")),
    name("rm-url", "", Instead(LOCAL)),
    name(
        "openclaw-eval-mode",
        "",
        Instead("`oclaw judge` scores every turn, whatever the estimator"),
    ),
    // Serving.
    name("update-weights-interval", "loop", Is("weight-sync-interval")),
    name("update-weights-interval", "sync-weights", Is("every")),
    name("rollout-temperature", "", Instead(CLIENT)),
    name("rollout-top-p", "", Instead(CLIENT)),
    name("rollout-top-k", "", Instead(CLIENT)),
    name("rollout-max-response-len", "", Instead(CLIENT)),
    name(
        "rollout-max-context-len",
        "",
        Instead("that is the engine's: `--context-length` in the `command` of `[engines.NAME]`"),
    ),
    name("served-model-name", "", Instead("the name is the engine's; `oclaw serve` passes it on")),
    name("openclaw-record-enabled", "", Instead("every chat is recorded, in `[serve] spool`")),
    name("openclaw-record-file", "", Instead("every chat is recorded, in `[serve] spool`")),
    name(
        "openclaw-prm-record-file",
        "",
        Instead("the judge's texts are in the column `judge_text`"),
    ),
    name("proxy-host", "", Instead("where people chat is `[serve] listen = \"HOST:PORT\"`")),
    name("proxy-port", "", Instead("where people chat is `[serve] listen = \"HOST:PORT\"`")),
    name(
        "sglang-api-key",
        "",
        Instead(
            "the keys of the clients are in the file of `[serve] key-file`, the engine's in `OCLAW_SERVE_KEY`",
        ),
    ),
    // Devices and processes.
    name("num-gpus-per-node", "", Instead(DEVICES)),
    name("actor-num-nodes", "", Instead(PARALLEL)),
    name("actor-num-gpus-per-node", "", Instead(DEVICES)),
    name("rollout-num-gpus", "", Instead(DEVICES)),
    name("rollout-num-gpus-per-engine", "", Instead(DEVICES)),
    name("prm-num-gpus", "", Instead(DEVICES)),
    name("prm-num-gpus-per-engine", "", Instead(DEVICES)),
    name("prm-teacher-num-gpus", "", Instead(DEVICES)),
    name("colocate", "", Instead(DEVICES)),
    name("offload", "", Instead(DEVICES)),
    name("tensor-model-parallel-size", "train", Same(ONE, PARALLEL)),
    name("pipeline-model-parallel-size", "train", Same(ONE, PARALLEL)),
    name("context-parallel-size", "train", Same(ONE, PARALLEL)),
    name("expert-model-parallel-size", "train", Same(ONE, PARALLEL)),
    name("sequence-parallel", "", Instead(PARALLEL)),
    name("recompute-granularity", "", Instead(PARALLEL)),
    name("optimizer-cpu-offload", "", Instead(PARALLEL)),
    // What is no setting here.
    name("rollout-function-path", "", Instead(PYTHON)),
    name("custom-generate-function-path", "", Instead(PYTHON)),
    name("custom-rm-path", "", Instead(PYTHON)),
    name("use-wandb", "", Instead(METRICS)),
    name("use-tensorboard", "", Instead("`[train] tensorboard` is the folder of the event files")),
];

/// Beginnings of names, for what their makers add to daily.
pub(super) const BEGINNINGS: &[(&str, &str)] = &[
    (
        "sglang-",
        "an option of SGLang stands in the `command` of `[engines.NAME]`, without `sglang-`",
    ),
    ("wandb-", METRICS),
];

/// Variables of the reference's scripts that no other program would mean.
pub(super) const VARIABLES: &[&str] = &[
    "OPENCLAW_COMBINE_W_OPD",
    "OPENCLAW_COMBINE_W_RL",
    "OPENCLAW_OPD_TEACHER_LP_MAX_CONCURRENCY",
    "OPENCLAW_RECORD_ENABLED",
    "OPENCLAW_RECORD_FILE",
    "OPENCLAW_PRM_RECORD_FILE",
    "OPENCLAW_EVAL_MODE",
    "PRM_M",
    "PRM_TEMPERATURE",
    "PRM_MAX_NEW_TOKENS",
    "PRM_MAX_TOKENS",
    "PRM_MODEL_PATH",
];
