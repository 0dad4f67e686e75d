//! One file per subcommand: the real binary, its flags, exit codes and words.

mod advantage;
mod attach;
mod cache;
mod convert;
mod engine;
mod explain;
mod export;
mod follow;
mod forget;
mod gate;
mod hint;
mod import;
mod judge;
mod lint;
mod man;
mod redact;
mod replay;
mod replay_stages;
mod report;
mod serve;
mod settings;
mod stats;
mod sync_weights;
mod teacher_lp;
mod train;
mod view;
