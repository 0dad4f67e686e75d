#!/usr/bin/env bash
# The whole loop under fire: people chat all the while, and every few seconds a
# process is killed, stopped, or finds its disk full. Ends with a table of what was
# done to it and what it did, and with the account of every turn.
#
#   scripts/soak.sh            an hour, on a tiny model
#   scripts/soak.sh MINUTES    so many minutes
#   --seed N                   another order of faults (0)
#   --keep                     leave the run folder behind (it is printed)
#
# OCLAW_BIN    an `oclaw` to use instead of building one
#
# Fails (exit code 1) if a chat failed for good, a turn is unaccounted for, no policy
# was made or served after the last fault, or the loop does not drain to exit code 0.
set -euo pipefail
cd "$(dirname "$0")/.."

case ${1:-} in
  -h | --help) sed -n '2,15s/^# \{0,1\}//p' "$0"; exit 0 ;;
esac
if [ -z "${OCLAW_BIN:-}" ]; then
  cargo build --release
  OCLAW_BIN=target/release/oclaw
fi
export OCLAW_BIN
exec python3 scripts/soak/soak.py "$@"
