#!/usr/bin/env bash
# Prints one JSON line per figure. Performance is a ratio against a peer of the
# same run, so each figure stands beside its peer's.
#
#   scripts/bench.sh            every part
#   scripts/bench.sh startup    `oclaw --help` in both builds
set -euo pipefail
cd "$(dirname "$0")/.."

parts=("$@")
[ $# -gt 0 ] || parts=(startup)

build_both() {
  mkdir -p target/bench
  cargo build --quiet --release --no-default-features
  cp target/release/oclaw target/bench/oclaw-without-torch
  cargo build --quiet --release
  cp target/release/oclaw target/bench/oclaw
}

for part in "${parts[@]}"; do
  case $part in
    startup)
      build_both
      python3 scripts/bench/startup.py target/bench/oclaw target/bench/oclaw-without-torch
      ;;
    *)
      echo "bench: no part \`$part\`; parts are: startup" >&2
      exit 2
      ;;
  esac
done
