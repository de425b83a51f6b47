# mmtrain for CUDA machines, on NVIDIA's PyTorch image.
#
# Built on a base with torch for CPUs (see below), and never on NVIDIA's: expect to adjust the tag. The image must bring a
# torch within pyproject.toml's range; images 25.xx are too old (25.12 ships a torch 2.10).
#
#   docker build -t mmtrain .
#   docker run --gpus all --ipc=host --ulimit memlock=-1 -v "$PWD/runs:/workspace/runs" mmtrain \
#       mmtrain train recipes/demo.yaml
#
# Another base, such as one with a torch for CPUs, which has no kernels to add:
#
#   docker build --build-arg BASE=python-with-torch --build-arg EXTRAS=all -t mmtrain .
ARG BASE=nvcr.io/nvidia/pytorch:26.06-py3
FROM ${BASE}
ARG EXTRAS=all,cuda

WORKDIR /opt/mmtrain
COPY pyproject.toml setup.py README.md LICENSE NOTICE ./
COPY mmtrain mmtrain
COPY recipes recipes
COPY docs/recipe.schema.json docs/recipe.schema.json
COPY scripts/train.sbatch scripts/train_ray.py scripts/

# The image's torch is built against its CUDA, NCCL and flash-attn; one from PyPI in its place would break all three.
# So pin what is there, build in the image's environment, and fail the build if the version moved all the same. `cuda`
# adds FlashAttention-4 and liger-kernel, which are wheels; the image's own FlashAttention-2 stays as it is. A torch that
# is newer than pyproject.toml allows ends the build with pip's message: take an older tag.
RUN python -c "import torch; print('torch==' + torch.__version__)" > /tmp/torch.txt \
    && pip install --no-cache-dir 'setuptools>=77.0.3' \
    && pip install --no-cache-dir --no-build-isolation -c /tmp/torch.txt ".[${EXTRAS}]" \
    && python -c "import torch; assert open('/tmp/torch.txt').read().strip() == 'torch==' + torch.__version__" \
    && mmtrain --version

# Which kernels will be used, and what is missing, on the machine that runs it: `docker run --gpus all mmtrain mmtrain doctor`.
# The recipes are where commands run, so that `mmtrain train recipes/demo.yaml` works as on the pages.
WORKDIR /workspace
COPY recipes recipes
CMD ["mmtrain", "--help"]
