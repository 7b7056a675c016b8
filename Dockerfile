# megatron-vl on NVIDIA GPUs, with the pinned stack. Written by the steps of docs/quickstart-gpu.md; the image itself
# has not been built.
#   docker build -t megatron-vl .
#   docker run --gpus all --ipc=host -v $PWD:/workspace megatron-vl megatron-vl doctor --nccl
FROM nvidia/cuda:13.0.1-cudnn-devel-ubuntu24.04
RUN apt-get update \
    && apt-get install -y --no-install-recommends git make g++ python3.12 python3.12-dev python3.12-venv \
    && rm -rf /var/lib/apt/lists/*
ENV PATH=/opt/venv/bin:$PATH CUDA_HOME=/usr/local/cuda
RUN python3.12 -m venv /opt/venv
COPY . /opt/megatron-vl
WORKDIR /opt/megatron-vl
RUN pip install --no-cache-dir . -c constraints.txt
# Transformer Engine is compiled against the installed torch, so pip must not isolate the build.
RUN pip install --no-cache-dir 'setuptools>=77' wheel ninja pybind11 \
    && pip install --no-cache-dir '.[gpu]' -c constraints.txt --no-build-isolation
WORKDIR /workspace
