#!/usr/bin/env bash
# Makes pictures of a page of `oclaw report`, wide and narrow, light and dark, with
# a headless Chromium (Debian's package `chromium`).
#
#   scripts/report-picture.sh report.html [FOLDER]     FOLDER/report-1200-light.png …
#
# CHROMIUM  the browser to use [default: chromium, chromium-browser, google-chrome]
# HEIGHT    height of the pictures in pixels [default: 3600]
set -euo pipefail

if [ $# -lt 1 ] || [ $# -gt 2 ]; then
  sed -n '2,8s/^# \{0,1\}//p' "$0" >&2
  exit 2
fi
page=$(realpath "$1")
folder=${2:-.}
[ -f "$page" ] || { echo "there is no page \`$1\`" >&2; exit 1; }
mkdir -p "$folder"

browser=${CHROMIUM:-}
for name in chromium chromium-browser google-chrome; do
  [ -n "$browser" ] || browser=$(command -v "$name" || true)
done
if [ -z "$browser" ]; then
  echo "no Chromium is installed: \`apt-get install chromium\`, or name one by CHROMIUM" >&2
  exit 3
fi

profile=$(mktemp -d)
trap 'rm -rf "$profile"' EXIT
# A browser run by root, as in a container, has no sandbox of its own.
sandbox=()
[ "$(id -u)" -ne 0 ] || sandbox=(--no-sandbox)

name=$(basename "$page" .html)
for width in 1200 600; do
  for scheme in light dark; do
    picture=$folder/$name-$width-$scheme.png
    [ $scheme = dark ] && preferred=0 || preferred=1
    "$browser" --headless --disable-gpu "${sandbox[@]}" --user-data-dir="$profile" --hide-scrollbars \
      --no-first-run --window-size="$width,${HEIGHT:-3600}" \
      --blink-settings=preferredColorScheme=$preferred \
      --screenshot="$picture" "file://$page" >"$profile/log" 2>&1 || { cat "$profile/log" >&2; exit 1; }
    [ -s "$picture" ] || { cat "$profile/log" >&2; exit 1; }
    echo "$picture"
  done
done
