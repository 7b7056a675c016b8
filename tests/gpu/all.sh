#!/usr/bin/env bash
# What has to be seen on GPUs, in one go: bash tests/gpu/all.sh OUT RANKS
# Parity in bf16, trainings with optimizer state in host memory, and the speed of the 7B shape. Needs Transformer Engine; prints a summary.
set -uo pipefail
out=$1 ranks=$2
export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True TOKENIZERS_PARALLELISM=false OMP_NUM_THREADS=4
shape=tests/hf_configs/Qwen2.5-VL-7B-Instruct.json
mkdir -p "$out"

bench() { # NAME, then options of bench
  local name=$1; shift
  timeout 200 python3 -m torch.distributed.run --standalone --nproc-per-node "$ranks" -m toolkit bench --model.hf $shape \
    --data.seq_len 8192 --timed 3 "$@" > "$out/bench_$name.log" 2>&1
  echo "== bench $name: exit $?"
  grep -q parameters "$out/bench_$name.log" && sed -n '/parameters/,$p' "$out/bench_$name.log" || grep -E "Error" "$out/bench_$name.log" | sort | uniq -c | head -5
}

timeout 400 python3 -m tests.gpu.parity --ranks "$ranks" --out "$out" > "$out/parity.log" 2>&1
echo "== parity on $ranks: exit $?"
grep -E "^ok|^FAILED" "$out/parity.log"
grep -E "Error" "$out/parity.log" | sort | uniq -c | head -5
timeout 300 python3 -m tests.gpu.commands --ranks $((ranks < 4 ? ranks : 4)) --out "$out" 2> "$out/commands.log"
echo "== commands: exit $?"
sp="--parallel.sequence_parallel true"
case "$ranks" in
8)
  bench dp8 --global_batch_size 32
  bench tp2pp2dp2 --global_batch_size 16 --data.path synthetic:images --parallel.tp 2 --parallel.pp 2 --parallel.layers '[8,20]' $sp
  bench tp4pp2 --global_batch_size 8 --data.path synthetic:images --parallel.tp 4 --parallel.pp 2 --parallel.layers '[8,20]' $sp
  ;;
4)
  bench dp4 --global_batch_size 16
  bench tp2pp2 --global_batch_size 8 --data.path synthetic:images --parallel.tp 2 --parallel.pp 2 --parallel.layers '[8,20]' $sp
  ;;
*)
  bench layers4 --global_batch_size 4 --language-layers 4
  bench layers4_offload --global_batch_size 4 --language-layers 4 --data.path synthetic:text --optimizer.offload_fraction 1
  ;;
esac
