#!/usr/bin/env bash
# Sourced by the scripts of the examples, with what they start: megatron-vl or python. Where the environment is not on the path they
# end with one line about it. From the root of the checkout any Python finds megatron_vl, but not what it imports: hence torch.
set -euo pipefail
on_the_path() {
  if [ "$1" = python ]; then
    python -c 'from importlib.util import find_spec; assert find_spec("megatron_vl") and find_spec("torch")' 2> /dev/null
  else
    command -v "$1" > /dev/null
  fi
}
if ! on_the_path "${1:-megatron-vl}"; then
  echo "${0##*/}: megatron-vl is not on the path; in the root of the checkout: source .venv/bin/activate (make setup makes it)" >&2
  exit 127
fi
