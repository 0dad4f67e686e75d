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

# Many processes share the cores here: a thread of libtorch that has nothing to do must
# sleep, not spin.
export OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-PASSIVE}

# A test that waits for ever must not hold up all: this is five times what they need.
host=$(rustc -vV | sed -n 's/^host: //p' | tr a-z- A-Z_)
export "CARGO_TARGET_${host}_RUNNER=timeout --foreground --verbose 30m"

# One process for all tests of a program: to load libtorch anew for each test takes
# longer than most tests do.
talk=target/tests.log
run_tests() { # [CARGO FLAG…] [-- FILTER…]
  local flags=() filters=()
  while [ $# -gt 0 ] && [ "$1" != -- ]; do flags+=("$1"); shift; done
  [ $# -eq 0 ] || { shift; filters=("$@"); }
  mkdir -p target
  # A test waits for its processes and for the network most of the time. What those
  # that pass print is kept, not shown.
  cargo test --no-fail-fast "${flags[@]}" -- --test-threads 3 --show-output "${filters[@]}" |
    tee "$talk" | grep --line-buffered -E '^(test |running )' || {
    sed -n '/^failures:/,/^test result/p' "$talk"
    return 1
  }
}

# Says what tests of the run before left out, which the runner hides of those that
# pass. To find nothing is no failure.
skipped() {
  { grep -oE '([^ ]+: )?skipped: .*' "$talk" || [ $? -eq 1 ]; } | sort -u | grep . || echo "nothing"
}

[ -e .libtorch ] || [ -n "${LIBTORCH:-}" ] || part "libtorch" scripts/setup-libtorch.sh
if [ $# -gt 0 ]; then
  run_tests -- "$@"
  exit
fi
part "build with torch" cargo build --tests
part "tests with torch" run_tests
part "what tests left out" skipped
part "build without torch" cargo build --tests --no-default-features
part "tests without torch" run_tests --no-default-features
# What they call was just tested; their own programs must compile as well.
part "fuzz targets" cargo build --locked --manifest-path fuzz/Cargo.toml --target-dir target
part "golden numbers of SmolLM2-135M" scripts/golden-smollm2.sh
printf '\nall parts: %d min\n' $((($(date +%s) - started + 59) / 60))
