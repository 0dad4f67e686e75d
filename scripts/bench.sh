#!/usr/bin/env bash
# Prints one JSON line per figure. Performance is a ratio against a peer of the
# same run, so each figure stands beside its peer's.
#
#   scripts/bench.sh            every part
#   scripts/bench.sh startup    `oclaw --help` in both builds
#   scripts/bench.sh annotate   `oclaw judge` against a judge that takes 50 ms, beside asyncio + httpx
#   scripts/bench.sh advantage  `oclaw advantage`, Parquet to Parquet, beside pyarrow + numpy and polars
#   scripts/bench.sh serve      `oclaw serve` capturing to disk, beside nginx and FastAPI + httpx
#   scripts/bench.sh score      log-probs of SmolLM2-135M in this process, beside transformers
#   scripts/bench.sh engine     `oclaw engine` with SmolLM2-135M at 1, 8 and 16 streams, beside transformers
#   scripts/bench.sh train      a training step of SmolLM2-135M, beside transformers
#   scripts/bench.sh train-memory  resident memory of `oclaw train` over 500 steps of random lengths
#   scripts/bench.sh train-scale   a training step of SmolLM2-135M at 1, 2 and 4 times the tokens
#
# PROFILE=dev takes the quick build, for a look only: our own code is then not
# optimised, what it calls is.
set -euo pipefail
cd "$(dirname "$0")/.."

profile=${PROFILE:-release}
built=target/$([ "$profile" = dev ] && echo debug || echo "$profile")
parts=("$@")
[ $# -gt 0 ] || parts=(startup annotate advantage serve score engine train train-memory train-scale)

build_both() {
  build_without_torch
  cargo build --quiet --profile "$profile"
  cp "$built/oclaw" target/bench/oclaw
}

build_without_torch() {
  cargo build --quiet --profile "$profile" --no-default-features
  cp "$built/oclaw" target/bench/oclaw-without-torch
}

# Prints the program of a bench target, and builds it first.
bench_target() { # NAME [CARGO FLAG…]
  local name=$1
  shift
  cargo build --quiet --profile "$profile" --bench "$name" --message-format=json "$@" |
    python3 -c 'import json, sys
lines = [json.loads(line) for line in sys.stdin if line.startswith("{")]
print([line["executable"] for line in lines if line.get("executable") and line["target"]["kind"] == ["bench"]][-1])'
}

# A Python under target/ with what a peer needs.
peer_python() { # NAME PACKAGE…
  local name=$1 folder="target/bench/$1"
  shift
  if [ ! -e "$folder/.complete" ]; then
    python3 -m venv "$folder"
    "$folder/bin/pip" install --quiet --disable-pip-version-check "$@" >&2
    touch "$folder/.complete"
  fi
  printf '%s/bin/python3\n' "$folder"
}

mkdir -p target/bench
for part in "${parts[@]}"; do
  case $part in
    startup)
      build_both
      python3 scripts/bench/startup.py target/bench/oclaw target/bench/oclaw-without-torch
      ;;
    annotate)
      build_without_torch
      program=$(bench_target annotate --no-default-features)
      python3 scripts/bench/annotate.py target/bench/oclaw-without-torch "$program" "$(peer_python httpx httpx)"
      ;;
    advantage)
      build_without_torch
      program=$(bench_target advantage --no-default-features)
      python3 scripts/bench/advantage.py target/bench/oclaw-without-torch "$program" "$(peer_python polars numpy polars pyarrow)"
      ;;
    serve)
      build_without_torch
      program=$(bench_target serve --no-default-features)
      python3 scripts/bench/serve.py target/bench/oclaw-without-torch "$program" "$(peer_python fastapi fastapi httpx uvicorn)"
      ;;
    score)
      scripts/fetch-model.sh smollm2-135m
      program=$(bench_target score)
      peer=$(peer_python transformers torch==2.13.0 transformers)
      python3 scripts/bench/score.py "$program" "$peer" models/SmolLM2-135M-Instruct
      ;;
    engine)
      cargo build --quiet --profile "$profile"
      scripts/fetch-model.sh smollm2-135m
      peer=$(peer_python transformers torch==2.13.0 transformers)
      python3 scripts/bench/engine.py "$built/oclaw" "$peer" models/SmolLM2-135M-Instruct
      ;;
    train)
      scripts/fetch-model.sh smollm2-135m
      program=$(bench_target train)
      peer=$(peer_python transformers torch==2.13.0 transformers)
      python3 scripts/bench/train.py "$program" "$peer" models/SmolLM2-135M-Instruct
      ;;
    train-memory)
      cargo build --quiet --profile "$profile"
      program=$(bench_target advantage)
      peer=$(peer_python polars numpy polars pyarrow)
      "$peer" scripts/bench/train_long.py memory "$built/oclaw" "$program" fixtures/models/tiny-qwen3
      ;;
    train-scale)
      scripts/fetch-model.sh smollm2-135m
      program=$(bench_target train)
      python3 scripts/bench/train_long.py scale "$program" models/SmolLM2-135M-Instruct
      ;;
    *)
      echo "bench: no part \`$part\`; parts are: startup, annotate, advantage, serve, score, engine, train, train-memory, train-scale" >&2
      exit 2
      ;;
  esac
done
