"""The TCP sockets of processes, as the kernel tells them."""

from dataclasses import dataclass
from pathlib import Path

_ESTABLISHED, _LISTENING = "01", "0A"


@dataclass(frozen=True)
class Sockets:
    """Local ports: one for each listener and one for each connection."""

    listening: list[int]
    connected: list[int]


def family(pid: int) -> list[int]:
    """A process and all that descend from it."""
    children = Path(f"/proc/{pid}/task").glob("*/children")
    return [pid, *(member for path in children for child in path.read_text().split() for member in family(int(child)))]


def sockets_of(pid: int) -> Sockets:
    """The TCP sockets that a process and its descendants hold, each counted once."""
    held = {
        link.readlink().name
        for member in family(pid)
        for link in Path(f"/proc/{member}/fd").iterdir()
        if link.is_symlink()
    }
    found: dict[str, list[int]] = {_LISTENING: [], _ESTABLISHED: []}
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if f"socket:[{fields[9]}]" in held and fields[3] in found:
                found[fields[3]].append(int(fields[1].rpartition(":")[2], 16))
    return Sockets(found[_LISTENING], found[_ESTABLISHED])
