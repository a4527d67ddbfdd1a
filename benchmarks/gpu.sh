#!/usr/bin/env bash
# All that a GPU is asked, the most important first, in some eight minutes. Needs PyTorch, Triton and pytest;
# uses pytest-xdist if it is present. The library runs from src/; nothing is installed and no network is used.
#
#     bash benchmarks/gpu.sh OUT
#
# OUT receives the rows (*.jsonl, *.json), a log of each step, and results.tar.gz, replaced after each step: however the
# call ends, it has everything measured so far. Checks compile all kernels in parallel, so that the other steps find them
# in Triton's cache. With TRITON_INTERPRET=1 and no GPU all steps but the last run at tiny sizes, to rehearse.
set -u
root=$(cd "$(dirname "$0")/.." && pwd)
mkdir -p "$1"
out=$(cd "$1" && pwd)
cd "$root"
python=${PYTHON:-python3}
workers=${WORKERS:-$(nproc)}
export PYTHONPATH="$root/src:$root${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 TRITON_CACHE_DIR=${TRITON_CACHE_DIR:-/tmp/triton-cache}

step() { # name, limit in seconds, command
    local name=$1 limit=$2
    shift 2
    timeout -k 5 "$limit" "$@" >"$out/$name.log" 2>&1
    echo "$name: exit $?, $SECONDS s in all"
    tail -n 12 "$out/$name.log" | cut -c1-300
    (cd "$out" && tar czf .results.tar.gz -- *.json* *.log && mv .results.tar.gz results.tar.gz) 2>/dev/null
}

check() { # part: wrong results are counted at the end
    OMP_NUM_THREADS=1 "$python" -m benchmarks.on_gpu check "$out/check.jsonl" "$1" "$workers"
}
export -f check
export out python workers

step machine 30 "$python" -c "import torch, triton; print(torch.__version__, triton.__version__); torch.cuda.is_available() and print(torch.cuda.get_device_name())"
step check 100 bash -c 'for part in $(seq 0 $((workers - 1))); do check "$part" & done; wait; grep -c "\"ok\": true" "$out/check.jsonl"; grep "\"ok\": false" "$out/check.jsonl"'
step time 100 "$python" -m benchmarks.on_gpu time "$out/time.jsonl" 90
step options 60 "$python" -m benchmarks.on_gpu options "$out/options.jsonl" 55
step overhead 40 "$python" -m benchmarks overhead --results "$out/overhead.json"
if [ "${TRITON_INTERPRET:-0}" = 0 ]; then
    step decode 50 "$python" -m benchmarks decode --no-flex --context-lengths 4096 65536 --batch-sizes 1 32 --results "$out/decode.json"
    step sweep 150 "$python" -m pytest -q -p no:cacheprovider tests/ops/test_correctness.py tests/ops/test_hopper.py tests/test_flash.py tests/test_flash_kvcache.py -k "(triton or hopper) and not (simulat or small)" $("$python" -c "import xdist" 2>/dev/null && echo "-n $workers")
    step tune 120 "$python" -m benchmarks tune --lengths 4096 --results "$out/tune"
fi
