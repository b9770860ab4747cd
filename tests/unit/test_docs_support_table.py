"""The README's support table says of each backend and device what the backend says of itself."""

from __future__ import annotations

from pathlib import Path

from octavo.backends import registry

ROOT = Path(__file__).resolve().parents[2]
HEAD = (
    "backend", "device", "what it is for", "weights", "cache",
    "built here", "run here", "not yet run on hardware",
)  # fmt: skip


def rows() -> dict[tuple[str, str], dict[str, str]]:
    lines = (ROOT / "README.md").read_text().splitlines()
    start = lines.index("| " + " | ".join(HEAD) + " |")
    found = {}
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        row = dict(zip(HEAD, (cell.strip() for cell in line.strip("|").split("|")), strict=True))
        found[row["backend"].strip("`"), row["device"].lower()] = row
    return found


def test_every_backend_and_device_has_a_row() -> None:
    declared = {
        (name, device) for name in registry.names() for device in registry.get(name).devices
    }
    assert set(rows()) == declared


def test_nobody_can_mistake_a_simulated_backend_for_a_proven_one() -> None:
    for (name, device), row in rows().items():
        tested = {str(one): how for one, how in registry.get(name).tested.items()}[device]
        has_run = row["run here"] == "yes"
        assert has_run == (tested == "run"), (name, device)
        assert ("not yet" in row["not yet run on hardware"]) != has_run, (name, device)
        if tested in ("run", "built"):
            assert row["built here"].startswith("yes"), (name, device)
