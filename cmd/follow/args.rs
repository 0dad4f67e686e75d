//! The flags of a follower.

use std::path::{Path, PathBuf};
use std::time::Duration;

use oclaw::store::Address;

use crate::report::Failure;
use crate::units;

/// How a folder is followed.
#[derive(clap::Args, Debug)]
#[command(next_help_heading = "Following a folder")]
pub(crate) struct FollowArgs {
    /// Do the shards of this folder (or s3://…) as they come, until a signal
    #[arg(long, value_name = "FOLDER")]
    pub(crate) follow: Option<PathBuf>,
    /// How often to look; what failed waits twice as long each time, a minute at most
    #[arg(long, value_name = "TIME", default_value = "2s", value_parser = interval, requires = "follow")]
    pub(crate) poll: Duration,
    /// Do the shards that are there, then end
    #[arg(long, requires = "follow")]
    pub(crate) once: bool,
    /// Tries of a shard before it is listed in `failed.jsonl`
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..), requires = "follow")]
    pub(crate) shard_tries: u32,
}

/// Reads a time to wait that is more than none.
pub(crate) fn interval(text: &str) -> Result<Duration, String> {
    match units::duration(text)? {
        Duration::ZERO => Err("wanted a time above 0".to_owned()),
        time => Ok(time),
    }
}

impl FollowArgs {
    /// Returns the folder to follow, which must be there.
    pub(crate) fn folder(&self) -> Result<Option<&Path>, Failure> {
        match &self.follow {
            Some(folder) if !Address::is(folder) && !folder.is_dir() => {
                let problem = format!("there is no folder `{}` to follow", folder.display());
                Err(Failure::usage(problem).hint("make it, if its shards are still to come"))
            }
            folder => Ok(folder.as_deref()),
        }
    }
}
