#!/usr/bin/env bash
# Everything that waits for a GPU, in one call: tests of the kernels, then the benchmarks, each step under a time limit
# of its own, together under 9 and a half minutes. For a machine with a GPU, PyTorch, Triton, pytest, hypothesis, rich and
# matplotlib, and no network; runs from the source tree, nothing is installed.
#
#     benchmarks/gpu.sh OUT [WHEELS]
#
# OUT: folder for results and logs. WHEELS: folder of wheels of peers (triton-sigmoid, flash-attn, …) to compare with.
# STEPS=tests,kernels,… does some of the steps only. Others are done only where they are named, in calls of their own:
# STEPS=hopper, the Hopper kernels in Gluon (tests, memory checks, every configuration beside the portable kernels, then
# the kernels' benchmark with them), nine minutes; STEPS=profile, Nsight Compute on what binds each kernel, three;
# STEPS=training, which also needs scikit-learn, tensorboard and safetensors, six. With TRITON_INTERPRET=1 and no GPU, it
# tries itself at tiny sizes.
set -uo pipefail

out=${1:?usage: benchmarks/gpu.sh OUT [WHEELS]}
wheels=${2:-}
mkdir -p "$out"
out=$(cd "$out" && pwd)
cd "$(dirname "$0")/.."
export PYTHONPATH="$PWD/src:$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
python=${PYTHON:-python3}
steps=${STEPS:-tests,accuracy,overhead,kernels,decode,hybridnorm,tune}
tiny=${TRITON_INTERPRET:-0}

