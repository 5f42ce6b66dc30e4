# draftsmith on CPUs:  docker build -f scripts/docker/cpu.Dockerfile -t draftsmith .
#                      docker run --rm -it -v "$PWD/runs:/draftsmith/runs" draftsmith ./scripts/quickstart.sh
FROM python:3.11-slim-bookworm
RUN apt-get update \
    && apt-get install -y --no-install-recommends git \
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
# torch first and alone, from PyTorch's index of CPU wheels: as a dependency it would bring CUDA along.
RUN sed -n 's/^torch==//p' constraints.txt | xargs -I{} pip install --no-cache-dir --index-url https://download.pytorch.org/whl/cpu "torch=={}" \
    && DRAFTSMITH_VENV=/usr/local bash -ec 'source scripts/environment.sh' \
    && pip cache purge
ENV DRAFTSMITH_VENV=/usr/local HF_HOME=/draftsmith/models/hub
CMD ["draftsmith", "--help"]
