#!/usr/bin/env bash
# Runs tests on an emulated ARM processor: tests/arm64.sh [PYTEST ARGUMENTS]. "make test-arm64" runs those of "llvm".
# Needs Debian's or Ubuntu's apt-get and qemu-user. Python, PyTorch, llvmlite and what the tests need are downloaded for
# ARM into .arm64, once: 5 GB, because the only wheel of PyTorch for Linux on ARM is built for CUDA.
set -euo pipefail
cd "$(dirname "$0")/.."
folder=$PWD/.arm64
root=$folder/root site=$folder/site

if ! [ -e "$folder/installed" ]; then
    rm -rf "$folder"
    mkdir -p "$folder"/apt/{lists,archives}/partial "$root" "$site"
    options=(-o "Dir::State=$folder/apt" -o "Dir::State::Lists=$folder/apt/lists" -o Dir::State::status=/dev/null
        -o "Dir::Cache=$folder/apt" -o APT::Architecture=arm64 -o APT::Architectures=arm64 -o APT::Sandbox::User=)
    apt-get "${options[@]}" update -qq
    apt-get "${options[@]}" install -qq --download-only --yes --no-install-recommends python3.11 libgomp1 libstdc++6
    for package in "$folder"/apt/archives/*.deb; do dpkg -x "$package" "$root"; done
    # qemu answers with the host's files where the root has none, and PyTorch reads the features of the processor there
    mkdir -p "$root"/proc "$root"/sys/devices/system/cpu
    for cpu in 0 1; do
        printf 'processor\t: %d\nFeatures\t: fp asimd atomics\nCPU implementer\t: 0x41\nCPU part\t: 0xd0c\n\n' $cpu
    done > "$root"/proc/cpuinfo
    for file in possible present online; do echo 0-1 > "$root/sys/devices/system/cpu/$file"; done
    platforms=(--platform manylinux2014_aarch64)
    for version in $(seq 5 36); do platforms+=(--platform "manylinux_2_${version}_aarch64"); done
    .venv/bin/python -m pip install --quiet --disable-pip-version-check --no-compile --no-warn-conflicts \
        --target "$site" --only-binary=:all: --python-version 3.11 --implementation cp "${platforms[@]}" \
        $(grep -E "^(torch|numpy|llvmlite|rich|beartype|jaxtyping|pytest)==" constraints.txt)
    touch "$folder/installed"
fi
# "default": PyTorch's own kernels without SVE, whose vectors are longer here than on any processor
exec qemu-aarch64 -cpu max -L "$root" -E "PYTHONPATH=$site:$PWD/src:$PWD" -E ATEN_CPU_CAPABILITY=default \
    -E PYTHONDONTWRITEBYTECODE= "$root/usr/bin/python3.11" -m pytest -p no:cacheprovider "$@"
