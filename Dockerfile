# Not built or run by us yet; the workflow in .github builds it.
#     docker build -t cifar10-fast .
#     docker run --gpus all --shm-size 1g -v "$PWD/data:/cifar10-fast/data" -v "$PWD:/results" cifar10-fast --runs 5
# As your own user: docker run --user "$(id -u):$(id -g)" -e HOME=/tmp ...
# On a cluster: apptainer run --nv docker-daemon:cifar10-fast:latest --data data --out results
# "devel" has the C compiler that torch.compile needs.
FROM pytorch/pytorch:2.10.0-cuda12.8-cudnn9-devel
# For the commit in logs and tables.
RUN apt-get update && apt-get install -y --no-install-recommends git && rm -rf /var/lib/apt/lists/*
COPY . /cifar10-fast
# The image has torch and torchvision; this adds the other dependencies, also where pip is told to leave them to apt.
ENV PIP_BREAK_SYSTEM_PACKAGES=1
RUN pip install --no-cache-dir /cifar10-fast pytest
ENV PYTHON=python3
# Images are downloaded once, and tables stay when the container is gone.
VOLUME ["/cifar10-fast/data", "/results"]
WORKDIR /results
ENTRYPOINT ["bash", "/cifar10-fast/train_cifar_parallel.sh"]
