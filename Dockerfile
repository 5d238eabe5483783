# Flexor with CUDA for x86_64, of the wheel of this clone: docs/docker.md.
#
#     docker build -t flexor .
#
# torch's own wheels bring CUDA's libraries: the host needs NVIDIA's driver and container toolkit, nothing else.

FROM --platform=linux/amd64 python:3.12 AS wheel
WORKDIR /flexor
COPY pyproject.toml MANIFEST.in README.md LICENSE ./
COPY src src
COPY client client
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /dist .

# Not the slim image: Triton compiles its launchers with gcc when a kernel is first used.
FROM --platform=linux/amd64 python:3.12
# "video" is the decoder of videos in the GPU, which containers do not get by default.
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility,video
ENV PYTHONUNBUFFERED=1 PIP_ROOT_USER_ACTION=ignore
COPY constraints.txt /flexor/constraints.txt
COPY --from=wheel /dist /dist
RUN pip install --no-cache-dir -c /flexor/constraints.txt "$(echo /dist/flexor-*.whl)[vla,tensorboard,accelerate]" && flexor --version
WORKDIR /work
CMD ["flexor"]
