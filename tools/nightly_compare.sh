#!/usr/bin/env bash
# Compares tonight's run ($RUN_ID) with BASE as the nightly jobs do: tools/nightly_compare.sh BASE NAME.
# Leaves nightly/compare-NAME.md and .xml. Exit 1: a regression that the intervals support.
set -euo pipefail
base=$1 name=$2

if [ ! -f "$base" ]; then
  if [ "$name" = pinned ]; then
    cat <<EOF | tee -a "${GITHUB_STEP_SUMMARY:-/dev/null}"

There is no $base yet, so nothing is compared with it. If you trust this night, pin it: in a checkout,
with the run.tgz of this night's artifact beside it,

    tar -xzf run.tgz
    specbench baseline save "./$RUN_ID" -o $base

and commit $base.
EOF
  else
    echo "There is no $base yet: it is kept after each good night, the first time after this one."
  fi
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
