# A server on CPUs. From the root of the repository:
#   docker build -f containers/cpu.Dockerfile -t slipstream:cpu .
#   docker run -p 8000:8000 -v models:/models slipstream:cpu            # the bundled demo
#   docker run -p 8000:8000 -v models:/models slipstream:cpu serve Qwen/Qwen3-0.6B --host 0.0.0.0
FROM python:3.12-slim-bookworm AS build
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
WORKDIR /source
COPY . .
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:3.12-slim-bookworm
# The build of torch for CPUs: the plain one brings gigabytes of CUDA libraries.
RUN pip install --no-cache-dir 'torch>=2.11,<=2.13.0' --index-url https://download.pytorch.org/whl/cpu
# With serve,hub,deploy it is an image for `slipstream deploy --manifest`.
ARG EXTRAS=serve,hub
RUN --mount=type=bind,from=build,source=/wheels,target=/wheels \
    pip install --no-cache-dir "$(echo /wheels/slipstream-*.whl)[${EXTRAS}]"
RUN useradd --create-home --uid 10001 slipstream && install -d -o slipstream /models
USER 10001
ENV HF_HOME=/models
VOLUME /models
EXPOSE 8000
HEALTHCHECK --start-period=120s CMD ["python", "-c", \
    "from urllib.request import urlopen; urlopen('http://127.0.0.1:8000/health', timeout=5)"]
ENTRYPOINT ["slipstream"]
CMD ["serve", "--host", "0.0.0.0"]
