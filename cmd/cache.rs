//! `oclaw cache`.

use std::io::Write;
use std::path::PathBuf;
use std::time::Duration;

use oclaw::cache::Cache;

use crate::answers;
use crate::asking;
use crate::common::{Context, Printing as _};
use crate::report::{Exit, Failure};

const DAY: u64 = 24 * 3600;

/// Ages that the answers are counted by.
const AGES: [(u64, &str); 3] =
    [(DAY, "under a day"), (7 * DAY, "under a week"), (30 * DAY, "under 30 days")];

/// Show or remove the answers that judge, hint and teacher-lp keep.
///
/// The answers are in one SQLite file. Nothing in it is needed to read a table;
/// without it, the same question is asked, and paid for, again. An answer's kind
/// is the subcommand that asked; `file` and `engine` are hashes of model files
/// and the models that servers were found to have.
#[derive(clap::Args, Debug)]
pub(crate) struct Args {
    /// File of answers [default: oclaw/answers.sqlite in the user's cache folder]
    #[arg(long, value_name = "FILE")]
    cache: Option<PathBuf>,
    /// Remove answers that are older: 90s, 30m, 12h, 7d, 4w
    #[arg(long, value_name = "TIME", value_parser = age)]
    prune_older_than: Option<Duration>,
    /// Remove all answers
    #[arg(long, conflicts_with = "prune_older_than")]
    clear: bool,
}

fn age(text: &str) -> Result<Duration, String> {
    let wanted = || "wanted a number and s, m, h, d or w".to_owned();
    let unit = text.chars().last().ok_or_else(wanted)?;
    let seconds: u64 = match unit {
        's' => 1,
        'm' => 60,
        'h' => 3600,
        'd' => DAY,
        'w' => 7 * DAY,
        _ => return Err(wanted()),
    };
    let number: u64 = text[..text.len() - 1].parse().map_err(|_| wanted())?;
    Ok(Duration::from_secs(number.checked_mul(seconds).ok_or_else(wanted)?))
}

/// Shows or removes answers.
pub(crate) fn run(args: Args, context: &Context) -> anyhow::Result<Exit> {
    let path = args.cache.or_else(answers::default_path).ok_or_else(|| {
        Failure::usage("no cache folder is known").hint("name the file by `--cache FILE`")
    })?;
    let mut table = asking::closing_table();
    table.add_row(["file".to_owned(), path.display().to_string()]);
    if !path.exists() {
        table.add_row(["entries".to_owned(), "0".to_owned()]);
        writeln!(std::io::stdout(), "{table}").printed()?;
        return Ok(Exit::Done);
    }
    let cache = Cache::open(&path)?;
    let removed = match (args.prune_older_than, args.clear) {
        (Some(age), _) => Some(cache.prune(age)?),
        (None, true) => Some(cache.clear()?),
        (None, false) => None,
    };
    if let Some(removed) = removed {
        context.say(format!("removed {removed} answers"));
    }
    let ages: Vec<_> = AGES.iter().map(|(seconds, _)| Duration::from_secs(*seconds)).collect();
    let groups = cache.groups(&ages)?;
    let sum = |number: fn(&oclaw::cache::Group) -> u64| groups.iter().map(number).sum::<u64>();
    table.add_row(["entries".to_owned(), sum(|group| group.entries).to_string()]);
    table.add_row(["bytes of answers".to_owned(), sum(|group| group.bytes).to_string()]);
    table.add_row(["bytes of the file".to_owned(), std::fs::metadata(&path)?.len().to_string()]);
    for group in &groups {
        let age = AGES.get(group.age).map_or("older", |(_, name)| name);
        let text = format!("{} entries, {} bytes", group.entries, group.bytes);
        table.add_row([format!("{}, {age}", group.kind), text]);
    }
    writeln!(std::io::stdout(), "{table}").printed()?;
    Ok(Exit::Done)
}
