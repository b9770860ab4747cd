"""The virtual environments of the peers, made from pinned requirements."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
from pathlib import Path

from octavo.tools.bench.peers.catalog import Peer
from octavo.tools.bench.peers.process import PeerError

REQUIREMENTS = Path(__file__).parent / "requirements"
STAMP = ".installed"
_VERSIONS = """
import importlib.metadata, json, platform, sys
found = {"python": platform.python_version()}
for name in sys.argv[1:]:
    try:
        found[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        pass
print(json.dumps(found))
"""


def install(name: str, root: Path, npm: tuple[str, ...] = ()) -> None:
    """Makes `root` from requirements/{name}.txt unless it is there; PeerError with the reason.

    The file names every package, so nothing is resolved: a peer that would accept a build of torch
    with CUDA does not get to ask for one.
    """
    requirements = REQUIREMENTS / f"{name}.txt"
    digest = hashlib.sha256(requirements.read_bytes() + repr(npm).encode()).hexdigest()
    stamp = root / STAMP
    if stamp.exists() and stamp.read_text(encoding="utf-8") == digest:
        return
    shutil.rmtree(root, ignore_errors=True)
    _run([sys.executable, "-m", "venv", str(root)])
    pip = [str(root / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "install"]
    _run([*pip, "--quiet", "--no-deps", "--requirement", str(requirements)])
    if npm:
        _run(["npm", "install", "--prefix", str(root / "node"), "--no-audit", "--no-save", *npm])
    stamp.write_text(digest, encoding="utf-8")


def versions(peer: Peer, root: Path) -> dict[str, str]:
    """Of the peer's packages, as its own interpreter sees them."""
    python = str(root / "bin" / "python") if peer.in_own_environment else sys.executable
    found: dict[str, str] = json.loads(_run([python, "-c", _VERSIONS, *peer.packages]))
    for package in peer.npm:
        name, _, version = package.rpartition("@")
        found[name] = version
    return found


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise PeerError(f"`{command[0]}` is not installed") from None
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "error" in line.lower()]
        reason = (lines or done.stderr.strip().splitlines() or ["no message"])[-1]
        raise PeerError(f"`{Path(command[0]).name} {command[1]}` failed: {reason.strip()}")
    return done.stdout
