"""A real Triton Inference Server, and how tests talk to it."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import sysconfig
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from tests.e2e.required import skip_or_fail

ROOT = Path(__file__).resolve().parents[2]
# A folder as `make triton-server` makes it.
TRITON = Path(os.environ.get("OCTAVO_TRITON", ROOT / "build" / "triton"))
START_TIMEOUT = 120.0
EXIT_TIMEOUT = 30


def require_triton() -> None:
    if not (TRITON / ".ready").exists():
        skip_or_fail(f"{TRITON} holds no Triton Inference Server: run `make triton-server`")


def export(engine: Path, repository: Path, *arguments: str) -> None:
    """Runs `octavo export-triton`."""
    command = [sys.executable, "-m", "octavo.tools.main", "export-triton", str(engine)]
    subprocess.run(
        [*command, "--output", str(repository), *arguments], check=True, capture_output=True
    )


@dataclass
class Server:
    process: subprocess.Popen[bytes]
    http: int
    grpc: int
    metrics: int
    log: Path

    def url(self, model: str, action: str) -> str:
        return f"http://127.0.0.1:{self.http}/v2/models/{model}/{action}"

    def post(self, model: str, body: dict[str, Any], action: str = "generate") -> tuple[int, str]:
        return self._post(self.url(model, action), body)

    def load(self, model: str) -> tuple[int, str]:
        return self._post(f"http://127.0.0.1:{self.http}/v2/repository/models/{model}/load", {})

    def _post(self, url: str, body: dict[str, Any]) -> tuple[int, str]:
        """Status and body of the answer."""
        try:
            with urllib.request.urlopen(url, json.dumps(body).encode(), timeout=60) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()

    def generate(self, model: str, **body: Any) -> dict[str, Any]:
        status, text = self.post(model, body)
        assert status == 200, text
        answer: dict[str, Any] = json.loads(text)
        assert "error" not in answer, answer
        return answer

    def refusal(self, model: str, **body: Any) -> str:
        status, text = self.post(model, body)
        assert status == 400, text
        return str(json.loads(text)["error"])

    def stream(self, model: str, **body: Any) -> list[dict[str, Any]]:
        """The pieces of /generate_stream."""
        status, text = self.post(model, {"stream": True, **body}, "generate_stream")
        assert status == 200, text
        lines = [line for line in text.splitlines() if line]
        assert all(line.startswith("data: ") for line in lines), lines
        return [json.loads(line.removeprefix("data: ")) for line in lines]

    def is_ready(self, model: str) -> bool:
        try:
            with urllib.request.urlopen(self.url(model, "ready"), timeout=10) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, ConnectionError):
            return False

    def metric(self, name: str, **labels: str) -> float:
        """The sum of the samples of this name that have these labels."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.metrics}/metrics") as answer:
            text = answer.read().decode()
        samples = re.findall(rf"^{re.escape(name)}\{{(.*)\}} (\S+)$", text, re.MULTILINE)
        wanted = [f'{key}="{value}"' for key, value in labels.items()]
        found = [float(value) for have, value in samples if all(one in have for one in wanted)]
        assert found, f"{name} with {labels} is not among the metrics"
        return sum(found)

    def engines(self, model: str) -> list[psutil.Process]:
        """The processes that run the engines of a model."""
        stubs = psutil.Process(self.process.pid).children()
        own = [one for one in stubs if f"/{model}/" in " ".join(one.cmdline())]
        return [child for stub in own for child in stub.children()]

    def descendants(self) -> list[psutil.Process]:
        return list(psutil.Process(self.process.pid).children(recursive=True))

    def shared_memory(self) -> set[Path]:
        """What it shares with the processes of its models."""
        maps = Path(f"/proc/{self.process.pid}/maps").read_text()
        return set(map(Path, re.findall(r"/dev/shm/triton_python_backend\S+", maps)))

    def wait_until(self, condition: str, holds: Any, timeout: float = 30.0) -> None:
        end = time.monotonic() + timeout
        while not holds():
            assert time.monotonic() < end, f"{condition} did not come true: {self.tail()}"
            time.sleep(0.02)

    def tail(self) -> str:
        return self.log.read_text(errors="replace")[-4000:]


@contextmanager
def triton_server(repository: Path, log: Path, **options: str) -> Iterator[Server]:
    """Ready when entered; ended with everything it has started. `options`: of the server."""
    require_triton()
    server = start(repository, log, **options)
    started, regions = server.descendants(), server.shared_memory()
    try:
        yield server
    finally:
        if server.process.poll() is None:
            started, regions = server.descendants(), server.shared_memory()
            server.process.terminate()
            try:
                server.process.wait(2 * EXIT_TIMEOUT)
            except subprocess.TimeoutExpired:
                server.process.kill()
                server.process.wait()
        _, alive = psutil.wait_procs(started, timeout=10)
        for process in alive:
            process.kill()
        for region in regions:  # a server that does not end by itself leaves them
            region.unlink(missing_ok=True)


def start(repository: Path, log: Path, **further: str) -> Server:
    ports = _free_ports(3)
    home = TRITON / "server" / "pytriton" / "tritonserver"
    options: dict[str, object] = {
        "backend-directory": home / "backends",
        "model-repository": repository,
        "exit-timeout-secs": EXIT_TIMEOUT,
        "http-address": "127.0.0.1",
        "grpc-address": "127.0.0.1",
        "http-port": ports[0],
        "grpc-port": ports[1],
        "metrics-port": ports[2],
        **{name.replace("_", "-"): value for name, value in further.items()},
    }
    environment = {
        **os.environ,
        "PATH": f"{TRITON / 'venv' / 'bin'}:{os.environ['PATH']}",
        "LD_LIBRARY_PATH": str(sysconfig.get_config_var("LIBDIR")),
        "OMP_NUM_THREADS": "1",
    }
    with log.open("wb") as output:
        process = subprocess.Popen(
            [
                home / "bin" / "tritonserver",
                *(f"--{key}={value}" for key, value in options.items()),
            ],
            stdout=output,
            stderr=output,
            env=environment,
        )
    server = Server(process, ports[0], ports[1], ports[2], log)
    end = time.monotonic() + START_TIMEOUT
    while not _answers(f"http://127.0.0.1:{server.http}/v2/health/ready"):
        if process.poll() is not None or time.monotonic() > end:
            process.kill()
            process.wait()
            raise RuntimeError(f"the server did not become ready: {server.tail()}")
        time.sleep(0.1)
    return server


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5):
            return True
    except (OSError, urllib.error.URLError):
        return False


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports
