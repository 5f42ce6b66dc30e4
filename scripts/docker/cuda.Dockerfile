# draftsmith on NVIDIA GPUs:  docker build -f scripts/docker/cuda.Dockerfile -t draftsmith-cuda .
#     docker run --rm -it --gpus all --ipc host -v /models:/models -v "$PWD/runs:/draftsmith/runs" draftsmith-cuda \
#         python scripts/bench/gpu.py --out runs/gpu
# --ipc host: ranks on one machine exchange gradients through shared memory.
# An engine has an image of its own, such as vllm/vllm-openai: its torch is another one.
FROM python:3.11-slim-bookworm
# Triton compiles its launchers with a C compiler.
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc git libc6-dev \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /draftsmith
COPY pyproject.toml constraints.txt constraints-dev.txt README.md LICENSE ./
COPY draftsmith draftsmith
COPY heads heads
COPY inference inference
COPY distill distill
COPY train train
COPY scripts scripts
COPY configs configs
COPY tests tests
# The packages for tests are there for the GPU benchmark. The registry's torch for Linux brings the CUDA libraries that it was built with; the driver is the host's.
RUN DRAFTSMITH_VENV=/usr/local extras=dev bash -ec 'source scripts/environment.sh' \
    && pip cache purge
ENV DRAFTSMITH_VENV=/usr/local HF_HOME=/models/hub
CMD ["draftsmith", "doctor"]
