# The CPU image:    docker build -t slipstream .
# The CUDA image:   docker build -t slipstream:cuda --target cuda .
#
# What the package index offers as torch may come with CUDA, gigabytes that a CPU has no use for.
# PyTorch has indexes of its own with torch for CPUs only, and for each version of CUDA:
#                   --build-arg TORCH_CPU_INDEX_URL=... or --build-arg TORCH_CUDA_INDEX_URL=...
# The git tags don't come along. Whoever knows the version names it:  --build-arg VERSION=1.2.3

ARG BASE_IMAGE=python:3.11-slim

FROM ${BASE_IMAGE} AS base
ENV PATH=/opt/venv/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1

FROM base AS build
ENV PIP_CONSTRAINT=constraints.txt \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PIP_NO_CACHE_DIR=1
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/* \
    && python3 -m venv /opt/venv
WORKDIR /src
COPY constraints.txt ./

FROM build AS build-cpu
ARG TORCH_CPU_INDEX_URL=""
# Versions are pinned by constraints.txt.
# hadolint ignore=DL3013
RUN if [ -n "$TORCH_CPU_INDEX_URL" ]; then \
        pip install --no-deps --index-url "$TORCH_CPU_INDEX_URL" torch; \
    fi
ARG VERSION=""
COPY pyproject.toml CMakeLists.txt README.md LICENSE ./
COPY engine engine
COPY server server
COPY loadtest loadtest
# hadolint ignore=DL3013
RUN SETUPTOOLS_SCM_PRETEND_VERSION_FOR_SLIPSTREAM="$VERSION" pip install '.[tracing]'

FROM build AS build-cuda
ARG TORCH_CUDA_INDEX_URL=""
# hadolint ignore=DL3013
RUN if [ -n "$TORCH_CUDA_INDEX_URL" ]; then \
        pip install --extra-index-url "$TORCH_CUDA_INDEX_URL" torch; \
    else \
        pip install torch; \
    fi
ARG VERSION=""
COPY pyproject.toml CMakeLists.txt README.md LICENSE ./
COPY engine engine
COPY server server
COPY loadtest loadtest
# hadolint ignore=DL3013
RUN SETUPTOOLS_SCM_PRETEND_VERSION_FOR_SLIPSTREAM="$VERSION" pip install '.[tracing]'

FROM base AS runtime
RUN useradd --no-create-home --home-dir /cache --uid 10001 slipstream \
    && mkdir /cache \
    && chown slipstream:slipstream /cache
WORKDIR /app
COPY configs configs
USER 10001:10001
# All that is ever written lies in /cache: the rest may be mounted read-only.
ENV SLIPSTREAM_CACHE=/cache \
    HF_HOME=/cache/huggingface \
    TMPDIR=/cache \
    SLIPSTREAM_LOG_FORMAT=json
VOLUME /cache
EXPOSE 8000
# Docker calls the container "starting" while the model loads, "healthy" once it is loaded, and
# "unhealthy" when the engine dies after that. A load that fails ends the container.
HEALTHCHECK --interval=15s --timeout=3s --start-period=30m --retries=2 \
    CMD ["python3", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8000/health', timeout=2)"]
ENTRYPOINT ["slipstream"]
CMD ["serve", "--config", "configs/default.yaml", "--host", "0.0.0.0", "--port", "8000"]

# The driver comes from the host, through NVIDIA's container toolkit; the rest of CUDA with torch.
FROM runtime AS cuda
COPY --from=build-cuda /opt/venv /opt/venv
ENV NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility

FROM runtime AS cpu
COPY --from=build-cpu /opt/venv /opt/venv
