"""Serve one model with the GPUs of a Ray cluster: python deploy/ray/serve.py RANKS MODEL [options of octavo serve].

A placement group holds one bundle with a GPU for each rank, close together where that is possible. An actor in each
runs `octavo serve` under torchrun's variables. Rank 0 answers HTTP on its node, whose address is printed (--host says
to whom). SIGTERM and SIGINT drain it. The launcher ends with the first rank that does, and with its exit code.
Octavo is installed on every node, with the extra `ray`.

RANKS:cpu takes bundles without GPUs, to try it out.
"""

import os
import signal
import socket
import subprocess
import sys
from collections import Counter
from typing import Any

SECONDS_TO_END = 40
"""After the first rank, until the others are killed."""


class Rank:
    """One rank's process on its node."""

    def address(self) -> tuple[str, int]:
        """The node's address, and a port there that nobody uses."""
        from ray.util import get_node_ip_address  # noqa: PLC0415

        with socket.create_server(("", 0)) as free:
            return get_node_ip_address(), free.getsockname()[1]

    def start(self, arguments: list[str], variables: dict[str, str]) -> None:
        """Run `octavo serve`."""
        command = [sys.executable, "-m", "octavo.server.cli", "serve", *arguments]
        self._process = subprocess.Popen(command, env={**os.environ, **variables})

    def wait(self) -> int:
        """Its exit code, once it has ended."""
        return self._process.wait()

    def signal(self, number: int) -> None:
        """Let it drain and end, or kill it."""
        self._process.send_signal(number)


def variables_of(addresses: list[tuple[str, int]]) -> list[dict[str, str]]:
    """torchrun's variables for each rank, from the addresses of their nodes. Ray shows each its own GPU only, as 0."""
    leader, port = addresses[0]
    ranks_on = Counter(node for node, _ in addresses)
    common = {"MASTER_ADDR": leader, "MASTER_PORT": str(port), "WORLD_SIZE": str(len(addresses)), "LOCAL_RANK": "0"}
    return [
        common | {"RANK": str(rank), "LOCAL_WORLD_SIZE": str(ranks_on[node])}
        for rank, (node, _) in enumerate(addresses)
    ]


def place(size: int, gpus: int) -> list[Any]:
    """An actor for each rank, in a bundle of its own."""
    import ray  # noqa: PLC0415
    from ray.util.placement_group import placement_group  # noqa: PLC0415
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy  # noqa: PLC0415

    group = placement_group([{"CPU": 1, "GPU": gpus} if gpus else {"CPU": 1}] * size, strategy="PACK")
    ray.get(group.ready())
    actor: Any = ray.remote(Rank)
    return [
        actor.options(
            num_cpus=1,
            num_gpus=gpus,
            max_concurrency=2,  # it hears `signal` while it waits
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index),
        ).remote()
        for index in range(size)
    ]


def main(arguments: list[str]) -> int:
    """Place the ranks, start them, and wait for the first that ends."""
    import ray  # noqa: PLC0415

    count, _, kind = arguments[0].partition(":")
    size = int(count)
    ray.init()
    ranks = place(size, gpus=0 if kind == "cpu" else 1)
    addresses = ray.get([rank.address.remote() for rank in ranks])
    serving = [*arguments[1:], "--tensor-parallel-size", str(size)]
    ray.get([rank.start.remote(serving, own) for rank, own in zip(ranks, variables_of(addresses), strict=True)])
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ranks[0].signal.remote(signal.SIGTERM))
    print(f"rank 0 is on {addresses[0][0]}", flush=True)
    ends = [rank.wait.remote() for rank in ranks]
    [first], _ = ray.wait(ends)
    ray.wait(ends, num_returns=size, timeout=SECONDS_TO_END)  # all others end with rank 0
    ray.get([rank.signal.remote(signal.SIGKILL) for rank in ranks])
    return int(ray.get(first))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
