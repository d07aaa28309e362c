# Trains and samples as a normal user; data and outputs live in volumes.
#
#   docker build -t imagegen .                              CPU build of PyTorch, about 1 GB
#   docker build -t imagegen-cuda --build-arg DEVICE=cuda . CUDA build, about 6 GB; x86-64 or ARM server
#
#   docker run --rm -v "$PWD/data:/app/data" -v "$PWD/outputs:/app/outputs" imagegen dataset=mnist
#   docker run --rm --gpus all -v ... imagegen-cuda dataset=mnist trainer=gpu
#   docker run --rm -v ... --entrypoint python imagegen sample.py ckpt=outputs/... out=outputs/samples
#
# What follows the image's name goes to train.py. Mounted folders must be writable by user 1000,
# or by the user that `--user "$(id -u):$(id -g)"` names. wandb is offline unless WANDB_API_KEY is
# passed with `-e WANDB_API_KEY`.
#
# Both builds install the versions in constraints.txt. uv knows where PyTorch publishes its CPU
# builds, which the package index itself does not carry for Linux; that place must be reachable during
# `docker build`. DEVICE=cuda needs the package index only, and on the host a driver for CUDA 13 and
# NVIDIA's container toolkit.

ARG PYTHON_VERSION=3.12
ARG DEVICE=cpu

FROM python:${PYTHON_VERSION}-slim AS base
WORKDIR /app
# HOME is writable for whichever user runs the container; USER spares libraries a look-up that fails
# for a user without an entry in /etc/passwd.
ENV HOME=/tmp USER=imagegen PYTHONUNBUFFERED=1 PATH=/opt/venv/bin:$PATH
RUN pip install --no-cache-dir uv==0.13.9 && uv venv /opt/venv
ENV VIRTUAL_ENV=/opt/venv UV_NO_CACHE=1 UV_COMPILE_BYTECODE=1
# Only what decides on the dependencies, so that a change of the code does not install them again.
COPY pyproject.toml constraints.txt ./

FROM base AS cpu
RUN uv pip install --torch-backend=cpu --constraint constraints.txt \
    -r pyproject.toml --extra tensorboard

FROM base AS cuda
RUN uv pip install --constraint constraints.txt -r pyproject.toml --extra tensorboard
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility

FROM ${DEVICE}
COPY conf conf
COPY imagegen imagegen
COPY train.py sample.py LICENSE ./
RUN uv pip install --no-deps --editable . \
    && useradd --uid 1000 --no-create-home --home-dir /tmp imagegen \
    && mkdir data outputs && chown imagegen: data outputs && chmod 1777 data outputs
USER imagegen
VOLUME ["/app/data", "/app/outputs"]
ENTRYPOINT ["python", "train.py"]
