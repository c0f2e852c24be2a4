#!/bin/sh
# Quantize, verify, decode, publish: what a CI job runs. Every step ends the job with ckptkit's own exit code.
#
#   SRC=org/model@main RECIPE=lm_head-w8a16 OUT=./model-w8 sh pipeline.sh
#
# SRC      a folder, or org/name[@revision] on the Hub; a branch may move between two steps, a commit does not
# RECIPE   a built-in recipe or a file
# OUT      the result's folder; what an earlier run of the same job left is resumed
# REPORTS  where reports go (default ./reports)
# ARGS     further options of `ckptkit quantize`: --set tie=untie --link hard
# SERVE    1: decode source and result (needs the extra `serve`); SERVE_ARGS further options: --engine vllm …
# PUSH     org/name[@branch]: publish the result; the token is taken from HF_TOKEN or `hf auth login`
set -eu

REPORTS=${REPORTS:-./reports}
mkdir -p "$REPORTS"

# Without anything to resume a run begins; with the same result there, it goes on to the next step.
case " ${ARGS:-} " in *" --overwrite "*) resume= ;; *) resume=--resume ;; esac

# shellcheck disable=SC2086  # ARGS and SERVE_ARGS are lists of options
ckptkit quantize "$SRC" "$OUT" --recipe "$RECIPE" $resume ${ARGS:-}
ckptkit verify "$OUT" --against "$SRC" --format "${FORMAT:-human}" \
  --junit "$REPORTS/verify.xml" --report "$REPORTS/verify.html" --report "$REPORTS/verify.json"
ckptkit hash "$OUT" --statement "$REPORTS/statement.intoto.json" --overwrite
if [ "${SERVE:-}" = 1 ]; then
  # shellcheck disable=SC2086
  ckptkit verify source="$SRC" result="$OUT" --serve --against "$SRC" --junit "$REPORTS/serve.xml" \
    --report "$REPORTS/serve.html" ${SERVE_ARGS:-}
fi
[ -z "${PUSH:-}" ] || ckptkit push "$OUT" "$PUSH"
