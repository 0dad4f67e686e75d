#!/usr/bin/env bash
# Does it learn? Made-up people with a wish talk to a small model in sessions while the
# loop trains on what they say: after how many sessions does the first reply obey, three
# times in a row?
#
#   scripts/prove.sh                 42 runs: six personas, five estimators (hours)
#   scripts/prove.sh --report        only the tables and the page, of the results that are there
#   scripts/prove.sh --tiny          a random fixture model, a minute; fails if the reward does not rise
#   --personas A,B  --estimators hybrid,none,…  --seeds 1,2,3    other runs
#   --sessions N                     sessions of a run (36)
#   --max-minutes N                  begin no run after so long; the rest is listed as not run
#   --lr X  --epochs N  --batch N  --lora-rank R (0: all weights)  --kl-coef X  --distill-clip C
#   --subset student|teacher|overlap  --teacher base|ema  …      other settings; --help lists all
#   --set NAME=VALUE                 a setting of the trainer without a flag here; several times
#   --results FILE.csv               the results (fixtures/personas/runs.csv, which is committed)
#   --out DIR                        what else is kept of runs, and the page (target/prove; --tiny: DIR/tiny)
#   --again                          make runs anew that were made, and empty DIR of earlier ones
#   --scratch DIR                    where a run's policies lie meanwhile, gigabytes (DIR; /dev/shm is quicker)
#   --model DIR                      the model (models/SmolLM2-135M-Instruct)
#
# OCLAW_BIN    an `oclaw` to use instead of building one
#
# A finished run is a row of FILE.csv, a row per session in FILE-sessions.csv; base rates
# are in FILE-rates.csv. A run whose row is there, made with the same settings and
# weights, is not made again, on whatever machine it was made. A DIR whose runs
# had other settings is refused. DIR/report.html has a plot per persona.
set -euo pipefail
cd "$(dirname "$0")/.."

case " $* " in
  *" -h "* | *" --help "*)
    sed -n '2,26s/^# \{0,1\}//p' "$0"
    exec python3 -B scripts/prove/prove.py --help
    ;;
  *" --report "*) ;;
  *)
    if [ -z "${OCLAW_BIN:-}" ]; then
      cargo build --release
      OCLAW_BIN=target/release/oclaw
    fi
    export OCLAW_BIN
    ;;
esac
exec python3 -B scripts/prove/prove.py "$@"
