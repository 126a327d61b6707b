#!/usr/bin/env bash
# Packs what FlashInfer's decoding needs (20 MB) for an x86-64 machine with nvcc, Python 3.12 and no package index.
# usage: pack_flashinfer.sh FOLDER    then there: xz -dc FOLDER/flashinfer.tar.xz | tar x -C SITE, with SITE in PYTHONPATH, and
# python lab/warm_baselines.py decode flashinfer 8: it compiles CUDA C++ for each kind of call
set -euo pipefail
mkdir -p "$1"
out=$(cd "$1" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m pip download -q --no-deps --only-binary=:all: --python-version 3.12 --implementation cp --platform manylinux_2_28_x86_64 \
  --platform manylinux_2_24_x86_64 --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 \
  flashinfer-python==0.7.4 apache-tvm-ffi==0.1.15.post2
mkdir site
for wheel in ./*.whl; do unzip -qo "$wheel" -d site; done
cd site
mv flashinfer/data/csrc flashinfer/data/all && mkdir flashinfer/data/csrc
find flashinfer/data/all -maxdepth 1 -type f -size -200k -exec mv -t flashinfer/data/csrc {} +
rm -rf flashinfer/data/all
find flashinfer -path flashinfer/data -prune -o -type f ! -name '*.py' ! -name '*.json' -print0 | xargs -0 rm -f
tar c . | xz -T0 -6 >"$out/flashinfer.tar.xz"
du -h "$out/flashinfer.tar.xz"
