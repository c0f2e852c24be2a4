#!/bin/sh
# A gate that has never been seen closed proves nothing. This breaks a checkpoint's config and wants exit code 1.
#
#   SRC=./model sh gate.sh
set -eu

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

# A draft layer is declared of which no tensor is there. --allow lets the result be made all the same.
ckptkit config "$SRC" "$folder/broken" --set num_nextn_predict_layers=1 --allow names.draft-missing --link copy
code=0
ckptkit verify "$folder/broken" --format "${FORMAT:-human}" --report "${REPORTS:-.}/gate.json" || code=$?
[ "$code" = 1 ] || { echo "exit code $code, not 1: the gate does not close" >&2; exit 1; }
