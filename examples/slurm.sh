#!/usr/bin/env bash
# Trains a model under Slurm: sbatch --nodes 4 examples/slurm.sh qwen2_5_vl_72b [--section.field value ...]
#SBATCH --job-name=megatron-vl
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --output=%x-%j.log
#SBATCH --requeue
# A requeued job continues from its latest checkpoint.
# Slurm sends SIGTERM before it takes nodes back, and the training then saves and ends. The partition's GraceTime
# (at preemption) must leave time for a step and a save.
set -euo pipefail
usage="usage: sbatch --nodes N examples/slurm.sh NAME|RUN.yaml [--section.field value ...]"
[ -n "${1:-}" ] || { echo "$usage" >&2; exit 2; }
[ -n "${SLURM_JOB_NUM_NODES:-}" ] || { echo "slurm.sh: start this script with sbatch; $usage" >&2; exit 2; }
source examples/environment.sh  # Slurm runs a copy of this script from the folder where sbatch was called
config=$(config_of "$1")
shift
# megatron-vl reads the nodes, the first host and a port from the step's environment.
srun --kill-on-bad-exit=1 megatron-vl train --config "$config" --nproc-per-node "${SLURM_GPUS_ON_NODE:-8}" "$@"
