#!/usr/bin/env bash
# Everything that only a GPU can show, in at most eight minutes on one H200: each kernel's numbers, tokens end to end, and speed.
#
#     benchmarks/gpu_check.sh [FOLDER] [TARGET-DEVICE]      # figures and logs go to FOLDER; the device defaults to h200
#
# Needs torch with CUDA, triton, transformers, cuda-core, pytest and the packages of pyproject.toml, but no network. Where some are
# missing and a folder wheels/ exists, they are installed from it.
set -uo pipefail
cd "$(dirname "$0")/.."
out=${1:-gpu-check}
device=${2:-h200}
python=${PYTHON:-python3}
mkdir -p "$out" build/gpu
ln -sfn "$PWD" build/gpu/llmc # the repository root is the package
export PYTHONPATH=$PWD/build/gpu PYTHONUNBUFFERED=1 LLMC_CACHE=$PWD/build/gpu/cache LLMC_TEST_GPU=$device
failed=0

step() { # name, seconds, command...
  local name=$1 limit=$2 start=$SECONDS
  shift 2
  if timeout "$limit" "$@" >"$out/$name.log" 2>&1; then outcome=passed; else outcome="FAILED ($?)"; failed=1; fi
  echo "== $name: $outcome in $((SECONDS - start)) s"
  tail -n "${TAIL:-15}" "$out/$name.log"
}

packages="click cuda.core elftools jinja2 msgspec pytest rich safetensors tokenizers torch transformers triton"
if [ -d wheels ]; then "$python" -m pip install -q --no-index --find-links wheels -r wheels/requirements.txt; fi
TAIL=20 step environment 60 "$python" -c "
import importlib, sys, torch
from importlib.metadata import version
missing = [name for name in sys.argv[1:] if importlib.util.find_spec(name) is None]
print({name: version(name) for name in ('torch', 'triton', 'transformers', 'cuda-core')}, torch.cuda.get_device_name())
sys.exit(f'missing packages: {missing}' if missing else 0)" $packages

workers=$("$python" -c "import importlib.util, os; print(f'-n {min(os.cpu_count(), 12)}' if importlib.util.find_spec('xdist') else '')")
# The kernels' own tests, with the same references, but launched on the device; then tiny models beside the CPU's float32 bundle.
step kernels 150 "$python" -m pytest $workers -p no:cacheprovider -m "not slow" tests/codegen/triton -k "not build and not tiles"
step tokens 120 "$python" -m pytest $workers -p no:cacheprovider tests/compiler/test_gpu_end_to_end.py
TAIL=30 step speed-fp8 120 "$python" benchmarks/gpu_speed.py examples/configs/llama-3.1-8b.json --target "$device-fp8" --json "$out/speed-fp8.json"
TAIL=30 step speed-bf16 90 "$python" benchmarks/gpu_speed.py examples/configs/llama-3.1-8b.json --target "$device-bf16" --num-layers 4 --json "$out/speed-bf16.json"
exit $failed
