//! One push at a time.

use std::fs::{File, TryLockError};
use std::path::Path;
use std::time::{Duration, Instant};

use super::{Error, Policy};

/// Held while a policy is pushed. The system lets go of it when the process
/// ends, however it ends, so that no push leaves a lock behind.
#[derive(Debug)]
pub struct Lock {
    _file: File,
}

impl Lock {
    /// Takes the lock file `.sync.lock` beside the policy folder, waiting up to
    /// `patience` for another push to end.
    pub async fn take(policy: &Policy, patience: Duration) -> Result<Self, Error> {
        const LOOK: Duration = Duration::from_millis(100);
        let path = policy.folder.parent().unwrap_or(Path::new(".")).join(".sync.lock");
        let failed = |source| Error::Lock { path: path.clone(), source };
        let file = File::options().create(true).append(true).open(&path).map_err(failed)?;
        let start = Instant::now();
        loop {
            match file.try_lock() {
                Ok(()) => return Ok(Self { _file: file }),
                Err(TryLockError::Error(source)) => return Err(failed(source)),
                Err(TryLockError::WouldBlock) if start.elapsed() >= patience => {
                    return Err(Error::Locked { path });
                }
                Err(TryLockError::WouldBlock) => tokio::time::sleep(LOOK).await,
            }
        }
    }
}
