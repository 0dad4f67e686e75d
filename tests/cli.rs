//! One file per subcommand: the real binary, its flags, exit codes and words.

mod advantage;
mod attach;
mod budgets;
mod cache;
mod calibrate;
mod chat;
#[cfg(feature = "torch")]
mod check;
mod convert;
mod dialects;
mod engine;
mod engines;
mod explain;
mod export;
mod follow;
mod forget;
mod gate;
mod hint;
mod import;
mod init;
mod judge;
mod judging;
mod lint;
mod r#loop;
mod man;
mod openai_sdk;
mod redact;
mod reference_names;
mod replay;
mod replay_stages;
mod report;
mod serve;
mod settings;
mod simulate;
mod stats;
mod stores;
mod sync_weights;
mod teacher_lp;
mod terminal;
mod train;
#[cfg(feature = "torch")]
mod train_killed;
#[cfg(feature = "torch")]
mod train_terms;
mod view;
