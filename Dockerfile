# Sightline with PyTorch for NVIDIA GPUs and CPUs; see docs/howto/container.md.
#   docker build -t sightline:0.2.0 .
#   docker run --rm --gpus all --shm-size 8g -v /my/data:/data:ro sightline:0.2.0 train resnet50 --data.path /data
# Loader workers pass batches through /dev/shm, of which Docker gives 64 MiB by default: hence --shm-size.
FROM debian:bookworm-20260824-slim@sha256:88200866dfff7ea7f5cbcb6ec7c8a701889efe6fe859fe64d6990e4b07ea4171

# torch.compile and Triton build code at run time: they need g++ and Python.h.
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*

# The user and the folders that `sightline launch --launcher kubernetes` expects.
RUN groupadd --gid 1000 sightline \
    && useradd --uid 1000 --gid 1000 --create-home sightline \
    && install -d -o 1000 -g 1000 /workspace /workspace/runs

ENV PATH=/opt/sightline/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin PYTHONUNBUFFERED=1
WORKDIR /src

# Dependencies first: this layer is 5.5 GB, and a change of the code leaves it alone.
COPY pyproject.toml constraints.txt ./
COPY sightline/__init__.py sightline/
RUN touch README.md LICENSE \
    && python3 -m venv /opt/sightline \
    && pip install --no-cache-dir -c constraints.txt pip setuptools \
    && pip install --no-cache-dir -c constraints.txt --no-build-isolation .

COPY README.md LICENSE ./
COPY sightline sightline/
COPY packages/migrate packages/migrate/
RUN pip install --no-cache-dir --no-deps --no-build-isolation --force-reinstall . ./packages/migrate \
    && rm -rf /src/*

# By number, so that Kubernetes can see that it is not root.
USER 1000:1000
WORKDIR /workspace
ENTRYPOINT ["sightline"]
CMD ["--help"]
