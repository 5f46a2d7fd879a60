# The orchestrator with TensorRT-LLM as its engine, on NVIDIA's release image, whose own licences hold for what it brings.
#   docker build -f docker/orchestrator-tensorrt-llm.Dockerfile -t ecospec-orchestrator-tensorrt-llm:0.1.0 .
# Several nodes: add --build-arg RAY=ray==VERSION, the version that this TensorRT-LLM asks for, and tag it 0.1.0-ray.
# The version is the one that the plug-in was written for; another may have other signatures.
ARG TENSORRT_LLM_IMAGE=nvcr.io/nvidia/tensorrt-llm/release:1.3.0rc24
ARG PYTHON_IMAGE=python:3.11.14-slim-bookworm@sha256:65a93d69fa75478d554f4ad27c85c1e69fa184956261b4301ebaf6dbb0a3543d

FROM ${PYTHON_IMAGE} AS wheels
WORKDIR /src
COPY proto proto
COPY services/orchestrator services/orchestrator
RUN pip wheel --no-cache-dir --disable-pip-version-check --no-deps --wheel-dir /wheels ./proto ./services/orchestrator

FROM ${TENSORRT_LLM_IMAGE} AS runtime
ARG TENSORRT_LLM_IMAGE
ARG VERSION=0.1.0
ARG REVISION=unknown
ARG RAY=
LABEL org.opencontainers.image.title="ecospec-orchestrator-tensorrt-llm" \
      org.opencontainers.image.description="Serves completions from a mixture-of-experts model with cost-aware speculative decoding in TensorRT-LLM." \
      org.opencontainers.image.licenses="Apache-2.0 AND LicenseRef-NVIDIA-container" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.base.name="${TENSORRT_LLM_IMAGE}"
COPY --from=wheels /wheels /tmp/wheels
COPY constraints.txt /tmp/ours.txt
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
# What NVIDIA's image brings stays as it is; what it lacks comes in our versions; what fits neither stops the build.
RUN python3 -m pip list --format=freeze | grep -v '@' > /tmp/theirs.txt \
    && python3 -c 'import re; name = lambda line: re.sub("[-_.]+", "-", line.split("==")[0].strip().lower()); \
theirs = {name(line) for line in open("/tmp/theirs.txt")}; \
kept = [line for line in open("/tmp/ours.txt") if "==" in line and name(line) not in theirs]; \
open("/tmp/constraints.txt", "w").writelines([*open("/tmp/theirs.txt"), *kept])' \
    && PIP_CONSTRAINT='' python3 -m pip install --no-cache-dir --break-system-packages --no-deps /tmp/wheels/*.whl \
    && PIP_CONSTRAINT='' python3 -m pip install --no-cache-dir --break-system-packages -c /tmp/constraints.txt \
        gguf grpcio grpcio-health-checking numba opentelemetry-exporter-otlp opentelemetry-sdk prometheus-client pydantic-settings redis \
        safetensors scipy uvloop ${RAY} \
    && rm -rf /tmp/wheels /tmp/*.txt
# Another version than the plug-in was written for, or other signatures, stop the build here and not a server later.
RUN python3 -c "from ecospec_orchestrator.engine.tensorrt_llm.plugin.signatures import require_supported; print(require_supported())"
RUN groupadd --gid 65532 ecospec \
    && useradd --uid 65532 --gid 65532 --no-create-home --home-dir /var/cache/ecospec --shell /usr/sbin/nologin ecospec \
    && install -d -o 65532 -g 65532 -m 0750 /var/cache/ecospec
COPY docker/http_health.py /opt/ecospec/libexec/http_health.py
COPY LICENSE NOTICE /licenses/ecospec/
# Kernels that TensorRT-LLM, Triton and FlashInfer compile go below HOME.
ENV PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    HOME=/var/cache/ecospec \
    XDG_CACHE_HOME=/var/cache/ecospec \
    ECOSPEC_HOST=0.0.0.0
VOLUME ["/var/cache/ecospec"]
EXPOSE 8000
USER 65532:65532
HEALTHCHECK --interval=15s --timeout=10s --start-period=60m --retries=3 CMD ["python3", "/opt/ecospec/libexec/http_health.py"]
ENTRYPOINT ["ecospec-orchestrator"]
CMD ["serve"]
