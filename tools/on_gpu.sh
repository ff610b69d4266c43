#!/usr/bin/env bash
# Measures on a machine with a GPU that one has for half an hour and that may lack a network. See `usage`.
#
# Nothing is installed there but what `prepare` has put into .wheels/, which travels with the tree. What compiles is kept in
# .cache/on_gpu/, results go to $OUT as JSON. Every word prints short tables, the last ones last, and ends within 9 minutes.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1

usage() {
  cat >&2 <<'TEXT'
usage: [PYTHON=python3] [OUT=folder] tools/on_gpu.sh WORD

  prepare                    where there is a network: the project and what an image with torch, Triton, transformers and
                             onnx lacks, as wheels for CPython 3.12 on Linux x86-64, in .wheels/
  first                      versions, rates of a copy and a product, the tests that need a GPU, in WORKERS=4 processes
  second                     the update of 350M parameters by itself, for gradients in BF16, FP32 and FP16
  step MODEL... [OPTION...]  training steps beside torch.autocast and torch.compile (see benchmarks/train_step.py)

In half an hour, what is worth most first; what a line has not done in ten minutes may be ended, its results are in $OUT:
  first; second
  step gpt2 --variants amp_compiler "amp_compiler max-autotune" torch.compile --modes reduce-overhead max-autotune
  step vit llama bert t5 resnet50 --modes reduce-overhead
TEXT
  exit 2
}

KEEP=$PWD/.cache/on_gpu
OUT=${OUT:-$KEEP/out}
LARGEST=16000000 # bytes of all wheels
LACKING=(pydantic pydantic_core annotated-types typing-inspection ruamel.yaml expecttest)
export PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
export TORCHINDUCTOR_CACHE_DIR=${TORCHINDUCTOR_CACHE_DIR:-$KEEP/inductor} TRITON_CACHE_DIR=${TRITON_CACHE_DIR:-$KEEP/triton}
export AMP_COMPILER_CACHE=${AMP_COMPILER_CACHE:-$KEEP/loops}

# Interrupted rather than ended, so that what was measured is printed. A rehearsal on a slow machine has PATIENCE=5 or so.
within() { timeout --signal=INT --kill-after=30 $(($1 * ${PATIENCE:-1})) "${@:2}"; }

# Tables go to the screen; what is said beside them, such as the tables of a tuner, to a file. Its errors are shown.
told() {
  local log=$OUT/$word.log failed
  "$@" 2> "$log" && return
  failed=$?
  grep -E '^[A-Za-z_.]*(Error|Exception|Interrupt)\b' "$log" | tail -n 5 | cut -c 1-200
  echo "more in $log"
  return "$failed"
}

prepare() {
  local python=${PYTHON:-.venv/bin/python} bytes
  rm -rf .wheels build && mkdir .wheels || return 1
  "$python" -m pip --disable-pip-version-check wheel --quiet --no-deps --no-build-isolation --wheel-dir .wheels . &&
    "$python" -m pip --disable-pip-version-check download --quiet --no-deps --only-binary=:all: --constraint constraints.txt \
      --python-version 3.12 --implementation cp --platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 \
      --platform manylinux2014_x86_64 --dest .wheels "${LACKING[@]}" || return 1
  ls -l .wheels
  bytes=$(cat .wheels/*.whl | wc -c)
  echo "$bytes bytes in all"
  [ "$bytes" -lt "$LARGEST" ] || { echo "that is more than $LARGEST: look what is in them" >&2; return 1; }
}

# Puts the wheels into a folder of their own. Python itself stays as it is.
installed() {
  mkdir -p "$OUT" "$AMP_COMPILER_CACHE" || exit 1
  python=${PYTHON:-python3}
  if compgen -G '.wheels/*.whl' > /dev/null; then
    rm -rf "$KEEP/site"
    "$python" -m pip --disable-pip-version-check install --quiet --no-index --no-deps --no-compile --no-cache-dir \
      --target "$KEEP/site" .wheels/*.whl || exit 1
    export PYTHONPATH=$KEEP/site${PYTHONPATH:+:$PYTHONPATH}
  fi
}

# Files by name: each of the processes would import all tests of a folder.
# -P: ./amp_compiler, which has no passes/ and rules/ in it, would hide the installed package.
first() {
  within 60 "$python" tools/gpu_facts.py --json "$OUT/facts.json"
  local pytest=("$python" -P -m pytest -m gpu -p no:cacheprovider --junitxml "$OUT/tests.xml") failed=0
  "$python" -P -c 'import pytest_timeout' 2> /dev/null && pytest+=(--timeout $((200 * ${PATIENCE:-1})))
  "$python" -P -c 'import xdist' 2> /dev/null && pytest+=(-n "${WORKERS:-4}" --dist worksteal)
  TORCHINDUCTOR_COMPILE_THREADS=1 within 420 "${pytest[@]}" tests/ops/test_*_gpu.py tests/ranks/test_checksum*.py \
    tests/training/test_training_gpu*.py tests/forward/test_opinfo_sweep*.py > "$OUT/tests.log" 2>&1 || failed=1
  "$python" tools/test_table.py "$OUT/tests.xml" --json "$OUT/tests.json" || tail -n 20 "$OUT/tests.log"
  return "$failed"
}

second() {
  told within 500 "$python" benchmarks/update.py --device cuda --json "$OUT/update.json" "$@"
}

step() {
  [ $# -gt 0 ] || usage
  told within 520 "$python" benchmarks/train_step.py --device cuda --json "$OUT/train_step.json" \
    --limit $((440 * ${PATIENCE:-1})) --models "$@"
}

[ $# -gt 0 ] || usage
word=$1
shift
case $word in
  prepare) prepare ;;
  first | second | step) installed; "$word" "$@" ;;
  *) usage ;;
esac
