# The CPU image:   docker build -t slipstream .
# A CUDA base:     docker build -t slipstream --build-arg BASE_IMAGE=nvidia/cuda:12.8.1-runtime-ubuntu24.04 .
# PyTorch's wheels for one CUDA version, or for CPUs only, come from an index of their own:
#                  --build-arg TORCH_INDEX_URL=...

ARG BASE_IMAGE=python:3.11-slim

FROM ${BASE_IMAGE} AS python
ENV PATH=/opt/venv/bin:$PATH \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PIP_NO_CACHE_DIR=1 \
    PYTHONUNBUFFERED=1
# CUDA images come without Python, and without the headers that native code is built against.
# hadolint ignore=DL3008
RUN if ! command -v python3 > /dev/null; then \
        apt-get update \
        && apt-get install --yes --no-install-recommends python3 python3-dev python3-venv \
        && rm -rf /var/lib/apt/lists/*; \
    fi

FROM python AS build
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /src
RUN python3 -m venv /opt/venv
COPY constraints.txt ./
ARG TORCH_INDEX_URL=""
# The version is pinned by constraints.txt.
# hadolint ignore=DL3013
RUN if [ -n "$TORCH_INDEX_URL" ]; then \
        pip install --no-deps --index-url "$TORCH_INDEX_URL" --constraint constraints.txt torch; \
    fi
COPY pyproject.toml CMakeLists.txt README.md LICENSE ./
COPY engine engine
COPY server server
COPY loadtest loadtest
RUN PIP_CONSTRAINT=constraints.txt pip install .

FROM python AS runtime
RUN useradd --create-home --uid 10001 slipstream \
    && mkdir /cache \
    && chown slipstream:slipstream /cache
COPY --from=build /opt/venv /opt/venv
WORKDIR /app
COPY configs configs
USER 10001:10001
ENV SLIPSTREAM_CACHE=/cache \
    HF_HOME=/cache/huggingface
VOLUME /cache
EXPOSE 8000
# Fails until the model is loaded; the first start may have to fetch it.
HEALTHCHECK --interval=10s --timeout=3s --start-period=10m \
    CMD ["python", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8000/health', timeout=2)"]
ENTRYPOINT ["slipstream"]
CMD ["serve", "--config", "configs/default.yaml", "--host", "0.0.0.0", "--port", "8000"]
