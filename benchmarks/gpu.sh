#!/usr/bin/env bash
# Builds nothing, downloads nothing: checks and measures saccade on the CUDA device of this machine in under 9 minutes.
#
#   bench/gpu.sh [FOLDER] [OPTIONS]     JSON files in FOLDER (default: $OUT, else results/gpu); gpu.json holds them all
#   bench/gpu.sh FOLDER --sections kernels,decode --minutes 6
#
# PYTHON=/path/to/python chooses the interpreter; it needs torch, triton and transformers, and pytest for the checks.
# Exits with 1 if a check or a section failed; every other section's results are there all the same.
set -u
cd "$(dirname "$0")/.."
folder=${OUT:-results/gpu}
if [ $# -gt 0 ] && [ "${1#-}" = "$1" ]; then folder=$1; shift; fi
export PYTHONPATH="$PWD/src:$PWD/bench/gpu${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
exec "${PYTHON:-$(command -v python3 || command -v python)}" bench/gpu/run.py "$folder" "$@"
