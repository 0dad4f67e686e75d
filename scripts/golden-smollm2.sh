#!/usr/bin/env bash
# Checks SmolLM2-135M-Instruct against its golden numbers: fetches the weights
# (once, into the cache) and runs the golden tests on them alone. Where the
# weights cannot be downloaded it says so and succeeds, as the tests do.
set -euo pipefail
cd "$(dirname "$0")/.."

cargo build --quiet
fetched=0
OCLAW_BIN=target/debug/oclaw scripts/fetch-model.sh smollm2-135m-q4_1 || fetched=$?
case $fetched in
  0) ;;
  4) echo "skipped: no weights of SmolLM2-135M-Instruct"; exit 0 ;;
  *) exit "$fetched" ;;
esac
models=$(mktemp -d)
trap 'rm -rf "$models"' EXIT
# The golden numbers are of the weights in the GGUF file, not of the hub's.
ln -s "$PWD/models/SmolLM2-135M-Instruct-Q4_1" "$models/smollm2-135m-instruct"
cache="${OCLAW_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/oclaw}"
export OCLAW_SMOLLM2_GGUF="$cache/SmolLM2-135M-Instruct.Q4_1.gguf"
OCLAW_MODELS=$models cargo test --quiet --test oclaw -- golden::model golden::gguf room::serving::greedy --nocapture
