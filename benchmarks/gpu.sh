#!/usr/bin/env bash
# Checks every path of generation and training on a CUDA GPU and measures them, in at most eight
# minutes: bash benchmarks/gpu.sh [FOLDER]. The folder, outputs/gpu by default, gets logs and tables.
set -u
cd "$(dirname "$0")/.." || exit 1
python=${PYTHON:-python}
[ -n "${PYTHON:-}" ] || [ ! -x .venv/bin/python ] || python=.venv/bin/python
out=${1:-outputs/gpu}

if ! "$python" -c "import sys, torch; sys.exit(not torch.cuda.is_available())"; then
    echo "there is no CUDA GPU here: nothing was checked" >&2
    exit 1
fi
mkdir -p "$out" || exit 1
"$python" -c "import torch; print(torch.cuda.get_device_name(), torch.__version__)" | tee "$out/gpu.txt"
failed=0

# run SECONDS NAME COMMAND…: at most so long, the output into NAME.log as well.
run() {
    local seconds=$1 name=$2
    shift 2
    echo "== $name"
    timeout "$seconds" "$@" 2>&1 | tee "$out/$name.log"
    local status=${PIPESTATUS[0]}
    if [ "$status" -ne 0 ]; then
        echo "== $name ended with status $status"
        failed=1
    fi
}

run 120 equality "$python" -m pytest -q -p no:cacheprovider tests/decode/test_graph.py \
    tests/test_generate.py -k "cuda or gpu or graph"
run 120 mnist "$python" -m imagegen.benchmark generate device=cuda dataset=mnist model=paper \
    "batch_sizes=[1,64,1000,10000]" repeats=3 budget=10 time_limit=20 out="$out/mnist"
run 120 cifar10 "$python" -m imagegen.benchmark generate device=cuda dataset=cifar10 model=paper \
    model.n_layers=16 "batch_sizes=[1,64,1000]" repeats=3 budget=10 time_limit=20 out="$out/cifar10"
run 90 train "$python" -m imagegen.benchmark train device=cuda dataset=mnist model=paper \
    "batch_sizes=[16,128]" repeats=3 budget=10 time_limit=20 out="$out/train"
exit $failed
