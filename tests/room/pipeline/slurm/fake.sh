#!/bin/sh
# sbatch, squeue, sacct and scancel of a cluster in a folder, by the name this is
# called by. Words and exit codes are those of Slurm 23.11. With a file `runs` in the
# folder a job is run at once; else a test says how it is.
folder=@FOLDER@
jobs=$folder/jobs
program=$(basename "$0")
echo "$program" >> "$folder/calls"
[ "${1:-}" != --version ] || { echo "slurm 23.11.4"; exit; }

away() {
  if [ -e "$folder/controller-away" ]; then
    echo "$1 error: Unable to contact slurm controller (connect failure)" >&2
    exit 1
  fi
}

option() { # NAME ARGUMENT…
  wanted=$1
  shift
  while [ $# -gt 0 ]; do
    case $1 in
      "$wanted") echo "$2"; return ;;
      "$wanted"=*) echo "${1#*=}"; return ;;
    esac
    shift
  done
}

put() { # FILE TEXT
  printf %s "$2" > "$1.new" && mv "$1.new" "$1"
}

run() { # NUMBER LOG
  # For good: a shell keeps what it is to give back, and who reads that would wait.
  exec < /dev/null >> "$2" 2>&1
  setsid sh "$jobs/$1.script" &
  put "$jobs/$1.pid" $!
  wait $!
  code=$?
  # What a signal has ended has no exit code.
  if [ $code -ge 128 ]; then put "$jobs/$1.code" "0:$((code - 128))"; else put "$jobs/$1.code" "$code:0"; fi
  if [ $code -eq 0 ]; then put "$jobs/$1.state" COMPLETED; else put "$jobs/$1.state" FAILED; fi
}

case $program in
  sbatch)
    away "sbatch: error: Batch job submission failed: slurm_submit_batch_job"
    number=$((1001 + $(ls "$jobs" | grep -c '\.name$')))
    printf '%s\n' "$@" > "$jobs/$number.arguments"
    cat > "$jobs/$number.script"
    printf %s PENDING > "$jobs/$number.state"
    printf %s 0:0 > "$jobs/$number.code"
    printf %s "$(option --job-name "$@")" > "$jobs/$number.name"
    if [ -e "$folder/runs" ]; then
      put "$jobs/$number.state" RUNNING
      (run "$number" "$(option --output "$@" | sed 's/%%/%/g')") &
    fi
    if [ -e "$folder/sbatch-loses" ]; then
      [ ! -e "$folder/squeue-fails-later" ] || : > "$folder/controller-away"
      echo "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation" >&2
      exit 1
    fi
    echo "$number;cluster"
    ;;
  squeue)
    away slurm_load_jobs
    name=$(option --name "$@")
    number=$(option -j "$@")
    if [ -n "$number" ]; then
      if [ ! -e "$jobs/$number.name" ] || [ -e "$jobs/$number.gone" ]; then
        echo "slurm_load_jobs error: Invalid job id specified" >&2
        exit 1
      fi
      # Without `-t all` only what has not ended is shown, but by its number any.
      state=$(cat "$jobs/$number.state")
      echo "${state%% *}"
      exit
    fi
    columns=$(option -o "$@")
    for file in "$jobs"/*.name; do
      [ -e "$file" ] || continue
      number=$(basename "$file" .name)
      [ -z "$name" ] || [ "$(cat "$file")" = "$name" ] || continue
      [ ! -e "$jobs/$number.gone" ] || continue
      state=$(cat "$jobs/$number.state")
      case $columns in
        %i) echo "$number" ;;
        *) echo "$number|${state%% *}|$(cat "$file")" ;;
      esac
    done
    ;;
  sacct)
    if [ -e "$folder/accounting-lags" ]; then exit 0; fi
    if [ -e "$folder/no-accounting" ]; then
      echo "Slurm accounting storage is disabled" >&2
      exit 1
    fi
    name=$(option --name "$@")
    number=$(option -j "$@")
    if [ -n "$number" ]; then
      echo "$(cat "$jobs/$number.state")|$(cat "$jobs/$number.code")"
      exit
    fi
    for file in "$jobs"/*.name; do
      [ -e "$file" ] && [ "$(cat "$file")" = "$name" ] || continue
      basename "$file" .name
    done
    ;;
  scancel)
    away "scancel: error: Kill job error on job id"
    for last; do :; done
    echo "$*" >> "$jobs/$last.cancelled"
    signal=$(option --signal "$@")
    if [ -n "$signal" ] && [ -e "$jobs/$last.pid" ]; then
      kill -s "$signal" -- "-$(cat "$jobs/$last.pid")" 2> /dev/null || true
    fi
    ;;
esac
