#!/usr/bin/env bash
# Run all GPU measurements, the most important first, in calls of at most ten minutes. Needs PyTorch, Triton, pytest,
# hypothesis, rich and matplotlib; training also needs scikit-learn, tensorboard and safetensors. Uses xdist,
# pytest-timeout, Nsight Compute and compute-sanitizer if they are present. The library runs from src/; nothing is
# installed and no network is used.
#
#     benchmarks/gpu.sh OUT [--from ARCHIVE] [--wheels FOLDER] [--steps A,B] [--seconds 570]
#
# OUT receives results.tar.gz, replaced after each measured row, and summary.txt: however the call ends, they contain
# everything measured so far. A call with the same OUT, or with --from and the archive of an earlier call, resumes it:
# rows of the same source, GPU and PyTorch in the archive are not measured again.
#
#     benchmarks/gpu.sh OUT                            first call: do the kernels run and agree with float64; speed
#                                                      compared with cuDNN, FlashAttention-2, FlexAttention, compiled and
#                                                      plain formula; TMA, Gluon, one-kernel backward, launch cache;
#                                                      decoding; hybrid norm; ViT; language models
#     benchmarks/gpu.sh OUT --from results.tar.gz      second call: the rest of the first; hardware counters,
#                                                      sanitizer, the kernels' test files, Gluon kernels, accuracy
#     benchmarks/gpu.sh OUT --from results.tar.gz      third call: tile shapes and Gluon configurations, the paper's
#                                                      lengths
#
# --wheels: folder with wheels of further baselines (triton-sigmoid, flash-attn, …). --steps: these steps only, in their
# order in gpu_steps.py. With TRITON_INTERPRET=1 and no GPU, everything runs at tiny sizes as a rehearsal.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
export PYTHONPATH="$(dirname "$here")/src:$(dirname "$here")${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
exec "${PYTHON:-python3}" -m benchmarks.gpu_runner "$@"
