#!/usr/bin/env bash
# Runs every test: the build with torch, the build without it, and, where the
# weights of SmolLM2-135M can be had, the golden numbers of that model too.
#
#   scripts/test.sh            everything
#   scripts/test.sh FILTER…    only tests whose path contains FILTER (torch build)
set -euo pipefail
cd "$(dirname "$0")/.."

started=$(date +%s)
part() { # NAME COMMAND…
  local name=$1 from
  shift
  from=$(date +%s)
  printf '\n== %s\n' "$name"
  "$@"
  printf '== %s: %d min %02d s\n' "$name" $((($(date +%s) - from) / 60)) $((($(date +%s) - from) % 60))
}

run_tests() { # [CARGO FLAG…] [-- FILTER…]
  local flags=() filters=()
  while [ $# -gt 0 ] && [ "$1" != -- ]; do flags+=("$1"); shift; done
  [ $# -eq 0 ] || { shift; filters=("$@"); }
  if cargo nextest --version >/dev/null 2>&1; then
    cargo nextest run --config-file scripts/nextest.toml --no-fail-fast "${flags[@]}" "${filters[@]}"
  else
    cargo test --no-fail-fast "${flags[@]}" -- "${filters[@]}"
  fi
}

# Says what tests of the run before left out, which the runners hide of those that
# pass.
skipped() {
  local talk
  if cargo nextest --version >/dev/null 2>&1; then
    talk=$(cat target/nextest/default/junit.xml)
  elif ! talk=$(cargo test --quiet --test oclaw -- golden slime a_real_ --nocapture 2>&1); then
    printf '%s\n' "$talk"
    return 1
  fi
  # To find nothing is no failure.
  printf '%s\n' "$talk" | { grep -oE '([^ >]+: )?skipped: [^<]*' || [ $? -eq 1 ]; } | sort -u | grep . ||
    echo "nothing"
}

# Names the tests of the run before that took longest, with their seconds.
slowest() {
  cargo nextest --version >/dev/null 2>&1 || return 0
  sed -nE 's/.*<testcase name="([^"]+)".* time="([0-9.]+)".*/\2 \1/p' target/nextest/default/junit.xml |
    sort -rn | sed -n 1,12p
}

[ -e .libtorch ] || [ -n "${LIBTORCH:-}" ] || part "libtorch" scripts/setup-libtorch.sh
if [ $# -gt 0 ]; then
  run_tests -- "$@"
  exit
fi
part "build with torch" cargo build --tests
part "tests with torch" run_tests
part "what tests left out" skipped
part "slowest tests" slowest
part "tests without torch" run_tests --no-default-features
# What they call was just tested; their own programs must compile as well.
part "fuzz targets" cargo build --locked --manifest-path fuzz/Cargo.toml --target-dir target
part "golden numbers of SmolLM2-135M" scripts/golden-smollm2.sh
printf '\nall parts: %d min\n' $((($(date +%s) - started + 59) / 60))
