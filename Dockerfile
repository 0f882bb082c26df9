# Not built or run by us yet. docker build -t cifar10-fast . && docker run --gpus all --shm-size 1g cifar10-fast
# "devel" has the C compiler that torch.compile needs.
FROM pytorch/pytorch:2.10.0-cuda12.8-cudnn9-devel
WORKDIR /cifar10-fast
COPY . .
# The image has torch and torchvision; this adds the other dependencies.
RUN pip install --no-cache-dir . pytest
ENV PYTHON=python3
ENTRYPOINT ["bash", "train_cifar_parallel.sh"]
