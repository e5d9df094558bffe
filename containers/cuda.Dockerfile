# A server on one NVIDIA GPU (compute capability 8.0 or newer). From the root of the repository:
#   docker build -f containers/cuda.Dockerfile -t slipstream:cuda .
#   docker run --gpus all -p 8000:8000 -v models:/models slipstream:cuda serve Qwen/Qwen3-8B --host 0.0.0.0
FROM python:3.12-slim-bookworm
# Triton compiles the start of each kernel with a C compiler when it is first used.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
# CUDA's libraries come with torch; the driver is the host's.
RUN pip install --no-cache-dir 'torch>=2.11,<=2.13.0'
# With serve,hub,deploy it is an image for `slipstream deploy --manifest`.
ARG EXTRAS=serve,hub
RUN --mount=type=bind,target=/source,rw \
    pip install --no-cache-dir "/source[${EXTRAS}]"
RUN useradd --create-home --uid 10001 slipstream && install -d -o slipstream /models
USER 10001
ENV HF_HOME=/models TRITON_CACHE_DIR=/models/triton
VOLUME /models
EXPOSE 8000
HEALTHCHECK --start-period=300s CMD ["python", "-c", \
    "from urllib.request import urlopen; urlopen('http://127.0.0.1:8000/health', timeout=5)"]
ENTRYPOINT ["slipstream"]
CMD ["serve", "--host", "0.0.0.0"]
