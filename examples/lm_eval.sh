#!/usr/bin/env bash
# RULER through lm-evaluation-harness, densely and under a policy, without a network: pip install ".[lm-eval]"
#   examples/lm_eval.sh [MODEL_FOLDER [TASK...]]
set -euo pipefail
export HF_HUB_OFFLINE=1 HF_DATASETS_OFFLINE=1
model=${1:-$(python -c 'from saccade.checkpoints.bundled import model_path; print(model_path())')}
# These six are made of words and numbers: niah_single_1 niah_multikey_2 niah_multikey_3 ruler_vt ruler_cwe ruler_fwe.
tasks=("${@:2}")
for policy in dense tidal:budget=128,reselect=7; do
  # JSON, since the commas of a policy would end an argument of the form pretrained=...,policy=...
  python -m saccade.lm_eval \
    --model saccade \
    --model_args "{\"pretrained\": \"$model\", \"policy\": \"$policy\", \"question_tokens\": 128}" \
    --metadata '{"max_seq_lengths": [2048]}' \
    --tasks "${tasks[@]:-ruler_fwe}" \
    --limit "${LIMIT:-2}" --batch_size 2
done
