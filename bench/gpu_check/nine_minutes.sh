#!/usr/bin/env bash
# Everything that needs a GPU, in one command of nine minutes. Results go to the folder $OUT. With wheels in
# the folder $WHEELS (see docs/gpu-check.md), it needs no network. It never changes the card's settings.
set -u
python=${PYTHON:-python3}
site=$(mktemp -d)
trap 'rm -rf "$site"' EXIT
mkdir -p "${OUT:?name an empty folder for the results}"
if [ -n "${WHEELS:-}" ]; then
  "$python" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --target "$site" "$WHEELS"/*.whl || exit 3
fi
export PYTHONPATH="$site:$PWD/shared:$PWD" PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 TRL_EXPERIMENTAL_SILENCE=1
timeout -k 5 540 "$python" -m bench.gpu_check "$@" 2> "$OUT/errors.txt" | tee "$OUT/report.md"
code=${PIPESTATUS[0]}
echo
echo "$(grep -c '^| PASS' "$OUT/report.md") PASS, $(grep -c '^| FAIL' "$OUT/report.md") FAIL:"
grep '^| FAIL' "$OUT/report.md"
exit "$code"
