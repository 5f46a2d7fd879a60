#!/bin/sh
# One command for a machine with NVIDIA's TensorRT-LLM image and 8 H200s; prints PASS or FAIL and writes report.md and report.json.
#
#   tests/h200/run.sh OUT --model MODEL --drafter HEAD --token-table TABLE [more options of ecospec-orchestrator serve]
#
# Not yet run anywhere. COMPARE holds options of compare.py, e.g. COMPARE="--batches 1,8 --tokens 64".
set -eu
if [ $# -lt 3 ]; then
    echo "usage: tests/h200/run.sh OUT --model MODEL --drafter HEAD --token-table TABLE [more options of serve]" >&2
    exit 2
fi
out=$1
shift
mkdir -p "$out"
here=$(dirname "$0")
python=${PYTHON:-python3}
echo "== doctor"
"$python" -m ecospec_orchestrator.cli doctor --engine tensorrt-llm --policy ecospec "$@" | tee "$out/doctor.txt"
if grep -q '^FAILED' "$out/doctor.txt"; then
    echo "FAIL: the doctor says why."
    exit 1
fi
echo "== comparison"
# shellcheck disable=SC2086  # several options
exec "$python" "$here/compare.py" "$out" ${COMPARE:-} -- --engine tensorrt-llm "$@"
