//! Answers removed so that the file no longer spells them.

use rusqlite::params;

use super::{Cache, Error};

impl Cache {
    /// Removes the answers that fit and returns how many there were. Their bytes
    /// are overwritten, the file is written anew and its log emptied. With `dry`
    /// they are only counted.
    pub fn forget(&self, fits: impl Fn(&str) -> bool, dry: bool) -> Result<u64, Error> {
        let (removed, busy) = self.read(|connection| {
            let mut keys: Vec<Vec<u8>> = Vec::new();
            {
                let mut statement = connection.prepare("SELECT key, answer FROM answers")?;
                let mut rows = statement.query([])?;
                while let Some(row) = rows.next()? {
                    if fits(row.get_ref(1)?.as_str().unwrap_or_default()) {
                        keys.push(row.get(0)?);
                    }
                }
            }
            if dry {
                return Ok((keys.len() as u64, false));
            }
            connection.pragma_update(None, "secure_delete", "ON")?;
            {
                let transaction = connection.unchecked_transaction()?;
                let mut delete = transaction.prepare("DELETE FROM answers WHERE key = ?1")?;
                for key in &keys {
                    delete.execute(params![key])?;
                }
                drop(delete);
                transaction.commit()?;
            }
            // Also after an interrupted run, which may have left old pages.
            connection.execute_batch("VACUUM")?;
            let checkpoint = "PRAGMA wal_checkpoint(TRUNCATE)";
            let busy: i64 = connection.query_row(checkpoint, [], |row| row.get(0))?;
            Ok((keys.len() as u64, busy != 0))
        })?;
        match busy {
            false => Ok(removed),
            true => Err(Error::Unusable {
                path: self.path.clone(),
                reason: "another process is using it, so its log still holds old answers"
                    .to_owned(),
            }),
        }
    }
}
