#!/usr/bin/env bash
# The other scripts source this file. It finds megatron-vl, the named model's YAML, and the YAML's values.
set -euo pipefail
if ! command -v megatron-vl > /dev/null; then
  echo "${0##*/}: megatron-vl is not on the path; in the checkout: make setup; source .venv/bin/activate" >&2
  exit 127
fi

# config_of qwen2_5_vl_7b prints examples/qwen2_5_vl_7b.yaml, config_of pretrain/NAME that of the folder; the path of
# your own YAML is printed unchanged.
config_of() {
  local here config
  here=$(dirname "${BASH_SOURCE[0]}")
  config=$1
  [ -f "$config" ] || config=$here/${1%.yaml}.yaml
  [ -f "$config" ] || config=$here/$(basename "$1" .yaml).yaml
  if [ ! -f "$config" ]; then
    echo "${0##*/}: $1 is neither a YAML nor one of: $(cd "$here" && echo *.yaml pretrain/*.yaml | sed 's/\.yaml//g')" >&2
    exit 2
  fi
  echo "$config"
}
# field RUN.yaml section.name prints the value of a field, or nothing if it is not set.
# field RUN.yaml section.name -> its value; empty where it is not set.
field() {
  "$(dirname "$(command -v megatron-vl)")/python" - "$@" << 'PYTHON'
import sys

import yaml

section, name = sys.argv[2].split(".")
print((yaml.safe_load(open(sys.argv[1], encoding="utf-8")).get(section) or {}).get(name, ""))
PYTHON
}
