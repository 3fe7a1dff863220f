"""Tensor parallelism: one model divided among ranks, each a process (Megatron's scheme; Shoeybi et al., 2019).

Every rank computes its heads and its columns of the feed-forward from the whole normed spine, so W_Q, W_K, W_V, W_gate
and W_up are divided by rows, W_O and W_down by columns, and what the branches add is the sum over the ranks. Embedding
and LM head are divided by rows of the vocabulary. After each of these sums all ranks hold the same bits; every rank
samples, and takes rank 0's tokens, so that no rounding of another processor can part them.

Collectives are torch.distributed's: gloo on a CPU, NCCL on GPUs.
"""

import contextlib
import hashlib
import logging
import os
import socket
from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta
from typing import Any, Final

import torch
from torch import Tensor, distributed

from octavo.model.device import CPU
from octavo.model.kernels import Linear
from octavo.model.weights.destination import Destination

_PATIENCE: Final = timedelta(minutes=30)
"""How long a rank waits for another in a collective. One that is gone is noticed at once."""
_UNLIMITED: Final = timedelta(days=3650)
"""How long a rank waits for the next step."""


class RankError(Exception):
    """A rank is gone, or is not what it should be."""


class Ranks:
    """One rank's end of the collectives."""

    def __init__(self, rendezvous: str, rank: int, size: int) -> None:
        """Wait until all ranks are there.

        rendezvous: a file of this machine that all can write and that was empty before; or "", and the ranks find each
        other by the environment's MASTER_ADDR and MASTER_PORT. Such ranks have a line from rank 0 to all others too.
        """
        self.rank = rank
        self.size = size
        self._device = CPU
        self._logits = self._parts = torch.empty(0)
        if rendezvous:
            os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
        distributed.init_process_group(
            "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo",
            init_method=f"file://{rendezvous}" if rendezvous else "env://",
            rank=rank,
            world_size=size,
            timeout=_PATIENCE,
        )
        self._line: Any = None
        if rendezvous:
            _stop_listening()
        else:
            self._line = distributed.new_group(backend="gloo", timeout=_UNLIMITED)

    @property
    def nbytes(self) -> int:
        """Bytes that were reserved."""
        return self._logits.nbytes + self._parts.nbytes

    def reserve(self, rows: int, vocabulary: int, tokens: int, width: int, device: torch.device) -> int:
        """Allocate what the collectives of a step work in; return its bytes. On a GPU sums are made in place."""
        self._device = device
        self._logits = torch.zeros(rows, vocabulary, device=self._device)
        self._parts = torch.zeros((self.size + 1) * tokens * width if self._device == CPU else 0)
        return self.nbytes

    def multiply(self, linear: Linear, x: Tensor, out: Tensor) -> None:
        """Write the sum of all ranks' products with x to out, the same bits on each.

        On a CPU the products are added in float32, unrounded and in the order of ranks: so an output depends on its
        own row only, where an all-reduce would begin its sums at a rank that depends on a number's place.
        """
        if self._device != CPU:
            linear(x, out=out)
            distributed.all_reduce(out)
            return
        own, *parts = self._parts[: (self.size + 1) * out.numel()].view(self.size + 1, *out.shape)
        linear(x, out=own)
        distributed.all_gather(parts, own)
        total = parts[0]
        for part in parts[1:]:
            total.add_(part)
        out.copy_(total)

    def embed(self, embedding: Linear, token_ids: Tensor, out: Tensor) -> None:
        """Copy the embeddings of token_ids, int32 [tokens], to out [tokens, width]; each rank has a part of the rows.

        One rank has a token's row and the others add zeros, which is exact. ValueError where an id is none of the
        vocabulary; on a GPU, which is not waited for, it gets zeros.
        """
        vocabulary = self._logits.shape[1]
        if self._device == CPU and not 0 <= int(token_ids.min()) <= int(token_ids.max()) < vocabulary:
            raise ValueError(f"token ids must be 0 .. {vocabulary - 1}")
        own = token_ids - self.rank * embedding.out_features
        elsewhere = (own < 0) | (own >= embedding.out_features)
        embedding.gather(own.masked_fill_(elsewhere, 0), out=out)
        distributed.all_reduce(out.masked_fill_(elsewhere[:, None], 0))

    def gather(self, part: Tensor) -> None:
        """Put whole logits together from each rank's columns, float32 [rows, columns]; `logits` then holds them.

        A sum in which all but one rank add zeros is exact, and needs neither a second buffer nor a transposition.
        """
        whole, columns = self.logits(part.shape[0]).zero_(), part.shape[1]
        own = whole[:, self.rank * columns :][:, :columns]
        own.copy_(part[:, : own.shape[1]])  # the last rank's part is padded
        distributed.all_reduce(whole)

    def logits(self, rows: int) -> Tensor:
        """The logits gathered last, float32 [rows, vocabulary], a view until the next call of `gather`."""
        return self._logits[:rows]

    def agree(self, tokens: Tensor) -> None:
        """Replace sampled tokens, int32 [rows], by those of rank 0."""
        distributed.broadcast(tokens, 0)

    def combine(self, digest: str) -> str:
        """Return one SHA-256 for those of all ranks, in hexadecimal."""
        return hashlib.sha256(b"".join(self._exchange(bytes.fromhex(digest)))).hexdigest()

    def compare(self, facts: object) -> None:
        """Raise RankError on every rank unless the facts, as they are printed, are the same on all."""
        if len(set(self._exchange(hashlib.sha256(repr(facts).encode()).digest()))) > 1:
            raise RankError(f"the ranks of the model differ: rank {self.rank} has {facts}")

    def tell(self, message: bytes) -> None:
        """Say something to all other ranks; rank 0 does. Raises RuntimeError where one is gone."""
        distributed.broadcast(torch.tensor([len(message)]), 0, group=self._line)
        if message:
            distributed.broadcast(torch.frombuffer(bytearray(message), dtype=torch.uint8), 0, group=self._line)

    def hear(self) -> bytes:
        """Wait for what rank 0 says next. Raises RankError where it is gone."""
        length = torch.zeros(1, dtype=torch.int64)
        try:
            distributed.broadcast(length, 0, group=self._line)
            message = torch.zeros(int(length), dtype=torch.uint8)
            if len(message):
                distributed.broadcast(message, 0, group=self._line)
        except RuntimeError as error:
            raise RankError("rank 0 of the model is gone") from error
        return bytes(message.numpy())

    def _exchange(self, own: bytes) -> list[bytes]:
        """What each rank says: all of them equally many bytes."""
        said = list(torch.empty(self.size, len(own), dtype=torch.uint8))
        distributed.all_gather(said, torch.frombuffer(bytearray(own), dtype=torch.uint8))
        return [bytes(part.numpy()) for part in said]


