#!/usr/bin/env bash
# Does it learn? Made-up people with a wish talk to a small model in sessions while the
# loop trains on what they say: after how many sessions does the first reply obey, three
# times in a row?
#
#   scripts/prove.sh                 42 runs: six personas, five estimators (hours)
#   scripts/prove.sh --tiny          a random fixture model, a minute; fails if the reward does not rise
#   --personas A,B  --estimators hybrid,none,…  --seeds 1,2,3    other runs
#   --sessions N                     sessions of a run (36)
#   --max-minutes N                  begin no run after so long; the rest is listed as not run
#   --set NAME=VALUE                 another setting of the trainer, as in `lr=1e-4`; may be given several times
#   --out DIR                        where runs are kept (target/prove)
#   --model DIR                      the model (models/SmolLM2-135M-Instruct)
#
# OCLAW_BIN    an `oclaw` to use instead of building one
#
# A run that is finished is kept: the next start goes on with the others. DIR gets
# runs.csv, sessions.csv, rates.csv and report.html, a plot per persona.
set -euo pipefail
cd "$(dirname "$0")/.."

case ${1:-} in
  -h | --help) sed -n '2,20s/^# \{0,1\}//p' "$0"; exit 0 ;;
esac
if [ -z "${OCLAW_BIN:-}" ]; then
  cargo build --release
  OCLAW_BIN=target/release/oclaw
fi
export OCLAW_BIN
exec python3 scripts/prove/prove.py "$@"
