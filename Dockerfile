# The server of docs/serving.md. Over the simulator in real time:
#   docker build -t pagedsim . && docker run --rm -p 8000:8000 pagedsim model=llama-3.1-8b
# Over the engine; without a GPU, leave --gpus away:
#   docker build -t pagedsim-engine --target engine .
#   docker run --rm --gpus all -p 8000:8000 pagedsim-engine model=Qwen/Qwen3-0.6B
# Words after the image's name are settings (pagedsim serve --help). It listens on every interface
# of the container: set -e PAGEDSIM_API_KEY=... where others reach the port.
FROM python:3.13-slim AS base
RUN useradd --create-home --uid 1000 pagedsim
COPY pyproject.toml hatch_build.py constraints.txt README.md LICENSE /src/
COPY pagedsim /src/pagedsim
COPY policies /src/policies
COPY kernels /src/kernels
COPY conf /src/conf
COPY experiments /src/experiments
WORKDIR /src
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=5s --start-period=5m CMD ["python", "-c", "from urllib.request import urlopen; urlopen('http://127.0.0.1:8000/health', timeout=4)"]

FROM base AS engine
# Triton compiles launchers with a C compiler.
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
RUN pip install --no-cache-dir -c constraints.txt '.[engine,serve]'
USER pagedsim
WORKDIR /home/pagedsim
ENTRYPOINT ["pagedsim", "serve", "host=0.0.0.0", "backend=engine"]

FROM base AS sim
RUN pip install --no-cache-dir -c constraints.txt '.[serve]'
USER pagedsim
WORKDIR /home/pagedsim
ENTRYPOINT ["pagedsim", "serve", "host=0.0.0.0"]
