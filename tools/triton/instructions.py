"""README.md of a model repository: the commands that serve it."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path


def readme(repository: Path, models: Sequence[str], python: str) -> str:
    """`models`: their names; `python`: the interpreter that the newest one's engine runs under."""
    name = models[0]
    folder = shlex.quote(str(repository))
    listed = "".join(f"- `{one}`\n" for one in models)
    return f"""# A model repository of Octavo

For Triton Inference Server 24.12 or newer, with its Python backend.

{listed}
`NAME/1/model.json` says which engine a model runs, with which options, and under which Python. That
Python must have Octavo (`pip install 'octavo[cpu]'`); the one of the server needs numpy alone.

## Serve it without a container

    tritonserver --model-repository {folder} --exit-timeout-secs 30

## Serve it with docker

Make an image that has Octavo in an environment of its own, from the wheel that `pip wheel .` makes:

    FROM nvcr.io/nvidia/tritonserver:25.06-py3
    COPY octavo-*.whl /tmp/
    RUN apt-get update && apt-get install -y python3-venv && python3 -m venv /opt/octavo \\
     && /opt/octavo/bin/pip install "$(ls /tmp/octavo-*.whl)[cpu]"

Export with `--python /opt/octavo/bin/python` (now: `{python}`) and with the engine copied into the
repository, which is the default. Then:

    docker build -t octavo-triton .
    docker run --rm --shm-size 1g -p 8000:8000 -p 8001:8001 -p 8002:8002 \\
      -v {folder}:/models:ro octavo-triton \\
      tritonserver --model-repository /models --exit-timeout-secs 30

## Ask it

    curl localhost:8000/v2/models/{name}/ready
    curl localhost:8000/v2/models/{name}/generate \\
      -d '{{"text_input": "The capital of France is", "max_tokens": 16, "temperature": 0.0}}'
    curl -N localhost:8000/v2/models/{name}/generate_stream \\
      -d '{{"text_input": "The capital of France is", "max_tokens": 16, "stream": true}}'
    curl -s localhost:8002/metrics | grep octavo:engine_up
"""
