#!/usr/bin/env bash
# The main job, start to end: chats are captured, judged by what came next,
# turned into an advantage, trained on, and the running server gets the weights.
#
#   scripts/demo.sh          SmolLM2-135M-Instruct (first run downloads and builds)
#   scripts/demo.sh --tiny   a random 0.1 M fixture model; the same path in a minute
#   --keep                   leave the run folder behind (it is printed)
#
# OCLAW_BIN    an `oclaw` to use instead of building one
# OCLAW_CACHE  folder for downloads
set -euo pipefail
cd "$(dirname "$0")/.."

tiny=false keep=false
for word in "$@"; do
  case $word in
    --tiny) tiny=true ;;
    --keep) keep=true ;;
    *) sed -n '2,11s/^# \{0,1\}//p' "$0" >&2; exit 2 ;;
  esac
done

times=()
step() { # NAME COMMAND…
  local name=$1 from=$EPOCHREALTIME
  shift
  printf '\n== %s\n' "$name"
  "$@"
  times+=("$(awk -v a="$from" -v b="$EPOCHREALTIME" -v n="$name" 'BEGIN { printf "%-34s %7.1f s", n, b - a }')")
}

setup_libtorch() { [ -e .libtorch ] || [ -n "${LIBTORCH:-}" ] || scripts/setup-libtorch.sh; }
build() { cargo build --release; }

step "set up libtorch" setup_libtorch
if [ -z "${OCLAW_BIN:-}" ]; then
  step "build" build
  OCLAW_BIN=target/release/oclaw
fi
export OCLAW_BIN
if $tiny; then
  model=fixtures/models/tiny-qwen3 learning_rate=1e-3
else
  step "fetch SmolLM2-135M-Instruct" scripts/fetch-model.sh smollm2-135m
  model=models/SmolLM2-135M-Instruct learning_rate=2e-5
fi

run=$(mktemp -d "${TMPDIR:-/tmp}/oclaw-demo-XXXXXX")
server=
python3 scripts/demo/memory.py "$OCLAW_BIN" "$run/memory" &
watcher=$!
finish() {
  local code=$?
  kill "$watcher" 2>/dev/null || true
  if [ -n "$server" ] && kill -0 "$server" 2>/dev/null; then
    kill -TERM "$server"
    wait "$server" || true
  fi
  if [ $code -ne 0 ] && [ -f "$run/serve.log" ]; then
    printf '\nthe last lines of serve.log:\n' >&2
    tail -20 "$run/serve.log" >&2
  fi
  if $keep || [ $code -ne 0 ]; then printf '\nrun folder: %s\n' "$run"; else rm -rf "$run"; fi
  exit $code
}
trap finish EXIT

free_port() { python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])'; }
front=http://127.0.0.1:$(free_port)
engine=http://127.0.0.1:$(free_port)

serve() {
  "$OCLAW_BIN" serve --model "$model" --listen "${front#http://}" --engine-listen "${engine#http://}" \
    --dtype f32 --spool "$run/turns" --shard-age 1s -v 2>"$run/serve.log" &
  server=$!
  for _ in $(seq 600); do
    python3 scripts/demo/client.py ready "$front" && return 0
    kill -0 "$server" 2>/dev/null || { echo "the server died" >&2; return 1; }
    sleep 0.1
  done
  echo "the server is not ready after a minute" >&2
  return 1
}

rows_on_disk() { # COUNT
  for _ in $(seq 300); do
    [ "$("$OCLAW_BIN" view --json "$run/turns" 2>/dev/null | wc -l)" -ge "$1" ] && return 0
    sleep 0.1
  done
  echo "fewer than $1 rows in $run/turns" >&2
  return 1
}

converse() {
  python3 scripts/demo/client.py chat "$front" "demo-" | tee "$run/chat.log"
  turns=$(awk 'END { print $3 }' "$run/chat.log")
  rows_on_disk "$turns"
  "$OCLAW_BIN" lint "$run/turns"
  "$OCLAW_BIN" view "$run/turns" -n 30
}

# Runs one stage of the pipe and notes what it cost. Stages run side by side, so
# only the seconds of processor are its own.
stage() { # COMMAND ARGUMENT…
  local TIMEFORMAT="$1 %R %U %S"
  { time "$OCLAW_BIN" "$@" 2>&3; } 3>&2 2>>"$run/costs"
}

annotate() {
  stage judge --rules "$run/turns" |
    stage hint --from-feedback |
    stage teacher-lp --topk 0 --model "$model" |
    stage advantage --estimator combine |
    tee "$run/batch.arrow" |
    stage train --estimator combine --model "$model" --lr "$learning_rate" --out "$run/policy" --metrics "$run/metrics.jsonl"
  cat "$run/metrics.jsonl"
}

score() { # WHEN
  "$OCLAW_BIN" view --json "$run/batch.arrow" >"$run/batch.jsonl"
  python3 scripts/demo/client.py score "$engine" "$run/batch.jsonl" "$run/$1.json"
}

sync() { "$OCLAW_BIN" sync-weights "$run/policy/latest" --engine "$engine" --proxy "$front"; }

ask_again() {
  python3 scripts/demo/client.py again "$front"
  rows_on_disk $((turns + 2))
  "$OCLAW_BIN" view "$run/turns" --json | python3 -c '
import collections, json, sys
rows = [json.loads(line) for line in sys.stdin]
versions = collections.Counter((row["weight_version"], row["session_id"] == "after-sync") for row in rows)
for (version, new), count in sorted(versions.items()):
    print(f"  weight version {version}: {count:3} rows ({'"'new session'"' if new else '"'before the sync'"'})")
assert all(row["weight_version"] == ("1" if row["session_id"] == "after-sync" else "0") for row in rows), versions
'
}

compare() { python3 scripts/demo/client.py moved "$run/before.json" "$run/after.json"; }

turns=0
step "start the server" serve
step "hold the conversations" converse
step "judge, hint, teacher, advantage, train" annotate
step "score the answers, old weights" score before
step "sync the weights" sync
step "score the answers, new weights" score after
step "ask again" ask_again
step "did the answers move the right way" compare

printf '\n== time per step\n'
printf '%s\n' "${times[@]}"
printf '\n== the stages of the pipe\n'
awk '{ printf "%-34s %7.1f s of processor, there for %.1f s\n", $1, $3 + $4, $2 }' "$run/costs"

# Set-up, build and download are not the main job.
setup='^(set up|build|fetch)'
printf '%s\n' "${times[@]}" | grep -Ev "$setup" |
  awk '{ sum += $(NF - 1) } END { printf "\nthe main job took %.1f s in all\n", sum }'
kill "$watcher"
wait "$watcher" || true
memory=$(cat "$run/memory")
echo "all oclaw processes together held at most $memory MiB"
if [ "$memory" -ge 6144 ]; then
  echo "that is more than 6 GiB" >&2
  exit 1
fi
