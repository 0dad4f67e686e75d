#!/usr/bin/env bash
# The whole gate before a commit: format, lints in both builds, documentation,
# then every test.
set -euo pipefail
cd "$(dirname "$0")/.."

cargo fmt --check
cargo clippy --all-targets -- -D warnings
cargo clippy --all-targets --no-default-features -- -D warnings
RUSTDOCFLAGS="-D warnings" cargo doc --no-deps --quiet
scripts/test.sh
