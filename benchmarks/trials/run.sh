#!/usr/bin/env bash
# bash .gpu/run.sh OUT, in the root of the repository, on a GPU of compute capability 9.0: some 310 s. OUT receives
# rows (*.jsonl) as they come, and logs.
out=$1
mkdir -p "$out"
said() { echo "== $1: $SECONDS s"; }
bash .gpu/fwd64/run.sh "$out" 92 | tail -n 15
said fwd64
bash .gpu/bwd128/run.sh "$out" 92
said bwd128
grep '"tflops"' "$out/bwd128.jsonl" | cut -c1-700
grep '"ok": false' "$out/bwd128.jsonl" | cut -c1-300
CHECK_LIMIT=50 bash .gpu/options/run.sh "$out" 5 check >/dev/null 2>&1
bash .gpu/options/run.sh "$out" 75 time
said options
grep '"ms"' "$out/options.jsonl" | cut -c1-500
