//! Progress on stderr, for people only: nothing when stderr is no terminal,
//! with `-q`, or with logging on (the two would tear each other's lines).

use std::io::IsTerminal;
use std::time::Duration;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use crate::common::Context;

/// Opens a bar, or a spinner where the total is not known.
pub(crate) fn bar(context: &Context, label: &str, total: Option<u64>) -> ProgressBar {
    let visible = std::io::stderr().is_terminal() && !context.quiet && context.verbose == 0;
    let target = match visible {
        true => ProgressDrawTarget::stderr_with_hz(15),
        false => ProgressDrawTarget::hidden(),
    };
    let bar = ProgressBar::with_draw_target(total, target);
    let template = match total {
        Some(_) => "{prefix} {bar:30} {pos}/{len} {per_sec} eta {eta} {msg}",
        None => "{prefix} {spinner} {pos} {per_sec} {elapsed} {msg}",
    };
    if let Ok(style) = ProgressStyle::with_template(template) {
        bar.set_style(style);
    }
    bar.set_prefix(label.to_owned());
    // A short run shows nothing at all.
    bar.enable_steady_tick(Duration::from_millis(250));
    bar
}
