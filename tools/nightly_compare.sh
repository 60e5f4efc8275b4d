#!/usr/bin/env bash
# Compares tonight's run ($RUN_ID) with BASE as the nightly jobs do: tools/nightly_compare.sh BASE NAME.
# Leaves nightly/compare-NAME.md and .xml. Exit 1: a regression that the intervals support.
set -euo pipefail
base=$1 name=$2

if [ ! -f "$base" ]; then
  echo "There is no $base yet, so nothing is compared with it."
  echo "A night that you trust becomes one: specbench baseline save RUN -o $base"
  exit 0
fi
mkdir -p nightly
code=0
specbench compare "$base" "$RUN_ID" \
  --fail-if "speedup < -3%" --fail-if "tpot_ms > +5%" --fail-if missing \
  --format github -o "nightly/compare-$name.md" --junit "nightly/compare-$name.xml" || code=$?
if [ "$code" = 1 ] && [ -n "${GITHUB_OUTPUT:-}" ]; then
  echo "regression=true" >> "$GITHUB_OUTPUT"
fi
exit "$code"
