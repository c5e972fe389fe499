#!/bin/sh
# All tests of tests/gpu/serving side by side on two GPUs, a log each: an engine's start is the host's work, and one
# after the other they take longer than a lent machine has. In the environment of assemble.sh:
#
#   sh benchmarks/gpu/vllm/tests.sh FOLDER [SECONDS [NAMES]]
#
# NAMES are of processes below, in one word ("rows kinds_c"); on one GPU those for two are left out, and it says so.
# Ends with 1 if a test failed or did not end in time.
set -eu
folder=$1 limit=${2:-430} chosen=${3:-} tests=tests/gpu/serving
gpus=$(nvidia-smi -L | wc -l)
mkdir -p "$folder"

go() {
  name=$1 devices=$2
  shift 2
  case " ${chosen:-$name} " in *" $name "*) ;; *) return 0 ;; esac
  if [ "$gpus" -lt 2 ]; then
    if [ "$devices" = 0,1 ]; then echo "$name: left out, it takes two GPUs"; return 0; fi
    devices=0
  fi
  (
    export CUDA_VISIBLE_DEVICES="$devices"
    code=0
    timeout "$limit" python3 -m pytest -q -rA --tb=short --show-capture=stderr -p no:cacheprovider "$@" \
      >"$folder/$name.log" 2>&1 || code=$?
    echo "$code" >"$folder/$name.code"
  ) &
}

captured=$tests/test_captured_steps.py
go two 0,1 $tests/test_two_devices.py -k one_device
go two_windows 0,1 $tests/test_two_devices.py -k windows
go logits_a 0 $captured -k "less_is_more and adapter or quest and adapter"
go logits_cluster 0 $captured -k "cluster and adapter"
go rows_cluster 1 $captured -k "cluster and not adapter"
go logits_b 1 $captured -k "lychee_decode or streaming"
go rows 0 $captured -k "not cluster and (preempted or aborted or second_turn)"
go own 1 $captured -k not_ours
go v1 1 $captured -k "not cluster and (runner_v1 or rectified)"
go measured 1 $tests/test_measured_steps.py
kinds=$tests/test_layer_kinds_gpu.py
go kinds_a 0 $kinds -k "adapter and less_is_more"
go kinds_b 1 $kinds -k "adapter and quest"
go kinds_c 0 $kinds -k rectified
bytes=$tests/test_fp8_steps.py
go bytes_a 0 $bytes -k "captured and (quest or tidal or resa)"
go bytes_b 1 $bytes -k "captured and (less_is_more or lychee_decode or streaming)"
go lossless 1 $tests/test_lossless_gpu.py
go bytes_c 1 $bytes -k "not captured"
wait
failed=0
for file in "$folder"/*.code; do
  if [ "$(cat "$file")" != 0 ]; then failed=1; fi
  echo "$(basename "$file" .code): exit code $(cat "$file"), $(tail -n 1 "${file%.code}.log")"
done
exit $failed