if [[ -n $wheels ]]; then
    shopt -s nullglob
    for wheel in "$wheels"/*.whl; do
        "$python" -m zipfile -e "$wheel" "$out/.peers" && echo "peer: $(basename "$wheel")"
    done
    export PYTHONPATH="$PYTHONPATH:$out/.peers"
fi

# step NAME SECONDS COMMAND…: its output goes into OUT/NAME.log, and the last lines of it here
step() {
    local name=$1 seconds=$2 start=$SECONDS
    shift 2
    [[ ,$steps, == *,$name,* ]] || return 0
    echo "== $name (at most $seconds s)"
    timeout --kill-after=10 "$seconds" "$@" >"$out/$name.log" 2>&1
    local status=$?
    tail -n "${TAIL:-12}" "$out/$name.log"
    echo "== $name: exit $status after $((SECONDS - start)) s" | tee -a "$out/steps.log"
    [[ $status == 0 ]] || failed=1
}

failed=0
: >"$out/steps.log"
if [[ $tiny == 1 ]]; then
    kernels="lengths=(32, 64), heads=2, head_dims=(16,), batch=1, rounds=1, round_seconds=0.0, dtype='float32'"
    accuracy="lengths=(64, 256), queries=8, head_dim=16, dtypes=('float16', 'bfloat16', 'float32')"
    hybrid="lengths=(32, 64), heads=2, head_dim=16, rounds=1, round_seconds=0.0, dtype='float32'"
    tune="lengths=(64,), heads=1, head_dims=(16,), most_flops=1e6, rounds=1, round_seconds=0.0, most_candidates=2"
    decode="contexts=(64,), batches=(2,), heads=2, kv_heads=1, head_dim=16, rounds=1, round_seconds=0.0, dtypes=('float32',), prompts=()"
    hopper_tune=$tune
    overhead="n=20, heads=1, head_dim=16, batches=(1,), rounds=1, round_seconds=0.0, dtype='float32'"
    training="kappas=(4,), seconds=2.0, steps=2, batch=1, upscale=1, layers=1"
    examples=3
else
    kernels="" overhead="" accuracy="" hybrid="" tune="" hopper_tune="lengths=(4096, 1024)" training="" decode="most_gib=40.0"
    examples=12  # each may compile three kernels
fi
workers=$(($(nproc) < 12 ? $(nproc) : 12))
parallel=$("$python" -c "import xdist" 2>/dev/null && echo "-n $workers --dist worksteal")

"$python" - >"$out/machine.txt" 2>&1 <<'PYTHON'
import torch, triton
print("torch", torch.__version__, "triton", triton.__version__, "cuda", torch.version.cuda)
print(torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU")
PYTHON
cat "$out/machine.txt"
export python out

run='import sys; from pathlib import Path; from sigattn.bench import'
step tests 120 env SIGATTN_FUZZ_EXAMPLES=$examples "$python" -m pytest -q -p no:cacheprovider --durations=5 $parallel \
    tests/ops/test_triton.py tests/ops/test_repeats.py tests/ops/test_correctness.py tests/ops/test_dropout.py \
    tests/test_flash.py tests/test_flash_kvcache.py -k "triton or repeats"
step accuracy 35 "$python" -c "$run accuracy as b; b.run(b.AccuracyBenchmark(results=Path('$out/accuracy'), $accuracy))"
step overhead 30 "$python" -c "$run overhead as b; b.run(b.OverheadBenchmark(results=Path('$out/overhead.json'), $overhead))"
step kernels 185 "$python" -c "$run kernels as b; b.run(b.KernelBenchmark(results=Path('$out/kernels'), seconds=145, $kernels))"
step decode 50 "$python" -c "$run decode as b; b.run(b.DecodeBenchmark(results=Path('$out/decode.json'), $decode))"
step hybridnorm 45 "$python" -c "$run hybridnorm as b; b.run(b.HybridNormBenchmark(results=Path('$out/hybridnorm'), $hybrid))"
step tune 105 "$python" -c "$run tune as b; b.run(b.TuneBenchmark(results=Path('$out/tune'), seconds=95, $tune))"
if [[ ,$steps, == *,hopper,* ]]; then
    steps=$steps,hopper_tests,sanitize,hopper_sanitize,hopper_tune,hopper_kernels
    # a process for each kernel: one that faults or hangs takes no other with it
    step hopper_tests 120 bash -c 'for kernel in forward keys queries fused; do
        "$python" -m pytest -q -p no:cacheprovider tests/ops/test_hopper.py -k "on_a_gpu and $kernel" \
            >"$out/hopper_tests_$kernel.log" 2>&1 & running+=($!)
    done
    for one in "${running[@]}"; do wait "$one" || failed=1; done
    tail -n 3 "$out"/hopper_tests_*.log
    exit ${failed:-0}'
    if command -v compute-sanitizer >/dev/null; then
        step sanitize 50 compute-sanitizer --error-exitcode 9 "$python" -m pytest -q -x -p no:cacheprovider \
            tests/ops/test_triton.py tests/ops/test_correctness.py -k "copy_engine or added_queries or sizes_that_cross"
        step hopper_sanitize 60 compute-sanitizer --error-exitcode 9 "$python" -m pytest -q -x -p no:cacheprovider \
            tests/ops/test_hopper.py -k "tables_on_a_gpu and 64"
    fi
    step hopper_tune 110 "$python" -c "$run tune as b; b.run(b.TuneBenchmark(results=Path('$out/hopper_tune'), seconds=95, specialised=True, $hopper_tune))"
    step hopper_kernels 200 "$python" -c "from sigattn.ops.triton import tuning; tuning.SPECIALISED, tuning.ADD_QUERY_FROM = frozenset(tuning.HOPPER), {90: 0}
$run kernels as b; b.run(b.KernelBenchmark(results=Path('$out/hopper_kernels'), seconds=160, alibi=False, $kernels))"
fi
# what binds each kernel, to hold against docs/speed.md (STEPS=profile): one line for each kernel and counter
if command -v ncu >/dev/null; then
    step profile 200 bash -c 'ncu --clock-control none --launch-skip 0 --kernel-name-base function \
        --kernel-name "regex:forward_kernel|keys_kernel|queries_kernel|fused_kernel" \
        --section SpeedOfLight --section ComputeWorkloadAnalysis --section WarpStateStats --section LaunchStats \
        --csv --page details "$python" -c "$1" >"$out/profile.csv"' - \
        "$run tune as b; b.run_tables(b.TuneBenchmark(specialised=True))"
fi
# in a call of its own (STEPS=training): six minutes of training runs
step training 400 "$python" -c "$run training as b; b.run(b.TrainingBenchmark(results=Path('$out/training'), $training))"
rm -rf "$out/.peers"
cat "$out/steps.log"
exit $failed
