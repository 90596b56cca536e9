#!/usr/bin/env bash
# Train on all hosts of a Cloud TPU slice that is there:
#
#     examples/pod/tpu_pod.sh NAME ZONE --out gs://BUCKET/run [arguments of train.py]
#
# PYTHON names the interpreter on the hosts, 3.11 or newer (default python3). Give a
# bucket as --out: all hosts must see the folder. Run again, it goes on from the last
# checkpoint.
set -euo pipefail

if [ $# -lt 2 ]; then
  echo "usage: $0 NAME ZONE [arguments of train.py]" >&2
  exit 2
fi
name=$1 zone=$2
shift 2
python=${PYTHON:-python3}
root=$(cd "$(dirname "$0")/../.." && pwd)
archive=$(mktemp -d)/jfleet.tar.gz
trap 'rm -rf "$(dirname "$archive")"' EXIT

tar -czf "$archive" -C "$root" jfleet examples pyproject.toml README.md LICENSE
gcloud compute tpus tpu-vm scp "$archive" "$name:jfleet.tar.gz" \
  --zone "$zone" --worker=all
# The same command on every host at once; jfleet.init finds the others.
gcloud compute tpus tpu-vm ssh "$name" --zone "$zone" --worker=all --command "
  set -e
  mkdir -p jfleet
  tar -xzf jfleet.tar.gz -C jfleet
  cd jfleet
  ${INSTALL:-$python -m pip install --quiet '.[tpu]'}
  $python examples/pod/train.py $(printf '%q ' "$@")"