def _stop_listening() -> None:
    """Close the ports on 127.0.0.1 at which gloo has waited for the other ranks, now that all have come.

    Nothing in torch does that. The numbers of the sockets stay taken, so that gloo cannot mistake another file for one.
    """
    with open(os.devnull) as nothing:  # noqa: PTH123
        for number in map(int, os.listdir("/proc/self/fd")):  # noqa: PTH208
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(number)) as found:
                if found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    os.dup2(nothing.fileno(), number)


def leave(code: int) -> None:
    """End a process that has met other ranks, at once: gloo's threads wait for each other in an orderly end."""
    if distributed.is_initialized():
        logging.shutdown()
        os._exit(code)


def share_destinations(
    destinations: Mapping[str, Destination], shapes: Mapping[str, tuple[int, ...]], rank: int
) -> dict[str, Destination]:
    """Where a checkpoint's whole tensors go, if the destinations hold a rank's shares of them.

    shapes: of the whole tensors. Which dimension is divided follows from how they differ. Of a tensor divided by rows
    nothing but the share is read, of others a slice at a time.
    """
    return {name: _share(name, destination, shapes[name], rank) for name, destination in destinations.items()}


def _share(name: str, destination: Destination, whole: tuple[int, ...], rank: int) -> Destination:
    own, load = destination.shape, destination.load
    if own[0] != whole[0]:
        first, end = (min(row, whole[0]) for row in (rank * own[0], (rank + 1) * own[0]))
        if padding := own[0] - (end - first):
            load(end - first, torch.zeros(padding, *own[1:]))
        return replace(destination, shape=whole, load=lambda row, rows: load(row - first, rows), rows=(first, end))
    if own != whole:
        columns = slice(rank * own[1], (rank + 1) * own[1])
        return replace(destination, shape=whole, load=lambda row, rows: load(row, rows[:, columns].contiguous()))
    if rank and name.endswith(".bias"):  # of W_O or W_down: added once, not by every rank
        return Destination(whole, lambda row, rows: load(row, torch.zeros_like(rows)))
    return destination
