#!/usr/bin/env bash
# Speed on one machine, ours and the peer in one call: bash tests/gpu/bench.sh OUT GPUS [ROWS_A_GPU] [OPTIONS OF OURS ...]
# 7B shape, rows of 8192 tokens, images and text. Writes OUT/ours.json, OUT/peer.json and logs; prints both tables and the ratio.
set -uo pipefail
out=$1 gpus=$2 rows=${3:-4}
shift $(($# < 3 ? $# : 3))
export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True TOKENIZERS_PARALLELISM=false OMP_NUM_THREADS=4
config=${CONFIG:-tests/hf_configs/Qwen2.5-VL-7B-Instruct.json} python=${PYTHON:-python3}
seq_len=${SEQ_LEN:-8192} timed=${TIMED:-5} warm_up=${WARM_UP:-2} limit=${LIMIT:-270}
mkdir -p "$out"

bench() { # NAME, then options of toolkit.bench
  local name=$1 start=$SECONDS; shift
  timeout "$limit" "$python" -m torch.distributed.run --standalone --nproc-per-node "$gpus" -m toolkit.bench --hf "$config" \
    --rows images,text --data.seq_len "$seq_len" --global_batch_size $((rows * gpus)) --timed "$timed" --warm_up "$warm_up" \
    --out "$out/$name.json" "$@" > "$out/$name.log" 2>&1
  local code=$?
  echo "== $name: exit $code after $((SECONDS - start)) s"
  if [ $code = 0 ]; then sed -n '/parameters/,$p' "$out/$name.log"; else grep -E "Error|failed" "$out/$name.log" | sort | uniq -c | tail -8; fi
  return $code
}

bench ours "$@"; ours=$?
bench peer --peer true; peer=$?
if [ $ours = 0 ] && [ $peer = 0 ]; then
  "$python" - "$out" <<'PY'
import json, sys
from pathlib import Path
from toolkit.bench.report import compare, ratios
folder = Path(sys.argv[1])
both = compare(*(json.loads((folder / f"{name}.json").read_text()) for name in ("ours", "peer")))
(folder / "comparison.json").write_text(json.dumps(both, indent=2) + "\n")
print("\n".join(ratios(both)))
PY
fi
exit $((ours | peer))
