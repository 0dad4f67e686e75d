#!/usr/bin/env bash
# Makes `.libtorch`, a link to a libtorch 2.13.0 that Cargo builds against.
#
# Taken, in this order: an existing LIBTORCH; a Python torch 2.13; a copy in the
# cache; PyTorch's own CPU archive; the PyPI wheel torch 2.13.0, of which only
# the CPU libraries and the headers are kept (486 MB unpacked).
#
# OCLAW_CACHE   folder for downloads (default: $XDG_CACHE_HOME/oclaw or ~/.cache/oclaw)
set -euo pipefail
cd "$(dirname "$0")/.."

version=2.13.0
cache="${OCLAW_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/oclaw}"
home="$cache/libtorch-$version-cpu"

say() { printf 'setup-libtorch: %s\n' "$*" >&2; }
fail() { say "$1"; printf 'hint: %s\n' "$2" >&2; exit 1; }
usable() { [ -f "$1/include/torch/csrc/api/include/torch/version.h" ] && [ -f "$1/lib/libtorch_cpu.so" ]; }
version_of() {
  sed -n 's/^#define TORCH_VERSION_\(MAJOR\|MINOR\|PATCH\) \([0-9]*\)$/\2/p' \
    "$1/include/torch/headeronly/version.h" "$1/include/torch/csrc/api/include/torch/version.h" 2>/dev/null |
    head -3 | paste -sd.
}
link() {
  if [ -e .libtorch ] && [ ! -L .libtorch ]; then
    fail "'.libtorch' exists and is no link" "move it away and run this again"
  fi
  ln -sfn "$1" .libtorch
  say ".libtorch -> libtorch $(version_of "$1")"
}

command -v c++ >/dev/null || fail "no C++ compiler" "install one: apt-get install build-essential"

if [ -n "${LIBTORCH:-}" ] && usable "$LIBTORCH"; then
  found=$(version_of "$LIBTORCH")
  [ "$found" = "$version" ] || fail "LIBTORCH is version ${found:-unknown}, oclaw wants $version" "unset LIBTORCH to let this script fetch it"
  link "$(cd "$LIBTORCH" && pwd)"
  exit 0
fi

if usable "$home" && [ -f "$home/.complete" ]; then
  link "$home"
  exit 0
fi

python_torch=$(python3 - <<'PY' 2>/dev/null || true
import importlib.util, pathlib
spec = importlib.util.find_spec("torch")
folder = pathlib.Path(spec.origin).parent
if (folder / "version.py").read_text().find("2.13.0") >= 0:
    print(folder)
PY
)
if [ -n "$python_torch" ] && usable "$python_torch" && [ -f "$python_torch/lib/libtorch.so" ]; then
  link "$python_torch"
  exit 0
fi

mkdir -p "$cache/dl"
# One set-up at a time; the second finds the first one's result.
exec 9>"$cache/.setup.lock"
if command -v flock >/dev/null; then flock 9; fi
if usable "$home" && [ -f "$home/.complete" ]; then
  link "$home"
  exit 0
fi
work=$(mktemp -d "$cache/.tmp-libtorch-XXXXXX")
trap 'rm -rf "$work"' EXIT

unpack() { # ZIP FOLDER [PATTERN…]
  python3 - "$@" <<'PY'
import fnmatch, os, sys, zipfile
archive, out, patterns = sys.argv[1], sys.argv[2], sys.argv[3:] or ["*"]
with zipfile.ZipFile(archive) as zipped:
    for name in zipped.namelist():
        if any(fnmatch.fnmatch(name, pattern) for pattern in patterns):
            zipped.extract(name, out)
PY
}

archive="https://download.pytorch.org/libtorch/cpu/libtorch-shared-with-deps-$version%2Bcpu.zip"
if command -v curl >/dev/null && curl -fsL --connect-timeout 5 --max-time 1800 -o "$work/libtorch.zip" "$archive" 2>/dev/null; then
  say "unpacking PyTorch's CPU archive"
  unpack "$work/libtorch.zip" "$work"
  tree="$work/libtorch"
else
  say "PyTorch's archive is out of reach, taking the wheel torch $version by pip (about 530 MB)"
  for wheel in "torch==$version" nvidia-cuda-runtime==13.0.96 nvidia-cuda-cupti==13.0.85; do
    name=$(printf '%s' "${wheel%%==*}" | tr - _)
    ls "$cache/dl/$name-${wheel##*==}"-*.whl >/dev/null 2>&1 ||
      python3 -m pip download --quiet --no-deps --only-binary :all: --dest "$cache/dl" "$wheel" >&2 ||
      fail "cannot download $wheel" "check that pip reaches its index, or set LIBTORCH to a libtorch $version"
  done
  unpack "$cache/dl"/torch-$version-*.whl "$work/wheel" 'torch/include/*' \
    torch/lib/libtorch_cpu.so torch/lib/libc10.so 'torch/lib/libgomp*'
  # libtorch_cpu.so of the wheel names two CUDA libraries; without a GPU they are never called.
  unpack "$cache/dl"/nvidia_cuda_runtime-13.0.96-*.whl "$work/cuda" '*/libcudart.so.13'
  unpack "$cache/dl"/nvidia_cuda_cupti-13.0.85-*.whl "$work/cuda" '*/libcupti.so.13'
  tree="$work/wheel/torch"
  find "$work/cuda" -name '*.so.13' -exec mv {} "$tree/lib/" \;
  # torch-sys links -ltorch; here it is a one-line linker script.
  printf 'INPUT(libtorch_cpu.so)\n' >"$tree/lib/libtorch.so"
fi
usable "$tree" || fail "the archive holds no usable libtorch" "set LIBTORCH to a libtorch $version"
found=$(version_of "$tree")
[ "$found" = "$version" ] || fail "found libtorch ${found:-of unknown version}, wanted $version" "set LIBTORCH to a libtorch $version"
touch "$tree/.complete"
rm -rf "$home"
mv "$tree" "$home"
link "$home"
