#!/usr/bin/env bash
# bash benchmarks/trials/prepare.sh, in a clone: makes .gpu/ from the patches, with the library's source of their commit.
set -eu
root=$(cd "$(dirname "$0")/../.." && pwd)
cd "$root"
for name in fwd64 bwd128 options; do
    rm -rf ".gpu/$name"
    mkdir -p ".gpu/$name"
    [ "$name" = options ] || git archive 896c7bef src | tar x -C ".gpu/$name"
    patch --quiet --strip=1 --directory=".gpu/$name" <"benchmarks/trials/$name.patch"
done
cp benchmarks/trials/run.sh .gpu/
