#!/usr/bin/env bash
# Run the GPU benchmark from a checkout, without an installation or a network:
#
#     bash bench/gpu/visit.sh KIT OUT [options of `moeserve bench gpu`]
#
# KIT is the folder that `make gpu-kit` fills. Python must have torch, triton and transformers. OUT receives gpu.jsonl, and
# kernels.tar.xz if kernels were compiled here. A gpu.jsonl in KIT is continued.
set -eu
kit=$(realpath "$1") out=$(realpath "$2")
shift 2
cd "$(dirname "$0")/../.."
site=$(mktemp -d)
trap 'rm -rf "$site"' EXIT
mkdir "$site/moeserve" # the layout of the installed package
ln -s "$PWD"/moeserve/* "$PWD/bench" "$PWD/triton_kernels" "$site/moeserve/"
python3 -m pip install -q --no-index --no-deps --no-compile --target "$site" "$kit"/*.whl
if [ -f "$kit/kernels.tar.xz" ]; then tar -C "$site" -xJf "$kit/kernels.tar.xz"; fi
mkdir -p "$site/kernels"
if [ -f "$kit/gpu.jsonl" ] && [ ! -f "$out/gpu.jsonl" ]; then cp "$kit/gpu.jsonl" "$out"; fi
touch "$site/began"
cd "$site" # the first place where Python looks for modules
code=0
PYTHONUNBUFFERED=1 PYTHONPATH="$site" python3 -m moeserve.bench.gpu.run --json "$out/gpu.jsonl" --cache "$site/kernels" "$@" || code=$?
if [ -n "$(find "$site/kernels" -name '*.cubin' -newer "$site/began" -print -quit)" ]; then
    tar -C "$site" -cf - kernels | xz -T0 > "$site/kernels.tar.xz"
    mv "$site/kernels.tar.xz" "$out"
fi
exit $code
