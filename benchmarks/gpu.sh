#!/usr/bin/env bash
# Builds nothing, downloads nothing: checks and measures saccade on the CUDA device of this machine in under 9 minutes.
#
#   benchmarks/gpu.sh [FOLDER] [OPTIONS]     JSON files in FOLDER (default: $OUT, else results/gpu); gpu.json holds them all
#   benchmarks/gpu.sh FOLDER --sections kernels,decode --minutes 6
#
# PYTHON=/path/to/python chooses the interpreter; it needs torch, triton, transformers and pydantic, and pytest for the checks;
# vLLM's pack (benchmarks/gpu/vllm) brings what a bare machine lacks: source its environment first.
# Exits with 1 if a check or a section failed; every other section's results are there all the same.
set -u
cd "$(dirname "$0")/.."
folder=${OUT:-results/gpu}
if [ $# -gt 0 ] && [ "${1#-}" = "$1" ]; then folder=$1; shift; fi
# As modules of the repository: a script's folder would come first on the path, and its kernels.py hide PyPI's package.
export PYTHONPATH="$PWD/src:$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
exec "${PYTHON:-$(command -v python3 || command -v python)}" -m benchmarks.gpu.run "$folder" "$@"
