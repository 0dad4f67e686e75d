#!/usr/bin/env bash
# How often `oclaw gate` rejects a policy that is equal, over 100 seeds of made-up
# scores each. The figures are printed by the test that bounds them.
set -euo pipefail
cd "$(dirname "$0")/../.."
cargo test --quiet --test oclaw room::replay::false_alarms -- --nocapture | grep '^gate,'
